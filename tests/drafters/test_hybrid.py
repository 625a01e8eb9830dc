"""Hybrid: merging against plain Python, and two drafters in one tree step by step."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdlite.drafters.adapld import AdaPLD
from jdlite.drafters.base import AGREED, BRANCH, LEXICAL, MODEL, SOURCES, Needs, Proposal
from jdlite.drafters.dlite import DLiteDrafter
from jdlite.drafters.hybrid import Hybrid, merge
from jdlite.drafters.logit_spec import LogitSpec
from jdlite.drafters.lookup import PromptLookup
from jdlite.drafters.plain import Plain
from jdlite.drafters.pld_plus import PLDPlus
from jdlite.drafters.suffix import Suffix
from jdlite.drafters.token_recycling import TokenRecycling
from jdlite.errors import ConfigError
from tests.drafters import harness
from tests.drafters.harness import LAYERS, NumpyProposal, Player, check_proposal, paths
from tests.drafters.oracles import hybrid as oracle
from tests.drafters.oracles.hybrid import Node
from tests.drafters.strategies import VOCAB, batches, seeds
from tests.models.dlite_models import random_model, small

B, N1, N2 = 3, 9, 6
merge_jit = jax.jit(merge, static_argnames=("max_nodes", "max_depth"))


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What `check_proposal` asks of a drafter."""

    max_nodes: int
    max_depth: int


@st.composite
def tree(draw, nodes: int, vocab: int, source: int) -> list[Node]:
    """A draft tree that keeps the contract: parents first, distinct siblings, gains that never rise."""
    made = [Node(0, 0, True, 1.0, source)]
    taken = set()
    for i in range(1, nodes):
        parent = draw(st.integers(0, i - 1))
        token = draw(st.integers(0, vocab - 1))
        valid = draw(st.booleans()) and (parent, token) not in taken
        if valid:
            taken.add((parent, token))
        share = draw(st.one_of(st.floats(0.01, 1.0), st.sampled_from([0.0, 0.5, 1.0])))
        made.append(Node(token, parent, valid, made[parent].gain * share, source))
    return made


def proposal(rows: list[list[Node]]) -> Proposal:
    field = lambda name, kind: np.array([[getattr(node, name) for node in row] for row in rows], kind)  # noqa: E731
    return Proposal(
        tokens=field("token", np.int32),
        parents=field("parent", np.int32),
        valid=field("valid", bool),
        gain=field("gain", np.float32),
        source=field("source", np.int32),
    )


def nodes_of(merged: NumpyProposal, row: int) -> dict[tuple[int, ...], tuple[float, int]]:
    found: dict[int, tuple[int, ...]] = {0: ()}
    kept = {}
    for i in range(1, merged.tokens.shape[1]):
        if merged.valid[row, i]:
            path = found[i] = (*found[int(merged.parents[row, i])], int(merged.tokens[row, i]))
            kept[path] = (float(merged.gain[row, i]), int(merged.source[row, i]))
    return kept


@pytest.mark.parametrize(("max_nodes", "max_depth"), [(N1 + N2 - 1, 8), (7, 3)])
@given(data=st.data(), vocab=st.integers(1, 4))
@settings(max_examples=60)
def test_merge_equals_oracle(max_nodes, max_depth, data, vocab):
    first = [data.draw(tree(N1, vocab, BRANCH)) for _ in range(B)]
    second = [data.draw(tree(N2, vocab, MODEL)) for _ in range(B)]
    made = merge_jit(proposal(first), proposal(second), max_nodes=max_nodes, max_depth=max_depth)
    made = NumpyProposal.of(made)
    check_proposal(made, Sizes(max_nodes, max_depth), anchor=[0] * B, vocab=vocab)
    for b in range(B):
        right = oracle.merge(first[b], second[b], AGREED, max_depth)
        kept = nodes_of(made, b)
        assert len(kept) == min(len(right), max_nodes - 1)
        for path, (gain, source) in kept.items():
            assert source == right[path].source
            assert gain == pytest.approx(right[path].gain, rel=1e-3, abs=1e-6)
        # What was left out is worth no more than what was kept.
        least = min((right[path].gain for path in kept), default=0.0)
        assert all(node.gain <= least * 1.001 + 1e-6 for path, node in right.items() if path not in kept)


