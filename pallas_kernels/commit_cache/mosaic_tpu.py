"""Committing to the cache on TPU: only the tiles that hold a committed slot are read, changed and written back."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.backends import MOSAIC_TPU
from pallas_kernels.tuning import Question, choose, power_of_two

# Bytes of a tile of slots of all heads, at most: keys and values, read and written, with second copies, are eight.
MAX_TILE_BYTES = 1 << 19


def _kernel(path, lengths, count, last, k_new, v_new, k_old, v_old, k_out, v_out, *, group):
    """One tile of slots of one layer and row, keys and values of all heads."""
    row, step = pl.program_id(1), pl.program_id(2)
    first = lengths[row]
    tile = jax.lax.div(first, group) + step

    # The steps past a row's last tile stay on it and must not begin it anew.
    @pl.when((step == 0) | (tile <= last[row]))
    def _():
        base = jnp.minimum(tile, last[row]) * group
        k_out[...] = k_old[...]
        v_out[...] = v_old[...]

        @pl.loop(jnp.maximum(base - first, 0), jnp.minimum(count[row], base + group - first))
        def _(p):
            for new, out in ((k_new, k_out), (v_new, v_out)):
                wanted = jax.lax.broadcasted_iota(jnp.int32, new.shape, 1) == path[row, p]
                moved = jnp.sum(jnp.where(wanted, new[...].astype(jnp.float32), 0.0), axis=1, keepdims=True)
                here = jax.lax.broadcasted_iota(jnp.int32, out.shape, 1) == first + p - base
                out[...] = jnp.where(here, moved, out[...].astype(jnp.float32)).astype(out.dtype)


def question(cache, nodes: int, steps: int, unit: int) -> Question:
    """What the tuning table is asked: slots of a tile of `cache`, `[L, B, G, S, h]`, in units of what can be copied."""
    _, _, G, S, h = cache.shape
    return Question(
        "commit_cache",
        MOSAIC_TPU,
        dtypes=(cache.dtype,),
        shape={"kv_heads": G, "head_dim": h, "nodes": power_of_two(nodes), "path": power_of_two(steps)},
        limits={"block": range(unit, S + 1, unit)},
        heuristic={"block": unit},
        fits=lambda block: S % block == 0 and block * G * h * cache.dtype.itemsize <= MAX_TILE_BYTES,
    )


def commit_cache(
    k_cache, v_cache, k_new, v_new, path, lengths, count, *, block: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.commit_cache.api.commit_cache`.

    `block` sets the slots of a tile: a divisor of the capacity, and a multiple of 16 (8 in float32), which is what the
    kernel takes where the tuning table has nothing.
    """
    L, B, G, S, h = k_cache.shape
    N, P = k_new.shape[3], path.shape[1]
    for name, x in (("the cache", k_cache), ("new keys", k_new)):
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            raise NotImplementedError(f"The kernel has float32 and bfloat16: got {name} in {x.dtype}.")
    group = 8 if k_cache.dtype.itemsize == 4 else 16
    if not S or S % group:
        # A part of a tile at the end might be written in place too, but the interpreter cannot check that.
        raise NotImplementedError(f"The capacity must be a positive multiple of {group}: got {S}.")
    group = choose(question(k_cache, N, P, group), block=block)["block"]
    lengths, count = lengths.astype(jnp.int32), count.astype(jnp.int32)
    last = jnp.minimum(lengths + jnp.maximum(count, 1), S) - 1
    last = jax.lax.div(jnp.maximum(last, 0), group)

    def place(layer, row, step, path, lengths, count, last):
        return layer, row, 0, jnp.minimum(jax.lax.div(lengths[row], group) + step, last[row]), 0

    new = pl.BlockSpec((None, None, G, N, h), lambda layer, row, step, *_: (layer, row, 0, 0, 0))
    tile = pl.BlockSpec((None, None, G, group, h), place)
    # P slots in a row touch one tile more than they fill, unless they start at its edge.
    tiles = -(-(P - 1) // group) + 1
    moved = 2 * L * B * G * h * (2 * tiles * group * k_cache.dtype.itemsize + N * k_new.dtype.itemsize)
    return pl.pallas_call(
        functools.partial(_kernel, group=group),
        out_shape=(
            jax.ShapeDtypeStruct(k_cache.shape, k_cache.dtype),
            jax.ShapeDtypeStruct(v_cache.shape, v_cache.dtype),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(L, B, tiles),
            in_specs=[new, new, tile, tile],
            out_specs=(tile, tile),
        ),
        input_output_aliases={6: 0, 7: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved),
        name="commit_cache",
    )(jnp.clip(path, 0, N - 1).astype(jnp.int32), lengths, count, last, k_new, v_new, k_cache, v_cache)
