"""The distinct tokens of each row, kept while the row grows, so that work per token id is done once per id."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from jdlite.models.cache import write_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DistinctTokens:
    """A sparse set (Briggs and Torczon, 1993): token t is a member if `ids[place[t]] == t` and `place[t] < count`.

    Nothing is ever cleared; rolling back is only a smaller count, because members stand in the order of their first
    occurrence.

    Attributes:
        ids: `[B, S]` int32, members in the order of their first occurrence; rubbish from `count` on.
        first: `[B, S]` int32, position of each member's first occurrence.
        place: `[B, V]` int32, index of each member in `ids`; rubbish for other tokens.
        count: `[B]` int32, members.
    """

    ids: Int[Array, "B S"]
    first: Int[Array, "B S"]
    place: Int[Array, "B V"]
    count: Int[Array, " B"]

    @classmethod
    def empty(cls, batch: int, capacity: int, vocab_size: int) -> DistinctTokens:
        zeros = lambda *shape: jnp.zeros(shape, jnp.int32)  # noqa: E731
        return cls(zeros(batch, capacity), zeros(batch, capacity), zeros(batch, vocab_size), zeros(batch))

    def add(self, tokens: Int[Array, "B P"], start: Int[Array, " B"], count: Int[Array, " B"]) -> DistinctTokens:
        """Take in the first `count[b]` of `tokens`, which stand at positions `start[b] ...`."""
        B, P = tokens.shape
        S, V = self.ids.shape[1], self.place.shape[1]
        steps = jnp.arange(P)
        place = jnp.take_along_axis(self.place, jnp.clip(tokens, 0, V - 1), axis=1)
        member = jnp.take_along_axis(self.ids, jnp.clip(place, 0, S - 1), axis=1) == tokens
        member = member & (place < self.count[:, None])
        earlier = (tokens[:, :, None] == tokens[:, None, :]) & (steps[:, None] > steps)
        fresh = (steps < count[:, None]) & ~member & ~earlier.any(axis=2)
        # Fresh tokens to the front, in their order.
        order = jnp.argsort(~fresh, axis=1, stable=True)[:, :S]
        taken = fresh.sum(axis=1, dtype=jnp.int32)
        ids = jnp.take_along_axis(tokens, order, axis=1)
        where = self.count[:, None] + jnp.arange(order.shape[1], dtype=jnp.int32)
        target = jnp.where(jnp.arange(order.shape[1]) < taken[:, None], ids, V)
        write = lambda buffer, rows: write_rows(buffer, rows, self.count, taken, row=0, slot=1)  # noqa: E731
        return DistinctTokens(
            ids=write(self.ids, ids),
            first=write(self.first, start[:, None] + order.astype(jnp.int32)),
            place=self.place.at[jnp.arange(B)[:, None], target].set(where, mode="drop"),
            count=self.count + taken,
        )

    def rollback(self, length: Int[Array, " B"]) -> DistinctTokens:
        """Forget the tokens at positions `length[b]` and later."""
        slots = jnp.arange(self.ids.shape[1])
        kept = (slots < self.count[:, None]) & (self.first < length[:, None])
        return dataclasses.replace(self, count=kept.sum(axis=1, dtype=jnp.int32))

    def spread(self, values: Shaped[Array, "B Q S"], tokens: Int[Array, "B S"]) -> Shaped[Array, "B Q S"]:
        """From a value per member (in the order of `ids`) to a value per position that holds a member's token."""
        S, V = self.ids.shape[1], self.place.shape[1]
        place = jnp.take_along_axis(self.place, jnp.clip(tokens, 0, V - 1), axis=1)
        return jnp.take_along_axis(values, jnp.clip(place, 0, S - 1)[:, None, :], axis=2)
