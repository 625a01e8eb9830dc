"""PLD+: of all earlier occurrences of the newest token, copy after the one that the target saw in the likest state.

Somasundaram, Phukan, Saxena, "PLD+: Accelerating LLM inference by leveraging Language Model Artifacts", Findings of
NAACL 2025 (arXiv 2412.01447), in its hidden-state form. The form that ranks by attention weights is left out: fused
attention does not return them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jdlite.drafters.base import LEXICAL, Context, Drafter, Needs, Observation, Proposal
from jdlite.drafters.retrieval import (
    anchor_positions,
    chain_gain,
    copy_span,
    normalise,
    record,
    require_positive,
    rerank,
    rerank_tap,
    rows_at,
    suffix_length_at,
)
from jdlite.errors import ConfigError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PLDPlusMemory:
    """Unit states of the tokens that were run, `[B, S, D]`; slots from the anchor's on are rubbish."""

    states: Float[Array, "B S D"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PLDPlus(Drafter):
    """Drafts a chain copied from after the best earlier occurrence of the anchor's token.

    The anchor itself has not been run, so an occurrence j is judged by the state *before* it: it wins whose state j - 1
    has the highest cosine with the state before the anchor. Equal cosines go to the earliest j. Slot 0 has no state
    before it and is skipped, even as the only occurrence. The copy stops at the end of the row.

    Attributes:
        num_drafts: K, most tokens copied.
        rerank_layer: tap whose states are compared; None takes `default_rerank_layer` of the target's depth.
        state_dtype: dtype of the stored states, such as "bfloat16"; None stores them in the target's compute dtype.
            On a CPU keep float32: XLA has no 16-bit float gather there and converts the whole buffer every round.
    """

    num_drafts: int = 10
    rerank_layer: int | None = None
    state_dtype: str | None = None

    name = "pld_plus"

    def __post_init__(self):
        require_positive("PLDPlus", num_drafts=self.num_drafts)
        if self.state_dtype is not None and not jnp.issubdtype(jnp.dtype(self.state_dtype), jnp.floating):
            raise ConfigError(
                f"PLDPlus needs a floating-point state_dtype, got {self.state_dtype!r}; use one such as 'bfloat16'."
            )

    @property
    def max_nodes(self) -> int:
        return self.num_drafts + 1

    def needs(self, num_layers: int) -> Needs:
        """One tap.

        Raises:
            ConfigError: `rerank_layer` is not a layer of the target.
        """
        return Needs(taps=(rerank_tap("PLDPlus", self.rerank_layer, num_layers),))

    def init(self, batch: int, capacity: int, *, hidden_size: int, vocab_size: int, dtype: Any) -> PLDPlusMemory:
        return PLDPlusMemory(jnp.zeros((batch, capacity, hidden_size), self.state_dtype or dtype))

    def observe(self, memory: PLDPlusMemory, context: Context, observation: Observation) -> PLDPlusMemory:
        return PLDPlusMemory(record(memory.states, normalise(observation.taps[0]), observation))

    def propose(self, memory: PLDPlusMemory, context: Context) -> Proposal:
        tokens, lengths = context.tokens, context.lengths
        query = rows_at(memory.states, lengths[:, None] - 2)
        slot, hit, _ = rerank(memory.states, anchor_positions(context)[:, None], query)
        slot, hit = slot[:, 0], hit[:, 0]
        drafts, valid = copy_span(tokens, lengths, jnp.where(hit, slot + 1, -1), self.num_drafts)
        gain = chain_gain(suffix_length_at(tokens, lengths, slot), self.num_drafts)
        return Proposal.chain(context.anchor, drafts, valid, gain, LEXICAL)
