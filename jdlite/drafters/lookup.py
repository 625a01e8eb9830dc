"""Prompt lookup decoding (PLD): copy what followed an earlier occurrence of the newest n-gram.

The method is by Apoorv Saxena (2023, `prompt-lookup-decoding`). Implementations differ in the details, which change
what is drafted; they are options here, and the class methods name the rules of three of them.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp

from jdlite.drafters.base import LEXICAL, Context, Drafter, Proposal
from jdlite.drafters.retrieval import chain_gain, copy_span, first_slot, last_slot, require_positive, suffix_lengths
from jdlite.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLookup(Drafter):
    """Drafts a chain copied from the text.

    The longest n-gram with an eligible match wins, `ngram_max` being tried first and `ngram_min` last; a row shorter
    than n + 1 tokens simply has no match for n. The match may overlap the newest n-gram, but its last token is never
    the anchor itself. The copy stops at the end of the row.

    Attributes:
        num_drafts: K, most tokens copied.
        ngram_max: longest n-gram looked for.
        ngram_min: shortest n-gram looked for.
        match: which of several matches of that n: "first" (leftmost) or "last" (rightmost, most recent).
        full_continuation: accept only matches followed by K known tokens and starting their continuation before the
            newest n-gram starts.
    """

    num_drafts: int = 10
    ngram_max: int = 3
    ngram_min: int = 1
    match: Literal["first", "last"] = "first"
    full_continuation: bool = False

    name = "pld"

    def __post_init__(self):
        require_positive("PromptLookup", num_drafts=self.num_drafts, ngram_min=self.ngram_min)
        if self.ngram_max < self.ngram_min:
            raise ConfigError(
                f"PromptLookup needs ngram_max of at least ngram_min, got {self.ngram_max} and {self.ngram_min}; "
                "raise one or lower the other."
            )
        if self.match not in ("first", "last"):
            raise ConfigError(f'PromptLookup needs match "first" or "last", got {self.match!r}; choose one of the two.')

    @classmethod
    def transformers(cls, *, num_drafts: int = 10, max_matching_ngram_size: int = 2) -> PromptLookup:
        """The rule of transformers' `prompt_lookup_num_tokens`: earliest match, shorter copies allowed."""
        return cls(num_drafts=num_drafts, ngram_max=max_matching_ngram_size)

    @classmethod
    def vllm(cls, *, num_drafts: int = 10, ngram_min: int = 5, ngram_max: int = 5) -> PromptLookup:
        """The rule of vLLM's `ngram` method: leftmost among the longest matches within the two bounds.

        Both bounds are 5 in vLLM when neither is set.
        """
        return cls(num_drafts=num_drafts, ngram_max=ngram_max, ngram_min=ngram_min)

    @classmethod
    def original(cls, *, num_drafts: int = 10, ngram_max: int = 3) -> PromptLookup:
        """The rule of the first publication: earliest match that a full copy of K tokens can follow."""
        return cls(num_drafts=num_drafts, ngram_max=ngram_max, full_continuation=True)

    @property
    def max_nodes(self) -> int:
        return self.num_drafts + 1

    def propose(self, memory, context: Context) -> Proposal:
        tokens, lengths = context.tokens, context.lengths
        matched = suffix_lengths(tokens, lengths, self.ngram_max)
        if self.full_continuation:
            left = lengths[:, None] - 1 - jnp.arange(tokens.shape[1])  # known tokens after each slot
            # An n-gram ending at j qualifies if K tokens follow and j + 1 < length - n, that is n < left.
            matched = jnp.where(left >= self.num_drafts, jnp.minimum(matched, left - 1), 0)
        n = matched.max(axis=1)
        best = (matched == n[:, None]) & (n >= self.ngram_min)[:, None]
        end = first_slot(best) if self.match == "first" else last_slot(best)
        hit = best.any(axis=1)
        drafts, valid = copy_span(tokens, lengths, jnp.where(hit, end + 1, -1), self.num_drafts)
        return Proposal.chain(context.anchor, drafts, valid, chain_gain(n, self.num_drafts), LEXICAL)
