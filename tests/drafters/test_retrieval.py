"""Helpers shared by the retrieval drafters, on small cases worked out by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdlite.drafters.base import Observation
from jdlite.drafters.retrieval import (
    chain_gain,
    copy_span,
    first_slot,
    keep_distinct,
    last_slot,
    normalise,
    record,
    rerank,
    rows_at,
    step_acceptance,
    token_at,
)


def test_keep_distinct():
    """The first valid one of equal tokens stays; an invalid one does not count as a predecessor."""
    tokens = jnp.array([[4, 4, 2, 4, 2], [4, 4, 4, 4, 4]])
    valid = jnp.array([[False, True, True, True, False], [True] * 5])
    expected = [[False, True, True, False, False], [True, False, False, False, False]]
    np.testing.assert_array_equal(keep_distinct(tokens, valid), expected)


def test_copy_span():
    """Cut at the row's length, nothing for a negative start, and any number of spans per row."""
    tokens = jnp.array([[1, 2, 3, 9], [5, 6, 7, 8]])
    lengths = jnp.array([3, 4])
    span, valid = copy_span(tokens, lengths, jnp.array([1, -1]), 3)
    np.testing.assert_array_equal(valid, [[True, True, False], [False] * 3])
    np.testing.assert_array_equal(span[0, :2], [2, 3])
    span, valid = copy_span(tokens, lengths, jnp.array([[0, 3], [3, 40]]), 2)
    np.testing.assert_array_equal(valid, [[[True, True], [False, False]], [[True, False], [False, False]]])
    np.testing.assert_array_equal(span[0, 0], [1, 2])
    assert span[1, 0, 0] == 8


def test_slots_and_gathers_stay_inside():
    mask = jnp.array([[False, True, True], [False, False, False]])
    np.testing.assert_array_equal(first_slot(mask), [1, 3])
    np.testing.assert_array_equal(last_slot(mask), [2, -1])
    tokens = jnp.array([[1, 2, 3], [4, 5, 6]])
    np.testing.assert_array_equal(token_at(tokens, jnp.array([-1, 3])), [1, 6])
    np.testing.assert_array_equal(rows_at(tokens[..., None], jnp.array([[-5, 1], [2, 9]]))[..., 0], [[1, 2], [6, 6]])


def test_gain():
    """m / (m + 1.5) per step, the match growing by one with each accepted copy."""
    np.testing.assert_allclose(step_acceptance(jnp.array([0, 1, 3])), [0, 1 / 2.5, 3 / 4.5], rtol=1e-6)
    expected = [[0.0, 0.0, 0.0], [2 / 3.5, 2 / 3.5 * 3 / 4.5, 2 / 3.5 * 3 / 4.5 * 4 / 5.5]]
    np.testing.assert_allclose(chain_gain(jnp.array([0, 2]), 3), expected, rtol=1e-6)


def test_normalise():
    got = normalise(jnp.array([[3.0, 4.0], [0.0, 0.0], [1e-3, 0.0]], jnp.bfloat16))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, [[0.6, 0.8], [0, 0], [1, 0]], atol=1e-6)


@pytest.mark.parametrize("capacity", [8, 1000])
def test_rerank_of_bfloat16_states(capacity):
    states = normalise(jnp.eye(8)[jnp.arange(capacity) % 8][None]).astype(jnp.bfloat16)
    query = normalise(jnp.eye(8)[5] + 0.3)[None, None]
    slot, hit, cosine = rerank(states, jnp.ones((1, 1, capacity), bool), query)
    assert (int(slot[0, 0]), bool(hit[0, 0])) == (6, True)
    assert float(cosine[0, 0]) == pytest.approx(float(query[0, 0, 5]), abs=0.01)


@pytest.mark.parametrize(("start", "count"), [(0, 3), (3, 2), (4, 0), (4, 3), (5, 0)])
def test_record(start, count):
    """Committed values go where they belong, nothing else changes, and nothing passes the end of the buffer."""
    nodes = jnp.array([[10, 11, 12, 13, 14, 15, 16]])
    path = jnp.array([[0, 2, 5, 6, 6, 6, 6]])
    flat = jnp.zeros((1, 7), jnp.int32)
    observation = Observation(
        tokens=flat,
        valid=flat == 0,
        path=path,
        start=jnp.array([start]),
        count=jnp.array([count]),
        taps=(),
        top_ids=jnp.zeros((1, 7, 0), jnp.int32),
        next_tokens=flat,
    )
    expected = [1, 2, 3, 4, 5]
    for i in range(min(count, 5 - start)):
        expected[start + i] = [10, 12, 15][i]
    got = jax.jit(record)(jnp.array([[1, 2, 3, 4, 5]]), nodes, observation)
    np.testing.assert_array_equal(got, [expected])
