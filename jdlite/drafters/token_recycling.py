"""Token Recycling: a table of the last-seen likely successors of every token id, unrolled into a fixed tree.

Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling", ACL
2025 (arXiv 2408.08696).
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jdlite.drafters.base import BRANCH, Context, Drafter, Needs, Observation, Proposal
from jdlite.drafters.retrieval import require_positive
from jdlite.errors import ConfigError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenRecyclingMemory:
    """Per row of the batch, what followed each token id when it was last run.

    Attributes:
        table: `[B, V, k]` int32, most likely next ids, best first; rubbish where `known` is false.
        known: `[B, V]` bool, ids that have been run.
    """

    table: Int[Array, "B V k"]
    known: Bool[Array, "B V"]


def rank_prior(rank: int) -> float:
    """Prior probability that the successor of this rank (0 = best) is right: 0.4 / (rank + 1)^1.6."""
    return 0.4 * (rank + 1) ** -1.6


@dataclasses.dataclass(frozen=True)
class TreeTemplate:
    """A fixed tree. Node 0 is the anchor; parents come first.

    Attributes:
        parents: parent of each node.
        ranks: which successor of its parent each node is, 0 the likeliest; 0 for the anchor.
        depths: distance from the anchor.
        gains: prior probability of acceptance, not rising from node to node.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    depths: tuple[int, ...]
    gains: tuple[float, ...]


