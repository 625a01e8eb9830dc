"""Where a row ends: stop ids, stop sequences, budget of new tokens and free capacity, cut inside a block of tokens."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jdlite.errors import ConfigError

NO_TOKEN = -1  # fills unused slots; no vocabulary has this id


class Finish(enum.IntEnum):
    """Why a row stopped. Lower non-zero values win when two reasons fall on the same token."""

    RUNNING = 0
    STOP_ID = 1
    STOP_SEQUENCE = 2
    LENGTH = 3  # the budget of new tokens is used up
    CAPACITY = 4  # the cache is full
    ERROR = 5  # the target's logits are not numbers; set by the decode loop, never by `cut`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stops:
    """What ends each row. E, Q or W may be 0 and then costs nothing.

    Attributes:
        ids: `[B, E]` int32, tokens that end a row, padded with -1.
        sequences: `[B, Q, W]` int32, runs of tokens that end a row, right-aligned and padded with -1 on the left.
            Example with W = 3: the sequence 7 9 is stored as `[-1, 7, 9]`.
        lengths: `[B, Q]` int32, tokens of each sequence; 0 marks an unused slot.
    """

    ids: Int[Array, "B E"]
    sequences: Int[Array, "B Q W"]
    lengths: Int[Array, "B Q"]

    @property
    def history(self) -> int:
        """How many generated tokens before a block `cut` must see: W - 1, or 0 without sequences."""
        return max(self.sequences.shape[2] - 1, 0)


def make_stops(
    stop_ids: Sequence[Sequence[int]] | None,
    stop_sequences: Sequence[Sequence[Sequence[int]]] | None,
    batch: int,
) -> Stops:
    """Pack the stop rules of `batch` rows.

    Args:
        stop_ids: one list of token ids per row, or None for no stop ids.
        stop_sequences: one list of token sequences per row, or None for none.
        batch: B.

    Raises:
        ConfigError: a list whose length is not `batch`, an id that is not a non-negative integer, or an empty sequence.
    """
    id_rows = [list(row) for row in _rows(stop_ids, "stop_ids", batch)]
    sequence_rows = [[list(s) for s in row] for row in _rows(stop_sequences, "stop_sequences", batch)]
    for b, (ids, sequences) in enumerate(zip(id_rows, sequence_rows, strict=True)):
        for token in [*ids, *(t for s in sequences for t in s)]:
            _check_id(token, b)
        if not all(sequences):
            raise ConfigError(f"a stop sequence of row {b} is empty; leave it out or give it at least one token.")

    E = max(map(len, id_rows), default=0)
    Q = max(map(len, sequence_rows), default=0)
    W = max((len(s) for row in sequence_rows for s in row), default=0)
    ids = np.full((batch, E), NO_TOKEN, np.int32)
    sequences = np.full((batch, Q, W), NO_TOKEN, np.int32)
    lengths = np.zeros((batch, Q), np.int32)
    for b in range(batch):
        ids[b, : len(id_rows[b])] = id_rows[b]
        for q, sequence in enumerate(sequence_rows[b]):
            sequences[b, q, W - len(sequence) :] = sequence
            lengths[b, q] = len(sequence)
    return Stops(jnp.asarray(ids), jnp.asarray(sequences), jnp.asarray(lengths))


def _rows(values: Sequence | None, name: str, batch: int) -> Sequence:
    if values is None:
        return [()] * batch
    if len(values) != batch:
        raise ConfigError(
            f"{name} has {len(values)} rows for a batch of {batch}; give one list per row, empty for none."
        )
    return values


def _check_id(token: object, row: int) -> None:
    if isinstance(token, bool) or not isinstance(token, int | np.integer) or token < 0:
        raise ConfigError(f"row {row} has the stop token {token!r}; stop tokens are non-negative integer ids.")


def recent_tokens(
    tokens: Int[Array, "B S"], lengths: Int[Array, " B"], prompt_lengths: Int[Array, " B"], count: int
) -> Int[Array, "B R"]:
    """The last `count` generated tokens of each row, right-aligned, -1 where fewer were generated.

    Args:
        tokens: committed tokens; slots at or past `lengths` are never read.
        lengths: known tokens of each row.
        prompt_lengths: tokens of each row that were given rather than generated.
        count: R, usually `Stops.history`.
    """
    slots = lengths[:, None] + jnp.arange(-count, 0)
    found = jnp.take_along_axis(tokens, jnp.clip(slots, 0, tokens.shape[1] - 1), axis=1)
    return jnp.where(slots >= prompt_lengths[:, None], found, NO_TOKEN).astype(jnp.int32)


def cut(
    emitted: Int[Array, "B P"],
    count: Int[Array, " B"],
    recent: Int[Array, "B R"],
    stops: Stops,
    budget: Int[Array, " B"],
    room: Int[Array, " B"],
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Cut each row's block of new tokens at the first thing that ends the row.

    The stop token, or the last token of a stop sequence, is kept, as in transformers. The earliest end wins; on the
    same token a stop id goes before a stop sequence, before the budget, before the capacity. A row whose block is
    exactly as long as its budget or room ends with this block. Example: block `5 6 7 8`, stop sequence `6 7`, budget 3
    keeps three tokens and reports `STOP_SEQUENCE`.

    Args:
        emitted: new tokens of the round; entries at or past `count` are rubbish.
        count: how many tokens each row emitted; a row with 0 is left alone (0 kept, `RUNNING`).
        recent: the last R = `stops.history` tokens generated before the block, see `recent_tokens`. A stop sequence
            must lie wholly inside generated text.
        stops: what ends each row.
        budget: new tokens that each row may still emit.
        room: new tokens for which each row still has capacity.

    Returns:
        `(kept, reason)`, both `[B]` int32: tokens to keep, and the `Finish` value.
    """
    B = emitted.shape[0]
    never = jnp.full((B,), jnp.iinfo(jnp.int32).max, jnp.int32)

    def first(hit: Bool[Array, "B P"]) -> Int[Array, " B"]:
        """Tokens up to and including the first hit of each row."""
        return jnp.where(hit.any(axis=1), jnp.argmax(hit, axis=1).astype(jnp.int32) + 1, never)

    ends = [  # in order of rank
        (Finish.STOP_ID, first(_id_hits(emitted, stops)) if stops.ids.shape[1] else never),
        (Finish.STOP_SEQUENCE, first(_sequence_hits(emitted, recent, stops)) if stops.sequences.shape[1] else never),
        (Finish.LENGTH, jnp.maximum(budget, 0)),
        (Finish.CAPACITY, jnp.maximum(room, 0)),
    ]
    end = jnp.stack([places for _, places in ends]).min(axis=0)
    reason = jnp.full((B,), Finish.RUNNING, jnp.int32)
    for code, places in reversed(ends):
        reason = jnp.where(places == end, jnp.int32(code), reason)
    ended = (end <= count) & (count > 0)
    return jnp.where(ended, end, count).astype(jnp.int32), jnp.where(ended, reason, Finish.RUNNING).astype(jnp.int32)


def _id_hits(emitted: Int[Array, "B P"], stops: Stops) -> Bool[Array, "B P"]:
    """Which new tokens are stop ids. Rubbish past `count` may hit; it cannot come before a true hit."""
    return ((emitted[:, :, None] == stops.ids[:, None, :]) & (stops.ids >= 0)[:, None, :]).any(axis=2)


def _sequence_hits(emitted: Int[Array, "B P"], recent: Int[Array, "B R"], stops: Stops) -> Bool[Array, "B P"]:
    """Which new tokens are the last one of a stop sequence."""
    W, P = stops.sequences.shape[2], emitted.shape[1]
    if recent.shape[1] != W - 1:
        raise ValueError(f"recent holds {recent.shape[1]} tokens per row but the stop sequences need {W - 1}.")
    text = jnp.concatenate([recent, emitted], axis=1)
    windows = text[:, jnp.arange(P)[:, None] + jnp.arange(W)]  # [B, P, W], window p ends at new token p
    unused = jnp.arange(W) < W - stops.lengths[:, :, None]  # [B, Q, W], left padding
    same = windows[:, :, None, :] == stops.sequences[:, None, :, :]
    return ((same | unused[:, None]).all(axis=3) & (stops.lengths > 0)[:, None]).any(axis=2)
