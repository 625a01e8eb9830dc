"""Tree attention on whatever device there is."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Array, Bool, Float, Int

from jdlite.errors import ConfigError
from pallas_kernels.backends import MOSAIC_GPU, MOSAIC_TPU, REFERENCE, dispatch
from pallas_kernels.tree_attention import mosaic_gpu, mosaic_tpu, reference

__all__ = ["tree_attention"]

_BACKENDS = {
    REFERENCE: reference.tree_attention,
    MOSAIC_TPU: mosaic_tpu.tree_attention,
    MOSAIC_GPU: mosaic_gpu.tree_attention,
}


def tree_attention(
    q: Float[Array, "B N H h"],
    k_new: Float[Array, "B N G h"],
    v_new: Float[Array, "B N G h"],
    k_cache: Float[Array, "L B G S h"],
    v_cache: Float[Array, "L B G S h"],
    layer: int | Int[Array, ""],
    lengths: Int[Array, " B"],
    mask: Bool[Array, "B N N"],
    *,
    backend: str | Sequence[str] | None = None,
) -> Float[Array, "B N H h"]:
    """Attention of N new nodes over each row's cached slots and over the new nodes that `mask` lets them see.

    `softmax(q k / sqrt(h)) v` with scores and sums in float32; query head i reads key/value head `i // (H / G)`. The
    arguments are those of `jdlite.models.layers.cached_attention`.

    Args:
        q: projections of the new nodes, rotary embedding applied.
        k_new: keys of the new nodes, likewise.
        v_new: their values.
        k_cache: the whole cache, in `q`'s dtype or another; only `layer` of it is read.
        v_cache: likewise.
        layer: which layer to read; may be traced.
        lengths: slots in use by each row; what lies past them may be anything.
        mask: `mask[b, i, j]` says that node i sees node j. Every node must see itself.
        backend: `"reference"`, `"mosaic_tpu"`, `"mosaic_gpu"`, several names to try in order, or None to go by the
            device.

    Returns:
        `[B, N, H, h]` in the dtype of `q`.

    Raises:
        ConfigError: shapes that do not go together, or an unknown backend.
        NotImplementedError: no backend that was tried can serve; all reasons are told.
    """
    B, N, H, h = q.shape
    L, _, G, S, _ = k_cache.shape
    wanted = {
        "k_new": (B, N, G, h),
        "v_new": (B, N, G, h),
        "k_cache": (L, B, G, S, h),
        "v_cache": (L, B, G, S, h),
        "lengths": (B,),
        "mask": (B, N, N),
    }
    arrays = {"k_new": k_new, "v_new": v_new, "k_cache": k_cache, "v_cache": v_cache, "lengths": lengths, "mask": mask}
    wrong = [
        f"{name} is {arrays[name].shape} and not {wanted[name]}"
        for name in wanted
        if arrays[name].shape != wanted[name]
    ]
    if wrong:
        raise ConfigError(f"The inputs of tree attention do not go together: {', '.join(wrong)}.")
    if H % G:
        raise ConfigError(f"Query heads must be a multiple of key/value heads: got {H} and {G}.")
    return dispatch("tree_attention", _BACKENDS, backend, q, k_new, v_new, k_cache, v_cache, layer, lengths, mask)
