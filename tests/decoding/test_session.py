"""A session after any sequence of calls equals a fresh one over the same tokens; compilations are counted."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdlite.decoding import session as session_module
from jdlite.decoding.request import row_keys
from jdlite.decoding.sampling import Sampling
from jdlite.decoding.session import Session
from jdlite.drafters.base import Drafter
from jdlite.drafters.plain import Plain
from jdlite.drafters.registry import make_drafter
from jdlite.errors import CapacityError, ConfigError, PromptError
from tests.decoding import oracle
from tests.decoding.test_exactness import NAMES
from tests.toys import CAPACITY, VOCAB, options, session, tiny_model

B = 3
# Token Recycling keeps its table over a rollback on purpose, so its tau may differ; its tokens may not.
SAME_TAU = ("plain", "pld", "pld_plus", "adapld", "suffix", "logit_spec")


def right(tokens: list[int], new: int) -> list[int]:
    return oracle.decode(tiny_model(), tokens, new, capacity=CAPACITY)[0]


def random_rows(rng, longest: int) -> list[list[int]]:
    """Rows of few different tokens, some empty."""
    return [
        rng.integers(0, int(rng.integers(1, VOCAB + 1)), int(rng.integers(0, longest + 1))).tolist() for _ in range(B)
    ]


def fresh_copy(live: Session) -> Session:
    """A new session over the same tokens, given at once."""
    fresh = session(live.drafter, B)
    fresh.append(live.tokens)
    return fresh


def compare_decode(live: Session, budgets: list[int], *, same_tau: bool = True) -> None:
    """The live session's answer, tau and rounds are those of a fresh one and the tokens those of the oracle."""
    texts, fresh = live.tokens, fresh_copy(live)
    got, again = (s.decode(**options(B, max_new=budgets)) for s in (live, fresh))
    assert got.tokens == again.tokens == [right(t, n) for t, n in zip(texts, budgets, strict=True)]
    assert got.finish_reasons == again.finish_reasons
    assert live.tokens == [t + new for t, new in zip(texts, got.tokens, strict=True)]
    if same_tau:
        np.testing.assert_array_equal(got.stats.rounds, again.stats.rounds)
        np.testing.assert_array_equal(got.stats.log, again.stats.log)
    np.testing.assert_array_equal(live.state.cache.lengths, np.array(live.lengths) - 1)


def play(drafter: Drafter, seed: int, steps: int = 6, *, same_tau: bool = True) -> None:
    """A random script of append, decode, fork and rollback."""
    rng = np.random.default_rng(seed)
    live = session(drafter, B)
    live.append([[int(rng.integers(0, VOCAB)), *row] for row in random_rows(rng, 14)])
    for _ in range(steps):
        action = rng.choice(["append", "decode", "fork", "rollback"])
        if action == "append":
            rows = [row[: CAPACITY - n] for row, n in zip(random_rows(rng, 12), live.lengths, strict=True)]
            before = live.tokens
            live.append(rows)
            assert live.tokens == [a + b for a, b in zip(before, rows, strict=True)]
        elif action == "decode":
            live.decode(**options(B, max_new=rng.integers(0, 9, B).tolist()))
        elif action == "rollback":
            keep = [int(rng.integers(1, n + 1)) for n in live.lengths]
            before = live.tokens
            live.rollback(keep)
            assert live.tokens == [t[:n] for t, n in zip(before, keep, strict=True)]
        else:
            order = rng.integers(0, B, B).tolist()
            twin = live.fork(order)
            assert twin.tokens == [live.tokens[i] for i in order]
            # Whatever the original does now is none of the twin's business, and the other way round.
            live.rollback([1] * B)
            live.append([[0, 1]] * B)
            live.decode(**options(B, max_new=3))
            live = twin
    compare_decode(live, rng.integers(0, 12, B).tolist(), same_tau=same_tau)


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 2**31 - 1))
@settings(max_examples=6)
def test_any_script_equals_a_fresh_run(name, seed):
    play(make_drafter(NAMES[name]), seed, same_tau=name in SAME_TAU)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 2**31 - 1))
@settings(max_examples=40)
def test_long_scripts(name, seed):
    play(make_drafter(NAMES[name]), seed, steps=14, same_tau=name in SAME_TAU)


