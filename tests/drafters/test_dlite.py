"""DLiteDrafter: what it remembers, what it proposes, and that its distribution is the one it reports."""

from __future__ import annotations

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from jdlite.drafters.base import MODEL, Context, Observation
from jdlite.drafters.dlite import DLiteDrafter, tempered
from jdlite.errors import ConfigError
from jdlite.models.config import DecoderConfig
from tests.drafters.harness import check_proposal
from tests.models.dlite_models import parameters, quick_jit, random_model, small
from tests.models.oracles import dlite as oracle

CAPACITY, CHUNK, NODES = 24, 5, 6
TRACES: list[str] = []


@quick_jit
def observe(drafter, memory, context, observation):
    return drafter.observe(memory, context, observation)


@quick_jit
def propose(drafter, memory, context):
    TRACES.append("propose")
    return drafter.propose(memory, context)


class Rows:
    """Rows of known texts whose target states are a fixed random table by layer and position."""

    def __init__(self, drafter: DLiteDrafter, lengths: list[int], *, seed: int = 0, temperature: float = 0.0):
        config = drafter.model.config
        self.drafter, self.config = drafter, config
        self.rng = np.random.default_rng(seed)
        B, L = len(lengths), config.num_target_layers
        self.texts = self.rng.integers(0, config.vocab_size, (B, CAPACITY)).astype(np.int32)
        self.states = (2 * self.rng.normal(size=(L, B, CAPACITY, config.hidden_size))).astype(np.float32)
        self.embedding = self.rng.normal(size=(config.vocab_size, config.hidden_size)).astype(np.float32)
        self.temperature = np.full(B, temperature, np.float32)
        self.keys = jax.random.split(jax.random.key(seed), B)
        self.taps = drafter.needs(L).taps
        self.lengths = np.ones(B, np.int64)
        self.memory = drafter.init(
            B, CAPACITY, hidden_size=config.hidden_size, vocab_size=config.vocab_size, dtype=jnp.float32
        )
        while (left := np.array(lengths) - self.lengths).any():
            self.commit(np.minimum(left, CHUNK), np.tile(np.arange(CHUNK), (B, 1)), CHUNK)

    def context(self) -> Context:
        tokens = self.texts.copy()
        for row, length in zip(tokens, self.lengths, strict=True):
            row[length:] = self.rng.integers(0, self.config.vocab_size, CAPACITY - length)
        return Context(
            tokens=jnp.asarray(tokens),
            lengths=jnp.asarray(self.lengths, jnp.int32),
            prompt_lengths=jnp.ones(len(tokens), jnp.int32),
            keys=self.keys,
            temperature=jnp.asarray(self.temperature),
            embedding=jnp.asarray(self.embedding),
        )

    def commit(self, count, path, nodes: int) -> None:
        """Run `nodes` nodes per row and commit the first `count[b]` along `path[b]`; other nodes hold rubbish."""
        start, B = self.lengths - 1, len(self.lengths)
        taps = [np.full((B, nodes, self.config.hidden_size), np.nan, np.float32) for _ in self.taps]
        for b in range(B):
            for i in range(count[b]):
                for tap, layer in zip(taps, self.taps, strict=True):
                    tap[b, path[b, i]] = self.states[layer, b, start[b] + i]
        self.lengths = self.lengths + count
        observation = Observation(
            tokens=jnp.zeros((B, nodes), jnp.int32),
            valid=jnp.ones((B, nodes), bool),
            path=jnp.asarray(path, jnp.int32),
            start=jnp.asarray(start, jnp.int32),
            count=jnp.asarray(count, jnp.int32),
            taps=tuple(map(jnp.asarray, taps)),
            top_ids=jnp.zeros((B, nodes, 0), jnp.int32),
            next_tokens=jnp.zeros(path.shape, jnp.int32),
        )
        self.memory = observe(self.drafter, self.memory, self.context(), observation)

    def round(self, count) -> None:
        """One decoding round on random trees."""
        others = [np.sort(1 + self.rng.choice(NODES - 1, 3, replace=False)) for _ in self.lengths]
        self.commit(np.array(count), np.stack([np.r_[0, rest] for rest in others]), NODES)

    def propose(self):
        made = propose(self.drafter, self.memory, self.context())
        fields = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
        proposal = types.SimpleNamespace(**{k: None if v is None else np.asarray(v) for k, v in fields.items()})
        anchors = [int(text[length - 1]) for text, length in zip(self.texts, self.lengths, strict=True)]
        check_proposal(proposal, self.drafter, anchor=anchors, vocab=self.config.vocab_size)
        return proposal

    def expected(self, b: int, choose):
        """The oracle's drafts of row b and the logits of each."""
        config, p = self.config, parameters(self.drafter.model)
        a = int(self.lengths[b]) - 1
        known = self.texts[b, max(a - config.anchor_group_size + 1, 0) : a + 1]
        features = np.float64(self.states[list(config.taps), b, a - 1])
        past = {}
        for t in range(a - 1) if config.draft_history else ():
            past[t] = oracle.history_state(p, config, np.float64(self.states[list(config.history_taps), b, t]))
        hidden = oracle.backbone(p, config, a, known, features, np.float64(self.embedding), past)
        head = None if self.drafter.lm_head is None else np.asarray(self.drafter.lm_head, np.float64)
        return oracle.draft(p, config, hidden, known, choose, head)


