"""Running TPU kernels without a TPU: the interpreter with its race detector, lowering, and real compilation."""

from __future__ import annotations

import contextlib
import functools
import re
from typing import Any

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu

TOPOLOGIES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")


@contextlib.contextmanager
def tpu_interpreter():
    """Run TPU kernels on this machine; copies happen as late as they may, and a race fails the test."""
    # Older versions print races, newer ones raise them; all keep them in this private place.
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

    pltpu.reset_tpu_interpret_mode_state()
    try:
        with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
            yield
        # The detector's state is made by the first kernel that runs.
        assert interpreter.races is not None, "no kernel ran in the interpreter"
        assert not interpreter.races.races_found, "a data race was found"
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def lowers_for_tpu(function, *args) -> str:
    """The text of `function` lowered for a TPU, which checks block shapes and the primitives that kernels may use."""
    return jax.jit(function).trace(*args).lower(lowering_platforms=("tpu",)).as_text()


@functools.cache
def tpu_devices(topology: str) -> tuple[Any, ...]:
    """TPUs to compile for, from libtpu; the test is skipped where that is not installed."""
    pytest.importorskip("libtpu", reason="libtpu is not installed")
    from jax.experimental import topologies

    return tuple(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)


def compile_for_tpu(function, topology: str, *args, donate_argnums=()):
    """`function` compiled for one chip of `topology`; `args` may be shapes only."""
    where = jax.sharding.SingleDeviceSharding(tpu_devices(topology)[0])
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), args)
    return jax.jit(function, donate_argnums=donate_argnums).lower(*placed).compile()


def copies_of(text: str, arrays) -> list[str]:
    """Instructions of a compiled text that copy an array with the axes of one of `arrays`, in whatever order."""
    wanted = {tuple(sorted(x.shape)) for x in jax.tree.leaves(arrays) if x.size > 1 << 12}
    found = []
    for line in text.splitlines():
        match = re.search(r"= \(?\w+\[([\d,]+)\]\S* (copy|copy-start|transpose)\(", line)
        if match and tuple(sorted(int(size) for size in match.group(1).split(","))) in wanted:
            found.append(line.strip()[:160])
    return found
