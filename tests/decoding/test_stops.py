"""Stop rules against a plain-Python oracle that reads one token at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdlite.decoding.stops import Finish, cut, make_stops, recent_tokens
from jdlite.errors import ConfigError

jitted_cut = jax.jit(cut)


def oracle(block, history, ids, sequences, budget, room):
    """Tokens kept of `block` and the reason, by emitting one token at a time after the generated text `history`."""
    if not block:
        return 0, Finish.RUNNING
    text = list(history)
    for i in range(len(block) + 1):
        if i:
            text.append(block[i - 1])
            if block[i - 1] in ids:
                return i, Finish.STOP_ID
            if any(text[-len(s) :] == list(s) for s in sequences):
                return i, Finish.STOP_SEQUENCE
        if budget <= i:
            return i, Finish.LENGTH
        if room <= i:
            return i, Finish.CAPACITY
    return len(block), Finish.RUNNING


def run(rows, width):
    """`cut` over rows of (block, history, ids, sequences, budget, room); rubbish in every unused slot."""
    stops = make_stops([r[2] for r in rows], [r[3] for r in rows], len(rows))
    R = stops.history
    emitted = np.ones((len(rows), width), np.int32)
    recent = np.full((len(rows), R), -1, np.int32)
    for b, (block, history, *_) in enumerate(rows):
        emitted[b, : len(block)] = block
        tail = history[-R:] if R else []
        recent[b, R - len(tail) :] = tail
    count, budget, room = (jnp.array(x, jnp.int32) for x in zip(*[(len(r[0]), r[4], r[5]) for r in rows], strict=True))
    kept, reason = jitted_cut(jnp.asarray(emitted), count, jnp.asarray(recent), stops, budget, room)
    return list(zip(kept.tolist(), reason.tolist(), strict=True))


TOKEN = st.integers(0, 3)  # few ids, so that sequences overlap and cross the border all the time
ROW = st.tuples(
    st.lists(TOKEN, max_size=6),
    st.lists(TOKEN, max_size=4),
    st.lists(TOKEN, max_size=2),
    st.lists(st.lists(TOKEN, min_size=1, max_size=3), max_size=2),
    st.integers(0, 8),
    st.integers(0, 8),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(ROW, min_size=2, max_size=2))
def test_cut_equals_oracle(rows):
    assert run(rows, 6) == [oracle(*row) for row in rows]


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("place", range(20))
def test_sequence_at_every_place_of_a_long_block(length, place):
    """The sequence's last token is block token `place`, so early places cross the border of the block."""
    stop = [90, 91, 92][:length]
    text = list(range(1, 31))  # 10 generated tokens before the block, then 20
    text[10 + place - length + 1 : 10 + place + 1] = stop
    assert run([(text[10:], text[:10], [], [stop], 99, 99)], 20) == [(place + 1, Finish.STOP_SEQUENCE)]


def test_sequence_must_lie_inside_generated_text():
    """Prompt 5, generated 6: the sequence 5 6 began in the prompt and does not count."""
    tokens = jnp.array([[5, 6, 0, 0]])
    recent = recent_tokens(tokens, jnp.array([1]), jnp.array([1]), 1)
    stops = make_stops(None, [[[5, 6]]], 1)
    one = jnp.array([1])
    kept, reason = cut(jnp.array([[6]]), one, recent, stops, one * 9, one * 9)
    assert (kept.item(), reason.item()) == (1, Finish.RUNNING)


@pytest.mark.parametrize("budget", [0, 1, 2, 3])
def test_budget_is_never_overshot(budget):
    assert run([([1, 2, 3, 3], [], [], [], budget, 99)], 4) == [(budget, Finish.LENGTH)]
    assert run([([1, 2, 3, 3], [], [], [], 99, budget)], 4) == [(budget, Finish.CAPACITY)]


def test_rank_on_the_same_token():
    block = [1, 2]
    assert run([(block, [], [2], [[1, 2]], 2, 2)], 2) == [(2, Finish.STOP_ID)]
    assert run([(block, [], [], [[1, 2]], 2, 2)], 2) == [(2, Finish.STOP_SEQUENCE)]
    assert run([(block, [], [], [], 2, 2)], 2) == [(2, Finish.LENGTH)]
    assert run([(block, [], [], [], 3, 2)], 2) == [(2, Finish.CAPACITY)]


def test_no_rules_have_no_axes():
    stops = make_stops(None, None, 2)
    assert stops.ids.shape == (2, 0)
    assert stops.sequences.shape == (2, 0, 0)
    assert stops.history == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(TOKEN, max_size=5), st.lists(TOKEN, max_size=5), st.integers(0, 4))
def test_recent_tokens(prompt, generated, count):
    text = prompt + generated
    buffer = jnp.array([(text + [7] * 12)[:12]], jnp.int32)
    got = recent_tokens(buffer, jnp.array([len(text)]), jnp.array([len(prompt)]), count)
    assert got.tolist() == [([-1] * count + generated)[len(generated) :]]


@pytest.mark.parametrize(
    ("ids", "sequences", "words"),
    [
        ([[1]], None, "stop_ids has 1 rows for a batch of 2"),
        (None, [[[1], []], []], "row 0 is empty"),
        ([[1], [-1]], None, "row 1 has the stop token -1"),
    ],
)
def test_bad_input(ids, sequences, words):
    with pytest.raises(ConfigError, match=words):
        make_stops(ids, sequences, 2)


def test_stop_text_instead_of_ids():
    """One clear sentence, unless a type checker is on and refuses first."""
    with pytest.raises((ConfigError, TypeError), match=r"row 0 has the stop token 'a'|[Tt]ype-check"):
        make_stops(None, [[["a"]]], 1)