@functools.lru_cache
def tree_template(num_nodes: int, depth: int, top_k: int) -> TreeTemplate:
    """The likeliest tree of this size: repeatedly add the node whose path has the highest product of `rank_prior`.

    Equal products go to the node that could have been added first. Nodes come out in order of falling probability, so
    the first n of them are the template of size n. With 80 nodes, 6 levels and 8 successors the anchor has all 8
    children and the likeliest path is 6 long. The paper's tree has the same size and depth, but its shape is fitted to
    measured acceptance.
    """
    parents, ranks, depths, gains = [0], [0], [0], [1.0]
    ready: list[tuple[float, int, int, int]] = []  # (-gain, order of discovery, parent, rank)

    def offer(parent: int, rank: int) -> None:
        if depths[parent] < depth and rank < top_k:
            heapq.heappush(ready, (-gains[parent] * rank_prior(rank), parent * top_k + rank, parent, rank))

    offer(0, 0)
    while ready and len(parents) < num_nodes:
        gain, _, parent, rank = heapq.heappop(ready)
        parents.append(parent)
        ranks.append(rank)
        depths.append(depths[parent] + 1)
        gains.append(-gain)
        offer(parent, rank + 1)
        offer(len(parents) - 1, 0)
    return TreeTemplate(tuple(parents), tuple(ranks), tuple(depths), tuple(gains))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenRecycling(Drafter):
    """Drafts a fixed tree in which the children of a token are its last-seen likely successors.

    Every node that a forward ran updates the row of its token, rejected nodes included: their next-token guesses are
    as good as any. Of several nodes with the same token in one forward, the last one counts. A token that has never
    been run has no children.

    Differs from the paper: one table per row of the batch, which starts empty (`hot_start` carries one over), and the
    shape of the tree (see `tree_template`).

    Attributes:
        num_nodes: N, size of the tree, anchor included.
        depth: most drafted levels below the anchor.
        top_k: successors kept per token.
    """

    num_nodes: int = 80
    depth: int = 6
    top_k: int = 8

    name = "token_recycling"

    def __post_init__(self):
        require_positive("TokenRecycling", num_nodes=self.num_nodes, depth=self.depth, top_k=self.top_k)

    @property
    def template(self) -> TreeTemplate:
        """The tree; it has fewer than `num_nodes` nodes only if `depth` and `top_k` do not allow more."""
        return tree_template(self.num_nodes, self.depth, self.top_k)

    @property
    def max_nodes(self) -> int:
        return len(self.template.parents)

    @property
    def max_depth(self) -> int:
        return max(self.template.depths)

    def needs(self, num_layers: int) -> Needs:
        return Needs(top_k=self.top_k)

    def init(self, batch: int, capacity: int, *, hidden_size: int, vocab_size: int, dtype: Any) -> TokenRecyclingMemory:
        """Empty tables.

        Raises:
            ConfigError: more successors wanted than there are ids.
        """
        if self.top_k > vocab_size:
            raise ConfigError(
                f"TokenRecycling got top_k {self.top_k} for a vocabulary of {vocab_size} ids; give at most that."
            )
        return TokenRecyclingMemory(
            jnp.zeros((batch, vocab_size, self.top_k), jnp.int32), jnp.zeros((batch, vocab_size), bool)
        )

    def hot_start(
        self, memory: TokenRecyclingMemory, table: Int[Array, "V k"], known: Bool[Array, " V"]
    ) -> TokenRecyclingMemory:
        """Give every row a table from elsewhere, such as one row of an earlier memory.

        Args:
            memory: decides the number of rows.
            table: `[V, k]`, next ids by token id; the ids of a row must differ.
            known: `[V]`, which rows of the table mean something.

        Raises:
            ConfigError: the table has another shape than a row of the memory.
        """
        if table.shape != memory.table.shape[1:] or known.shape != memory.known.shape[1:]:
            raise ConfigError(
                f"TokenRecycling.hot_start got a table of shape {table.shape} and flags of shape {known.shape}; "
                f"give {memory.table.shape[1:]} and {memory.known.shape[1:]}."
            )
        return TokenRecyclingMemory(
            jnp.broadcast_to(table, memory.table.shape).astype(jnp.int32), jnp.broadcast_to(known, memory.known.shape)
        )

    def observe(self, memory: TokenRecyclingMemory, context: Context, observation: Observation) -> TokenRecyclingMemory:
        B, V = memory.known.shape
        N = observation.tokens.shape[1]
        run = observation.valid & (observation.count > 0)[:, None]
        # A scatter with repeated indices has no defined order, so only the last node of each token takes part: after
        # a stable sort by token it is the one whose neighbour is another token. Nodes that were not run sort behind.
        keys, order = jax.lax.sort_key_val(
            jnp.where(run, observation.tokens, V), jnp.broadcast_to(jnp.arange(N), (B, N)), dimension=1
        )
        last = jnp.concatenate([keys[:, 1:] != keys[:, :-1], jnp.ones((B, 1), bool)], axis=1) & (keys < V)
        rows = jnp.take_along_axis(observation.top_ids, order[..., None], axis=1)
        where = (jnp.arange(B)[:, None], jnp.where(last, keys, V + jnp.arange(N)))  # out of range: dropped
        return TokenRecyclingMemory(
            memory.table.at[where].set(rows, mode="drop", unique_indices=True),
            memory.known.at[where].set(True, mode="drop", unique_indices=True),
        )

    def propose(self, memory: TokenRecyclingMemory, context: Context) -> Proposal:
        B = context.lengths.shape[0]
        template = self.template
        N = len(template.parents)
        parents, ranks, depths = (np.array(x) for x in (template.parents, template.ranks, template.depths))
        tokens = jnp.zeros((B, N), jnp.int32).at[:, 0].set(context.anchor)
        valid = jnp.zeros((B, N), bool).at[:, 0].set(True)
        for level in range(1, int(depths.max()) + 1):
            nodes = np.flatnonzero(depths == level)
            # Parents one by one and not their children: each row of the table is read once.
            above, which = np.unique(parents[nodes], return_inverse=True)
            ids = tokens[:, above]
            successors = jnp.take_along_axis(memory.table, ids[..., None], axis=1)
            known = valid[:, above] & jnp.take_along_axis(memory.known, ids, axis=1)
            tokens = tokens.at[:, nodes].set(successors[:, which, ranks[nodes]])
            valid = valid.at[:, nodes].set(known[:, which])
        return Proposal(
            tokens=tokens,
            parents=jnp.broadcast_to(jnp.asarray(parents, jnp.int32), (B, N)),
            valid=valid,
            gain=jnp.broadcast_to(jnp.asarray(template.gains, jnp.float32), (B, N)),
            source=jnp.full((B, N), BRANCH, jnp.int32),
        )
