"""Committing to the cache on whatever device there is."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Array, Int, Shaped

from jdlite.errors import ConfigError
from pallas_kernels.backends import MOSAIC_GPU, MOSAIC_TPU, REFERENCE, dispatch
from pallas_kernels.commit_cache import mosaic_gpu, mosaic_tpu, reference

__all__ = ["commit_cache"]

_BACKENDS = {
    REFERENCE: reference.commit_cache,
    MOSAIC_TPU: mosaic_tpu.commit_cache,
    MOSAIC_GPU: mosaic_gpu.commit_cache,
}


def commit_cache(
    k_cache: Shaped[Array, "L B G S h"],
    v_cache: Shaped[Array, "L B G S h"],
    k_new: Shaped[Array, "L B G N h"],
    v_new: Shaped[Array, "L B G N h"],
    path: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    count: Int[Array, " B"],
    *,
    backend: str | Sequence[str] | None = None,
) -> tuple[Shaped[Array, "L B G S h"], Shaped[Array, "L B G S h"]]:
    """Write the keys and values of nodes `path[b, :count[b]]` to slots `lengths[b] ...` of each row b, nothing else.

    The caches are updated in place where they are donated or carried by a loop.

    Args:
        k_cache: keys of all layers.
        v_cache: values.
        k_new: keys of the nodes of one forward; rounded to the cache's dtype where they have another.
        v_new: their values.
        path: nodes to keep, in order; entries from `count[b]` on are not read.
        lengths: slots in use by each row.
        count: how many nodes to keep, 0 to P; `lengths + count` must not exceed S.
        backend: `"reference"`, `"mosaic_tpu"`, `"mosaic_gpu"`, several names to try in order, or None to go by the
            device.

    Returns:
        The two caches. The caller advances the lengths.

    Raises:
        ConfigError: shapes that do not go together, or an unknown backend.
        NotImplementedError: no backend that was tried can serve; all reasons are told.
    """
    L, B, G, _, h = k_cache.shape
    N, P = k_new.shape[3], path.shape[1]
    arrays = {"v_cache": v_cache, "k_new": k_new, "v_new": v_new, "path": path, "lengths": lengths, "count": count}
    new = (L, B, G, N, h)
    wanted = {"v_cache": k_cache.shape, "k_new": new, "v_new": new, "path": (B, P), "lengths": (B,), "count": (B,)}
    wrong = [f"{name} is {x.shape} and not {wanted[name]}" for name, x in arrays.items() if x.shape != wanted[name]]
    if wrong:
        raise ConfigError(f"The inputs of committing to the cache do not go together: {', '.join(wrong)}.")
    return dispatch("commit_cache", _BACKENDS, backend, k_cache, v_cache, k_new, v_new, path, lengths, count)
