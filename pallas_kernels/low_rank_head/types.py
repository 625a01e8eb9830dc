"""What the low-rank head takes and gives, and the rounding of its output matrix to eight bits."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jdlite.errors import ConfigError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadWeights:
    """The head's parameters as they are stored, `[out, in]`, in float32 or bfloat16.

    Attributes:
        embed: the head's own embedding table E, `[V, R]`.
        state_weight: W_s, `[2R, 2R]`; the first R rows are the gate, the first R columns read the state.
        state_bias: b_s, `[2R]`.
        mix_weight: W_u, `[R, R + D]`; the first R columns read the state.
        mix_bias: b_u, `[R]`.
        output: W_o, `[V, R]`; also int8 or float8_e4m3fn, with `output_scale`.
        output_scale: `[V]` float32, what row v of `output` is multiplied by; None for a matrix that was not rounded.
    """

    embed: Float[Array, "V R"]
    state_weight: Float[Array, "R2 R2"]
    state_bias: Float[Array, " R2"]
    mix_weight: Float[Array, "R RD"]
    mix_bias: Float[Array, " R"]
    output: Shaped[Array, "V R"]
    output_scale: Float[Array, " V"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafts:
    """What the head chose.

    Attributes:
        tokens: `[B, K]` int32.
        log_q: `[B, K]` float32, log-probability of each token under `softmax(logits / temperature)`; at temperature 0
            under `softmax(logits)`. It is not finite where the logits hold a value that is not.
        u: `[B, K, R]` in the dtype of the weights; `W_o u` are the logits that a token was chosen from.
    """

    tokens: Int[Array, "B K"]
    log_q: Float[Array, "B K"]
    u: Float[Array, "B K R"]


def quantise(output: Float[Array, "V R"], dtype) -> tuple[Shaped[Array, "V R"], Float[Array, " V"]]:
    """Round W_o to eight bits with one scale per row, so that the largest entry of a row is the largest number.

    Args:
        output: W_o.
        dtype: int8 or float8_e4m3fn.

    Returns:
        The rounded matrix and the scales, float32. A row of zeros has scale 1.

    Raises:
        ConfigError: another dtype.
    """
    if dtype not in (jnp.int8, jnp.float8_e4m3fn):
        raise ConfigError(f"The output matrix can be rounded to int8 or float8_e4m3fn: got {jnp.dtype(dtype).name}.")
    wide = output.astype(jnp.float32)
    largest = jnp.iinfo(dtype).max if dtype == jnp.int8 else jnp.finfo(dtype).max.astype(jnp.float32)
    top = jnp.max(jnp.abs(wide), axis=1)
    scale = jnp.where(top > 0, top / largest, 1.0)
    scaled = wide / scale[:, None]
    # Halves round to even in both; float8 rounds in the conversion itself.
    return (jnp.round(scaled) if dtype == jnp.int8 else scaled).astype(dtype), scale
