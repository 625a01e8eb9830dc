"""Decoding many prompts in a batch whose rows are refilled: as soon as one answer ends, the next prompt takes its row.

The rounds are those of `jdlite.decode` with the plain drafter. A row's answer depends on its prompt and seed alone, not
on the rows beside it nor on when it got its place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdlite.api import bucket
from jdlite.decoding import loop
from jdlite.decoding.policy import variants
from jdlite.decoding.request import make_request, row_keys
from jdlite.decoding.sampling import Sampling
from jdlite.decoding.state import DecodeState, Progress, Request, init_state
from jdlite.decoding.stats import Stats
from jdlite.decoding.stops import Finish
from jdlite.drafters.plain import Plain
from jdlite.errors import CapacityError, ConfigError
from jdlite.models.decoder import Decoder

# Rounds between two looks at the queue where no row ends; a look costs little, and Ctrl-C waits for it.
_MAX_ROUNDS = 32
_PLAIN = Plain()


@dataclasses.dataclass(frozen=True)
class Job:
    """A prompt to answer.

    Attributes:
        tokens: of the prompt, at least one.
        seed: of its noise.
        name: for the caller.
    """

    tokens: Sequence[int]
    seed: int
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a job gave.

    Attributes:
        job: the job.
        tokens: new tokens, the stop token included.
        finish: `stop_id`, `length`, `capacity` or `error` (logits that are not numbers).
    """

    job: Job
    tokens: list[int]
    finish: str


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Batch:
    """What is live on the device."""

    state: DecodeState
    request: Request
    progress: Progress


@partial(jax.jit, static_argnames="chunk", donate_argnames="spare")
def _prefill(model: Decoder, spare: DecodeState, tokens: jax.Array, count: jax.Array, chunk: int) -> DecodeState:
    """Fill a state of one row with a prompt, forgetting what it held."""
    empty = spare.rollback(_PLAIN, jnp.zeros(1, jnp.int32))
    return loop.catch_up(model, _PLAIN, empty.append(tokens, count), chunk=chunk)


