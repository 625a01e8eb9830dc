"""Timing compiled calls, and the verify forward that is timed most."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp

from jdlite.models.cache import KVCache
from jdlite.models.decoder import Decoder

Name = TypeVar("Name", bound=Hashable)


def medians_in_turn(
    calls: Mapping[Name, Callable[[], object]], repeats: int, begin: Callable[[Name], object] = lambda name: None
) -> dict[Name, float]:
    """Median seconds of each call, until its arrays are there.

    The calls take turns, so a machine that slows down for a while does not favour one of them. A first pass compiles
    and is not counted.

    Args:
        calls: by name; each returns arrays.
        repeats: timings of each.
        begin: told the name before each call.
    """
    times: dict[Name, list[float]] = {name: [] for name in calls}
    for repeat in range(-1, repeats):
        for name, call in calls.items():
            begin(name)
            start = time.perf_counter()
            jax.block_until_ready(call())
            if repeat >= 0:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def median_seconds(call: Callable[[], object], repeats: int) -> float:
    """Median seconds of one call; as `medians_in_turn`."""
    return medians_in_turn({"": call}, repeats)[""]


@partial(jax.jit, static_argnames="n")
def verify_forward(model: Decoder, cache: KVCache, n: int):
    """A forward of a chain of n nodes, LM head and greedy choice included, as a round verifies it.

    Args:
        model: the target.
        cache: of B rows, each with its length; it is not written.
        n: nodes per row.

    Returns:
        Tokens `[B, n]` and the nodes' keys and values.
    """
    batch = cache.lengths.shape[0]
    steps = jnp.arange(n)
    mask = jnp.broadcast_to(steps[:, None] >= steps, (batch, n, n))
    out = model(jnp.zeros((batch, n), jnp.int32), cache.lengths[:, None] + steps, mask, cache)
    return jnp.argmax(model.logits(out.hidden), axis=-1), out.k, out.v
