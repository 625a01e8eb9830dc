"""The loop with drafters that do what a table says: faults, budgets, stops, capacity, statistics."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from jdlite.decoding import loop
from jdlite.decoding.request import make_request
from jdlite.decoding.state import init_state
from jdlite.drafters.base import SOURCES
from jdlite.drafters.plain import Plain
from jdlite.errors import CapacityError, PromptError
from jdlite.models.decoder import Decoder
from tests.decoding import oracle
from tests.toys import CAPACITY, VOCAB, Script, chain, options, run, script, session, tiny_model

B, NODES, K = 3, 6, 5
NEW = 20
PROMPTS = [[1, 2, 3, 1, 2, 3], [5], [7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7]]


@functools.cache
def text(row: int, prompts: tuple = tuple(map(tuple, PROMPTS))) -> list[int]:
    """Prompt and greedy answer of a row, long enough for any table."""
    prompt = list(prompts[row])
    return prompt + oracle.decode(tiny_model(), prompt, CAPACITY + K + 1 - len(prompt))[0]


def greedy(row: int, new: int = NEW) -> list[int]:
    prompt = len(PROMPTS[row])
    return text(row)[prompt : prompt + new]


def future(row: int, known: int, count: int = K) -> list[int]:
    return text(row)[known : known + count]


def wrong(row: int, known: int, count: int = K) -> list[int]:
    return [(t + 1) % VOCAB for t in future(row, known, count)]


def make(table) -> Script:
    return script(B, NODES, table)


PERFECT = make(lambda b, n: chain(future(b, n)))


def random_tree(b: int, n: int):
    """A tree of right and wrong tokens, siblings distinct."""
    rng = np.random.default_rng([b, n])
    paths, nodes, gains = [()], [], [1.0]
    for _ in range(int(rng.integers(0, NODES))):
        parent = int(rng.integers(0, len(paths)))
        depth = len(paths[parent])
        right = future(b, n + depth, 1)[0]
        token = right if rng.random() < 0.7 else int(rng.integers(0, VOCAB))
        if (*paths[parent], token) in paths:
            continue
        paths.append((*paths[parent], token))
        gains.append(gains[parent] * float(rng.random()))
        nodes.append((token, parent, gains[-1]))
    return nodes


FAULTY = {
    "perfect": lambda b, n: chain(future(b, n)),
    "constant": lambda b, n: chain([4] * K),
    "always wrong": lambda b, n: chain(wrong(b, n)),
    "nothing": lambda b, n: [],
    "nan gains": lambda b, n: [(t, p, np.nan) for t, p, _ in random_tree(b, n)],
    "zero gains": lambda b, n: [(t, p, 0.0) for t, p, _ in chain(future(b, n))],
    "rising gains": lambda b, n: [(t, p, 0.1 * (i + 1)) for i, (t, p, _) in enumerate(chain(future(b, n)))],
    "duplicate siblings": lambda b, n: [(future(b, n)[0], 0, 0.5)] * 3 + [(future(b, n)[1], 2, 0.4)],
    "out of range": lambda b, n: chain([[VOCAB, -1, 2**31 - 1, -(2**31)][n % 4], *future(b, n + 1, 2)]),
    "late out of range": lambda b, n: chain([*future(b, n, 2), -1, VOCAB]),
    "random trees": random_tree,
}


@pytest.mark.parametrize("fault", FAULTY)
def test_any_drafter_gives_the_greedy_text(fault):
    """The answer never depends on the drafts; every round emits at least one token."""
    result = run(make(FAULTY[fault]), PROMPTS, max_new=NEW)
    assert result.tokens == [greedy(b) for b in range(B)]
    assert result.finish_reasons == ["length"] * B
    assert (result.stats.log[:, : result.stats.rounds.max(), 2] <= NODES).all()
    for b in range(B):
        assert (result.stats.log[b, : result.stats.rounds[b], 2] >= 1).all()
    if fault in ("always wrong", "nothing", "out of range"):
        assert result.stats.rounds.tolist() == [NEW] * B
        assert result.tau == 1


def test_plain_loop_equals_the_oracle():
    result = run(Plain(), PROMPTS, max_new=NEW)
    assert result.tokens == [greedy(b) for b in range(B)]
    assert result.stats.rounds.tolist() == [NEW] * B
    assert int(result.stats.forwards) == NEW
    assert result.stats.drafted.tolist() == [0] * B


def test_perfect_drafter_has_tau_of_the_block():
    """K drafts and the bonus token each round."""
    result = run(PERFECT, PROMPTS, max_new=3 * (K + 1))
    assert result.tau == K + 1
    assert result.stats.rounds.tolist() == [3] * B
    assert result.stats.accepted_at.tolist() == [[3] * K] * B


def forced(pattern: list[int]):
    """Accept `pattern[i]` drafts in round i; -1 drafts nothing. Returns the drafter and the tokens of each round."""
    plans = []
    for b in range(B):
        known, plan = len(PROMPTS[b]), {}
        for accept in pattern:
            right = max(accept, 0)
            plan[known] = [] if accept < 0 else chain([*future(b, known, right), *wrong(b, known + right, K - right)])
            known += right + 1
        plans.append(plan)
    return make(lambda b, n: plans[b].get(n, [])), [max(a, 0) + 1 for a in pattern]


@pytest.mark.parametrize(
    "pattern", [[3, -1, 3], [-1, 3, -1, -1, 2], [K, K, K], [K, 0, K, -1, K], [0, -1, 0, 4], [2, K, -1]], ids=str
)
def test_forced_sequences(pattern):
    """Blocks of every size follow each other, the full one and the empty one included."""
    drafter, emitted = forced(pattern)
    result = run(drafter, PROMPTS, max_new=sum(emitted))
    assert result.tokens == [greedy(b, sum(emitted)) for b in range(B)]
    for b in range(B):
        assert result.stats.log[b, : len(pattern), 2].tolist() == emitted
        assert result.stats.log[b, : len(pattern), 0].tolist()[:-1] == [1 if a < 0 else NODES for a in pattern[:-1]]


# What the rounds leave behind.


@jax.jit
def _prefill(model, drafter, state, tokens, counts):
    return loop.catch_up(model, drafter, state.append(tokens, counts), chunk=8)


@jax.jit
def _round(model, drafter, state, request, progress):
    return loop.decode_round(model, drafter, state, request, progress)


_start = jax.jit(functools.partial(loop.start, log_rounds=0))


def request_of(model):
    """A greedy request without stops, and its arrays."""
    return make_request(model, PERFECT, B, stop_ids=[[99]] * B)


def prefilled(model, drafter):
    state = init_state(model, drafter, B, CAPACITY)
    buffer = np.zeros((B, CAPACITY), np.int32)
    for b, prompt in enumerate(PROMPTS):
        buffer[b, : len(prompt)] = prompt
    return _prefill(model, drafter, state, jnp.asarray(buffer), jnp.asarray([len(p) for p in PROMPTS], jnp.int32))


def poison(state, value):
    """Everything past each row's length overwritten."""
    cached = np.arange(CAPACITY) >= np.asarray(state.cache.lengths)[:, None]
    hide = lambda x: jnp.where(jnp.asarray(cached)[None, :, None, :, None], value, x)  # noqa: E731
    rubbish = jnp.where(jnp.arange(CAPACITY) >= state.lengths[:, None], 2**31 - 1, state.tokens)
    cache = dataclasses.replace(state.cache, k=hide(state.cache.k), v=hide(state.cache.v))
    return dataclasses.replace(state, cache=cache, tokens=rubbish)