def test_turns_of_a_conversation():
    """Append, decode, append, decode: as if all had been said at once; a rolled back turn leaves nothing."""
    live = session(make_drafter("adapld"), B)
    live.append([[1, 2, 3, 4, 1, 2], [5], [6, 6, 6]])
    first = live.decode(**options(B, max_new=6))
    saved = live.lengths
    live.append([[9, 9, 9], [], [1]])
    live.decode(**options(B, max_new=4))
    live.rollback(saved)
    assert live.tokens == [p + t for p, t in zip([[1, 2, 3, 4, 1, 2], [5], [6, 6, 6]], first.tokens, strict=True)]
    live.append([[7, 1, 2], [8], []])
    compare_decode(live, [8, 8, 8])


def test_seeds_of_rows():
    """One seed gives row b stream b; a list gives each row stream 0 of its own."""
    one, many = row_keys(7, 3), row_keys([7, 8, 7], 3)
    data = jax.random.key_data
    assert not np.array_equal(data(one[0]), data(one[1]))
    np.testing.assert_array_equal(data(many[0]), data(one[0]))
    np.testing.assert_array_equal(data(many[2]), data(one[0]))
    np.testing.assert_array_equal(data(many[1]), data(row_keys(8, 1)[0]))
    with pytest.raises(ConfigError, match="got 2 for 3 rows"):
        row_keys([1, 2], 3)


def test_noise_belongs_to_the_position():
    """A sampled answer that is rolled back and decoded again in two parts comes out the same."""
    live = session(make_drafter("adapld"), B)
    live.append([[1, 2, 3], [4], [5, 5]])
    hot = [Sampling(temperature=0.9, top_k=5), Sampling(temperature=1.3, top_p=0.8, min_p=0.05), Sampling(
        temperature=1.0, repetition_penalty=1.0, banned_ids=(2,))]  # fmt: skip
    whole = live.decode(**options(B, max_new=10, sampling=hot, seed=5))
    live.rollback([3 + 4, 1 + 2, 2])
    parts = live.decode(**options(B, max_new=[6, 8, 10], sampling=hot, seed=5))
    assert [w[k:] for w, k in zip(whole.tokens, (4, 2, 0), strict=True)] == parts.tokens


# Streaming.


