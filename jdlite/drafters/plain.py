"""Plain decoding: the drafter that drafts nothing, so that the baseline runs through the same loop."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jdlite.drafters.base import LEXICAL, Context, Drafter, Proposal


@dataclasses.dataclass(frozen=True)
class Plain(Drafter):
    """One token per forward."""

    name = "plain"

    @property
    def max_nodes(self) -> int:
        return 1

    def propose(self, memory, context: Context) -> Proposal:
        nothing = jnp.zeros((context.lengths.shape[0], 0))
        return Proposal.chain(context.anchor, nothing, nothing.astype(bool), nothing, LEXICAL)
