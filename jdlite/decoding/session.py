"""A live batch of conversations: append, decode, fork and roll back, with everything that was computed kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jdlite.decoding import loop
from jdlite.decoding.policy import Costs, variants
from jdlite.decoding.request import make_request
from jdlite.decoding.sampling import GREEDY, Sampling
from jdlite.decoding.state import DecodeState, Progress, Request, init_state
from jdlite.decoding.stats import Stats
from jdlite.decoding.stops import Finish
from jdlite.drafters.base import Drafter
from jdlite.errors import CapacityError, ConfigError, PromptError
from jdlite.models.decoder import Decoder

TokenRows = Sequence[Sequence[int]]


@dataclasses.dataclass(frozen=True)
class Result:
    """What a decode call produced.

    Attributes:
        tokens: new tokens of each row, stop token included.
        finish_reasons: of each row: `stop_id`, `stop_sequence`, `length`, `capacity` or `error` (logits not numbers).
        stats: counters, as numpy arrays.
        texts: the new tokens as text, where a tokenizer is known.
    """

    tokens: list[list[int]]
    finish_reasons: list[str]
    stats: Stats
    texts: list[str] | None = None

    @property
    def tau(self) -> float:
        """Tokens per round, pooled over rows; the bonus token counts, tokens cut after a stop do not."""
        return float(self.stats.emitted.sum() / max(int(self.stats.rounds.sum()), 1))


@partial(jax.jit, static_argnames="chunk", donate_argnames="state")
def _append(model, drafter, state: DecodeState, tokens, counts, chunk: int) -> DecodeState:
    return loop.catch_up(model, drafter, state.append(tokens, counts), chunk=chunk)


@partial(jax.jit, static_argnames="log_rounds")
def _start(model, drafter, state: DecodeState, request: Request, budget, log_rounds: int) -> Progress:
    return loop.start(model, drafter, state, request, budget, log_rounds=log_rounds)


@partial(jax.jit, donate_argnames=("state", "progress"))
def _rounds(model, drafter, state: DecodeState, request: Request, progress: Progress, max_rounds):
    return loop.decode_rounds(model, drafter, state, request, progress, max_rounds)


@partial(jax.jit)
def _rollback(drafter, state: DecodeState, lengths) -> DecodeState:
    return state.rollback(drafter, lengths)


@jax.jit
def _take(state: DecodeState, rows) -> DecodeState:
    return state.take(rows)


class Session:
    """A batch of conversations with a live cache.

    After any sequence of calls it holds what a fresh session over the same tokens would hold, so decoding goes on as if
    the whole text had been given at once.

    Example:
        >>> session = Session(model, drafter, capacity=4096)
        >>> session.append([prompt_ids])
        >>> answer = session.decode(max_new_tokens=256, stop_ids=[[2]])
        >>> session.append([next_turn_ids])

    Args:
        model: the target.
        drafter: an option-only drafter or one with parameters.
        batch: B, rows.
        capacity: tokens that a row can hold, prompts and answers together.
        cache_dtype: of keys and values; the model's by default.
        prefill_chunk: tokens of a row per prefill forward.
        costs: what forwards cost (`decoding.costs`); the default verifies all that is drafted.

    Raises:
        CapacityError: the capacity does not fit the model or the drafter.
        ConfigError: the drafter was made for another target, the costs are of another drafter, or the prefill chunk is
            empty.
    """

    def __init__(
        self,
        model: Decoder,
        drafter: Drafter,
        *,
        batch: int = 1,
        capacity: int,
        cache_dtype=None,
        prefill_chunk: int = 128,
        costs: Costs | None = None,
    ):
        if prefill_chunk < 1:
            raise ConfigError(f"prefill_chunk must be at least 1: got {prefill_chunk}; 128 is a good size.")
        self.model, self.drafter = model, drafter.fit(model)
        self.prefill_chunk = prefill_chunk
        self.costs = Costs.free(variants(drafter.max_nodes)) if costs is None else costs
        if self.costs.counts[-1] != drafter.max_nodes:
            raise ConfigError(
                f"costs must be for a drafter of {drafter.max_nodes} nodes: got {self.costs.counts[-1]}; "
                "measure them for this drafter."
            )
        self.state = init_state(model, drafter, batch, capacity, cache_dtype)

    @property
    def batch(self) -> int:
        """B, rows."""
        return self.state.lengths.shape[0]

    @property
    def capacity(self) -> int:
        """Tokens that a row can hold."""
        return self.state.capacity

    @property
    def lengths(self) -> list[int]:
        """Known tokens of each row."""
        return np.asarray(self.state.lengths).tolist()

    @property
    def tokens(self) -> list[list[int]]:
        """Known tokens of each row, prompts and answers."""
        buffer = np.asarray(self.state.tokens)
        return [row[:n].tolist() for row, n in zip(buffer, self.lengths, strict=True)]

    def append(self, rows: TokenRows) -> None:
        """Add tokens to each row and run them through the target, except the newest.

        Args:
            rows: one list per row; an empty list leaves its row alone.

        Raises:
            PromptError: the number of rows is wrong, or an id is not in the vocabulary.
            CapacityError: a row would not fit.
        """
        if len(rows) != self.batch:
            raise PromptError(f"append takes one list per row: got {len(rows)} lists for {self.batch} rows.")
        lengths, V = self.lengths, self.model.config.vocab_size
        buffer, counts = np.zeros((self.batch, self.capacity), np.int32), np.zeros(self.batch, np.int32)
        for b, row in enumerate(rows):
            ids = _token_array(row, b)
            if ids.size and not (ids.min() >= 0 and ids.max() < V):
                wrong = int(ids[(ids < 0) | (ids >= V)][0])
                raise PromptError(f"row {b} holds token {wrong}, but ids go from 0 to {V - 1}; check the tokenizer.")
            if lengths[b] + ids.size > self.capacity:
                raise CapacityError(
                    f"row {b} would hold {lengths[b] + ids.size} tokens but the capacity is {self.capacity}; "
                    "use a larger capacity or a shorter prompt."
                )
            buffer[b, : ids.size] = ids
            counts[b] = ids.size
        self.state = _append(self.model, self.drafter, self.state, buffer, counts, self.prefill_chunk)

    def decode(self, **options) -> Result:
        """Decode every row until it stops. Options as in `stream`."""
        result: Result
        *_, result = self._run(2**31 - 1, *self._prepare(**options))  # pyright: ignore[reportAssignmentType]
        return result

    def stream(self, *, rounds_per_yield: int = 4, **options) -> Iterator[list[list[int]] | Result]:
        """Decode, and yield each row's new tokens every few rounds; the last item is the whole `Result`.

        Args:
            rounds_per_yield: rounds between two items.
            sampling: a `Sampling` for all rows, or one per row; greedy by default.
            max_new_tokens: budget of all rows, or one per row.
            stop_ids: stop ids of each row, a list per row.
            stop_sequences: stop sequences of each row, a list of token lists per row.
            seed: an integer for all rows (row b then uses stream b of it), or one per row.
            log_rounds: rounds per row to record in `Result.stats.log`.

        Raises:
            PromptError: a row is empty.
            ConfigError: an option is not usable.
        """
        if rounds_per_yield < 1:
            raise ConfigError(f"rounds_per_yield must be at least 1: got {rounds_per_yield}.")
        return self._run(rounds_per_yield, *self._prepare(**options))

    def _prepare(
        self,
        *,
        sampling: Sampling | Sequence[Sampling] = GREEDY,
        max_new_tokens: int | Sequence[int] = 256,
        stop_ids: Sequence[Sequence[int]] | None = None,
        stop_sequences: Sequence[Sequence[Sequence[int]]] | None = None,
        seed: int | Sequence[int] = 0,
        log_rounds: int = 0,
    ) -> tuple[Request, np.ndarray, int]:
        """The request, each row's budget and how many rounds to record, checked."""
        begin = self.lengths
        if 0 in begin:
            raise PromptError(f"row {begin.index(0)} is empty; append at least one token before decoding.")
        budget = np.asarray(max_new_tokens)
        if budget.shape not in ((), (self.batch,)) or not np.issubdtype(budget.dtype, np.integer):
            raise ConfigError(
                f"max_new_tokens must be one number or one per row, whole: got {max_new_tokens!r:.60} "
                f"for {self.batch} rows."
            )
        if budget.min() < 0:
            raise ConfigError(f"max_new_tokens must not be negative: got {budget.min()}.")
        if log_rounds < 0:
            raise ConfigError(f"log_rounds must not be negative: got {log_rounds}.")
        request = make_request(
            self.model,
            self.drafter,
            self.batch,
            sampling=sampling,
            stop_ids=stop_ids,
            stop_sequences=stop_sequences,
            seed=seed,
            costs=self.costs,
        )
        return request, np.broadcast_to(np.minimum(budget, 2**31 - 1).astype(np.int32), self.batch), log_rounds

    def _run(self, rounds_per_yield: int, request: Request, budget: np.ndarray, log_rounds: int):
        begin = self.lengths
        progress = _start(self.model, self.drafter, self.state, request, budget, log_rounds)
        sent = list(begin)
        while True:
            self.state, progress = _rounds(
                self.model, self.drafter, self.state, request, progress, np.int32(rounds_per_yield)
            )
            finish, now = np.asarray(progress.finish), self.lengths
            if (finish != Finish.RUNNING).all():
                break
            buffer = np.asarray(self.state.tokens)
            yield [buffer[b, sent[b] : now[b]].tolist() for b in range(self.batch)]
            sent = now
        buffer = np.asarray(self.state.tokens)
        if rounds_per_yield < 2**31 - 1:
            yield [buffer[b, sent[b] : now[b]].tolist() for b in range(self.batch)]
        yield Result(
            tokens=[buffer[b, begin[b] : now[b]].tolist() for b in range(self.batch)],
            finish_reasons=[Finish(int(code)).name.lower() for code in finish],
            stats=jax.tree.map(np.asarray, progress.stats),
        )

    def fork(self, rows: Sequence[int] | None = None) -> Session:
        """An independent copy, of all rows or of the given ones (which may repeat)."""
        chosen = list(range(self.batch)) if rows is None else list(rows)
        if not chosen or not all(0 <= r < self.batch for r in chosen):
            raise ConfigError(f"fork takes row numbers from 0 to {self.batch - 1}: got {chosen}.")
        twin = object.__new__(Session)
        twin.__dict__.update(self.__dict__)
        twin.state = _take(self.state, jnp.asarray(chosen, jnp.int32))
        return twin

    def rollback(self, lengths: Sequence[int]) -> None:
        """Forget the tokens of each row from `lengths[b]` on.

        Raises:
            ConfigError: a length is negative or longer than its row.
        """
        now = self.lengths
        if len(lengths) != self.batch or any(not 0 <= want <= have for want, have in zip(lengths, now, strict=True)):
            raise ConfigError(f"rollback takes one length per row, at most {now}: got {list(lengths)}.")
        self.state = _rollback(self.drafter, self.state, jnp.asarray(lengths, jnp.int32))


def _token_array(row: Sequence[int], b: int) -> np.ndarray:
    """A row of token ids as a flat array of integers.

    Raises:
        PromptError: it is something else.
    """
    try:
        ids = np.asarray(row)
    except ValueError:  # lists of unequal length
        ids = np.asarray(None)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise PromptError(f"row {b} must be a flat list of integer token ids: got {row!r:.80}.")
    return ids
