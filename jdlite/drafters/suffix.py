"""Adaptive suffix matching, after SuffixDecoding: the longer the match, the longer the draft.

Oliaro, Jia, Campos, Qiao, "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications", NeurIPS 2025
(arXiv 2411.04975).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jdlite.drafters.base import LEXICAL, Context, Drafter, Proposal
from jdlite.drafters.retrieval import (
    chain_gain,
    copy_span,
    last_slot,
    newest_slots,
    require_positive,
    suffix_lengths,
)
from jdlite.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suffix(Drafter):
    """Drafts a chain that follows the longest earlier occurrence of the newest tokens.

    For every earlier position the common suffix with the row is measured, up to `match_depth` tokens; the positions
    with the longest one are the matches, m tokens long. At most `factor * m + offset` tokens are drafted.

    With `vote`, the newest `max_matches` matches vote on each token: the most frequent next token wins, ties go to the
    newest match that has one, and the matches that said otherwise, or have reached the end of the row, leave. The
    estimated probability of the draft is the product of the winning shares; it is cut where this falls below
    `min_probability`. Without `vote` the newest match is copied.

    What differs from the published method: it keeps suffix trees of the row and of earlier requests, and scores the
    frequent continuations of *every* match length to choose among them. Here there is no tree (a few passes over the
    row's tokens find the same longest match, need no memory and are exact after a rollback), no corpus of earlier
    requests, only the longest matches vote, and the draft is a chain.

    Attributes:
        num_drafts: K, most tokens drafted.
        match_depth: longest suffix compared.
        factor: drafted tokens per matched token.
        offset: drafted tokens besides.
        vote: whether all longest matches count, or only the newest.
        max_matches: how many of the longest matches vote.
        min_probability: least estimated probability of a drafted token.
    """

    num_drafts: int = 32
    match_depth: int = 64
    factor: float = 1.0
    offset: int = 0
    vote: bool = True
    max_matches: int = 64
    min_probability: float = 0.1

    name = "suffix"

    def __post_init__(self):
        require_positive(
            "Suffix", num_drafts=self.num_drafts, match_depth=self.match_depth, max_matches=self.max_matches
        )
        if not self.factor >= 0:
            raise ConfigError(f"Suffix needs a factor of at least 0, got {self.factor}; the published one is 1.0.")
        if not 0 <= self.min_probability <= 1:
            raise ConfigError(
                f"Suffix needs a min_probability between 0 and 1, got {self.min_probability}; the published one is 0.1."
            )

    @property
    def max_nodes(self) -> int:
        return self.num_drafts + 1

    def propose(self, memory, context: Context) -> Proposal:
        tokens, lengths = context.tokens, context.lengths
        K = self.num_drafts
        matched = suffix_lengths(tokens, lengths, self.match_depth)
        longest = matched.max(axis=1)
        ends = (matched == longest[:, None]) & (matched > 0)
        if self.vote:
            slots, exist = newest_slots(ends, self.max_matches)
            spans, known = copy_span(tokens, lengths, jnp.where(exist, slots + 1, -1), K)
            drafts, probability = _vote(spans, known)
        else:
            newest = last_slot(ends)
            drafts, known = copy_span(tokens, lengths, jnp.where(newest >= 0, newest + 1, -1), K)
            probability = known.astype(jnp.float32)
        reach = jnp.floor(self.factor * longest + self.offset)[:, None]
        valid = (probability > 0) & (probability >= self.min_probability) & (jnp.arange(K) < reach)
        return Proposal.chain(context.anchor, drafts, valid, chain_gain(longest, K) * probability, LEXICAL)


def _vote(spans: Int[Array, "B C K"], known: Bool[Array, "B C K"]) -> tuple[Int[Array, "B K"], Float[Array, "B K"]]:
    """Walk down the continuations by majority.

    Args:
        spans: continuations of C matches, the newest first.
        known: which of their tokens exist; a prefix of each span.

    Returns:
        The winning tokens, and the product of the winning shares up to each, 0 from where no match has a token left.
    """

    def step(carry, column):
        alive, probability = carry
        token, exists = column
        alive = alive & exists
        votes = ((token[:, :, None] == token[:, None, :]) & alive[:, None, :]).sum(axis=2) * alive
        winner = votes.argmax(axis=1)[:, None]  # the first maximum is the newest match
        draft = jnp.take_along_axis(token, winner, axis=1)
        share = jnp.take_along_axis(votes, winner, axis=1)[:, 0] / jnp.maximum(alive.sum(axis=1), 1)
        probability = probability * share
        return (alive & (token == draft), probability), (draft[:, 0], probability)

    B, C, _ = spans.shape
    start = (jnp.ones((B, C), bool), jnp.ones(B, jnp.float32))
    _, (drafts, probability) = jax.lax.scan(step, start, (jnp.moveaxis(spans, 2, 0), jnp.moveaxis(known, 2, 0)))
    return drafts.T, probability.T
