"""Shape of a draft tree: ancestors, depths and the order in which nodes are worth verifying."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from jdlite.drafters.base import Proposal


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tree:
    """Structure derived from the parents of N nodes.

    Example: `parents = [0, 0, 1, 0]` (anchor a, chain b c, sibling d of b) has `depth = [0, 1, 2, 1]` and
    `ancestors = [[1,0,0,0], [1,1,0,0], [1,1,1,0], [1,0,0,1]]`.

    Attributes:
        parents: `[B, N]` int32.
        ancestors: `[B, N, N]` bool, `ancestors[b, i, j]`: node j is node i or above it. This is the attention mask.
        depth: `[B, N]` int32, 0 for the anchor.
        valid: `[B, N]` bool, nodes whose whole path is valid.
    """

    parents: Int[Array, "B N"]
    ancestors: Bool[Array, "B N N"]
    depth: Int[Array, "B N"]
    valid: Bool[Array, "B N"]

    @classmethod
    def from_parents(cls, parents: Int[Array, "B N"], valid: Bool[Array, "B N"]) -> Tree:
        """Build the structure by squaring the parent relation: `ceil(log2 N)` small products."""
        N = parents.shape[1]
        own = jnp.eye(N, dtype=jnp.float32)
        reach = jnp.maximum(own, jax.nn.one_hot(parents, N, dtype=jnp.float32))
        for _ in range(math.ceil(math.log2(N)) if N > 1 else 0):
            reach = jnp.minimum(reach @ reach, 1.0)
        ancestors = reach > 0.5
        depth = jnp.sum(ancestors, axis=-1, dtype=jnp.int32) - 1
        return cls(parents, ancestors, depth, ~jnp.any(ancestors & ~valid[:, None, :], axis=-1))

    def first(self, n: int) -> Tree:
        """The tree of the first n nodes; since parents come first, it is a tree again."""
        return Tree(self.parents[:, :n], self.ancestors[:, :n, :n], self.depth[:, :n], self.valid[:, :n])


def order_by_gain(proposal: Proposal, extra: Shaped[Array, "B N"]) -> tuple[Proposal, Shaped[Array, "B N"]]:
    """Reorder the nodes of each row by falling gain, so that a budget of n nodes is the first n.

    Gain never rises from a parent to its child, so the stable order keeps parents before children. Invalid nodes go
    last.
    A chain stays as it is. `extra`, one value per node, is reordered along.
    """
    worth = jnp.where(proposal.valid, proposal.gain, -1.0).at[:, 0].set(jnp.inf)
    order = jnp.argsort(-worth, axis=1, stable=True)
    place = jnp.argsort(order, axis=1)
    take = lambda x: jnp.take_along_axis(x, order, axis=1)  # noqa: E731
    ordered = Proposal(
        tokens=take(proposal.tokens),
        parents=jnp.take_along_axis(place, take(proposal.parents), axis=1).astype(jnp.int32),
        valid=take(proposal.valid),
        gain=take(proposal.gain),
        source=take(proposal.source),
        log_q=None,
    )
    return ordered, take(extra)
