"""State of decoding: what is kept for as long as a conversation lives, and what belongs to one decode call."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jdlite.decoding.penalties import History
from jdlite.decoding.policy import Costs, Earnings, Reliability
from jdlite.decoding.sampling import SamplingArrays
from jdlite.decoding.stats import Stats
from jdlite.decoding.stops import Stops
from jdlite.drafters.base import Context, Drafter
from jdlite.errors import CapacityError
from jdlite.models.cache import KVCache, write_rows
from jdlite.models.decoder import Decoder


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """All that a batch of conversations carries between calls.

    The newest known token of a row, its anchor, has not been through the target yet, so between calls
    `cache.lengths == lengths - 1` (both 0 for an empty row).

    Attributes:
        cache: keys and values of the tokens that went through the target.
        tokens: known tokens, `[B, S]` int32; slots at or past `lengths` hold rubbish.
        lengths: `[B]` int32, known tokens, anchor included.
        memory: what the drafter keeps.
        reliability: how often each kind of draft was accepted so far.
        earnings: what the drafter's network brought in so far.
    """

    cache: KVCache
    tokens: Int[Array, "B S"]
    lengths: Int[Array, " B"]
    memory: Any
    reliability: Reliability
    earnings: Earnings

    @property
    def capacity(self) -> int:
        """S, tokens that a row can hold."""
        return self.tokens.shape[1]

    def append(self, tokens: Int[Array, "B T"], counts: Int[Array, " B"]) -> DecodeState:
        """Make the first `counts[b]` of `tokens` known; `loop.catch_up` then runs them. `T` must not exceed S."""
        tokens = write_rows(self.tokens, tokens, self.lengths, counts, row=0, slot=1)
        return dataclasses.replace(self, tokens=tokens, lengths=self.lengths + counts)

    def rollback(self, drafter: Drafter, lengths: Int[Array, " B"]) -> DecodeState:
        """Forget all tokens from `lengths[b]` on; a length past the row's own is ignored."""
        lengths = jnp.minimum(self.lengths, lengths)
        cache = self.cache.rollback(jnp.maximum(lengths - 1, 0))
        memory = drafter.rollback(self.memory, lengths)
        return dataclasses.replace(self, cache=cache, lengths=lengths, memory=memory)

    def take(self, rows: Int[Array, " R"]) -> DecodeState:
        """A copy with the given rows, in that order; rows may repeat (forks)."""
        cache = KVCache(self.cache.k[:, rows], self.cache.v[:, rows], self.cache.lengths[rows])
        others = (self.tokens, self.lengths, self.memory, self.reliability, self.earnings)
        return DecodeState(cache, *jax.tree.map(lambda x: x[rows], others))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Request:
    """How a batch is to be decoded.

    Attributes:
        sampling: distribution of each row.
        stops: stop ids and sequences of each row.
        keys: `[B]` typed PRNG keys; noise is keyed by (key, absolute position) and by nothing else.
        costs: what a forward of each compiled number of nodes costs; `Costs.free` verifies all that is drafted.
    """

    sampling: SamplingArrays
    stops: Stops
    keys: Any
    costs: Costs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Progress:
    """Where one decode call stands.

    Attributes:
        finish: `[B]` int32, `stops.Finish` codes; `RUNNING` while the row goes on.
        budget: `[B]` int32, new tokens that the row may still emit.
        prompt_lengths: `[B]` int32, known tokens when the call started.
        history: what penalties look at, or None when no row uses them.
        stats: counters.
    """

    finish: Int[Array, " B"]
    budget: Int[Array, " B"]
    prompt_lengths: Int[Array, " B"]
    history: History | None
    stats: Stats


def context(
    model: Decoder,
    state: DecodeState,
    lengths: Int[Array, " B"],
    request: Request | None,
    prompt_lengths: Int[Array, " B"],
    run_network: bool | Bool[Array, ""] = True,
) -> Context:
    """What the drafter is shown. In prefill there is no request and nothing to sample."""
    B = lengths.shape[0]
    keys = jax.vmap(jax.random.key)(jnp.zeros(B, jnp.uint32)) if request is None else request.keys
    temperature = jnp.zeros(B, jnp.float32) if request is None else request.sampling.temperature
    embedding = model.embed.weight[...]
    return Context(state.tokens, lengths, prompt_lengths, keys, temperature, embedding, jnp.asarray(run_network))


def init_state(model: Decoder, drafter: Drafter, batch: int, capacity: int, cache_dtype=None) -> DecodeState:
    """An empty state.

    Args:
        model: the target.
        drafter: whose memory to make.
        batch: B.
        capacity: S, tokens that a row can hold, prompt and answer together.
        cache_dtype: of keys and values; the model's by default.

    Raises:
        CapacityError: the capacity is longer than the model's context, or shorter than one draft of this drafter.
    """
    c = model.config
    if capacity > c.max_position:
        raise CapacityError(
            f"capacity must not exceed the model's context of {c.max_position} tokens: got {capacity}; "
            "use a shorter capacity or a model with a longer context."
        )
    if capacity < drafter.max_depth + 1:
        raise CapacityError(
            f"capacity must hold one draft of {drafter.max_depth + 1} tokens: got {capacity}; use a larger capacity."
        )
    return DecodeState(
        cache=model.init_cache(batch, capacity, cache_dtype),
        tokens=jnp.zeros((batch, capacity), jnp.int32),
        lengths=jnp.zeros(batch, jnp.int32),
        memory=drafter.init(batch, capacity, hidden_size=c.hidden_size, vocab_size=c.vocab_size, dtype=model.dtype),
        reliability=Reliability.zeros(batch),
        earnings=Earnings.zeros(batch),
    )
