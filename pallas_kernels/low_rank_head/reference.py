"""The low-rank head in plain `jax.numpy`: the definition that every backend is compared with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from pallas_kernels.low_rank_head.types import Drafts, HeadWeights
from pallas_kernels.noise import gumbel_from_bits, key_words, threefry_bits


def dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x @ weight.T` in float32, whatever the operands are; float32 operands are not rounded on the way."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dimensions = (((x.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, weight, dimensions, precision=precision, preferred_element_type=jnp.float32)


def logits(weights: HeadWeights, u: Float[Array, "*B R"]) -> Float[Array, "*B V"]:
    """`W_o u` in float32."""
    out = dot(u, weights.output.astype(u.dtype))
    return out if weights.output_scale is None else out * weights.output_scale


def low_rank_head(
    weights: HeadWeights,
    hidden: Float[Array, "B K D"],
    anchor: Int[Array, " B"],
    state: Float[Array, "B R"],
    keys: Key[Array, "B K"] | None = None,
    temperature: Float[Array, " B"] | None = None,
) -> Drafts:
    """See `pallas_kernels.low_rank_head.api.low_rank_head`."""
    dtype, R = weights.embed.dtype, weights.embed.shape[1]
    V = weights.output.shape[0]
    bias = weights.state_bias.astype(jnp.float32)
    hidden_part = dot(hidden.astype(dtype), weights.mix_weight[:, R:]) + weights.mix_bias.astype(jnp.float32)
    cold = jnp.ones_like(anchor, bool) if temperature is None else temperature <= 0
    inverse = jnp.ones(anchor.shape, jnp.float32) if temperature is None else 1 / jnp.where(cold, 1.0, temperature)
    words = None if keys is None else key_words(keys).swapaxes(0, 1)

    def body(carry, x):
        state, previous = carry
        hidden_part, words = x
        embedded = jnp.take(weights.embed, previous, axis=0, mode="clip")
        both = dot(jnp.concatenate([state.astype(dtype), embedded], axis=-1), weights.state_weight) + bias
        gate = jax.nn.sigmoid(both[:, :R])
        state = gate * state + (1 - gate) * jnp.tanh(both[:, R:])
        u = (dot(state.astype(dtype), weights.mix_weight[:, :R]) + hidden_part).astype(dtype)
        scaled = logits(weights, u) * inverse[:, None]
        score = scaled
        if words is not None:
            noise = gumbel_from_bits(threefry_bits(words[:, :1], words[:, 1:], jnp.arange(V, dtype=jnp.int32)[None]))
            score = jnp.where(cold[:, None], scaled, scaled + noise)
        tokens = jnp.argmax(jnp.where(jnp.isnan(score), jnp.inf, score), axis=-1).astype(jnp.int32)
        picked = jnp.take_along_axis(scaled, tokens[:, None], axis=1)[:, 0]
        return (state, tokens), (tokens, picked - jax.nn.logsumexp(scaled, axis=-1), u)

    carry = (state.astype(jnp.float32), anchor.astype(jnp.int32))
    _, out = jax.lax.scan(body, carry, (hidden_part.swapaxes(0, 1), words))
    return Drafts(*(x.swapaxes(0, 1) for x in out))