def test_example_of_the_docstring():
    a, b, c, d, e = range(5)
    chain = [Node(a, 0, True, 1.0, LEXICAL), Node(b, 0, True, 0.5, LEXICAL), Node(c, 1, True, 0.4, LEXICAL)]
    branched = [Node(a, 0, True, 1.0, MODEL), Node(b, 0, True, 0.6, MODEL), Node(d, 1, True, 0.3, MODEL)]
    branched += [Node(e, 0, True, 0.1, MODEL)]
    made = NumpyProposal.of(merge_jit(proposal([chain]), proposal([branched]), max_nodes=6, max_depth=2))
    # b: 1 - 0.5 * 0.4; c is believed with 0.8 and d with 0.5, together 1.3.
    assert nodes_of(made, 0) == {
        (b,): (pytest.approx(0.8), AGREED),
        (b, c): (pytest.approx(0.8 * 0.8 / 1.3), LEXICAL),
        (b, d): (pytest.approx(0.8 * 0.5 / 1.3), MODEL),
        (e,): (pytest.approx(0.1), MODEL),
    }
    assert made.tokens[0, :5].tolist() == [a, b, c, d, e]


def test_faulty_drafts_leave_a_tree():
    """Equal siblings, ids that are none, NaN gains and gains that rise: the result keeps the contract."""
    rows = [Node(0, 0, True, 1.0, LEXICAL), Node(-7, 0, True, np.nan, LEXICAL), Node(-7, 0, True, 0.5, LEXICAL)]
    rows += [Node(2**31 - 1, 1, True, 0.9, LEXICAL), Node(-(2**31), 3, True, 2.0, LEXICAL)]
    made = merge_jit(proposal([rows]), proposal([rows[:3]]), max_nodes=7, max_depth=3)
    assert np.isfinite(made.gain).all()
    assert nodes_of(NumpyProposal.of(made), 0).keys() == {(-7,), (-7, 2**31 - 1), (-7, 2**31 - 1, -(2**31))}
    assert (np.asarray(made.parents)[0, 1:] < np.arange(1, 7)).all()
    assert (np.diff(np.asarray(made.gain)[0]) <= 0).all()


SMALL = AdaPLD(copy_length=4, num_branches=3)


@functools.cache
def network() -> DLiteDrafter:
    shape = {"vocab_size": VOCAB, "hidden_size": harness.HIDDEN, "num_target_layers": LAYERS, "num_taps": 2}
    config = small(**shape, mask_token_id=VOCAB - 1, num_layers=1, block_size=4)
    return DLiteDrafter(model=random_model(config))


PAIRS = {
    "adapld and dlite": lambda: Hybrid(SMALL, network()),
    "dlite and adapld, few nodes": lambda: Hybrid(network(), SMALL, num_nodes=6),
    "two hybrids": lambda: Hybrid(Hybrid(PLDPlus(num_drafts=3), Suffix(num_drafts=5)), LogitSpec(top_k=4, num_nodes=9)),
    "token recycling and pld": lambda: Hybrid(TokenRecycling(num_nodes=12, top_k=4), PromptLookup(num_drafts=4)),
    "pld and nothing": lambda: Hybrid(PromptLookup(num_drafts=4), Plain()),
}


def fitted(drafter):
    """The hybrid, and hybrids inside it, for a target of `LAYERS` layers."""
    if not isinstance(drafter, Hybrid):
        return drafter
    return dataclasses.replace(drafter, first=fitted(drafter.first), second=fitted(drafter.second), num_layers=LAYERS)


class Parts(Player):
    """Plays a hybrid, and beside it each of its drafters with a memory of its own on the same forwards."""

    def __init__(self, drafter: Hybrid, texts, *, seed: int):
        super().__init__(drafter, texts, seed=seed, vocab=VOCAB)
        self.own = [harness._init(part, len(texts), self.capacity, VOCAB) for part in drafter.parts]

    def see(self, context, observation) -> None:
        super().see(context, observation)
        for i, part in enumerate(self.drafter.parts):
            want = part.needs(LAYERS)
            seen = {
                **observation,
                "taps": tuple(observation["taps"][self.needs.taps.index(tap)] for tap in want.taps),
                "top_ids": observation["top_ids"][:, :, : want.top_k],
            }
            self.own[i] = harness._observe(part, self.own[i], context, seen)

    def rollback(self, lengths, texts) -> None:
        super().rollback(lengths, texts)
        kept = np.asarray(lengths, np.int32)
        self.own = [harness._rollback(p, m, kept) for p, m in zip(self.drafter.parts, self.own, strict=True)]

    def fork(self, order) -> None:
        super().fork(order)
        self.own = jax.tree.map(lambda leaf: leaf[np.array(order)], self.own)

    def compare(self) -> None:
        """The hybrid's tree is the merged one of what its drafters propose by themselves."""
        made = self.propose()
        parts = []
        for part, memory in zip(self.drafter.parts, self.own, strict=True):
            p = NumpyProposal.of(harness._propose(part, memory, self.context()))
            parts.append((p.tokens, p.parents, p.valid, p.gain, p.source))
        for b in range(len(self.rows)):
            trees = [
                [Node(*(x.item() for x in node)) for node in zip(*(field[b] for field in part), strict=True)]
                for part in parts
            ]
            right = oracle.merge(*trees, AGREED, self.drafter.max_depth)
            kept = nodes_of(made, b)
            assert len(kept) == min(len(right), self.drafter.max_nodes - 1)
            for path, (gain, source) in kept.items():
                assert source == right[path].source
                assert gain == pytest.approx(right[path].gain, rel=2e-3, abs=1e-6)
            least = min((right[path].gain for path in kept), default=0.0)
            assert all(node.gain <= least * 1.002 + 1e-6 for path, node in right.items() if path not in kept)


