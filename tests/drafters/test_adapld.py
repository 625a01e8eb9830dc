"""AdaPLD step by step against a plain-Python oracle, and its choices one by one."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdlite.drafters.adapld import AdaPLD
from jdlite.drafters.registry import make_drafter
from jdlite.errors import ConfigError
from tests.drafters import harness
from tests.drafters.harness import CAPACITY, LAYERS, Player, paths, to_context
from tests.drafters.oracles.adapld import adapld
from tests.drafters.strategies import ROWS, VOCAB, batches, seeds

SMALL = {"copy_length": 4, "num_branches": 3}
FAST = [
    AdaPLD(**SMALL),
    AdaPLD(**SMALL, successors="always", threshold=0.3),
    AdaPLD(copy_length=2, num_branches=5, semantic="hidden", threshold=0.2, top_delta=2, window=3, context=2),
]
SLOW = [
    AdaPLD(num_branches=VOCAB),
    AdaPLD(**SMALL, successors="never", rerank_layer=0),
    AdaPLD(copy_length=1, num_branches=1, successors="always"),
    AdaPLD(copy_length=30, num_branches=2, context=3),
    AdaPLD(**SMALL, threshold=1.0),
    AdaPLD(**SMALL, threshold=-1.0, window=1),
    AdaPLD(**SMALL, threshold=0.5, top_delta=1),
    AdaPLD(**SMALL, semantic="hidden", successors="always"),
    AdaPLD(**SMALL, context=2, semantic="hidden", threshold=0.0, top_delta=3),
]


def follow(player: Player, born: list[list[int]], forwards: list[int]) -> None:
    """Note after each step which forward committed each position; a row's forwards are those that commit something."""
    for b, row in enumerate(player.rows):
        run = len(row.states)
        if run > len(born[b]):
            born[b] += [forwards[b]] * (run - len(born[b]))
            forwards[b] += 1
        else:
            del born[b][run:]


class Watched(Player):
    """A player that also keeps the number of the forward that committed each position."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.born: list[list[int]] = [[] for _ in self.rows]
        self.forwards = [0] * len(self.rows)

    def _forward(self, start, path, count, valid) -> None:
        super()._forward(start, path, count, valid)
        follow(self, self.born, self.forwards)

    def rollback(self, lengths, texts) -> None:
        super().rollback(lengths, texts)
        for b, row in enumerate(self.rows):
            del self.born[b][len(row.states) :]

    def fork(self, order) -> None:
        super().fork(order)
        self.born = [list(self.born[i]) for i in order]
        self.forwards = [self.forwards[i] for i in order]

    def expected(self, b: int):
        window = self.drafter.window
        born, row = self.born[b], self.rows[b]
        newest = {j for j, f in enumerate(born) if window is None or f >= self.forwards[b] - window}
        return adapld(self.drafter, row.tokens, row.states, row.top_ids, self.embedding, newest)


def compare(player: Watched) -> None:
    proposal = player.propose()
    for b, row in enumerate(player.rows):
        assert paths(proposal, b) == player.expected(b), f"row {b}: {row.tokens}"


def play(drafter, texts, seed: int) -> None:
    """As `harness.play`, with the forwards watched."""
    player = Watched(drafter, texts, seed=seed, vocab=VOCAB)
    rng = player.rng
    player.prefill([int(rng.integers(1, len(text) + 1)) for text in texts])
    compare(player)
    while player.advance():
        compare(player)
    player.fork([int(b) for b in rng.integers(0, len(texts), len(texts))])
    compare(player)
    keep = [int(rng.integers(1, len(row.tokens) + 1)) for row in player.rows]
    ends = [rng.integers(0, VOCAB, int(rng.integers(0, CAPACITY - length + 1))).tolist() for length in keep]
    player.rollback(keep, [row.tokens[:length] + end for row, length, end in zip(player.rows, keep, ends, strict=True)])
    compare(player)
    while player.advance():
        compare(player)


def identify(drafter: AdaPLD) -> str:
    default = AdaPLD()
    changed = {f.name: getattr(drafter, f.name) for f in dataclasses.fields(AdaPLD)}
    return ",".join(f"{k}={v}" for k, v in changed.items() if v != getattr(default, k))


@pytest.mark.parametrize(
    "drafter", [*FAST, *(pytest.param(d, marks=pytest.mark.slow) for d in SLOW)], ids=lambda d: identify(d)
)
@given(texts=batches(), seed=seeds)
@settings(max_examples=20)
def test_equals_oracle(drafter, texts, seed):
    play(drafter, texts, seed)


@pytest.mark.parametrize("successors", ["semantic", "always"])
@given(texts=batches(), seed=seeds, shift=st.integers(0, VOCAB - 1))
@settings(max_examples=10)
def test_successors_from_a_forward(successors, texts, seed, shift):
    """Variant: the target's own next token under each branch, and nothing else changes."""
    drafter = AdaPLD(**SMALL, successors=successors, successor_source="forward")
    assert drafter.lookahead
    player = Watched(drafter, texts, seed=seed, vocab=VOCAB)
    player.prefill([len(text) for text in texts])
    context = player.context()
    first = harness._propose(drafter, player.memory, context)
    after = lambda token: (3 * token + shift) % VOCAB  # noqa: E731
    next_ids = np.asarray([[after(int(t)) for t in row] for row in np.asarray(first.tokens)], np.int32)
    extended = harness.NumpyProposal.of(_extend(drafter, player.memory, context, first, next_ids))
    harness.check_proposal(extended, drafter, anchor=[row.tokens[-1] for row in player.rows], vocab=VOCAB)
    for b, row in enumerate(player.rows):
        right = adapld(
            drafter, row.tokens, row.states, row.top_ids, player.embedding, range(len(row.tokens)), next_token=after
        )
        assert paths(extended, b) == right