def greedy(logits, step):
    return logits.argmax()


def log_softmax(x):
    x = x - x.max()
    return x - np.log(np.exp(x).sum())


VARIANTS = {
    "paper": {},
    "group-3": {"anchor_group_size": 3, "block_size": 4},
    "history": {"draft_history": 5},
    "lm-head": {"head_output": "lm_head", "num_layers": 1},
}


def make(name: str = "paper", **options) -> DLiteDrafter:
    config = small(**{"num_layers": 1, **VARIANTS[name]})
    target = DecoderConfig.tiny(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, num_layers=config.num_target_layers
    )
    lm_head = jnp.asarray(np.random.default_rng(4).normal(size=(config.vocab_size, config.hidden_size)), jnp.float32)
    return DLiteDrafter.create(random_model(config), target, lm_head=lm_head, **options)


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_chain_equals_oracle_through_prefill_and_rounds(name):
    rows = Rows(make(name), [2, 9, 16])
    for count in ([0, 0, 0], [1, 4, 2], [3, 0, 1]):
        if any(count):
            rows.round(count)
        proposal = rows.propose()
        assert proposal.log_q is None
        assert proposal.valid.all()
        assert (proposal.source == MODEL).all()
        assert (proposal.parents == np.maximum(np.arange(proposal.tokens.shape[1]) - 1, 0)).all()
        for b in range(3):
            drafts, logits = rows.expected(b, greedy)
            assert proposal.tokens[b, 1:].tolist() == drafts
            gain = np.exp(np.cumsum([log_softmax(row).max() for row in logits]))
            np.testing.assert_allclose(proposal.gain[b, 1:], gain, rtol=1e-4)


def beam_of(rows: Rows, b: int, width: int):
    """The likeliest paths of each length of row b, by the oracle: every step scores whole paths from the anchor on."""
    kept, found = [((), 0.0)], []
    for i in range(rows.config.num_drafts):
        longer = []
        for path, total in kept:
            given = iter((*path, *[0] * rows.config.num_drafts))
            _, logits = rows.expected(b, lambda logits, step, given=given: next(given))
            longer += [((*path, token), total + log_q) for token, log_q in enumerate(log_softmax(logits[i]))]
        kept = sorted(longer, key=lambda one: -one[1])[:width]
        found.append(dict(kept))
    return found


def walk(proposal, b: int) -> dict[int, tuple[int, ...]]:
    """Tokens on the way from the anchor to each node."""
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, proposal.tokens.shape[1]):
        paths[node] = (*paths[proposal.parents[b, node]], int(proposal.tokens[b, node]))
    return paths


