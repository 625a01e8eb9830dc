"""Building blocks of the decoders: few-row products, largest values, RMSNorm, rotary embedding, cached attention."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jdlite.models.config import RopeConfig
from pallas_kernels.backends import with_kernel

# XLA's CPU backend packs the whole weight on every call of `x @ W.T`; up to this many rows the transposed product with
# barriers is faster (docs/measurements.md, "Small-row products").
FEW_ROWS = 128
# Cache slots of a row read per step of the attention loop. On a CPU the slots of all rows together must fit its
# second-level cache: with 16 rows, 64 slots each took a fifth of the time of 512 (docs/measurements.md).
CACHE_BLOCK = 512
CPU_CACHE_BLOCK, CPU_CACHE_SLOTS = 64, 1024


def project(x: Float[Array, "*T I"], weight: Float[Array, "O I"], bias: Array | None = None) -> Float[Array, "*T O"]:
    """`x @ weight.T + bias`, in the form that suits the platform and the number of rows.

    Weights are stored `[out, in]`, as in Hugging Face checkpoints, so a tied LM head needs no copy.
    """
    rows = x.reshape(-1, x.shape[-1])

    def plain(rows, weight):
        return rows @ weight.T

    def few_rows_on_cpu(rows, weight):
        # The barriers keep XLA from folding the transposes back into the product.
        columns = jax.lax.optimization_barrier(rows.T)
        return jax.lax.optimization_barrier(weight @ columns).T

    if rows.shape[0] <= FEW_ROWS:
        y = jax.lax.platform_dependent(rows, weight, cpu=few_rows_on_cpu, default=plain)
    else:
        y = plain(rows, weight)
    y = y.reshape(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias


def k_largest(x: Float[Array, "*T V"], k: int) -> Float[Array, "*T k"]:
    """The k largest values along the last axis, falling."""
    # Without the barrier XLA's CPU backend drops the unused indices, and then sorts everything.
    return jax.lax.optimization_barrier(jax.lax.top_k(x, k))[0]


class Linear(nnx.Module):
    """`y = x W^T + b` with W `[out, in]`.

    `axes` names the logical axes of W for sharding (`jdlite.models.sharding`).
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool, axes: tuple, dtype, rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.02)
        self.weight = nnx.Param(init(rngs.params(), (out_features, in_features), dtype), axes=axes)
        self.bias = nnx.Param(jnp.zeros(out_features, dtype), axes=axes[:1]) if bias else None

    def __call__(self, x: Float[Array, "*T I"]) -> Float[Array, "*T O"]:
        return project(x, self.weight[...], None if self.bias is None else self.bias[...])


class RMSNorm(nnx.Module):
    """`x / rms(x) * scale`, computed in float32 (Zhang and Sennrich, 2019)."""

    def __init__(self, width: int, eps: float, dtype):
        self.scale = nnx.Param(jnp.ones(width, dtype), axes=(None,))
        self.eps = eps

    def __call__(self, x: Float[Array, "*T D"]) -> Float[Array, "*T D"]:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return self.scale[...] * wide.astype(x.dtype)


def rope_frequencies(config: RopeConfig, head_dim: int, max_position: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies `[h/2]` float32 and the factor on cos and sin, as in Hugging Face's rope utilities.

    Sources: Su et al. 2021 (rotary embedding), Peng et al. 2023 (YaRN, equations 17 to 25), Llama 3.1's rescaling rule.

    They are constants computed on the host: at position 32,768 one unit in the last place of a frequency turns a key by
    0.002 radians, and a device's power function may be several units off.
    """
    one = np.float32(1)
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # The steps of the reference implementation, each rounded to float32.
    inverse = one / np.power(np.float64(config.theta), exponent).astype(np.float32)
    if config.kind == "default":
        return inverse, 1.0
    scale = np.float32(config.factor)
    if config.kind == "linear":
        return inverse / scale, 1.0
    original = config.original_max_position or max_position
    if config.kind == "llama3":
        low, high = config.low_freq_factor, config.high_freq_factor
        smooth = np.clip((original * inverse.astype(np.float64) / (2 * math.pi) - low) / (high - low), 0, 1)
        smooth = smooth.astype(np.float32)
        return (one - smooth) * inverse / scale + smooth * inverse, 1.0
    if config.kind == "yarn":

        def dimension(rotations: float) -> float:
            return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))

        low, high = dimension(config.beta_fast), dimension(config.beta_slow)
        if config.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        high = high + 0.001 if low == high else high
        ramp = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0, 1).astype(np.float32)
        factor = config.attention_factor
        if factor is None:
            factor = 1.0 if config.factor <= 1 else 0.1 * math.log(config.factor) + 1.0
        return inverse / scale * ramp + inverse * (one - ramp), factor
    raise ValueError(f"rope kind must be default, linear, llama3 or yarn: got {config.kind!r}.")


def apply_rope(
    x: Float[Array, "B T heads h"], cos: Float[Array, "B T half"], sin: Float[Array, "B T half"]
) -> Float[Array, "B T heads h"]:
    """Rotate the pairs `(x[i], x[i + h/2])` by the angle of their position."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def cached_attention(
    q: Float[Array, "B N H h"],
    k_new: Float[Array, "B N G h"],
    v_new: Float[Array, "B N G h"],
    k_cache: Float[Array, "L B G S h"],
    v_cache: Float[Array, "L B G S h"],
    layer: int,
    lengths: Int[Array, " B"],
    mask: Bool[Array, "B N N"],
) -> Float[Array, "B N H h"]:
    """Attention of N new nodes over each row's cached slots and over the new nodes that `mask` lets them see.

    Where the device has a kernel that serves, it runs (docs/kernels.md); else `swept_attention` does. The cost follows
    the committed length and not the capacity.

    Args:
        q, k_new, v_new: projections of the new nodes, rotary embedding applied.
        k_cache, v_cache: the whole cache; only `layer` is read, and nothing is written.
        layer: which layer to read.
        lengths: slots in use by each row.
        mask: `mask[b, i, j]` says that node i sees node j; every node must see itself.

    Returns:
        `[B, N, H, h]` in the dtype of `q`.
    """
    return with_kernel(swept_attention, _tree_attention, q, k_new, v_new, k_cache, v_cache, layer, lengths, mask)


