"""Timing: in turn, without the first pass, medians; and a verify forward is what a greedy chain needs."""

import jax.numpy as jnp
import numpy as np
import pytest

from jdlite import timing
from jdlite.timing import median_seconds, medians_in_turn, verify_forward
from tests.toys import tiny_model


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still but for what calls add to it."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    return now


def test_medians_in_turn_without_the_first_pass(clock):
    taken = {"a": iter([100, 1, 5, 3]), "b": iter([100, 2, 2, 9])}
    order = []

    def call(name):
        order.append(name)
        clock[0] += next(taken[name])

    begun = []
    found = medians_in_turn({name: lambda name=name: call(name) for name in taken}, 3, begun.append)
    assert found == {"a": 3, "b": 2}
    assert order == begun == ["a", "b"] * 4


def test_median_of_one_call(clock):
    taken = iter([9, 4, 1, 2])

    def call():
        clock[0] += next(taken)

    assert median_seconds(call, 3) == 2


def test_a_verify_forward_sees_cache_and_chain():
    model = tiny_model()
    cache = model.init_cache(2, 12)
    tokens, k, v = verify_forward(model, cache, 3)
    assert tokens.shape == (2, 3)
    mask = jnp.tril(jnp.ones((2, 3, 3), bool))
    out = model(jnp.zeros((2, 3), jnp.int32), jnp.broadcast_to(jnp.arange(3), (2, 3)), mask, cache)
    np.testing.assert_array_equal(tokens, np.argmax(model.logits(out.hidden), axis=-1))
    np.testing.assert_allclose(k, out.k, atol=1e-6)
    np.testing.assert_allclose(v, out.v, atol=1e-6)
