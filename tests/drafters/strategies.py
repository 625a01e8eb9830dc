"""Texts for the drafters' property tests: small vocabularies, many repeats, rows of unequal length."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.drafters.harness import CAPACITY

VOCAB = 8
ROWS = 3


@st.composite
def text(draw, vocab: int = VOCAB, capacity: int = CAPACITY) -> list[int]:
    """A row: random ids of a tiny set, one token repeated, or a span repeated; its length is 1 to the capacity."""
    length = draw(st.one_of(st.integers(1, capacity), st.just(capacity)))
    token = st.integers(0, draw(st.integers(0, vocab - 1)))
    span = draw(st.lists(token, min_size=1, max_size=length))
    if draw(st.booleans()):
        return (span * length)[:length]
    return (span + draw(st.lists(token, min_size=length, max_size=length)))[:length]


def batches(vocab: int = VOCAB, capacity: int = CAPACITY):
    """Always the same number of rows, so that all examples share a compilation."""
    return st.lists(text(vocab, capacity), min_size=ROWS, max_size=ROWS)


seeds = st.integers(0, 2**31 - 1)