@pytest.mark.parametrize("name", VARIANTS)
def test_beam_equals_oracle_through_rounds(name):
    width = 3
    rows = Rows(make(name, beam=width), [2, 9, 16])
    rows.round([1, 4, 2])
    proposal = rows.propose()
    K = rows.config.num_drafts
    assert rows.drafter.max_nodes == proposal.tokens.shape[1] == 1 + K * width
    assert rows.drafter.max_depth == K
    assert proposal.valid.all()
    assert (proposal.source == MODEL).all()
    for b in range(3):
        paths = walk(proposal, b)
        for depth, want in enumerate(beam_of(rows, b, width), start=1):
            nodes = range(1 + (depth - 1) * width, 1 + depth * width)
            gains = {paths[node]: proposal.gain[b, node] for node in nodes}
            assert gains == pytest.approx({path: np.exp(total) for path, total in want.items()}, rel=1e-4)
            assert [paths[node] for node in nodes] == list(want), "the likeliest first"


def test_tree_of_few_nodes_has_the_likeliest():
    rows = Rows(make(beam=4), [4, 9, 16])
    whole = rows.propose()
    for nodes in (2, 9, 20, 29, 50):
        rows.drafter = make(beam=4, num_nodes=nodes)
        few = rows.propose()
        assert rows.drafter.max_nodes == few.tokens.shape[1] == min(nodes, 29)
        for b in range(3):
            want = np.sort(whole.gain[b])[::-1][: few.gain.shape[1]]
            np.testing.assert_allclose(few.gain[b], want, rtol=1e-6)
            assert set(walk(few, b).values()) <= set(walk(whole, b).values())


def test_beam_of_one_is_the_chain():
    rows = Rows(make(), [5, 8, 13])
    one = rows.propose()
    model, tokens = rows.drafter.model, jnp.asarray(one.tokens[:, :1])
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(3, rows.config.num_drafts, rows.config.hidden_size)), jnp.float32)

    def both(head, hidden, tokens):
        start = head.start(tokens)
        chain, _ = head.unroll(hidden, tokens[:, -1], start, lambda logits, _: (jnp.argmax(logits, axis=-1),) * 2)
        return chain, head.beam(hidden, tokens[:, -1], start, 1)

    chain, (drafts, parents, log_path) = quick_jit(both)(model.head, hidden, tokens)
    np.testing.assert_array_equal(drafts[..., 0], chain)
    assert not np.asarray(parents).any()
    assert (np.diff(log_path[..., 0], axis=1) <= 0).all()


def test_memory_is_features_and_nothing_else():
    drafter = make()
    memory = drafter.init(2, 1000, hidden_size=12, vocab_size=23, dtype=jnp.bfloat16)
    assert memory.features.shape == (2, 3, 12)
    assert memory.history.size == 0
    assert {leaf.dtype for leaf in jax.tree.leaves((memory.features, memory.history))} == {jnp.dtype(jnp.bfloat16)}
    assert all(leaf.shape[0] == 2 for leaf in jax.tree.leaves(memory))


def test_forks_and_rollbacks():
    rows = Rows(make("history"), [9, 14])
    fork = dataclasses.replace(rows.memory)
    before = rows.propose()
    rows.round([4, 2])
    # Rolled back to where features are those of another position: nothing is drafted, until one forward brings them.
    rows.lengths = rows.lengths - np.array([3, 2])
    rows.memory = rows.drafter.rollback(rows.memory, jnp.asarray(rows.lengths, jnp.int32))
    assert not rows.propose().valid[:, 1:].any()
    rows.round([1, 1])
    proposal = rows.propose()
    for b in range(2):
        assert proposal.valid[b].all()
        assert proposal.tokens[b, 1:].tolist() == rows.expected(b, greedy)[0]
    # A fork taken earlier is untouched by all this.
    rows.memory, rows.lengths = fork, np.array([9, 14])
    np.testing.assert_array_equal(rows.propose().tokens, before.tokens)