@pytest.mark.parametrize("value", [None, np.nan, 1e30], ids=["as left", "nan", "huge"])
def test_cache_equals_a_fresh_prefill_after_every_round(value):
    """The committed keys and values are those of the text run at once; unused slots may hold anything."""
    model = tiny_model()
    drafter = make(random_tree)
    state, request = prefilled(model, drafter), request_of(model)
    progress = _start(model, drafter, state, request, jnp.full(B, 24, jnp.int32))
    rounds = 0
    while (np.asarray(progress.finish) == 0).any():
        if value is not None:
            state = poison(state, value)
        state, progress = _round(model, drafter, state, request, progress)
        rounds += 1
        for b in range(B):
            n = int(state.lengths[b])
            assert np.asarray(state.tokens[b, :n]).tolist() == text(b)[:n]
            assert int(state.cache.lengths[b]) == n - 1
            k, v = oracle.keys_and_values(model, text(b)[: n - 1])
            np.testing.assert_allclose(state.cache.k[:, b, :, : n - 1], k, rtol=0, atol=1e-5)
            np.testing.assert_allclose(state.cache.v[:, b, :, : n - 1], v, rtol=0, atol=1e-5)
    assert rounds < 24
    assert (np.asarray(state.lengths) == [len(p) + 24 for p in PROMPTS]).all()


