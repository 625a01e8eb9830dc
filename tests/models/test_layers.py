"""Building blocks: what they compute, and that XLA keeps the form that makes them fast."""

import jax
import numpy as np
import pytest

from jdlite.models.layers import k_largest


@pytest.mark.parametrize("k", [1, 3, 7])
def test_k_largest_equals_a_sort(k):
    x = np.random.default_rng(0).normal(size=(2, 3, 7)).astype(np.float32)
    x[0, 0, :3] = 1.5
    np.testing.assert_array_equal(jax.jit(k_largest, static_argnums=1)(x, k), np.sort(x, axis=-1)[..., ::-1][..., :k])


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about XLA's CPU backend")
def test_k_largest_sorts_nothing():
    """It took 180 ms instead of 3 for 16 rows of 49,152 when XLA sorted them."""
    text = jax.jit(k_largest, static_argnums=1).lower(np.zeros((2, 3, 4096), np.float32), 64).compile().as_text()
    assert " sort(" not in text