@pytest.mark.parametrize("beam", [1, 2])
def test_row_without_any_forward_drafts_nothing(beam):
    rows = Rows(make("group-3", beam=beam), [1, 2])
    assert rows.propose().valid.tolist() == [[True] + [False] * 3 * beam, [True] * (1 + 3 * beam)]


@pytest.mark.parametrize("options", [{}, {"mode": "rejection"}, {"beam": 3}], ids=str)
def test_network_of_nans_drafts_nothing(options):
    drafter = make(**options)
    broken = dataclasses.replace(drafter, model=jax.tree.map(lambda x: x * jnp.nan, drafter.model))
    proposal = Rows(broken, [5, 6], temperature=1.0).propose()
    assert not proposal.valid[:, 1:].any()
    assert np.isfinite(proposal.gain).all()


@pytest.mark.parametrize("name", ["paper", "group-3"])
def test_rejection_reports_the_distribution_of_each_draft(name):
    rows = Rows(make(name, mode="rejection", prior=0.5), [7, 12, 9], temperature=0.8)
    rows.temperature[2] = 0.0
    proposal = rows.propose()
    for b in range(3):
        taken = iter(proposal.tokens[b, 1:])
        drafts, logits = rows.expected(b, lambda logits, step, taken=taken: next(taken))
        assert proposal.tokens[b, 1:].tolist() == drafts
        for i, row in enumerate(logits):
            if rows.temperature[b]:
                np.testing.assert_allclose(proposal.log_q[b, i + 1], log_softmax(row / 0.8), rtol=1e-4, atol=1e-4)
            else:
                want = np.where(np.arange(len(row)) == row.argmax(), 0.0, -np.inf)
                np.testing.assert_array_equal(proposal.log_q[b, i + 1], want)
                assert drafts[i] == row.argmax()
    # What is verified must not depend on the tokens that were drawn.
    np.testing.assert_allclose(proposal.gain[:, 1:], np.tile(0.5 ** np.arange(1, proposal.gain.shape[1]), (3, 1)))


def test_drafts_are_drawn_from_the_reported_distribution():
    rows = Rows(make("group-3", mode="rejection"), [8, 10], temperature=1.3)
    context, draws = rows.context(), 4000

    def first_two(keys):
        proposal = rows.drafter.propose(rows.memory, dataclasses.replace(context, keys=keys))
        return proposal.tokens[:, 1:3], proposal.log_q[:, 1]

    keys = jax.random.split(jax.random.key(1), (draws, 2))
    tokens, log_q = quick_jit(jax.vmap(first_two))(keys)
    tokens, V = np.asarray(tokens), rows.config.vocab_size
    for b in range(2):
        q = np.exp(np.float64(log_q[0, b]))
        counts = np.bincount(tokens[:, b, 0], minlength=V)
        kept = q * draws > 5
        chi2 = ((counts - q * draws) ** 2 / (q * draws))[kept].sum()
        assert chi2 < kept.sum() + 5 * np.sqrt(2 * kept.sum())
    # Rows and positions have noise of their own.
    assert 0.0 < np.mean(tokens[:, 0, 0] == tokens[:, 1, 0]) < 0.9
    _, again = quick_jit(first_two)(keys[0])
    np.testing.assert_allclose(again, log_q[0], rtol=1e-5, atol=1e-5)


def test_noise_belongs_to_the_position_not_to_the_round():
    # The first draft of a round and the last of the round before, at the same position, see the same noise.
    drafter = make(mode="rejection")
    flat = jax.tree.map(jnp.zeros_like, drafter.model)  # uniform q everywhere: tokens show the noise alone
    rows = Rows(dataclasses.replace(drafter, model=flat), [6, 6], temperature=1.0)
    one = rows.propose().tokens[:, 1:]
    rows.round([3, 3])
    other = rows.propose().tokens[:, 1:]
    np.testing.assert_array_equal(one[:, 3:], other[:, :-3])
    assert one[0].tolist() != one[1].tolist()


