"""Committing to the cache on Hopper: the copy engine moves one slot of all heads per block, in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.backends import require_mosaic_gpu

# What the copy engine takes along one axis of a box, and what one block can have of shared memory.
MAX_BOX = 256
SHARED_BYTES = 227 << 10


def commit_cache(k_cache, v_cache, k_new, v_new, path, lengths, count) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.commit_cache.api.commit_cache`."""
    require_mosaic_gpu()
    L, B, G, S, h = k_cache.shape
    N, P = k_new.shape[3], path.shape[1]
    dtype = k_cache.dtype
    for name, x in (("the cache", k_cache), ("new keys", k_new)):
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            raise NotImplementedError(f"The kernel has float32 and bfloat16: got {name} in {x.dtype}.")
    if v_cache.dtype != dtype:
        raise NotImplementedError(f"Keys and values must have one dtype: got {dtype} and {v_cache.dtype}.")
    if h * dtype.itemsize % 16 or not 0 < h <= MAX_BOX:
        raise NotImplementedError(f"The head width must be whole units of 16 bytes and at most {MAX_BOX}: got {h}.")
    if G > MAX_BOX or 2 * G * h * dtype.itemsize >= SHARED_BYTES:
        raise NotImplementedError(f"One slot of all heads must fit shared memory: got {G} heads of {h}.")
    if 0 in (L, B, S, N, P):
        raise NotImplementedError(f"The kernel needs something to move: got shapes {k_cache.shape} and {k_new.shape}.")

    def commit_slot(k_new, v_new, path, lengths, count, k_cache, v_cache, k_slot, v_slot, arrived):
        layer, row, step = (jax.lax.axis_index(name) for name in ("layer", "row", "step"))
        slot = lengths[row] + step

        @pl.when((step < count[row]) & (slot < S))
        def _():
            node = path[row, step]
            plgpu.copy_gmem_to_smem(k_new.at[layer, row, :, node], k_slot, arrived.at[0])
            plgpu.copy_gmem_to_smem(v_new.at[layer, row, :, node], v_slot, arrived.at[1])
            # Shared memory is only read by the copy engine again, so no fence is needed between the two.
            plgpu.barrier_wait(arrived.at[0])
            plgpu.copy_smem_to_gmem(k_slot, k_cache.at[layer, row, :, slot])
            plgpu.barrier_wait(arrived.at[1])
            plgpu.copy_smem_to_gmem(v_slot, v_cache.at[layer, row, :, slot])
            plgpu.wait_smem_to_gmem(0)

    slot = plgpu.SMEM((G, h), dtype)
    run = plgpu.kernel(
        commit_slot,
        out_type=(),
        grid=(P, B, L),
        grid_names=("step", "row", "layer"),
        scratch_types=[slot, slot, plgpu.Barrier(num_barriers=2)],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    # Mutable references are what Mosaic GPU updates in place; XLA copies only a cache that is used again afterwards.
    caches = jax.new_ref(k_cache), jax.new_ref(v_cache)
    path = jnp.clip(path, 0, N - 1).astype(jnp.int32)
    lengths, count = lengths.astype(jnp.int32), count.astype(jnp.int32)
    run(k_new.astype(dtype), v_new.astype(dtype), path, lengths, count, *caches)
    return jax.freeze(caches[0]), jax.freeze(caches[1])
