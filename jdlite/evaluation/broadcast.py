"""Several drafters on one target: one prefill that all of them observe, and decoding from the same history."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdlite.decoding.policy import Costs, Earnings, Reliability, variants
from jdlite.decoding.session import Session, _rounds, _start
from jdlite.decoding.state import DecodeState, Request, context
from jdlite.decoding.stats import Stats
from jdlite.decoding.stops import Finish
from jdlite.drafters.base import Context, Drafter, Needs, Observation
from jdlite.errors import ConfigError
from jdlite.models.decoder import Decoder


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Broadcast(Drafter, static=False):
    """Observes for several drafters at once and drafts for none: its memory is the tuple of their memories.

    Attributes:
        drafters: who listens.
        num_layers: L of the target, static.
    """

    drafters: tuple[Drafter, ...]
    num_layers: int = dataclasses.field(metadata={"static": True})

    name = "broadcast"

    @property
    def max_nodes(self) -> int:
        return 1

    @property
    def max_depth(self) -> int:
        return max(drafter.max_depth for drafter in self.drafters)

    def needs(self, num_layers: int) -> Needs:
        return Needs.union([drafter.needs(num_layers) for drafter in self.drafters])

    def init(self, batch: int, capacity: int, **options) -> tuple:
        return tuple(drafter.init(batch, capacity, **options) for drafter in self.drafters)

    def observe(self, memory: tuple, context: Context, observation: Observation) -> tuple:
        """Each drafter sees the taps that it asked for, and as many of the most likely ids."""
        have = self.needs(self.num_layers)
        return tuple(
            drafter.observe(own, context, observation.part(have, drafter.needs(self.num_layers)))
            for drafter, own in zip(self.drafters, memory, strict=True)
        )

    def rollback(self, memory: tuple, lengths) -> tuple:
        return tuple(d.rollback(own, lengths) for d, own in zip(self.drafters, memory, strict=True))


@jax.jit
def _rollback(drafter, memory, lengths):
    return drafter.rollback(memory, lengths)


@dataclasses.dataclass(frozen=True)
class Run:
    """One timed decode.

    Attributes:
        tokens: new tokens of each row.
        finish: finish reason of each row.
        seconds: of the rounds, until their results were there; prefill and compilation are not in it.
        stats: counters, as numpy arrays.
    """

    tokens: list[list[int]]
    finish: list[str]
    seconds: float
    stats: Stats


class SharedSession:
    """One history and cache, several drafters.

    A decode borrows the cache, and what it wrote past the history is forgotten afterwards, which is only a length. The
    drafter's memory is copied before, so that repeated decodes start alike; with `keep=True` what it learned (all that
    its rollback leaves) goes on to the next turn, as it would in a `Session`.

    Args:
        model: the target.
        drafters: by name.
        costs: the cost table of each.
        batch: B.
        capacity: S.
        cache_dtype: of keys and values.
        prefill_chunk: tokens of a row per prefill forward.
    """

    def __init__(
        self,
        model: Decoder,
        drafters: Mapping[str, Drafter],
        costs: Mapping[str, Costs],
        *,
        batch: int = 1,
        capacity: int,
        cache_dtype=None,
        prefill_chunk: int = 128,
    ):
        self.model, self.costs = model, dict(costs)
        self.drafters = {name: drafter.fit(model) for name, drafter in drafters.items()}
        for name, drafter in self.drafters.items():
            counts = variants(drafter.max_nodes)
            if self.costs[name].counts != counts:
                raise ConfigError(f"the costs of {name} must be for {counts} nodes: got {self.costs[name].counts}.")
        self._session = Session(
            model,
            Broadcast(tuple(self.drafters.values()), model.config.num_layers),
            batch=batch,
            capacity=capacity,
            cache_dtype=cache_dtype,
            prefill_chunk=prefill_chunk,
        )
        self._learned = {name: (Reliability.zeros(batch), Earnings.zeros(batch)) for name in self.drafters}

    @property
    def lengths(self) -> list[int]:
        """Known tokens of each row."""
        return self._session.lengths

    def append(self, rows: Sequence[Sequence[int]]) -> None:
        """Add tokens to each row and run them through the target once, for all drafters."""
        self._session.append(rows)

    def block(self) -> None:
        """Wait until everything that was appended has been computed."""
        jax.block_until_ready(self._session.state)

    def lend(self, name: str) -> DecodeState:
        """The state of one drafter: the shared cache itself, and copies of everything small."""
        shared = self._session.state
        copy = lambda tree: jax.tree.map(jnp.copy, tree)  # noqa: E731
        reliability, earnings = copy(self._learned[name])
        return DecodeState(
            cache=dataclasses.replace(shared.cache, lengths=jnp.copy(shared.cache.lengths)),
            tokens=shared.tokens,
            lengths=jnp.copy(shared.lengths),
            memory=copy(shared.memory[list(self.drafters).index(name)]),
            reliability=reliability,
            earnings=earnings,
        )

    def take_back(self, name: str, state: DecodeState, *, keep: bool) -> None:
        """Put a lent cache back, without what was decoded on it."""
        shared = self._session.state
        memory = shared.memory
        if keep:
            at = list(self.drafters).index(name)
            own = _rollback(self.drafters[name], state.memory, shared.lengths)
            memory = (*memory[:at], own, *memory[at + 1 :])
            self._learned[name] = (state.reliability, state.earnings)
        cache = dataclasses.replace(state.cache, lengths=shared.cache.lengths)
        self._session.state = dataclasses.replace(shared, cache=cache, tokens=state.tokens, memory=memory)

    def decode(
        self, name: str, request: Request, budget: Sequence[int], *, keep: bool = False, max_rounds: int = 2**31 - 1
    ) -> Run:
        """Decode from the present history with one drafter, and forget the outcome.

        Args:
            name: of the drafter.
            request: how to decode; its costs are replaced by the drafter's.
            budget: new tokens of each row, at most.
            keep: keep what the drafter learned for the next turn.
            max_rounds: stop earlier (for warming up).
        """
        drafter, begin = self.drafters[name], self.lengths
        request = dataclasses.replace(request, costs=self.costs[name])
        state: Any = self.lend(name)
        progress = _start(self.model, drafter, state, request, np.asarray(budget, np.int32), 0)
        jax.block_until_ready((state, progress))
        started = time.perf_counter()
        state, progress = _rounds(self.model, drafter, state, request, progress, np.int32(max_rounds))
        jax.block_until_ready((state, progress))
        seconds = time.perf_counter() - started
        buffer, now = np.asarray(state.tokens), np.asarray(state.lengths)
        finish = [Finish(int(code)).name.lower() for code in np.asarray(progress.finish)]
        stats = jax.tree.map(np.asarray, progress.stats)
        tokens = [buffer[b, begin[b] : now[b]].tolist() for b in range(len(begin))]
        self.take_back(name, state, keep=keep)
        return Run(tokens, finish, seconds, stats)

    def context(self, request: Request) -> Context:
        """What drafters are shown at the present history."""
        state = self._session.state
        return context(self.model, state, state.lengths, request, state.lengths)

    @property
    def cache(self):
        """The shared key/value cache, to read."""
        return self._session.state.cache
