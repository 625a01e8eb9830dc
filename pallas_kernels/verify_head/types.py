"""What a verify forward's head gives back."""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import Array, Bool, Float, Int

from jdlite.decoding.accept import Acceptance


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verified:
    """The target's choice after each node of a draft tree, and the path that it accepts.

    Attributes:
        tokens: `[B, N]` int32, the token drawn after each node.
        log_prob: `[B, N]` float32, log-probability of that token under the processed distribution, which for rows with
            temperature 0 is the softmax of the processed logits. It is not finite where no logit is above -inf, or one
            is NaN or +inf.
        top_ids: `[B, N, k]` int32, ids of the largest unprocessed logits, best first, the lower id first where two are
            equal. NaN counts as +inf. Where fewer than k logits are above -inf, the other ids are 0.
        top_logits: `[B, N, k]` float32, those logits; -inf where there is none, +inf for a NaN.
        broken: `[B, N]` bool, nodes whose logits hold a NaN; nothing after such a node can be trusted.
        acceptance: the accepted path and the tokens that a round emits, the bonus token last.
        fused: scalar bool, whether the vocabulary was swept without logits in memory; for statistics.
    """

    tokens: Int[Array, "B N"]
    log_prob: Float[Array, "B N"]
    top_ids: Int[Array, "B N k"]
    top_logits: Float[Array, "B N k"]
    broken: Bool[Array, "B N"]
    acceptance: Acceptance
    fused: Bool[Array, ""]
