"""DLite, and DLite beside AdaPLD, in the loop and in sessions: the tokens of plain decoding, whatever they draft."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdlite.decoding import session as session_module
from jdlite.decoding.policy import variants
from jdlite.decoding.sampling import GREEDY, Sampling
from jdlite.decoding.session import Session
from jdlite.drafters.adapld import AdaPLD
from jdlite.drafters.base import AGREED, MODEL, Drafter
from jdlite.drafters.dlite import DLiteDrafter
from jdlite.drafters.hybrid import Hybrid
from jdlite.drafters.lookup import PromptLookup
from jdlite.errors import ConfigError
from tests.decoding.test_exactness import MIXED, NEW, PROMPTS, check_stats, expected
from tests.decoding.test_session import fresh_copy, play, right
from tests.learnt import learnt
from tests.toys import VOCAB, options, run, session, tiny_model

B = 3
COPIES = AdaPLD(copy_length=5, num_branches=3)
DRAFTERS = {
    "paper": lambda: dlite(),
    "group 2": lambda: dlite(anchor_group_size=2),
    "history": lambda: dlite(draft_history=5),
    "group 2, history": lambda: dlite(anchor_group_size=2, draft_history=5),
    "constant gain": lambda: dataclasses.replace(dlite(), gain="constant"),
    "lm head, stream": lambda: dlite(head_output="lm_head", context_mode="stream"),
    "feature axis": lambda: dlite(feature_concat="feature", num_layers=2),
    "beam": lambda: dataclasses.replace(dlite(), beam=3, num_nodes=16),
    "group 2, history, beam": lambda: dataclasses.replace(dlite(anchor_group_size=2, draft_history=5), beam=2),
    "hybrid": lambda: Hybrid(COPIES, dlite()),
    "hybrid, beam": lambda: Hybrid(COPIES, dataclasses.replace(dlite(), beam=3), num_nodes=20),
    "hybrid, few nodes": lambda: Hybrid(dlite(anchor_group_size=2), COPIES, num_nodes=5),
    "hybrid with pld": lambda: Hybrid(PromptLookup(num_drafts=6), dlite(draft_history=5)),
}
FAST = ("paper", "group 2, history", "beam", "hybrid")
NAMES = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in DRAFTERS]


@functools.cache
def network(**overrides):
    return learnt(VOCAB, **overrides)


def dlite(**overrides) -> DLiteDrafter:
    return DLiteDrafter(model=network(**overrides))


@functools.cache
def drafter_of(name: str) -> Drafter:
    return DRAFTERS[name]().fit(tiny_model())


@pytest.mark.parametrize("name", NAMES)
def test_greedy(name):
    drafter = drafter_of(name)
    deep = 0
    for group in PROMPTS:
        result = run(drafter, PROMPTS[group], max_new=NEW)
        assert result.tokens == expected(group), group
        check_stats(result, B)
        deep += result.stats.accepted_at[:, 1].sum()
    assert deep > 0, "chains are accepted somewhere"


@pytest.mark.parametrize("name", NAMES)
def test_sampled(name):
    """Match mode, with mixed samplings and the same keys: equal token for token."""
    drafter = drafter_of(name)
    accepted = 0
    for seed, group in enumerate(PROMPTS):
        result = run(drafter, PROMPTS[group], max_new=NEW, sampling=MIXED, seed=seed, stop_ids=[[], [], [10]])
        assert result.tokens == expected(group, MIXED, seed, (None, None, 10)), group
        check_stats(result, B)
        accepted += result.stats.accepted_at.sum()
    assert accepted > 0


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("name", ["group 2, history", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_other_batch_sizes(name, batch):
    """The same rows alone and among seven others."""
    rows = [prompt for group in PROMPTS.values() for prompt in group]
    rights = [text for group in PROMPTS for text in expected(group)]
    rows, rights = rows + rows[:1], rights + rights[:1]
    for first in range(0, len(rows), batch):
        assert run(drafter_of(name), rows[first : first + batch], max_new=NEW).tokens == rights[first : first + batch]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["paper", "hybrid"])
def test_any_number_of_verified_nodes(name):
    """With all compiled numbers of nodes, chosen by gain."""
    drafter = drafter_of(name)
    for group in PROMPTS:
        result = run(drafter, PROMPTS[group], max_new=NEW, counts=variants(drafter.max_nodes))
        assert result.tokens == expected(group), group


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("sampling", [GREEDY, MIXED], ids=["greedy", "sampled"])
def test_a_draft_that_is_too_dear_is_left_out_after_a_trial(name, sampling):
    drafter, found = drafter_of(name), []
    for draft in (0.0, 1000.0):
        live = session(drafter, B)
        live.costs = dataclasses.replace(live.costs, draft=draft)
        live.append(PROMPTS["repetitive"])
        found.append(live.decode(**options(B, sampling=sampling, max_new=NEW)))
    free, dear = found
    assert dear.tokens == free.tokens
    own = [result.stats.accepted_from[:, [MODEL, AGREED]].sum() for result in found]
    assert own[1] < own[0]


def test_network_of_nans_is_plain_decoding():
    drafter = drafter_of("paper")
    broken = dataclasses.replace(drafter, model=jax.tree.map(lambda x: x * np.nan, drafter.model))
    result = run(broken, PROMPTS["random"], max_new=NEW)
    assert result.tokens == expected("random")
    assert result.tau == 1


def test_sources_of_a_hybrid():
    """What both offer, what only one does: every accepted draft is counted once."""
    result = run(drafter_of("hybrid"), PROMPTS["repetitive"], max_new=NEW)
    counts = result.stats.accepted_from.sum(axis=0)
    assert counts.sum() == result.stats.accepted_at.sum() == result.stats.emitted.sum() - result.stats.rounds.sum()
    alone = run(drafter_of("paper"), PROMPTS["repetitive"], max_new=NEW).stats
    assert alone.accepted_from[:, MODEL].sum() == alone.accepted_at.sum()
    assert counts[AGREED] > 0
    assert counts[MODEL] > 0


@pytest.mark.slow
def test_hybrid_is_no_worse_than_its_parts_here():
    """One tree holds both, so on these texts no part alone needs fewer rounds."""
    rounds = {}
    for name, drafter in {"hybrid": drafter_of("hybrid"), "dlite": drafter_of("paper"), "adapld": COPIES}.items():
        rounds[name] = sum(int(run(drafter, PROMPTS[group], max_new=NEW).stats.rounds.sum()) for group in PROMPTS)
    assert rounds["hybrid"] <= min(rounds["dlite"], rounds["adapld"])


# Sessions.


@pytest.mark.parametrize("name", ["group 2, history", "hybrid"])
@given(seed=st.integers(0, 2**31 - 1))
@settings(max_examples=6)
def test_any_script_gives_the_tokens_of_a_fresh_run(name, seed):
    play(drafter_of(name), seed, same_tau=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["paper", "history", "group 2, history", "hybrid"])
@given(seed=st.integers(0, 2**31 - 1))
@settings(max_examples=30)
def test_long_scripts(name, seed):
    play(drafter_of(name), seed, steps=14, same_tau=False)


def same_decode(live: Session, new: int = 10):
    """The live session decodes as a fresh one over the same tokens, round by round."""
    texts, fresh = live.tokens, fresh_copy(live)
    got, again = (s.decode(**options(live.batch, max_new=new)) for s in (live, fresh))
    assert got.tokens == again.tokens == [right(text, new) for text in texts]
    np.testing.assert_array_equal(got.stats.log, again.stats.log)
    return got


@pytest.mark.parametrize("name", ["group 2, history", "hybrid"])
def test_turns_forks_and_prefix_reuse_keep_tau(name):
    live = session(drafter_of(name), B)
    live.append([[1, 2, 3, 4, 1, 2], [5], [6, 6, 6]])
    live.decode(**options(B, max_new=[6, 4, 5]))
    live.append([[9, 9, 9], [2], [1, 3]])
    same_decode(live.fork([2, 0, 1]))
    # The next request shares a prefix, ends before it or goes on after it.
    live.rollback([7, 2, 9])
    live.append([[4, 1], [7, 7, 7], [2]])
    same_decode(live.fork())
    # Rows that had nothing to forget are not disturbed by others that had.
    live.decode(**options(B, max_new=[0, 3, 5]))
    live.rollback([live.lengths[0], live.lengths[1] - 3, live.lengths[2]])
    live.append([[], [3], []])
    assert same_decode(live).stats.drafted.sum() > 0


@pytest.mark.parametrize("name", ["paper", "history"])
def test_a_rollback_costs_one_round_without_drafts(name):
    """Decoding right after a rollback starts with a plain round, which brings the features; then all is as ever.

    Running the last kept token once more instead would take a forward too, and emit nothing.
    """
    live = session(drafter_of(name), B)
    live.append([[1, 2, 3, 4, 1, 2], [5], [6, 6, 6]])
    live.decode(**options(B, max_new=8))
    live.rollback([9, 5, live.lengths[2]])
    texts = live.tokens
    other = live.fork()
    got = live.decode(**options(B, max_new=12))
    assert got.tokens == [right(text, 12) for text in texts]
    assert got.stats.log[:, 0, 0].tolist() == [1, 1, 4], "nodes verified in the first round"
    # From the second round on, the rolled back rows go as a fresh session that knows one token more.
    for b in (0, 1):
        fresh = session(drafter_of(name), 1)
        fresh.append([texts[b] + got.tokens[b][:1]])
        again = fresh.decode(**options(1, max_new=11))
        np.testing.assert_array_equal(got.stats.log[b, 1:], again.stats.log[0, :-1])
    # One appended token is a forward as well: nothing is lost then.
    other.append([[3], [3], [3]])
    same_decode(other)


def test_hybrid_drafts_right_after_a_rollback():
    """AdaPLD's memory does not go stale."""
    live = session(drafter_of("hybrid"), 1)
    live.append([[1, 2, 3, 4, 1, 2, 3, 4, 1, 2]])
    live.decode(**options(1, max_new=8))
    live.rollback([9])
    got = live.decode(**options(1, max_new=8))
    assert got.tokens == [right([1, 2, 3, 4, 1, 2, 3, 4, 1], 8)]
    assert got.stats.log[0, 0, 0] > 1