def test_prefill_where_chunks_do_not_divide_the_capacity():
    """Rows up to the full capacity, appended in two parts; the last window of a buffer is shifted, never clamped."""
    model, capacity = tiny_model(), 45
    rows = [(text(0)[:45], 38), (text(1)[:44], 1), (text(2)[:9], 8)]
    state = init_state(model, Plain(), B, capacity)
    for part in range(2):
        buffer, counts = np.zeros((B, capacity), np.int32), []
        for b, (row, first) in enumerate(rows):
            new = row[:first] if part == 0 else row[first:]
            buffer[b, : len(new)] = new
            counts.append(len(new))
        state = _prefill(model, Plain(), state, jnp.asarray(buffer), jnp.asarray(counts, jnp.int32))
        for b, (row, first) in enumerate(rows):
            known = row[:first] if part == 0 else row
            assert int(state.cache.lengths[b]) == len(known) - 1
            k, v = oracle.keys_and_values(model, known) if len(known) > 1 else (np.zeros((2, 2, 1, 8)),) * 2
            np.testing.assert_allclose(state.cache.k[:, b, :, : len(known) - 1], k[:, :, :-1], rtol=0, atol=1e-5)
            np.testing.assert_allclose(state.cache.v[:, b, :, : len(known) - 1], v[:, :, :-1], rtol=0, atol=1e-5)


@jax.jit
def _tree_logits(model, tokens, tree, state):
    positions = (state.lengths - 1)[:, None] + tree.depth
    return model.logits(model(tokens, positions, tree.ancestors, state.cache).hidden)


def test_each_node_equals_its_path_as_a_chain():
    """Logits of every node of random trees, wrong tokens included, equal those of the text that the path spells."""
    from jdlite.decoding.tree import Tree

    model = tiny_model()
    state = prefilled(model, PERFECT)
    for seed in range(5):
        rng = np.random.default_rng(seed)
        parents = np.array([[0] + [int(rng.integers(0, i)) for i in range(1, NODES)] for _ in range(B)], np.int32)
        tokens = rng.integers(0, VOCAB, (B, NODES)).astype(np.int32)
        tokens[:, 0] = [p[-1] for p in PROMPTS]
        tree = Tree.from_parents(jnp.asarray(parents), jnp.ones((B, NODES), bool))
        logits = np.asarray(_tree_logits(model, jnp.asarray(tokens), tree, state))
        for b in range(B):
            for i in range(NODES):
                path, node = [], i
                while node:
                    path.insert(0, int(tokens[b, node]))
                    node = parents[b, node]
                right = oracle.logits_after(model, [*PROMPTS[b], *path])
                np.testing.assert_allclose(logits[b, i], right, rtol=0, atol=1e-4)


# Where rows end.


