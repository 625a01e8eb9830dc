"""Tree attention in plain `jax.numpy`, with all scores at once: the definition that every backend is compared with."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def tree_attention(
    q: Float[Array, "B N H h"],
    k_new: Float[Array, "B N G h"],
    v_new: Float[Array, "B N G h"],
    k_cache: Float[Array, "L B G S h"],
    v_cache: Float[Array, "L B G S h"],
    layer: int | Int[Array, ""],
    lengths: Int[Array, " B"],
    mask: Bool[Array, "B N N"],
) -> Float[Array, "B N H h"]:
    """See `pallas_kernels.tree_attention.api.tree_attention`."""
    B, N, H, h = q.shape
    G, S = k_cache.shape[2], k_cache.shape[3]
    wide = lambda x: x.astype(q.dtype).astype(jnp.float32)  # noqa: E731
    product = lambda form, *operands: jnp.einsum(form, *operands, precision=jax.lax.Precision.HIGHEST)  # noqa: E731
    keys, values = (
        jnp.concatenate([wide(cache[layer]), wide(new.swapaxes(1, 2))], axis=2)
        for cache, new in ((k_cache, k_new), (v_cache, v_new))
    )
    cached = jnp.broadcast_to((jnp.arange(S) < lengths[:, None])[:, None], (B, N, S))
    seen = jnp.concatenate([cached, mask], axis=2)
    scores = product("bngrh,bgsh->bgrns", wide(q).reshape(B, N, G, H // G, h), keys) / math.sqrt(h)
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf), axis=-1)
    # What no node of the row sees may be anything, NaN included.
    values = jnp.where(jnp.any(seen, axis=1)[:, None, :, None], values, 0)
    out = product("bgrns,bgsh->bngrh", wide(weights), values)
    return out.astype(q.dtype).reshape(B, N, H, h)