_extend = jax.jit(lambda drafter, memory, context, proposal, ids: drafter.extend(
    memory, to_context(context), proposal, ids
))  # fmt: skip


def drafted(texts: list[list[int]], drafter=None):
    """Paths after prefilling three whole texts."""
    player = Watched(drafter or FAST[0], texts, seed=0, vocab=VOCAB)
    player.prefill([len(text) for text in texts])
    proposal = player.propose()
    compare(player)
    return [paths(proposal, b) for b in range(len(texts))]


def kinds(found: dict) -> set[str]:
    return set(found.values())


def test_one_token_and_two_tokens():
    """The first token has no state before it: it is never a candidate, so short rows draft nothing."""
    assert drafted([[3], [3, 3], [3, 4]]) == [{}, {}, {}]


def test_hit_at_the_end_copies_the_anchor_alone():
    found = drafted([[1, 2, 5, 5], [1, 5, 2, 5], [2, 4, 4]])
    assert [p for p, s in found[0].items() if s == "lexical"] == [(5,)]
    assert [p for p, s in found[1].items() if s == "lexical"] == [(2,), (2, 5)]
    assert [p for p, s in found[2].items() if s == "lexical"] == [(4,)]


def test_all_the_same_token():
    """A chain of that token, as long as the memory's end allows; branches without it."""
    for found in drafted([[6] * 20, [6] * 3, [6] * CAPACITY]):
        chain = [p for p, s in found.items() if s == "lexical"]
        assert chain == [(6,) * (i + 1) for i in range(len(chain))]
        assert 1 <= len(chain) <= 4
        assert (6,) not in [p for p, s in found.items() if s == "branch"]


def test_semantic_hits_have_no_chain():
    drafter = AdaPLD(**SMALL, threshold=-1.0)
    for found in drafted([[1, 2, 3, 4], [1, 2, 3, 1, 2, 7], [0, 1, 2, 3, 4, 5]], drafter):
        assert kinds(found) <= {"semantic", "successor"}
        assert sum(s == "semantic" for s in found.values()) == SMALL["num_branches"]