@pytest.mark.parametrize("budgets", [[0, 1, 2], [3, 0, 0], [1, 1, 1], [7, 3, 0], [K, K + 1, K + 2], [0, 0, 0]], ids=str)
def test_budgets_are_never_overshot(budgets):
    """Drafts longer than what is left, per row."""
    result = run(PERFECT, PROMPTS, max_new=budgets)
    assert result.tokens == [greedy(b, budgets[b]) for b in range(B)]
    assert result.finish_reasons == ["length"] * B
    assert result.stats.emitted.tolist() == budgets
    assert result.stats.rounds.tolist() == [-(-n // (K + 1)) for n in budgets]


def first_use(row: int) -> dict[int, int]:
    """Each token of a row's answer, with where it first occurs."""
    found = {}
    for i, token in enumerate(greedy(row)):
        found.setdefault(token, i)
    return found


@pytest.mark.parametrize("lead", range(1, K + 2))
def test_stop_id_at_every_place_of_a_block(lead):
    """The stop token falls on draft 0, ..., the last draft and the bonus token: nothing is emitted after it."""
    stops = [list(first_use(b).items())[-1] for b in range(B)]
    places = [place for _, place in stops]
    # Blocks of `lead` tokens first, so that the place of the stop within its block varies.
    drafter = make(lambda b, n: chain(future(b, n)[: K if n >= len(PROMPTS[b]) + lead else lead - 1]))
    result = run(drafter, PROMPTS, max_new=NEW, stop_ids=[[token] for token, _ in stops])
    for b in range(B):
        assert result.tokens[b] == greedy(b, places[b] + 1)
    assert result.finish_reasons == ["stop_id"] * B


def test_stop_id_places_are_covered():
    """The rows of the test above really reach every place of a block, the bonus token included."""
    places = set()
    for lead in range(1, K + 2):
        for b in range(B):
            place = list(first_use(b).values())[-1]
            places.add(place if place < lead else (place - lead) % (K + 1))
    assert places == set(range(K + 1))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("block", [1, 2, 4, K + 1])
def test_stop_sequences_inside_and_across_blocks(size, block):
    """Every run of `size` tokens of the answer as the stop sequence; the earliest occurrence ends the row."""
    drafter = make(lambda b, n: chain(future(b, n, block - 1)))
    for at in (0, 3, 4, 7):
        sequences = [greedy(b)[at : at + size] for b in range(B)]
        result = run(drafter, PROMPTS, max_new=NEW, stop_sequences=[[s] for s in sequences])
        for b in range(B):
            right = oracle.decode(tiny_model(), PROMPTS[b], NEW, stop_sequence=sequences[b])
            assert (result.tokens[b], result.finish_reasons[b]) == right


def test_stop_sequence_does_not_reach_into_the_prompt():
    """A sequence that the prompt has begun is not completed by the answer."""
    sequences = [[PROMPTS[b][-1], greedy(b)[0]] for b in range(B)]
    result = run(PERFECT, PROMPTS, max_new=NEW, stop_sequences=[[s] for s in sequences])
    for b in range(B):
        assert (result.tokens[b], result.finish_reasons[b]) == oracle.decode(
            tiny_model(), PROMPTS[b], NEW, stop_sequence=sequences[b]
        )


def test_capacity_is_a_finish_reason():
    """A full cache ends a row at the right token; the others go on."""
    live = session(PERFECT, B)
    long = text(0)[: CAPACITY - 7]
    prompts = [long, PROMPTS[1], PROMPTS[2]]
    live.append(prompts)
    result = live.decode(**options(B, max_new=[20, 20, 20]))
    assert result.tokens == [text(0)[len(long) : CAPACITY], greedy(1), greedy(2)]
    assert result.finish_reasons == ["capacity", "length", "length"]
    assert live.lengths[0] == CAPACITY
    again = live.decode(**options(B, max_new=[5, 2, 2]))
    assert again.tokens[0] == []
    assert again.finish_reasons == ["capacity", "length", "length"]
    with pytest.raises(CapacityError, match="row 0 would hold 49 tokens but the capacity is 48"):
        live.append([[1], [], []])


def test_budget_that_just_fits_is_no_capacity_stop():
    long = text(0)[: CAPACITY - 7]
    result = run(PERFECT, [long, long, long], max_new=[7, 6, 8])
    assert [len(t) for t in result.tokens] == [7, 6, 7]
    assert result.finish_reasons == ["length", "length", "capacity"]


def test_prompt_of_the_whole_capacity():
    full = text(0)[:CAPACITY]
    result = run(PERFECT, [full, [1], [2]], max_new=[3, 1, 1])
    assert result.tokens[0] == []
    assert result.finish_reasons == ["capacity", "length", "length"]


def test_longer_prompt_is_refused():
    with pytest.raises(CapacityError, match=f"row 1 would hold {CAPACITY + 1} tokens but the capacity is {CAPACITY}"):
        run(PERFECT, [[1], [2] * (CAPACITY + 1), [3]])


def test_empty_row_is_refused():
    live = session(PERFECT, B)
    live.append([[1], [], [2]])
    with pytest.raises(PromptError, match="row 1 is empty"):
        live.decode(**options(B))


def test_capacity_must_fit_model_and_draft():
    with pytest.raises(CapacityError, match="context of 256"):
        session(Plain(), 1, capacity=257)
    with pytest.raises(CapacityError, match="one draft of 6 tokens"):
        session(PERFECT, B, capacity=5)


def damaged(path, row: int = 3) -> Decoder:
    """The tiny model with NaN somewhere."""
    graph, state = nnx.split(tiny_model())
    flat = dict(nnx.to_flat_state(state))
    leaf = flat[path]
    flat[path] = leaf.replace(leaf.get_value().at[row].set(jnp.nan))
    return nnx.merge(graph, nnx.from_flat_state(list(flat.items())))


@pytest.mark.parametrize("drafter", [PERFECT, Plain()], ids=["perfect", "plain"])
def test_nan_weights_end_rows_with_an_error(drafter):
    result = run(drafter, PROMPTS, model=damaged(("layers", 1, "mlp", "down", "weight")), max_new=5)
    assert result.tokens == [[]] * B
    assert result.finish_reasons == ["error"] * B
    assert result.stats.emitted.tolist() == [0] * B


def test_tokens_before_the_nan_are_kept():
    """Plain decoding fails after the token whose embedding is NaN, and rows without it do not at all.

    With drafts it may fail some tokens earlier, because a draft that is not a number spoils its whole forward.
    """
    bad = 8
    model, clean = damaged(("embed", "weight"), bad), [[1, 2], [5], [7, 7]]
    rights = [oracle.decode(tiny_model(), prompt, NEW)[0] for prompt in clean]
    ends = [right.index(bad) + 1 if bad in right[:-1] else NEW for right in rights]
    assert min(ends) < NEW == max(ends)
    plain, drafted = (run(d, clean, model=model, max_new=NEW) for d in (Plain(), make(lambda b, n: chain([bad]))))
    for b in range(B):
        assert plain.tokens[b] == rights[b][: ends[b]]
        assert plain.finish_reasons[b] == ("length" if ends[b] == NEW else "error")
        assert drafted.tokens[b] == rights[b][: len(drafted.tokens[b])]


# Statistics.


@given(seed=st.integers(0, 2**31 - 1))
@settings(max_examples=10)
def test_statistics_equal_a_replay(seed):
    """Counters against a replay of the rounds in plain Python."""
    rng = np.random.default_rng(seed)
    good = rng.random((B, CAPACITY + K + 2)) < 0.7
    size = rng.integers(0, K + 1, (B, CAPACITY + 1))

    def table(b, n):
        right = future(b, n, int(size[b, n]))
        return chain([t if good[b, n + i] else (t + 1) % VOCAB for i, t in enumerate(right)])

    budgets = rng.integers(0, NEW, B).tolist()
    result = run(make(table), PROMPTS, max_new=budgets)
    stats = result.stats
    longest = 0
    for b in range(B):
        known, left, log = len(PROMPTS[b]), budgets[b], []
        while left:
            drafts = min(int(size[b, known]), left - 1, CAPACITY - known - 1)
            accepted = next((i for i in range(drafts) if not good[b, known + i]), drafts)
            log.append([drafts + 1, accepted, accepted + 1])
            known, left = known + accepted + 1, left - accepted - 1
        longest = max(longest, len(log))
        assert stats.log[b, : len(log)].tolist() == log
        assert not stats.log[b, len(log) :].any()
        assert stats.rounds[b] == len(log)
        assert stats.emitted[b] == budgets[b] == len(result.tokens[b])
        assert stats.drafted[b] == sum(nodes - 1 for nodes, *_ in log)
        assert stats.accepted_at[b].tolist() == [sum(a > d for _, a, _ in log) for d in range(K)]
        assert stats.accepted_from[b].tolist() == [sum(a for _, a, _ in log), *[0] * (len(SOURCES) - 1)]
    assert int(stats.forwards) == longest == int(stats.uses.sum())
    assert result.tau == pytest.approx(sum(budgets) / max(stats.rounds.sum(), 1))


def test_tokens_cut_after_a_stop_are_not_counted():
    stop = greedy(0)[1]
    place = greedy(0).index(stop)
    result = run(PERFECT, PROMPTS, max_new=[NEW, 0, 0], stop_ids=[[stop], [], []])
    assert result.stats.emitted.tolist() == [place + 1, 0, 0]
    assert result.stats.accepted_at[0].sum() == place + 1
    assert result.tau == place + 1


# Inside a user's own jit.


def test_inside_a_users_jit_without_callbacks():
    """`decode_rounds` is a pure function; nothing in it calls the host."""
    model, drafter = tiny_model(), PERFECT
    request = request_of(model)

    def mine(model, drafter, tokens, counts):
        state = init_state(model, drafter, B, CAPACITY)
        state = loop.catch_up(model, drafter, state.append(tokens, counts), chunk=8)
        begin = state.lengths
        progress = loop.start(model, drafter, state, request, jnp.full(B, NEW, jnp.int32))
        state, progress = loop.decode_rounds(model, drafter, state, request, progress)
        return state.tokens, begin, state.lengths

    buffer = np.zeros((B, CAPACITY), np.int32)
    for b, prompt in enumerate(PROMPTS):
        buffer[b, : len(prompt)] = prompt
    counts = jnp.asarray([len(p) for p in PROMPTS], jnp.int32)
    tokens, begin, end = (np.asarray(x) for x in jax.jit(mine)(model, drafter, jnp.asarray(buffer), counts))
    assert [tokens[b, begin[b] : end[b]].tolist() for b in range(B)] == [greedy(b) for b in range(B)]

    names = set()

    def visit(jaxpr):
        for equation in jaxpr.eqns:
            names.add(equation.primitive.name)
            for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    visit(inner)

    visit(jax.make_jaxpr(mine)(model, drafter, jnp.asarray(buffer), counts).jaxpr)
    assert "while" in names
    assert "dot_general" in names, "the walk reaches the loop's body"
    assert not [name for name in names if "callback" in name or "infeed" in name or "outfeed" in name]
