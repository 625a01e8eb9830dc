"""AdaPLD: copy after the best earlier occurrence of the newest token, branch into what the target nearly said there,
and where the token never occurred, fall back on the occurrence of a similar one.

"AdaPLD" (arXiv 2606.05742 v1), section 3 and Algorithm 1. The project that this drafter was first written for described
some steps differently; those variants are options and are marked "variant" below.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jdlite.drafters.base import (
    BRANCH,
    LEXICAL,
    SEMANTIC,
    SUCCESSOR,
    Context,
    Drafter,
    Needs,
    Observation,
    Proposal,
)
from jdlite.drafters.distinct import DistinctTokens
from jdlite.drafters.retrieval import (
    chain_gain,
    copy_span,
    keep_distinct,
    normalise,
    record,
    require_positive,
    rerank,
    rerank_tap,
    rows_at,
    suffix_length_at,
    suffix_lengths,
)
from jdlite.errors import ConfigError
from jdlite.models.layers import k_largest

# Tokens whose embeddings are gathered at once in the semantic search; bounds the [tokens, D] array.
_SWEEP = 512
# Prior probability that the r-th best next token of a similar place is right when the copied one is not, and how likely
# a successor is to follow its branch: read off the paper's step breakdown (13B, code), smoothed.
_BRANCH_PRIOR = (0.30, 0.15, 0.09, 0.06, 0.05, 0.04, 0.03, 0.025)
_SUCCESSOR_PRIOR = 0.25


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdaPLDMemory:
    """What is kept of each token that was run; slots from the anchor's on are rubbish.

    Attributes:
        states: `[B, S, D]`, unit states of the rerank layer.
        top_ids: `[B, S, K]` int32, the target's most likely next tokens, best first. They come from an older prefix
            than the one they are offered for: guesses, never probabilities.
        forward: `[B, S]` int32, index of the forward that committed the token; `[B, 0]` unless `window` is set.
        forwards: `[B]` int32, forwards seen.
        distinct: the row's distinct tokens, or None where no embeddings are compared.
    """

    states: Float[Array, "B S D"]
    top_ids: Int[Array, "B S K"]
    forward: Int[Array, "B W"]
    forwards: Int[Array, " B"]
    distinct: DistinctTokens | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaPLD(Drafter):
    """Drafts a tree of at most 1 + L + K nodes (39 by default), all of it from text and states that exist already.

    1. *Lexical*: positions that hold the anchor's token. 2. *Semantic*, where there is none: positions whose token has
    an input embedding of cosine `threshold` or more with the anchor's. 3. The best candidate j is the one whose state
    before it has the highest cosine with the state before the anchor (ties: the earliest). 4. Tree: on a lexical hit
    the L tokens after j as a chain; K branches, the target's most likely tokens after j; on a semantic hit one
    successor per branch, found by the same retrieval with the branch's token. A row without any hit drafts nothing.

    The first token of a row has no state before it and is never a candidate.

    Attributes:
        copy_length: L, most tokens copied on a lexical hit.
        num_branches: K, branches at the anchor; also how many next tokens are stored per position.
        threshold: least cosine of a semantic hit.
        successors: "semantic" gives successors to the branches of semantic hits only (Algorithm 1, and what the paper's
            profile shows), "always" to those of lexical hits too (the paper's section 3.5), "never" to none.
        rerank_layer: tap whose states are compared; None takes `default_rerank_layer` of the target's depth.
        state_dtype: dtype of the stored states; None stores them in the target's compute dtype.
        context: variant: how many tokens up to and including the anchor's must match on a lexical hit (1: the paper).
        semantic: "embedding" is the paper's signal; variant "hidden" compares the states before, with no embedding.
        window: variant: semantic hits only among tokens committed by the last `window` forwards; None searches all.
        top_delta: variant: keep that many positions with the highest semantic similarity, and those that tie with the
            last of them (equal tokens do); None keeps all.
        successor_source: "retrieval" as in the paper; variant "forward" takes each branch's successor from one extra
            pass of the target over all branches, which counts as a forward.
    """

    copy_length: int = 30
    num_branches: int = 8
    threshold: float = 0.1
    successors: Literal["semantic", "always", "never"] = "semantic"
    rerank_layer: int | None = None
    state_dtype: str | None = None
    context: int = 1
    semantic: Literal["embedding", "hidden"] = "embedding"
    window: int | None = None
    top_delta: int | None = None
    successor_source: Literal["retrieval", "forward"] = "retrieval"

    name = "adapld"

    def __post_init__(self):
        require_positive(
            "AdaPLD",
            copy_length=self.copy_length,
            num_branches=self.num_branches,
            context=self.context,
            window=1 if self.window is None else self.window,
            top_delta=1 if self.top_delta is None else self.top_delta,
        )
        if not -1 <= self.threshold <= 1:
            raise ConfigError(f"AdaPLD needs a threshold from -1 to 1, got {self.threshold}; it is a cosine.")
        choices = {
            "successors": ("semantic", "always", "never"),
            "semantic": ("embedding", "hidden"),
            "successor_source": ("retrieval", "forward"),
        }
        for option, allowed in choices.items():
            if getattr(self, option) not in allowed:
                raise ConfigError(
                    f"AdaPLD needs {option} to be one of {', '.join(allowed)}, got {getattr(self, option)!r}."
                )

    @property
    def _tail(self) -> int:
        """Slots after the branches: the chain, and the successors where the chain leaves them free."""
        if self.successors == "always":
            return self.copy_length + self.num_branches
        return self.copy_length if self.successors == "never" else max(self.copy_length, self.num_branches)

    @property
    def max_nodes(self) -> int:
        return 1 + self.num_branches + self._tail

    @property
    def max_depth(self) -> int:
        return max(self.copy_length, 1 if self.successors == "never" else 2)

    @property
    def lookahead(self) -> bool:
        return self.successor_source == "forward" and self.successors != "never"

    def needs(self, num_layers: int) -> Needs:
        """One tap and the K best next tokens.

        Raises:
            ConfigError: `rerank_layer` is not a layer of the target.
        """
        return Needs(taps=(rerank_tap("AdaPLD", self.rerank_layer, num_layers),), top_k=self.num_branches)

    def init(self, batch: int, capacity: int, *, hidden_size: int, vocab_size: int, dtype: Any) -> AdaPLDMemory:
        if self.num_branches > vocab_size:
            raise ConfigError(
                f"AdaPLD needs num_branches of at most the vocabulary of {vocab_size}, got {self.num_branches}."
            )
        return AdaPLDMemory(
            states=jnp.zeros((batch, capacity, hidden_size), self.state_dtype or dtype),
            top_ids=jnp.zeros((batch, capacity, self.num_branches), jnp.int32),
            forward=jnp.zeros((batch, capacity if self.window else 0), jnp.int32),
            forwards=jnp.zeros(batch, jnp.int32),
            distinct=DistinctTokens.empty(batch, capacity, vocab_size) if self.semantic == "embedding" else None,
        )

    def observe(self, memory: AdaPLDMemory, context: Context, observation: Observation) -> AdaPLDMemory:
        forward = memory.forward
        if self.window:
            now = jnp.broadcast_to(memory.forwards[:, None], observation.tokens.shape)
            forward = record(forward, now, observation)
        distinct = memory.distinct
        if distinct is not None:
            tokens = observation.committed(observation.tokens)
            distinct = distinct.add(tokens, observation.start, observation.count)
        return AdaPLDMemory(
            states=record(memory.states, normalise(observation.taps[0]), observation),
            top_ids=record(memory.top_ids, observation.top_ids, observation),
            forward=forward,
            forwards=memory.forwards + (observation.count > 0),
            distinct=distinct,
        )

    def rollback(self, memory: AdaPLDMemory, lengths: Int[Array, " B"]) -> AdaPLDMemory:
        if memory.distinct is None:
            return memory
        # The token at `lengths - 1` becomes the anchor, which has not been run.
        return dataclasses.replace(memory, distinct=memory.distinct.rollback(lengths - 1))

    def propose(self, memory: AdaPLDMemory, context: Context) -> Proposal:
        tokens, lengths = context.tokens, context.lengths
        query = rows_at(memory.states, lengths[:, None] - 2)
        lexical = suffix_lengths(tokens, lengths, self.context) == self.context
        lexical = lexical & (jnp.arange(tokens.shape[1]) > 0)
        strict = lexical.any(axis=1)
        missed = ~strict & (lengths > 1)
        nothing = jnp.zeros_like(lexical)[:, None]
        search = lambda: self._similar(memory, context, context.anchor[:, None], query, missed[:, None])  # noqa: E731
        similar = jax.lax.cond(missed.any(), search, lambda: nothing)
        slot, hit, _ = rerank(memory.states, jnp.where(strict[:, None, None], lexical[:, None], similar), query)
        slot, hit = slot[:, 0], hit[:, 0]
        strict = strict & hit

        drafts, copied = copy_span(tokens, lengths, jnp.where(strict, slot + 1, -1), self.copy_length)
        branches = rows_at(memory.top_ids, slot[:, None])[:, 0]
        # The chain's first token comes first here, so a branch that repeats it is dropped.
        firsts = jnp.concatenate([drafts[:, :1], branches], axis=1)
        offered = jnp.concatenate([copied[:, :1], jnp.broadcast_to(hit[:, None], branches.shape)], axis=1)
        branched = keep_distinct(firsts, offered)[:, 1:]

        chain = jnp.where(copied, chain_gain(suffix_length_at(tokens, lengths, slot), self.copy_length), 0.0)
        prior = jnp.asarray(_BRANCH_PRIOR + (_BRANCH_PRIOR[-1],) * max(0, self.num_branches - len(_BRANCH_PRIOR)))
        branch = (1 - chain[:, :1]) * prior[: self.num_branches]

        want = branched & (hit & (~strict if self.successors == "semantic" else True))[:, None]
        if self.successors == "never" or self.lookahead:
            followers, followed = jnp.zeros_like(branches), jnp.zeros_like(want)
        else:
            none = (jnp.zeros_like(branches), jnp.zeros_like(want))
            search = lambda: self._successors(memory, context, branches, slot, want)  # noqa: E731
            followers, followed = jax.lax.cond(want.any(), search, lambda: none)
        return self._tree(context, strict, drafts, copied, chain, branches, branched, branch, followers, followed)

    def extend(self, memory: AdaPLDMemory, context: Context, proposal: Proposal, next_ids) -> Proposal:
        """Variant `successor_source="forward"`: the target's own next token `next_ids[b, i]` follows branch i."""
        K = self.num_branches
        strict = proposal.valid[:, 1 + K] & (proposal.source[:, 1 + K] == LEXICAL)
        branches, branched = proposal.tokens[:, 1 : 1 + K], proposal.valid[:, 1 : 1 + K]
        followed = branched if self.successors == "always" else branched & ~strict[:, None]
        chain = slice(1 + K, 1 + K + self.copy_length)
        return self._tree(
            context,
            strict,
            proposal.tokens[:, chain],
            proposal.valid[:, chain],
            proposal.gain[:, chain],
            branches,
            branched,
            proposal.gain[:, 1 : 1 + K],
            next_ids[:, 1 : 1 + K],
            followed,
        )

    def _similar(
        self,
        memory: AdaPLDMemory,
        context: Context,
        query_tokens: Int[Array, "B Q"],
        query_states: Float[Array, "B Q D"],
        wanted: Bool[Array, "B Q"],
    ) -> Bool[Array, "B Q S"]:
        """Semantic candidates of each query token: known positions before the anchor that are similar enough."""
        S = context.tokens.shape[1]
        if memory.distinct is not None:
            similarity = _embedding_cosines(context, memory.distinct, query_tokens)
        else:
            queries = query_states.astype(memory.states.dtype)
            before = jnp.einsum("bsd,bqd->bqs", memory.states, queries, preferred_element_type=jnp.float32)
            similarity = jnp.pad(before, ((0, 0), (0, 0), (1, 0)))[:, :, :S]
        slots = jnp.arange(S)
        allowed = (slots > 0) & (slots < context.lengths[:, None] - 1)
        if self.window:
            allowed = allowed & (memory.forward >= memory.forwards[:, None] - self.window)
        found = allowed[:, None] & (similarity >= self.threshold) & wanted[:, :, None]
        if self.top_delta is not None:
            least = k_largest(jnp.where(found, similarity, -jnp.inf), min(self.top_delta, S))[..., -1:]
            found = found & (similarity >= least)
        return found

    def _successors(self, memory, context: Context, branches, slot, wanted):
        """One token to follow each branch: retrieval with the branch's token as the query, `[B, K]` each."""
        tokens, lengths = context.tokens, context.lengths
        slots = jnp.arange(tokens.shape[1])
        usable = (slots > 0) & (slots < lengths[:, None] - 1)
        lexical = (tokens[:, None] == branches[:, :, None]) & usable[:, None] & wanted[:, :, None]
        missed = wanted & ~lexical.any(axis=2)
        query = jnp.broadcast_to(rows_at(memory.states, slot[:, None]), (*branches.shape, memory.states.shape[-1]))
        search = lambda: lexical | self._similar(memory, context, branches, query, missed)  # noqa: E731
        candidates = jax.lax.cond(missed.any(), search, lambda: lexical)
        place, found, _ = rerank(memory.states, candidates, query)
        follow = jnp.clip(place + 1, 0, tokens.shape[1] - 1)
        return jnp.take_along_axis(tokens, follow, axis=1), found

    def _tree(
        self, context, strict, drafts, copied, chain, branches, branched, branch, followers, followed
    ) -> Proposal:
        """Slots: anchor, K branches, then the chain and (in its place on semantic hits, or after it) the successors."""
        B, K, L, tail = branches.shape[0], self.num_branches, self.copy_length, self._tail
        fit = lambda x, shift: jnp.pad(x, ((0, 0), (shift, tail - shift - x.shape[1])))  # noqa: E731
        tokens, valid, gain = fit(drafts, 0), fit(copied, 0), fit(chain, 0)
        parents = jnp.broadcast_to(jnp.where(jnp.arange(tail) == 0, 0, K + jnp.arange(tail)), (B, tail))
        source = jnp.full((B, tail), LEXICAL)
        if self.successors != "never":
            shift = L if self.successors == "always" else 0
            # A successor is there only where no chain is, or in slots of its own.
            after = fit(followed if shift else followed & ~strict[:, None], shift)
            place = fit(jnp.broadcast_to(1 + jnp.arange(K), (B, K)), shift)
            tokens = jnp.where(after, fit(followers, shift), tokens)
            parents = jnp.where(after, place, parents)
            gain = jnp.where(after, fit(branch * _SUCCESSOR_PRIOR, shift), gain)
            source = jnp.where(after, SUCCESSOR, source)
            valid = valid | after
        # An unused slot hangs under the anchor, so that parents always come first.
        parents = jnp.where(valid, parents, 0)
        kind = jnp.broadcast_to(jnp.where(strict, BRANCH, SEMANTIC)[:, None], (B, K))
        join = lambda *parts: jnp.concatenate(parts, axis=1)  # noqa: E731
        one = jnp.ones((B, 1))
        return Proposal(
            tokens=join(context.anchor[:, None], branches, tokens).astype(jnp.int32),
            parents=join(jnp.zeros((B, 1 + K), jnp.int32), parents).astype(jnp.int32),
            valid=join(one.astype(bool), branched, valid),
            gain=join(one, branch, gain).astype(jnp.float32),
            source=join(jnp.full((B, 1), LEXICAL), kind, source).astype(jnp.int32),
        )


def _embedding_cosines(
    context: Context, distinct: DistinctTokens, query_tokens: Int[Array, "B Q"]
) -> Float[Array, "B Q S"]:
    """Cosine of the input embeddings of each query token and each known token before the anchor.

    Only distinct tokens are compared, in blocks: a long text repeats few of them.
    """
    B, Q = query_tokens.shape
    S = context.tokens.shape[1]
    block = min(_SWEEP, S)
    queries = normalise(jnp.take(context.embedding, query_tokens, axis=0, mode="clip"))

    def sweep(i, cosines):
        # The last block is shifted left to end at S; members done twice get the same value.
        first = jnp.minimum(i * block, S - block)
        ids = jax.lax.dynamic_slice_in_dim(distinct.ids, first, block, axis=1)
        embedded = jnp.take(context.embedding, ids, axis=0, mode="clip").astype(jnp.float32)
        norms = jnp.sqrt(jnp.maximum(jnp.square(embedded).sum(axis=-1), 1e-24))
        dots = jnp.einsum("bsd,bqd->bqs", embedded, queries, precision="highest")
        return jax.lax.dynamic_update_slice_in_dim(cosines, dots / norms[:, None], first, axis=2)

    blocks = (jnp.max(distinct.count) + block - 1) // block
    cosines = jax.lax.fori_loop(0, blocks, sweep, jnp.full((B, Q, S), -jnp.inf, jnp.float32))
    return distinct.spread(cosines, context.tokens)