def _tree_attention(*args, backend):
    # Imported where it is used: Pallas takes long to import, and many never need it.
    from pallas_kernels.tree_attention.api import tree_attention

    return tree_attention(*args, backend=backend)


def swept_attention(
    q: Float[Array, "B N H h"],
    k_new: Float[Array, "B N G h"],
    v_new: Float[Array, "B N G h"],
    k_cache: Float[Array, "L B G S h"],
    v_cache: Float[Array, "L B G S h"],
    layer: int | Int[Array, ""],
    lengths: Int[Array, " B"],
    mask: Bool[Array, "B N N"],
) -> Float[Array, "B N H h"]:
    """`cached_attention` without kernels.

    The cache is swept in blocks with a running maximum and sum (online softmax, Milakov and Gimelshein 2018), only as
    far as the longest row reaches.
    """
    B, N, H, h = q.shape
    G, S = k_cache.shape[2], k_cache.shape[3]
    repeats = H // G
    scale = 1.0 / math.sqrt(h)
    # One product per key/value head: its query heads and the nodes are rows of the same matrix.
    queries = (q * scale).reshape(B, N, G, repeats, h).transpose(0, 2, 3, 1, 4).reshape(B, G, repeats * N, h)

    def scores(keys):
        return jnp.einsum("bgqh,bgsh->bgqs", queries, keys, preferred_element_type=jnp.float32)

    def weighted(weights, values):
        return jnp.einsum("bgqs,bgsh->bgqh", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)

    low = jnp.finfo(jnp.float32).min
    k_new, v_new = k_new.transpose(0, 2, 1, 3), v_new.transpose(0, 2, 1, 3)
    visible = jnp.broadcast_to(mask[:, None, None], (B, 1, repeats, N, N)).reshape(B, 1, repeats * N, N)
    logits = jnp.where(visible, scores(k_new), low)
    top = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.where(visible, jnp.exp(logits - top), 0.0)
    carry = (weighted(weights, v_new), jnp.sum(weights, axis=-1, keepdims=True), top)

    def sweep_cache(carry, block):
        block = min(block, S)

        def sweep(i, carry):
            total, norm, top = carry
            # The last block is shifted left to end at the capacity; slots already seen are masked.
            first = jnp.minimum(i * block, S - block)
            begin, size = (layer, 0, 0, first, 0), (1, B, G, block, h)
            keys = jax.lax.dynamic_slice(k_cache, begin, size)[0].astype(q.dtype)
            values = jax.lax.dynamic_slice(v_cache, begin, size)[0].astype(q.dtype)
            slots = first + jnp.arange(block)
            seen = ((slots >= i * block) & (slots < lengths[:, None]))[:, None, None, :]
            logits = jnp.where(seen, scores(keys), low)
            new_top = jnp.maximum(top, jnp.max(logits, axis=-1, keepdims=True))
            # The values of unused slots may be anything, NaN included.
            values = jnp.where(seen[:, :, 0, :, None], values, 0)
            weights = jnp.where(seen, jnp.exp(logits - new_top), 0.0)
            fade = jnp.exp(top - new_top)
            total = total * fade + weighted(weights, values)
            return total, norm * fade + jnp.sum(weights, axis=-1, keepdims=True), new_top

        blocks = (jnp.max(lengths) + block - 1) // block
        return jax.lax.fori_loop(0, blocks, sweep, carry)

    if S:
        on_cpu = min(CACHE_BLOCK, max(CPU_CACHE_BLOCK, CPU_CACHE_SLOTS // B))
        if on_cpu == CACHE_BLOCK:
            carry = sweep_cache(carry, CACHE_BLOCK)
        else:
            carry = jax.lax.platform_dependent(
                carry, cpu=partial(sweep_cache, block=on_cpu), default=partial(sweep_cache, block=CACHE_BLOCK)
            )
    total, norm, _ = carry
    out = (total / norm).astype(q.dtype)
    return out.reshape(B, G, repeats, N, h).transpose(0, 3, 1, 2, 4).reshape(B, N, H, h)
