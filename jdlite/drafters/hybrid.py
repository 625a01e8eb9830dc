"""Two drafters in one tree: what either offers is verified once, and what both offer is believed more.

Made for AdaPLD's copied chain and branches beside DLite's chain, which are right at different places: copies where the
text repeats itself, the network where it is new. Any two drafters can be joined. No publication describes this.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jdlite.decoding.policy import conditional
from jdlite.decoding.tree import Tree, order_by_gain
from jdlite.drafters.base import AGREED, Context, Drafter, Needs, Observation, Proposal
from jdlite.errors import ConfigError

if TYPE_CHECKING:
    from jdlite.models.decoder import Decoder


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Hybrid(Drafter, static=False):
    """Offers the trees of two drafters as one, see `merge`. Deterministic drafts only, so it is lossless by sample and
    match.

    Example: `Hybrid(AdaPLD(), DLiteDrafter(model=network))`.

    Attributes:
        first, second: the drafters. Each keeps its own memory and observes every forward.
        num_nodes: N at most, anchor included; where the trees hold more, the nodes of least gain are left out.
        num_layers: L of the target, which `fit` fills in.
    """

    first: Drafter
    second: Drafter
    num_nodes: int = dataclasses.field(default=40, metadata={"static": True}, kw_only=True)
    num_layers: int | None = dataclasses.field(default=None, metadata={"static": True}, kw_only=True)

    name = "hybrid"

    def __post_init__(self) -> None:
        if self.num_nodes < 2:
            raise ConfigError(f"a hybrid needs num_nodes of at least 2, got {self.num_nodes}; 40 is a good number.")
        for part in (self.first, self.second):
            # JAX also builds pytrees whose leaves are no drafters.
            if not isinstance(part, Drafter):
                continue
            if part.samples:
                raise ConfigError(
                    f"a hybrid is exact for deterministic drafts only: got {part.name} in rejection mode; use match."
                )
            if part.lookahead:
                raise ConfigError(
                    f"a hybrid runs the target once per round: got {part.name} with successor_source forward, which "
                    "wants another pass; use retrieval."
                )

    @property
    def parts(self) -> tuple[Drafter, Drafter]:
        """Both drafters."""
        return self.first, self.second

    @property
    def max_nodes(self) -> int:
        return min(self.num_nodes, self.first.max_nodes + self.second.max_nodes - 1)

    @property
    def max_depth(self) -> int:
        return min(self.num_nodes - 1, max(self.first.max_depth, self.second.max_depth))

    @property
    def network(self) -> Drafter | None:
        return self.first.network or self.second.network

    def fit(self, model: Decoder) -> Hybrid:
        """Both drafters fitted to the target."""
        first, second = (part.fit(model) for part in self.parts)
        return dataclasses.replace(self, first=first, second=second, num_layers=model.config.num_layers)

    def needs(self, num_layers: int) -> Needs:
        return Needs.union([part.needs(num_layers) for part in self.parts])

    def init(self, batch: int, capacity: int, *, hidden_size: int, vocab_size: int, dtype: Any) -> tuple:
        options = {"hidden_size": hidden_size, "vocab_size": vocab_size, "dtype": dtype}
        return tuple(part.init(batch, capacity, **options) for part in self.parts)

    def observe(self, memory: tuple, context: Context, observation: Observation) -> tuple:
        """Each drafter sees the taps and top ids that it asked for.

        Raises:
            ConfigError: the hybrid was not fitted to its target.
        """
        L = self.num_layers
        if L is None:
            raise ConfigError("a hybrid must know its target before it observes; call hybrid.fit(model) first.")
        have = self.needs(L)
        return tuple(
            part.observe(own, context, observation.part(have, part.needs(L)))
            for part, own in zip(self.parts, memory, strict=True)
        )

    def propose(self, memory: tuple, context: Context) -> Proposal:
        first, second = (part.propose(own, context) for part, own in zip(self.parts, memory, strict=True))
        return merge(first, second, max_nodes=self.max_nodes, max_depth=self.max_depth)

    def rollback(self, memory: tuple, lengths: Int[Array, " B"]) -> tuple:
        return tuple(part.rollback(own, lengths) for part, own in zip(self.parts, memory, strict=True))


def merge(first: Proposal, second: Proposal, *, max_nodes: int, max_depth: int) -> Proposal:
    """One tree of two: nodes with the same tokens on the way from the anchor become one node.

    Example: the chain a-b-c and the tree a-{b-d, e} give a-{b-{c, d}, e}, where b counts as agreed.

    Gains are merged as probabilities given the parent. Where both trees have the node they are taken for independent
    reasons to believe in it, `1 - (1 - p)(1 - q)`; children that together would be more than certain share 1. A node's
    gain is the product along its new path. Decoding corrects this by what it sees accepted, for agreed nodes by
    themselves.

    Args:
        first: its nodes come first where gains are equal, and give the tokens of the anchor.
        second: of the same rows. Neither may carry `log_q`.
        max_nodes: N of the result; the nodes of least gain are left out.
        max_depth: deeper nodes are left out.

    Returns:
        The tree with its nodes in falling order of gain, `[B, max_nodes]`. Nodes that one tree offered keep their
        source, those that both offered have source `AGREED`.

    Raises:
        ConfigError: a proposal carries `log_q`.
    """
    if first.log_q is not None or second.log_q is not None:
        raise ConfigError("only deterministic drafts can be merged: got sampled ones; use match mode.")
    trees = [Tree.from_parents(proposal.parents, proposal.valid) for proposal in (first, second)]
    N1 = first.tokens.shape[1]
    join = lambda one, other: jnp.concatenate([one, other], axis=1)  # noqa: E731
    tokens, source = join(first.tokens, second.tokens), join(first.source, second.source)
    depth = join(*(tree.depth for tree in trees))
    valid = join(*(tree.valid for tree in trees)) & (depth <= max_depth)
    prior = join(*(conditional(p.gain, tree) for p, tree in zip((first, second), trees, strict=True)))
    keys = join(*(_paths(p.tokens, tree, max_depth) for p, tree in zip((first, second), trees, strict=True)))

    # A node's twin is the first node with the same path: itself, or in the second tree often one of the first.
    same = jnp.all(keys[:, :, None] == keys[:, None], axis=-1) & (depth[:, :, None] == depth[:, None])
    same = same & valid[:, :, None] & valid[:, None]
    place = jnp.arange(tokens.shape[1])
    twin = jnp.where(valid, jnp.argmax(same, axis=2), place).astype(jnp.int32)
    kept = valid & (twin == place)
    parents = jnp.take_along_axis(twin, join(first.parents, second.parents + N1), axis=1)
    parents = jnp.where(kept, parents, 0)

    doubt = jnp.where(same, 1 - prior[:, None], 1.0).prod(axis=2)
    belief = jnp.where(kept, 1 - doubt, 0.0).at[:, 0].set(1.0)
    child_of = (parents[:, :, None] == place) & (kept & (place > 0))[:, :, None]
    total = jnp.einsum("bip,bi->bp", child_of.astype(jnp.float32), belief)
    belief = belief / jnp.maximum(jnp.take_along_axis(total, parents, axis=1), 1.0).at[:, 0].set(1.0)

    ancestors = Tree.from_parents(parents, kept).ancestors
    log_path = jnp.einsum("bij,bj->bi", ancestors.astype(jnp.float32), jnp.log(jnp.maximum(belief, 1e-12)))
    # Rounding must not put a child before its parent.
    gain = jnp.min(jnp.where(ancestors, jnp.exp(log_path)[:, None], jnp.inf), axis=2)
    agreed = same.sum(axis=2) > 1
    merged = Proposal(
        tokens=tokens,
        parents=parents,
        valid=kept,
        gain=jnp.where(kept, gain, 0.0),
        source=jnp.where(agreed, AGREED, source),
    )
    ordered, _ = order_by_gain(merged, kept)
    return jax.tree.map(lambda x: x[:, :max_nodes], ordered)


def _paths(tokens: Int[Array, "B N"], tree: Tree, max_depth: int) -> Int[Array, "B N depth"]:
    """Tokens of each node's path after the anchor, by depth 1 to `max_depth`; the least integer past its end."""
    steps = tree.ancestors[..., None] & (tree.depth[:, None, :, None] == jnp.arange(1, max_depth + 1))
    return jnp.max(jnp.where(steps, tokens[:, None, :, None], jnp.iinfo(jnp.int32).min), axis=2)
