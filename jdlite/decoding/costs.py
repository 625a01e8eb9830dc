"""What a verify forward costs on this machine, measured once per machine, model and batch size and kept in a file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jdlite.decoding.policy import NODE_COUNTS, Costs
from jdlite.files import atomic_file
from jdlite.models.decoder import Decoder
from jdlite.timing import medians_in_turn, verify_forward


def measure_costs(
    model: Decoder,
    counts: tuple[int, ...] = NODE_COUNTS,
    *,
    batch: int = 1,
    capacity: int = 2048,
    repeats: int = 5,
    cache_dtype=None,
    progress: Callable[[str], None] = lambda message: None,
) -> Costs:
    """Time forwards of each number of nodes, LM head included, at an almost empty and at a full cache.

    The numbers of nodes are timed in turn and the medians taken, so a machine that slows down for a while does not
    favour one of them.

    Args:
        model: the target.
        counts: numbers of nodes to compile and time. `Costs.resample` gives those of a drafter.
        batch: B.
        capacity: committed tokens of the second measurement.
        repeats: timings of each.
        cache_dtype: of keys and values; the model's by default.
        progress: told what is being done.

    Returns:
        Costs relative to the first of `counts` at length 0.
    """
    capacity = min(capacity, model.config.max_position)
    lengths = (min(16, capacity // 2), capacity - counts[-1] if capacity > 2 * counts[-1] else capacity)
    empty = model.init_cache(batch, capacity, cache_dtype)
    caches = [dataclasses.replace(empty, lengths=jnp.full(batch, length, jnp.int32)) for length in lengths]
    calls = {(i, n): partial(verify_forward, model, cache, n) for i, cache in enumerate(caches) for n in counts}
    seconds = medians_in_turn(
        calls, repeats, lambda name: progress(f"forwards of {name[1]} nodes, {lengths[name[0]]} tokens cached")
    )
    short, long = (np.array([seconds[i, n] for n in counts]) for i in (0, 1))
    slope = np.maximum(long - short, 0) / (lengths[1] - lengths[0])
    # On a noisy machine the line may even fall below zero at length 0.
    fixed = np.maximum(short - slope * lengths[0], short / 2)
    # More nodes never cost less; a timing that says so is noise.
    fixed, slope = np.maximum.accumulate(fixed) / fixed[0], np.maximum.accumulate(slope) / fixed[0]
    return Costs(jnp.asarray(fixed, jnp.float32), jnp.asarray(slope, jnp.float32), counts)


def costs_file(folder: Path, model: Decoder, batch: int) -> Path:
    """Where the costs of this device, model shape, dtype and batch size are kept, for all drafters."""
    device = jax.devices()[0]
    what = [device.platform, device.device_kind, os.cpu_count(), jax.__version__, str(model.dtype), batch]
    key = hashlib.sha256(repr((what, dataclasses.astuple(model.config))).encode()).hexdigest()[:16]
    return folder / f"costs-{key}.json"


def load_costs(path: Path) -> Costs | None:
    """Costs kept in a file, or None where there is none that can be read and makes sense."""
    try:
        content = json.loads(path.read_text())
        counts = tuple(int(n) for n in content["counts"])
        fixed, slope = (np.asarray(content[name], np.float32) for name in ("fixed", "per_token"))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    sensible = (
        fixed.shape == slope.shape == (len(counts),)
        and counts
        and list(counts) == sorted(set(counts))
        and np.isfinite([fixed, slope]).all()
        and (fixed > 0).all()
        and (slope >= 0).all()
    )
    return Costs(jnp.asarray(fixed), jnp.asarray(slope), counts) if sensible else None


def save_costs(path: Path, costs: Costs) -> None:
    """Write costs to a temporary name and rename."""
    content = {
        "counts": list(costs.counts),
        "fixed": np.asarray(costs.fixed).tolist(),
        "per_token": np.asarray(costs.per_token).tolist(),
    }
    with atomic_file(path) as file:
        json.dump(content, file, indent=1)
