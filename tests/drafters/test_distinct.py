"""`DistinctTokens` against a Python dict, over growth in blocks and roll-backs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jdlite.drafters.distinct import DistinctTokens

BATCH, CAPACITY, BLOCK, VOCAB = 2, 16, 4, 6

add = jax.jit(DistinctTokens.add)
rollback = jax.jit(DistinctTokens.rollback)
spread = jax.jit(DistinctTokens.spread)


def oracle(tokens: list[int]) -> dict[int, int]:
    """Position of the first occurrence of each distinct token, in order."""
    first: dict[int, int] = {}
    for position, token in enumerate(tokens):
        first.setdefault(token, position)
    return first


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.booleans(),
            st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=4, max_size=4), min_size=2, max_size=2),
            st.lists(st.integers(0, BLOCK), min_size=2, max_size=2),
        ),
        max_size=8,
    )
)
def test_equals_a_dict_over_blocks_and_rollbacks(script):
    rows: list[list[int]] = [[] for _ in range(BATCH)]
    distinct = DistinctTokens.empty(BATCH, CAPACITY, VOCAB)
    for forget, blocks, counts in script:
        if forget:
            keep = [max(len(row) - 2 * n, 0) for row, n in zip(rows, counts, strict=True)]
            rows = [row[:n] for row, n in zip(rows, keep, strict=True)]
            distinct = rollback(distinct, jnp.asarray(keep, jnp.int32))
        else:
            counts = [min(n, CAPACITY - len(row)) for n, row in zip(counts, rows, strict=True)]
            start = jnp.asarray([len(row) for row in rows], jnp.int32)
            distinct = add(distinct, jnp.asarray(blocks, jnp.int32), start, jnp.asarray(counts, jnp.int32))
            rows = [row + block[:n] for row, block, n in zip(rows, blocks, counts, strict=True)]
        for b, row in enumerate(rows):
            want = oracle(row)
            n = int(distinct.count[b])
            assert np.asarray(distinct.ids)[b, :n].tolist() == list(want)
            assert np.asarray(distinct.first)[b, :n].tolist() == list(want.values())
    # A value per member reaches every position of its token.
    tokens = np.zeros((BATCH, CAPACITY), np.int32)
    for b, row in enumerate(rows):
        tokens[b, : len(row)] = row
    values = jnp.asarray(distinct.ids, jnp.float32)[:, None] * 10
    found = np.asarray(spread(distinct, values, jnp.asarray(tokens)))
    for b, row in enumerate(rows):
        assert found[b, 0, : len(row)].tolist() == [10.0 * t for t in row]