@pytest.mark.parametrize("name", ["paper", "hybrid"])
def test_sampled_answers_in_parts(name):
    """Rolled back and decoded again in two parts, a sampled answer comes out the same."""
    live = session(drafter_of(name), B)
    live.append([[1, 2, 3], [4], [5, 5]])
    hot = [Sampling(temperature=0.9, top_k=5), Sampling(temperature=1.3, top_p=0.8), Sampling(temperature=1.0)]
    whole = live.decode(**options(B, max_new=10, sampling=hot, seed=5))
    live.rollback([3 + 4, 1 + 2, 2])
    parts = live.decode(**options(B, max_new=[6, 8, 10], sampling=hot, seed=5))
    assert [text[k:] for text, k in zip(whole.tokens, (4, 2, 0), strict=True)] == parts.tokens


def test_one_compilation_for_all_parameters_and_lengths():
    functions = [getattr(session_module, name) for name in ("_append", "_start", "_rounds")]
    for function in functions:
        function.clear_cache()
    for seed in range(3):
        live = session(Hybrid(COPIES, DLiteDrafter(model=learnt(VOCAB, seed=seed))), B)
        live.append([[1, 2, 3][: seed + 1], [4], [5, 5]])
        live.decode(**options(B, max_new=4 + seed, seed=seed))
    assert [function._cache_size() for function in functions] == [1] * 3


