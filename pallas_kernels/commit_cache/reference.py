"""Committing to the cache in plain `jax.numpy`: the definition that every backend is compared with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped


def commit_cache(
    k_cache: Shaped[Array, "L B G S h"],
    v_cache: Shaped[Array, "L B G S h"],
    k_new: Shaped[Array, "L B G N h"],
    v_new: Shaped[Array, "L B G N h"],
    path: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    count: Int[Array, " B"],
) -> tuple[Shaped[Array, "L B G S h"], Shaped[Array, "L B G S h"]]:
    """See `pallas_kernels.commit_cache.api.commit_cache`."""
    steps = jnp.arange(path.shape[1])
    # Slots of entries that are not committed lie past the end, where a scatter drops them.
    slots = jnp.where(steps < count[:, None], lengths[:, None] + steps, k_cache.shape[3])

    def write(cache: jax.Array, new: jax.Array) -> jax.Array:
        def row(cache, new, path, slots):
            rows = jnp.take(new, path, axis=2, mode="clip").astype(cache.dtype)
            return cache.at[:, :, slots].set(rows, mode="drop")

        return jax.vmap(row, in_axes=(1, 1, 0, 0), out_axes=1)(cache, new, path, slots)

    return write(k_cache, k_new), write(v_cache, v_new)