@partial(jax.jit, donate_argnames="batch")
def _place(batch: _Batch, spare: DecodeState, row: jax.Array, key: jax.Array, budget: jax.Array) -> _Batch:
    """Put a filled row into the batch and set it running."""
    state, progress = batch.state, batch.progress
    put = lambda whole, one: whole.at[row].set(one[0])  # noqa: E731

    def put_cache(whole: jax.Array, one: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(whole, one, (0, row, 0, 0, 0))

    cache = dataclasses.replace(
        state.cache,
        k=put_cache(state.cache.k, spare.cache.k),
        v=put_cache(state.cache.v, spare.cache.v),
        lengths=put(state.cache.lengths, spare.cache.lengths),
    )
    return _Batch(
        state=DecodeState(
            cache=cache,
            tokens=put(state.tokens, spare.tokens),
            lengths=put(state.lengths, spare.lengths),
            memory=state.memory,
            reliability=jax.tree.map(put, state.reliability, spare.reliability),
            earnings=jax.tree.map(put, state.earnings, spare.earnings),
        ),
        request=dataclasses.replace(batch.request, keys=put(batch.request.keys, key[None])),
        progress=dataclasses.replace(
            progress,
            finish=progress.finish.at[row].set(int(Finish.RUNNING)),
            budget=progress.budget.at[row].set(budget),
            prompt_lengths=put(progress.prompt_lengths, spare.lengths),
        ),
    )


@partial(jax.jit, donate_argnames="batch")
def _advance(model: Decoder, batch: _Batch) -> _Batch:
    """Run rounds until a row ends."""
    at_work = lambda progress: jnp.sum(progress.finish == Finish.RUNNING)  # noqa: E731
    before = at_work(batch.progress)

    def going(carry):
        done, _, progress = carry
        return (done < _MAX_ROUNDS) & (at_work(progress) == before)

    def step(carry):
        done, state, progress = carry
        state, progress = loop.decode_round(model, _PLAIN, state, batch.request, progress)
        return done + 1, state, progress

    _, state, progress = jax.lax.while_loop(going, step, (jnp.zeros((), jnp.int32), batch.state, batch.progress))
    return _Batch(state, batch.request, progress)


def decode_jobs(
    model: Decoder,
    jobs: Sequence[Job],
    *,
    sampling: Sampling,
    stop_ids: Sequence[int],
    max_new_tokens: int,
    batch_size: int,
    capacity: int | None = None,
    prefill_chunk: int = 64,
) -> Iterator[Answer]:
    """Answer all jobs, in the order in which the answers end.

    Jobs are started in the given order. Jobs of like length side by side cost least, since a round costs what its
    longest row does.

    Args:
        model: the target.
        jobs: prompts that leave room for at least one token.
        sampling: of all jobs.
        stop_ids: tokens that end an answer.
        max_new_tokens: longest answer.
        batch_size: B. Part of the compiled program, so another one may round logits differently.
        capacity: tokens that a row can hold; by default what the longest job needs, rounded up.
        prefill_chunk: prompt tokens per forward.

    Raises:
        CapacityError: a prompt does not fit the model's context.
        ConfigError: the sampling has penalties, which would need each row's history.
    """
    if not jobs:
        return
    if (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1, 0, 0):
        raise ConfigError("training answers cannot be sampled with penalties; set them to 1, 0 and 0.")
    longest = max(len(job.tokens) for job in jobs)
    limit = model.config.max_position
    if longest >= (capacity or limit):
        raise CapacityError(
            f"a prompt has {longest} tokens but a row holds {capacity or limit}; leave out prompts that are so long."
        )
    capacity = capacity or bucket(longest + max_new_tokens, limit)
    batch = _empty_batch(model, sampling, stop_ids, batch_size, capacity)
    spare = init_state(model, _PLAIN, 1, capacity)
    rows: list[Job | None] = [None] * batch_size
    queue = iter(jobs)
    waiting = True
    buffer = np.zeros((1, capacity), np.int32)
    while True:
        for row, holder in enumerate(rows):
            job = next(queue, None) if holder is None and waiting else None
            if holder is None and job is None:
                waiting = False
            elif job is not None:
                rows[row] = job
                count = len(job.tokens)
                buffer[0, :count] = job.tokens
                # The buffer is written again while the device may still read it, hence the copy.
                spare = _prefill(model, spare, buffer.copy(), np.full(1, count, np.int32), prefill_chunk)
                batch = _place(batch, spare, np.int32(row), row_keys([job.seed], 1)[0], np.int32(max_new_tokens))
        if not any(rows):
            return
        batch = _advance(model, batch)
        yield from _collect(batch, rows)


def _empty_batch(model: Decoder, sampling: Sampling, stop_ids: Sequence[int], batch_size: int, capacity: int) -> _Batch:
    """A batch of which no row is running."""
    B, counts = batch_size, variants(_PLAIN.max_nodes)
    zeros = lambda: jnp.zeros(B, jnp.int32)  # noqa: E731
    return _Batch(
        state=init_state(model, _PLAIN, B, capacity),
        request=make_request(model, _PLAIN, B, sampling=sampling, stop_ids=[list(stop_ids)] * B),
        progress=Progress(
            finish=jnp.full(B, int(Finish.LENGTH), jnp.int32),
            budget=zeros(),
            prompt_lengths=zeros(),
            history=None,
            stats=Stats.zeros(B, _PLAIN.max_depth + 1, len(counts)),
        ),
    )


def _collect(batch: _Batch, rows: list[Any]) -> Iterator[Answer]:
    """The answers that have ended; their rows become free."""
    finish = np.asarray(batch.progress.finish)
    ended = [row for row, job in enumerate(rows) if job is not None and finish[row] != Finish.RUNNING]
    if not ended:
        return
    tokens, lengths = np.asarray(batch.state.tokens), np.asarray(batch.state.lengths)
    for row in ended:
        job: Job = rows[row]
        rows[row] = None
        new = tokens[row, len(job.tokens) : lengths[row]].tolist()
        yield Answer(job, new, Finish(int(finish[row])).name.lower())