# Fitting.


def test_sessions_fit_their_drafter():
    assert session(dlite(), 1).drafter.lm_head is None
    bare = dlite(head_output="lm_head", context_mode="stream")
    fitted = session(bare, 1).drafter
    lm_head = tiny_model().lm_head
    assert lm_head is not None
    np.testing.assert_array_equal(fitted.lm_head, lm_head.weight[...])
    assert fitted.fit(tiny_model()) is fitted
    tied = tiny_model(VOCAB, tie_embeddings=True)
    np.testing.assert_array_equal(bare.fit(tied).lm_head, tied.embed.weight[...])
    hybrid = session(Hybrid(COPIES, bare), 1).drafter
    assert hybrid.num_layers == 2
    assert hybrid.second.lm_head is not None


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: Hybrid(COPIES, d)], ids=["dlite", "hybrid"])
@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        ({"num_layers": 3}, "layers 2 against the target's 3"),
        ({"hidden_size": 8}, "hidden_size 16 against the target's 8"),
        ({"vocab": 14}, "vocab_size 13 against the target's 14"),
    ],
    ids=str,
)
def test_another_target_is_refused(shape, sentence, wrap):
    shape = dict(shape)
    other = tiny_model(shape.pop("vocab", VOCAB), **shape)
    with pytest.raises(ConfigError, match=f"made for another target: {sentence}; use the drafter of this target"):
        session(wrap(dlite()), 1, model=other)
