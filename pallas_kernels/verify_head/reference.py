"""The head of a verify forward in plain `jax.numpy`, all logits at once: the definition of the operation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jdlite.decoding.accept import sample_and_match
from jdlite.decoding.penalties import History
from jdlite.decoding.sampling import SamplingArrays, any_nan, draw, processed_logits
from jdlite.decoding.tree import Tree
from pallas_kernels.verify_head.types import Verified


def lm_head(weight: Float[Array, "V D"], hidden: Float[Array, "B N D"]) -> Float[Array, "B N V"]:
    """`hidden @ weight.T` with sums in float32 that are not rounded to the weight's dtype afterwards."""
    precision = jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
    dimensions = (((2,), (1,)), ((), ()))
    operands = (hidden.astype(weight.dtype), weight)
    return jax.lax.dot_general(*operands, dimensions, precision=precision, preferred_element_type=jnp.float32)


def verify_head(
    weight: Float[Array, "V D"],
    hidden: Float[Array, "B N D"],
    tree: Tree,
    drafts: Int[Array, "B N"],
    positions: Int[Array, "B N"],
    sampling: SamplingArrays,
    keys: Any,
    top_k: int,
    path_length: int,
    history: History | None,
    generated: Int[Array, "B N"] | None,
    row_major: bool = False,
) -> Verified:
    """See `pallas_kernels.verify_head.api.verify_head`."""
    del row_major  # XLA sees the layout itself
    logits = lm_head(weight, hidden)
    # top_k puts 0 before -0, and NaN anywhere; here zeros are equal.
    comparable = jnp.where(jnp.isnan(logits), jnp.inf, jnp.where(logits == 0, 0.0, logits))
    top_logits, top_ids = jax.lax.top_k(comparable, top_k)
    generated = jnp.zeros_like(positions) if generated is None else generated
    processed = processed_logits(logits, sampling, history=history, generated=generated)
    tokens = draw(jnp.where(jnp.isnan(processed), jnp.inf, processed), keys, positions, sampling)
    picked = jnp.take_along_axis(processed, tokens[..., None], axis=-1)[..., 0]
    return Verified(
        tokens=tokens,
        log_prob=picked - jax.nn.logsumexp(processed, axis=-1),
        top_ids=jnp.where(top_logits > -jnp.inf, top_ids, 0).astype(jnp.int32),
        top_logits=top_logits,
        broken=any_nan(logits),
        acceptance=sample_and_match(tree, drafts, tokens, path_length),
        fused=jnp.array(False),
    )