def test_threshold_of_one_needs_the_same_embedding():
    drafter = AdaPLD(**SMALL, threshold=1.0)
    assert drafted([[1, 2, 3, 4], [1, 2, 3, 4, 5], [0, 1]], drafter) == [{}, {}, {}]


def test_rows_without_a_hit_do_not_disturb_others():
    """The same row drafts the same next to a lexical, a semantic or no hit (the searches run for the whole batch)."""
    rows = [[1, 2, 3, 1, 2], [4, 5, 6, 7], [3]]
    player = Watched(FAST[0], rows, seed=1, vocab=VOCAB)
    player.prefill([len(r) for r in rows])
    before = [paths(player.propose(), b) for b in range(ROWS)]
    for order in ([0, 0, 0], [1, 1, 1], [2, 2, 2], [2, 1, 0]):
        fork = Watched(FAST[0], rows, seed=1, vocab=VOCAB)
        fork.prefill([len(r) for r in rows])
        fork.fork(order)
        after = [paths(fork.propose(), b) for b in range(ROWS)]
        assert after == [before[i] for i in order]


@pytest.mark.parametrize("drafter", FAST, ids=identify)
@given(texts=batches(), seed=seeds)
@settings(max_examples=10)
def test_memory_beyond_a_row_is_never_read(drafter, texts, seed):
    """NaN states and wild ids in all unused slots change nothing."""
    player = Watched(drafter, texts, seed=seed, vocab=VOCAB)
    player.prefill([len(text) for text in texts])
    before = player.propose()
    unused = np.arange(CAPACITY) >= player.lengths[:, None] - 1
    memory = jax.tree.map(np.array, player.memory)
    memory.states[unused] = np.nan
    memory.top_ids[unused] = -(10**9)
    if drafter.window:
        memory.forward[unused] = 10**9
    player.memory = memory
    after = player.propose()
    for b in range(ROWS):
        assert paths(before, b) == paths(after, b)


def test_size_of_the_tree():
    """1 + L + K nodes by default, and K more where successors have slots of their own."""
    assert AdaPLD().max_nodes == 39
    assert AdaPLD().max_depth == 30
    assert AdaPLD(successors="always").max_nodes == 47
    assert AdaPLD(copy_length=1, num_branches=4).max_nodes == 9
    assert AdaPLD(copy_length=1, num_branches=4, successors="never").max_nodes == 6
    assert AdaPLD(copy_length=1, successors="never").max_depth == 1
    assert AdaPLD(copy_length=1).max_depth == 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"copy_length": 0}, "copy_length"),
        ({"num_branches": 0}, "num_branches"),
        ({"context": 0}, "context"),
        ({"window": 0}, "window"),
        ({"top_delta": 0}, "top_delta"),
        ({"threshold": 1.5}, "threshold"),
        ({"threshold": float("nan")}, "threshold"),
        ({"successors": "sometimes"}, "successors"),
        ({"semantic": "both"}, "semantic"),
        ({"successor_source": "guess"}, "successor_source"),
    ],
    ids=str,
)
def test_refuses_bad_options(wrong, message):
    with pytest.raises(ConfigError, match=message):
        AdaPLD(**wrong)


def test_refuses_what_does_not_fit_the_target():
    with pytest.raises(ConfigError, match="rerank_layer"):
        AdaPLD(rerank_layer=LAYERS).needs(LAYERS)
    with pytest.raises(ConfigError, match="num_branches"):
        AdaPLD(num_branches=VOCAB + 1).init(1, 8, hidden_size=4, vocab_size=VOCAB, dtype=np.float32)
    needs = AdaPLD().needs(36)
    assert (needs.taps, needs.top_k) == ((28,), 8)


def test_by_name():
    assert make_drafter("adapld") == AdaPLD()
    assert make_drafter("adapld:copy_length=10,successors=never,threshold=0.5,window=none") == AdaPLD(
        copy_length=10, successors="never", threshold=0.5
    )