SLOW = ("two hybrids", "token recycling and pld", "pld and nothing")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in PAIRS])
@given(texts=batches(), seed=seeds)
@settings(max_examples=12)
def test_hybrid_is_the_merged_tree_of_its_parts(name, texts, seed):
    """Through prefill, rounds, forks and rollbacks; every drafter sees what it would see alone."""
    player = Parts(fitted(PAIRS[name]()), texts, seed=seed)
    rng = player.rng
    player.prefill([int(rng.integers(1, len(text) + 1)) for text in texts])
    player.compare()
    while player.advance():
        player.compare()
    player.fork([int(b) for b in rng.integers(0, len(texts), len(texts))])
    player.compare()
    keep = [int(rng.integers(1, len(row.tokens) + 1)) for row in player.rows]
    ends = [rng.integers(0, VOCAB, int(rng.integers(0, player.capacity - n + 1))).tolist() for n in keep]
    player.rollback(keep, [row.tokens[:n] + end for row, n, end in zip(player.rows, keep, ends, strict=True)])
    player.compare()
    while player.advance():
        player.compare()


def test_pld_with_nothing_beside_it_is_pld():
    texts = [[1, 2, 3, 1, 2, 3, 1], [5], [4, 4, 4, 4]]
    drafter = Hybrid(PromptLookup(num_drafts=4), Plain(), num_layers=LAYERS)
    player, lone = (Player(d, texts, seed=0, vocab=VOCAB) for d in (drafter, PromptLookup(num_drafts=4)))
    for each in (player, lone):
        each.prefill([7, 1, 4])
    made, alone = player.propose(), lone.propose()
    for b in range(3):
        assert paths(made, b) == paths(alone, b)
    np.testing.assert_allclose(made.gain, np.where(alone.valid, alone.gain, 0), rtol=1e-5)
    assert drafter.max_nodes == 5
    assert drafter.max_depth == 4


def test_sizes_and_needs():
    drafter = Hybrid(AdaPLD(), network())
    assert drafter.max_nodes == 40
    assert Hybrid(AdaPLD(), network(), num_nodes=100).max_nodes == 39 + 4 - 1
    assert drafter.max_depth == 30
    assert Hybrid(AdaPLD(), network(), num_nodes=16).max_depth == 15
    parts = AdaPLD().needs(LAYERS), network().needs(LAYERS)
    assert drafter.needs(LAYERS) == Needs(taps=tuple(sorted({*parts[0].taps, *parts[1].taps})), top_k=8)


def test_parameters_are_leaves_and_options_are_static():
    drafter = Hybrid(SMALL, network(), num_layers=LAYERS)
    assert len(jax.tree.leaves(drafter)) == len(jax.tree.leaves(network()))
    assert hash(jax.tree.structure(drafter)) == hash(jax.tree.structure(Hybrid(SMALL, network(), num_layers=LAYERS)))
    assert jax.tree.structure(drafter) != jax.tree.structure(dataclasses.replace(drafter, num_nodes=7))
    memory = drafter.init(2, 24, hidden_size=harness.HIDDEN, vocab_size=VOCAB, dtype=jnp.float32)
    assert all(leaf.shape[0] == 2 for leaf in jax.tree.leaves(memory))


def test_refusals():
    with pytest.raises(ConfigError, match="got dlite in rejection mode; use match"):
        Hybrid(AdaPLD(), dataclasses.replace(network(), mode="rejection"))
    with pytest.raises(ConfigError, match="got adapld with successor_source forward"):
        Hybrid(AdaPLD(successor_source="forward"), network())
    with pytest.raises(ConfigError, match="num_nodes of at least 2, got 1"):
        Hybrid(AdaPLD(), network(), num_nodes=1)
    drafter = Hybrid(SMALL, network())
    with pytest.raises(ConfigError, match=r"call hybrid.fit\(model\) first"):
        Player(drafter, [[1, 2, 3]], seed=0, vocab=VOCAB).prefill([3])
    tree = proposal([[Node(0, 0, True, 1.0, MODEL)]])
    with pytest.raises(ConfigError, match="only deterministic drafts can be merged"):
        merge(tree, dataclasses.replace(tree, log_q=jnp.zeros((1, 1, 4))), max_nodes=1, max_depth=0)
    assert SOURCES[AGREED] == "agreed"