@pytest.mark.parametrize("every", [1, 2, 5])
def test_stream_concatenates_to_the_decode(every):
    prompts = [[1, 2, 3, 1, 2, 3], [5], [7] * 9]
    live, other = (session(make_drafter("adapld"), B) for _ in range(2))
    live.append(prompts)
    other.append(prompts)
    given_options = options(B, max_new=[20, 7, 0])
    whole = other.decode(**given_options)
    *parts, result = live.stream(rounds_per_yield=every, **given_options)
    assert [[t for part in parts for t in part[b]] for b in range(B)] == whole.tokens == result.tokens
    assert result.finish_reasons == whole.finish_reasons
    np.testing.assert_array_equal(result.stats.log, whole.stats.log)
    assert int(result.stats.forwards) == int(whole.stats.forwards)
    assert len(parts) == max(-(-int(whole.stats.forwards) // every), 1)
    assert live.tokens == other.tokens


def test_a_stream_may_be_left_early():
    """What was streamed is committed; the session goes on from there."""
    live = session(make_drafter("adapld"), B)
    prompts = [[1, 2, 3, 1, 2, 3], [5], [7] * 9]
    live.append(prompts)
    stream = live.stream(rounds_per_yield=1, **options(B, max_new=20))
    part = next(stream)
    stream.close()
    assert live.tokens == [p + t for p, t in zip(prompts, part, strict=True)]
    compare_decode(live, [5, 6, 7])


# Compilations.


def test_one_compilation_per_bucket():
    """Prompt lengths, hits, budgets, seeds, sampling values and stop tokens vary; batch and capacity do not."""
    functions = [getattr(session_module, name) for name in ("_append", "_start", "_rounds", "_rollback", "_take")]
    for function in functions:
        function.clear_cache()
    rng = np.random.default_rng(0)
    drafter = make_drafter("adapld")
    for i in range(12):
        live = session(drafter, B)
        live.append([[1]] * B)
        live.append(random_rows(rng, 20))
        live = live.fork([0, 1, 2])
        live.decode(
            **options(
                B,
                max_new=rng.integers(0, 8, B).tolist(),
                sampling=[Sampling(temperature=float(t)) for t in rng.random(B) + 0.1],
                stop_ids=[[int(t)] for t in rng.integers(0, VOCAB, B)],
                seed=i,
            )
        )
        live.rollback([1, 1, 1])
        for _ in live.stream(
            rounds_per_yield=1 + i % 3,
            **options(B, max_new=5, sampling=Sampling(temperature=0.5 + i)),
        ):
            pass
    assert [function._cache_size() for function in functions] == [1] * 5


# Bad input.


@pytest.fixture(scope="module")
def plain():
    live = session(Plain(), B)
    live.append([[1], [2, 3], [4]])
    return live


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([[1]], PromptError, "one list per row: got 1 lists for 3 rows"),
        ([[1], [VOCAB], [2]], PromptError, "row 1 holds token 13, but ids go from 0 to 12"),
        ([[1], [2], [-1]], PromptError, "row 2 holds token -1"),
        ([[1], [2.5], [1]], PromptError, "row 1 must be a flat list of integer token ids"),
        ([[1], [[2]], [1]], PromptError, "row 1 must be a flat list of integer token ids"),
        ([[1], ["a"], [1]], PromptError, "row 1 must be a flat list of integer token ids"),
        ([[1], [2], [0] * CAPACITY], CapacityError, "row 2 would hold"),
        ([[1], [[1], [2, 3]], [1]], PromptError, "row 1 must be a flat list of integer token ids"),
        ([[1], [True], [1]], PromptError, "row 1 must be a flat list of integer token ids"),
        ([[1], 5, [1]], PromptError, "row 1 must be a flat list of integer token ids"),
        ([[1], None, [1]], PromptError, "row 1 must be a flat list of integer token ids"),
    ],
    ids=str,
)
def test_append_refuses(plain, rows, error, message):
    before = plain.tokens
    with pytest.raises(error, match=message) as caught:
        plain.append(rows)
    assert "\n" not in str(caught.value)
    assert plain.tokens == before


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens must not be negative: got -1"),
        ({"max_new_tokens": [1, 2]}, "max_new_tokens must be one number or one per row"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be"),
        ({"max_new_tokens": None}, "max_new_tokens must be"),
        ({"seed": [1, 2]}, "seed must be one integer or one per row"),
        ({"seed": 1.5}, "seed must be one integer or one per row"),
        ({"seed": None}, "seed must be one integer or one per row"),
        ({"sampling": [Sampling()]}, "1 samplings were given for a batch of 3"),
        ({"stop_ids": [[1]]}, "stop_ids has 1 rows for a batch of 3"),
        ({"stop_ids": [[-2], [], []]}, "stop token -2"),
        ({"stop_sequences": [[[]], [], []]}, "stop sequence of row 0 is empty"),
        ({"sampling": Sampling(banned_ids=(VOCAB,))}, f"bans token {VOCAB}"),
        ({"log_rounds": -1}, "log_rounds must not be negative"),
    ],
    ids=str,
)
def test_decode_refuses(plain, wrong, message):
    before = plain.tokens
    with pytest.raises(ConfigError, match=message):
        plain.decode(**wrong)
    assert plain.tokens == before


def test_stream_fork_and_rollback_refuse(plain):
    with pytest.raises(ConfigError, match="rounds_per_yield must be at least 1"):
        plain.stream(rounds_per_yield=0)
    with pytest.raises(ConfigError, match="row numbers from 0 to 2"):
        plain.fork([0, 3])
    with pytest.raises(ConfigError, match="row numbers from 0 to 2"):
        plain.fork([])
    for lengths in ([1, 1], [9, 1, 1], [-1, 1, 1]):
        with pytest.raises(ConfigError, match="rollback takes one length per row"):
            plain.rollback(lengths)


def test_costs_must_fit_the_drafter():
    from jdlite.decoding.policy import Costs

    with pytest.raises(ConfigError, match="costs must be for a drafter of 39 nodes: got 8"):
        Session(tiny_model(), make_drafter("adapld"), capacity=CAPACITY, costs=Costs.free((1, 8)))
