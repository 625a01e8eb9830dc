"""What forwards and drafts cost on this machine, measured once per machine, model and batch size and kept in files."""

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
from jdlite.decoding.state import context, init_state
from jdlite.drafters.base import Drafter
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


def measure_draft(model: Decoder, drafter: Drafter, *, batch: int = 1, repeats: int = 7) -> float:
    """Time of a draft relative to a plain step at length 0.

    Args:
        model: the target.
        drafter: fitted to it.
        batch: B.
        repeats: timings of each; the median counts.
    """
    state = init_state(model, drafter, batch, max(64, drafter.max_depth + 1))
    lengths = jnp.full(batch, 2, jnp.int32)
    here = context(model, state, lengths, None, lengths)
    seconds = medians_in_turn(
        {
            "draft": partial(jax.jit(lambda drafter, *args: drafter.propose(*args)), drafter, state.memory, here),
            "step": partial(verify_forward, model, state.cache, 1),
        },
        repeats,
    )
    return seconds["draft"] / seconds["step"]


def costs_file(folder: Path, model: Decoder, batch: int) -> Path:
    """Where the costs of this device, model shape, dtype and batch size are kept, for all drafters."""
    return folder / f"costs-{_key(model, batch)}.json"


def draft_file(folder: Path, model: Decoder, drafter: Drafter, batch: int) -> Path:
    """Where the cost of this drafter's draft is kept: by the shapes of its parameters and its options."""
    leaves, options = jax.tree.flatten(drafter)
    shapes = [(leaf.shape, str(leaf.dtype)) for leaf in leaves]
    return folder / f"draft-{_key(model, batch, drafter.name, shapes, str(options))}.json"


def _key(model: Decoder, *what: object) -> str:
    device = jax.devices()[0]
    machine = [device.platform, device.device_kind, os.cpu_count(), jax.__version__, str(model.dtype), *what]
    return hashlib.sha256(repr((machine, dataclasses.astuple(model.config))).encode()).hexdigest()[:16]


def load_draft(path: Path) -> float | None:
    """The cost kept in a file, or None where there is none that can be read and makes sense."""
    try:
        draft = float(json.loads(path.read_text())["draft"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return draft if 0 <= draft < float("inf") else None


def save_draft(path: Path, draft: float) -> None:
    """Write the cost to a temporary name and rename."""
    with atomic_file(path) as file:
        json.dump({"draft": draft}, file)


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
