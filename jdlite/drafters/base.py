"""The Drafter contract: what a drafter asks of the target's forward, what it is told, and what it proposes.

A drafter is a frozen, hashable description (options only). Its per-row memory is a pytree that `init` makes, `observe`
updates and the decode loop carries; every leaf has the row axis first, so sessions can fork and select rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

if TYPE_CHECKING:
    from jdlite.models.decoder import Decoder

# Where a drafted node came from; statistics count accepted tokens by these names. "agreed" is what both drafters of a
# hybrid offered.
SOURCES = ("lexical", "branch", "successor", "semantic", "model", "agreed")
LEXICAL, BRANCH, SUCCESSOR, SEMANTIC, MODEL, AGREED = range(len(SOURCES))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needs:
    """What a drafter wants from each forward of the target, besides the tokens.

    Attributes:
        taps: layers whose block output it reads (`num_layers - 1` is the final-normed state).
        top_k: how many most likely next-token ids it reads per node, 0 for none. Makes prefill run the LM head on every
            prompt position, in chunks.
    """

    taps: tuple[int, ...] = ()
    top_k: int = 0

    @classmethod
    def union(cls, wants: Sequence[Needs]) -> Needs:
        """What serves several drafters at once; `Observation.part` gives each its own again."""
        taps = sorted({tap for want in wants for tap in want.taps})
        return cls(taps=tuple(taps), top_k=max(want.top_k for want in wants))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """What is known when drafting.

    Attributes:
        tokens: committed tokens of each row, `[B, S]` int32. Slots at or past `lengths` hold rubbish.
        lengths: `[B]` int32, known tokens of each row, anchor included (the anchor is `tokens[b, lengths[b] - 1]`).
        prompt_lengths: `[B]` int32, tokens that were given rather than generated.
        keys: `[B]` typed PRNG keys of the rows, for drafters that sample.
        temperature: `[B]` float32, for drafters that sample.
        embedding: the target's input embedding table, `[V, D]`.
        run_network: scalar bool; where False, a drafter's `network` is to be left out and offer nothing.
    """

    tokens: Int[Array, "B S"]
    lengths: Int[Array, " B"]
    prompt_lengths: Int[Array, " B"]
    keys: Any
    temperature: Float[Array, " B"]
    embedding: Float[Array, "V D"]
    run_network: bool | Bool[Array, ""] = True

    @property
    def anchor(self) -> Int[Array, " B"]:
        """The newest known token of each row."""
        last = jnp.maximum(self.lengths - 1, 0)
        return jnp.take_along_axis(self.tokens, last[:, None], axis=1)[:, 0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Observation:
    """What a forward of the target computed, and which part of it was committed.

    In prefill the nodes are the T tokens of a chunk and `path` is `0, 1, ..., T-1`; in decoding they are the draft
    tree.
    Committed token i of row b is node `path[b, i]`, at absolute position `start[b] + i`, for `i < count[b]`.

    Attributes:
        tokens: `[B, N]` int32, ids of the nodes (node 0 is the anchor when decoding).
        valid: `[B, N]` bool, nodes that were really run (padding is not).
        path: `[B, P]` int32, committed nodes from the first on; entries at or past `count` are rubbish within `0..N-1`.
        start: `[B]` int32, absolute position of the first committed node.
        count: `[B]` int32, how many nodes were committed; 0 for a finished row, whose memory must not change.
        taps: the states asked for in `Needs.taps`, each `[B, N, D]`.
        top_ids: `[B, N, k]` int32, most likely next tokens of each node, best first (k = `Needs.top_k`).
        next_tokens: `[B, P]` int32, the token that followed each committed node; for the last one of a round this is
            the new anchor. In prefill the token after the chunk's last one is the next prompt token.
    """

    tokens: Int[Array, "B N"]
    valid: Bool[Array, "B N"]
    path: Int[Array, "B P"]
    start: Int[Array, " B"]
    count: Int[Array, " B"]
    taps: tuple[Float[Array, "B N D"], ...]
    top_ids: Int[Array, "B N k"]
    next_tokens: Int[Array, "B P"]

    def committed(self, node_values: jax.Array) -> jax.Array:
        """Rows of `node_values` `[B, N, ...]` along the committed path, `[B, P, ...]`."""
        index = self.path.reshape(*self.path.shape, *([1] * (node_values.ndim - 2)))
        return jnp.take_along_axis(node_values, index, axis=1)

    def part(self, have: Needs, want: Needs) -> Observation:
        """The taps and top ids of `want`, where this observation holds those of `have`, which includes them."""
        taps = tuple(self.taps[have.taps.index(tap)] for tap in want.taps)
        return dataclasses.replace(self, taps=taps, top_ids=self.top_ids[..., : want.top_k])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Proposal:
    """A draft tree per row.

    Node 0 is the anchor. Parents come before their children, and siblings carry distinct tokens. Example: the anchor a
    with a chain b c and a second guess d for the first token is `tokens = [a, b, c, d]`, `parents = [0, 0, 1, 0]`.

    Attributes:
        tokens: `[B, N]` int32.
        parents: `[B, N]` int32, `parents[b, i] < i` for `i > 0`; `parents[b, 0] = 0`.
        valid: `[B, N]` bool. Node 0 is always valid; a node whose parent is invalid counts as invalid.
        gain: `[B, N]` float32, estimated probability that the node is accepted (not conditional on its parent), used to
            choose how many nodes are worth verifying; ignored for invalid nodes.
        source: `[B, N]` int32, index into `SOURCES`.
        log_q: `[B, N, V]` float32 or None. If given the proposal is a chain, node i was *sampled* from
            `exp(log_q[b, i])`, and acceptance is by exact rejection; otherwise by sample and match. `gain` and `valid`
            must then not depend on the tokens drawn: dropping unlikely drafts before verification would bend the law.
    """

    tokens: Int[Array, "B N"]
    parents: Int[Array, "B N"]
    valid: Bool[Array, "B N"]
    gain: Float[Array, "B N"]
    source: Int[Array, "B N"]
    log_q: Float[Array, "B N V"] | None = None

    @classmethod
    def chain(cls, anchor, drafts, valid, gain, source) -> Proposal:
        """The tree that is a chain: `drafts` `[B, K]` in order after `anchor` `[B]`.

        Args:
            anchor: `[B]` int32.
            drafts: `[B, K]` int32.
            valid: `[B, K]` bool; everything after the first invalid draft is dropped.
            gain: `[B, K]` float32.
            source: index into `SOURCES`.
        """
        B, K = drafts.shape
        tokens = jnp.concatenate([anchor[:, None], drafts], axis=1).astype(jnp.int32)
        parents = jnp.broadcast_to(jnp.maximum(jnp.arange(K + 1) - 1, 0), (B, K + 1)).astype(jnp.int32)
        valid = jnp.concatenate([jnp.ones((B, 1), bool), jnp.cumprod(valid, axis=1).astype(bool)], axis=1)
        gain = jnp.concatenate([jnp.ones((B, 1), jnp.float32), gain], axis=1)
        return cls(tokens, parents, valid, gain, jnp.full((B, K + 1), source, jnp.int32))


class Drafter:
    """Base class of all drafters: frozen dataclasses that hold options only.

    Subclasses set `max_nodes` (N of their proposals, anchor included) and implement `init`, `observe` and `propose` as
    pure functions of arrays: no Python branching on values, no host callback, bounded memory.

    A drafter is an argument of the jitted loop. One that holds options only is registered as a pytree without leaves,
    so equal options share a compilation; one with parameters is declared `class Mine(Drafter, static=False)` and
    registers itself with its parameters as leaves.
    """

    name: str = "drafter"

    def __init_subclass__(cls, static: bool = True, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        if static:
            jax.tree_util.register_pytree_node(cls, lambda drafter: ((), drafter), lambda drafter, _: drafter)

    @property
    def max_nodes(self) -> int:
        """N, nodes of a proposal, anchor included."""
        raise NotImplementedError

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node it may propose; by default that of a chain."""
        return self.max_nodes - 1

    @property
    def samples(self) -> bool:
        """Whether its proposals are drawn from a law that they report (`Proposal.log_q`)."""
        return False

    @property
    def network(self) -> Drafter | None:
        """The part of it, if any, that runs a network in each draft. It obeys `Context.run_network`, and the loop turns
        it off for as long as what it offers is not worth its measured time."""
        return None

    def fit(self, model: Decoder) -> Drafter:
        """The drafter as it is used with this target. Sessions call it; a loop of one's own must do so first.

        Drafters that were made for one target check that it is this one, and take what they use of its weights.

        Raises:
            ConfigError: the drafter does not fit the target.
        """
        self.needs(model.config.num_layers)
        return self

    def needs(self, num_layers: int) -> Needs:
        """What each forward must deliver for a target of `num_layers` layers."""
        return Needs()

    def init(self, batch: int, capacity: int, *, hidden_size: int, vocab_size: int, dtype) -> Any:
        """Memory of `batch` rows that can hold `capacity` tokens each; every leaf has the row axis first."""
        return ()

    def observe(self, memory: Any, context: Context, observation: Observation) -> Any:
        """Take in one forward. `context` is as it stands after the commit (new anchor included)."""
        return memory

    def propose(self, memory: Any, context: Context) -> Proposal:
        """Draft a tree for each row."""
        raise NotImplementedError

    @property
    def lookahead(self) -> bool:
        """Whether the loop should run the proposal once more through the target and call `extend` with the outcome."""
        return False

    def extend(self, memory: Any, context: Context, proposal: Proposal, next_ids: Int[Array, "B N"]) -> Proposal:
        """With `lookahead`: complete the proposal, knowing the target's most likely token after each of its nodes."""
        return proposal

    def rollback(self, memory: Any, lengths: Int[Array, " B"]) -> Any:
        """Forget what depends on tokens at or past `lengths[b]`. Memory that is masked by length needs nothing."""
        return memory