def test_constant_gain_needs_no_softmax():
    rows = Rows(make(gain="constant", prior=0.9), [5, 8])
    proposal = rows.propose()
    assert proposal.tokens[0, 1:].tolist() == rows.expected(0, greedy)[0]
    np.testing.assert_allclose(proposal.gain[0], 0.9 ** np.arange(8), rtol=1e-6)


def test_parameters_are_leaves_and_options_are_static():
    drafter = make()
    leaves, structure = jax.tree.flatten(drafter)
    assert len(leaves) == len(jax.tree.leaves(drafter.model))
    assert hash(structure) == hash(jax.tree.structure(make()))
    rows = Rows(drafter, [5, 8])
    rows.propose()
    TRACES.clear()
    first = rows.propose()
    rows.drafter = dataclasses.replace(drafter, model=jax.tree.map(lambda x: -x, drafter.model))
    other = rows.propose()
    assert not TRACES, "other parameters must not compile again"
    assert first.tokens.tolist() != other.tokens.tolist()
    rows.drafter = dataclasses.replace(drafter, gain="constant")
    rows.propose()
    assert TRACES == ["propose"]


def test_drafter_may_be_closed_over_by_a_loop_inside_jit():
    rows = Rows(make(), [5, 8])

    @quick_jit
    def rounds(drafter, memory, context):
        def body(carry):
            i, total = carry
            return i + 1, total + drafter.propose(memory, context).tokens

        return jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, jnp.zeros((2, drafter.max_nodes), jnp.int32)))

    _, total = rounds(rows.drafter, rows.memory, rows.context())
    np.testing.assert_array_equal(total, 3 * rows.propose().tokens)


def test_tempered_agrees_with_its_limit():
    logits = jnp.array([[1.0, 3.0, 2.0]] * 2)
    warm, cold = tempered(logits, jnp.array([1e-3, 0.0]))
    np.testing.assert_allclose(np.exp(warm), np.exp(cold), atol=1e-6)


def test_refusals():
    drafter = make()
    config = drafter.model.config
    with pytest.raises(ConfigError, match="made for another target: vocab_size 23 against the target's 97"):
        DLiteDrafter.create(drafter.model, DecoderConfig.tiny())
    with pytest.raises(ConfigError, match="target of 5 layers: got one of 4"):
        drafter.needs(4)
    with pytest.raises(ConfigError, match="width 12 and 23 tokens: got 16 and 23"):
        drafter.init(1, 8, hidden_size=16, vocab_size=23, dtype=jnp.float32)
    target = DecoderConfig.tiny(vocab_size=23, hidden_size=12, num_layers=5)
    with pytest.raises(ConfigError, match="was given none; pass lm_head"):
        DLiteDrafter.create(random_model(small(head_output="lm_head")), target)
    with pytest.raises(ConfigError, match="beam of at most the vocabulary of 23, got 24"):
        make(beam=24).init(1, 8, hidden_size=12, vocab_size=23, dtype=jnp.float32)
    build = functools.partial(DLiteDrafter, model=drafter.model)
    for options, sentence in (
        ({"mode": "tree"}, "mode must be match or rejection: got 'tree'"),
        ({"gain": "none"}, "gain must be probability or constant: got 'none'"),
        ({"prior": 0.0}, "prior must be a probability above 0: got 0.0"),
        ({"beam": 0}, "DLite needs beam of at least 1, got 0"),
        ({"beam": 2, "mode": "rejection"}, "needs mode=match and gain=probability: got rejection and probability"),
        ({"num_nodes": 9}, "got 9 with a beam of 1; leave it out or give a beam"),
        ({"num_nodes": 1, "beam": 2}, "at least 2: got 1 with a beam of 2"),
        ({"beam": 2, "gain": "constant"}, "needs mode=match and gain=probability: got match and constant"),
    ):
        # Where jaxtyping's import hook is on, it refuses ill-typed values first.
        with pytest.raises((ConfigError, TypeCheckError)) as caught:
            build(**options)
        if isinstance(caught.value, ConfigError):
            assert sentence in str(caught.value)
    assert drafter.max_nodes == config.block_size == 8
