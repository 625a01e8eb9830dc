"""LogitSpec: the logits that gave the newest token also hint at the token after it.

Liu et al., "LogitSpec: Accelerating Retrieval-based Speculative Decoding via Next Next Token Speculation"
(arXiv 2507.01449).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jdlite.drafters.base import BRANCH, LEXICAL, Context, Drafter, Needs, Observation, Proposal
from jdlite.drafters.retrieval import chain_gain, record, require_positive, rows_at, suffix_lengths
from jdlite.errors import ConfigError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogitSpecMemory:
    """Most likely next ids after each token that was run, `[B, S, k]`; slots from the anchor's on are rubbish."""

    top_ids: Int[Array, "B S k"]


def branch_prior(rank: Int[Array, "*any"]) -> Float[Array, "*any"]:
    """Prior probability that the id of this rank (0 = best) in a token's logits is the token *after next*.

    It is 0.1 / (rank + 1), flat on purpose: 85 % of the guesses that come true lie within 37 ranks, and no fewer
    (arXiv 2604.14885).
    """
    return 0.1 / (rank.astype(jnp.float32) + 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogitSpec(Drafter):
    """Drafts a chain looked up for the anchor, and one short chain for each guess of the token after it.

    The anchor has not been run, so the newest logits at hand are those it was chosen from. Their `top_k` ids are
    guesses of the token that *follows* the anchor; each becomes a child of the anchor and is extended by the n-gram
    lookup for the text that ends with anchor and child. A lookup takes the longest n-gram up to `ngram_max` with a
    match, of its matches the newest that `num_drafts` known tokens follow, and if there is none the earliest. The
    anchor's own lookup chain comes first with up to `num_drafts` tokens, then the children by rank, each with its
    chain, until the tree is full; the last chain is cut. The anchor's token itself and the first token of its chain are
    no children (the latter is there already).

    Differs from the paper's code: the anchor counts as a known continuation, and equal siblings are merged.

    Attributes:
        num_nodes: N, most nodes of the tree, anchor included.
        num_drafts: most tokens copied after the anchor.
        ngram_max: longest n-gram looked for.
        top_k: ids tried as children.
        branch_lengths: pairs (last rank, nodes) in rising order: how many nodes a child and its chain may take, by its
            rank counted from 0; ranks past the last pair get one.
    """

    num_nodes: int = 64
    num_drafts: int = 20
    ngram_max: int = 3
    top_k: int = 64
    branch_lengths: tuple[tuple[int, int], ...] = ((8, 4), (32, 3))

    name = "logit_spec"

    def __post_init__(self):
        require_positive(
            "LogitSpec",
            num_nodes=self.num_nodes,
            num_drafts=self.num_drafts,
            ngram_max=self.ngram_max,
            top_k=self.top_k,
            branch_lengths=min((nodes for _, nodes in self.branch_lengths), default=1),
        )

    @property
    def max_nodes(self) -> int:
        return self.num_nodes

    @property
    def max_depth(self) -> int:
        return min(self.num_nodes - 1, max(self.num_drafts, *self._limits()))

    def needs(self, num_layers: int) -> Needs:
        return Needs(top_k=self.top_k)

    def init(self, batch: int, capacity: int, *, hidden_size: int, vocab_size: int, dtype: Any) -> LogitSpecMemory:
        """Empty memory.

        Raises:
            ConfigError: more children wanted than there are ids.
        """
        if self.top_k > vocab_size:
            raise ConfigError(
                f"LogitSpec got top_k {self.top_k} for a vocabulary of {vocab_size} ids; give at most that."
            )
        return LogitSpecMemory(jnp.zeros((batch, capacity, self.top_k), jnp.int32))

    def observe(self, memory: LogitSpecMemory, context: Context, observation: Observation) -> LogitSpecMemory:
        return LogitSpecMemory(record(memory.top_ids, observation.top_ids, observation))

    def propose(self, memory: LogitSpecMemory, context: Context) -> Proposal:
        tokens, lengths, anchor = context.tokens, context.lengths, context.anchor
        B, S = tokens.shape
        K = self.num_drafts
        last = lengths[:, None] - 1
        slot = jnp.arange(S)

        # One integer orders the matches: first by n, then full continuations by recency, then the others by age.
        preference = jnp.where(slot + K <= last, 2 * S + slot, S - 1 - slot)
        matched = suffix_lengths(tokens, lengths, self.ngram_max)
        main = jnp.where(matched > 0, matched * 4 * S + preference, 0).max(axis=1)
        # A child's match at j is one longer than the anchor's match at j - 1.
        longer = 1 + jnp.pad(jnp.minimum(matched, self.ngram_max - 1), ((0, 0), (1, 0)))[:, :S]
        child_score = jnp.where(slot < last, longer * 4 * S + preference, 0)
        children = rows_at(memory.top_ids, lengths[:, None] - 2)[:, 0]
        same = tokens[:, None, :] == children[:, :, None]
        score = jnp.concatenate([main[:, None], jnp.where(same, child_score[:, None, :], 0).max(axis=2)], axis=1)
        n, order = score // (4 * S), score % (4 * S)
        start = 1 + jnp.where(order >= 2 * S, order - 2 * S, S - 1 - order)  # of the continuations
        known = jnp.where(n > 0, lengths[:, None] - start, 0)

        # Sequence 0 is the anchor's chain, sequence 1 + r the child of rank r with its chain.
        first = jnp.where(n[:, 0] > 0, jnp.take_along_axis(tokens, jnp.minimum(start[:, :1], S - 1), axis=1)[:, 0], -1)
        is_child = (children != anchor[:, None]) & (children != first[:, None]) & (last > 0)
        limits = jnp.asarray(self._limits(), jnp.int32)
        sizes = jnp.where(is_child, 1 + jnp.minimum(limits - 1, known[:, 1:]), 0)
        sizes = jnp.concatenate([jnp.minimum(K, known[:, :1]), sizes], axis=1)
        ends = jnp.cumsum(sizes, axis=1)

        # Nodes are packed: node i is token `place` of sequence `owner`.
        node = jnp.arange(self.num_nodes - 1)
        owner = jnp.minimum((ends[:, None, :] <= node[:, None]).sum(axis=2), self.top_k)
        of_owner = lambda values: jnp.take_along_axis(values, owner, axis=1)  # noqa: E731
        place = jnp.maximum(node - of_owner(ends - sizes), 0)
        is_root_child = (owner > 0) & (place == 0)
        copied = of_owner(start) + place - (owner > 0)
        copied = jnp.take_along_axis(tokens, jnp.clip(copied, 0, S - 1), axis=1)
        guessed = jnp.take_along_axis(children, jnp.maximum(owner - 1, 0), axis=1)
        drafts = jnp.where(is_root_child, guessed, copied)
        valid = node < ends[:, -1:]

        depth = max(K, *self._limits())
        gains = chain_gain(n, depth)
        missed = 1 - gains[:, 0, 0]
        prior = branch_prior(jnp.arange(self.top_k)) * missed[:, None]
        branch = prior[..., None] * jnp.pad(gains[:, 1:, :-1], ((0, 0), (0, 0), (1, 0)), constant_values=1)
        gains = jnp.concatenate([gains[:, :1], branch], axis=1).reshape(B, -1)
        gain = jnp.take_along_axis(gains, owner * depth + jnp.minimum(place, depth - 1), axis=1)

        parents = jnp.where(place == 0, 0, node)  # node i's parent within its sequence is i - 1, and nodes start at 1
        root = lambda value, dtype: jnp.full((B, 1), value, dtype)  # noqa: E731
        return Proposal(
            tokens=jnp.concatenate([anchor[:, None], drafts], axis=1).astype(jnp.int32),
            parents=jnp.concatenate([root(0, jnp.int32), parents], axis=1).astype(jnp.int32),
            valid=jnp.concatenate([root(True, bool), valid], axis=1),
            gain=jnp.concatenate([root(1, jnp.float32), gain], axis=1),
            source=jnp.concatenate(
                [root(BRANCH, jnp.int32), jnp.where(owner == 0, LEXICAL, BRANCH).astype(jnp.int32)], axis=1
            ),
        )

    def _limits(self) -> list[int]:
        """Most nodes of each child with its chain, by rank."""
        return [next((nodes for bound, nodes in self.branch_lengths if rank <= bound), 1) for rank in range(self.top_k)]
