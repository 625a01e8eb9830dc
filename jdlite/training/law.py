"""The target's next-token distributions at the positions that drafts are compared with."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jdlite.models.layers import project

# Rows of the target's LM head product that are made at once.
_BLOCK = 128


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Sizes of the pieces.

    Attributes:
        tile: vocabulary rows of a tile.
        tiles: how many; the last may reach past the vocabulary.
        anchors: anchors per row of a chunk.
    """

    tile: int
    tiles: int
    anchors: int

    @classmethod
    def of(cls, vocab: int, rows: int, drafts: int, *, pairs: int, tile: int) -> Pieces:
        """Tiles of about `tile` rows (0: what suits the platform) and chunks of about `pairs` pairs."""
        want = tile or (1024 if jax.default_backend() == "cpu" else 16_384)
        tiles = math.ceil(vocab / want)
        return cls(math.ceil(vocab / tiles), tiles, max(1, pairs // (rows * drafts)))

    def cut(self, weight: Float[Array, "V U"]) -> Float[Array, "tiles tile U"]:
        """A matrix in tiles of rows, padded with zeros."""
        short = self.tile * self.tiles - weight.shape[0]
        padded = jnp.pad(weight, ((0, short), (0, 0))) if short else weight
        return padded.reshape(self.tiles, self.tile, -1)


@dataclasses.dataclass(frozen=True)
class Compared:
    """Distributions of n pairs.

    Attributes:
        best: most likely tokens, `[n]`.
        tile: probabilities of a vocabulary tile, `[n, tile]`; None when only the most likely tokens are kept.
        ids, top: the k most likely tokens and their probabilities, `[n, k]`, or None.
    """

    best: jax.Array
    tile: Callable[[jax.Array], jax.Array] | None = None
    ids: jax.Array | None = None
    top: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Law:
    """The target's distributions of one micro-batch, computed once per position (`rank` is there) or once per pair.

    Attributes:
        hidden: final-normed states of all positions, `[B T, D]`.
        head: the LM head.
        pieces: vocabulary tiles.
        top_k: keep the k most likely tokens only; 0 keeps all.
        rank: row of each position in the arrays below.
        best: most likely token of each row.
        table: probabilities of all tokens.
        ids, top: the k most likely tokens and their probabilities.
    """

    hidden: Float[Array, "BT D"]
    head: Float[Array, "V D"]
    pieces: Pieces = dataclasses.field(metadata={"static": True})
    top_k: int = dataclasses.field(default=0, metadata={"static": True})
    rank: Int[Array, " BT"] | None = None
    best: Int[Array, " BT"] | None = None
    table: Float[Array, "BT tiles tile"] | None = None
    ids: Int[Array, "BT k"] | None = None
    top: Float[Array, "BT k"] | None = None

    def at(self, index: Int[Array, " n"]) -> Compared:
        """Distributions at these positions."""
        if self.rank is None or self.best is None:
            best, table, ids, top = _distributions(self.hidden[index], self.head, self.pieces, self.top_k)
            return Compared(best, None if table is None else (lambda tile: table[:, tile]), ids, top)
        row, table = self.rank[index], self.table
        if table is not None:
            return Compared(self.best[row], lambda tile: table[row, tile])
        assert self.ids is not None
        assert self.top is not None
        return Compared(self.best[row], None, self.ids[row], self.top[row])


def make_law(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    needed: Bool[Array, "B T"],
    pieces: Pieces,
    *,
    shared: bool,
    top_k: int = 0,
) -> Law:
    """The target's distributions at the needed positions.

    Args:
        hidden: final-normed states.
        head: the LM head.
        needed: positions that some draft is compared with.
        pieces: vocabulary tiles.
        shared: compute each position once and keep it (one LM-head row per position), instead of once per pair.
        top_k: keep the k most likely tokens only; 0 keeps all.
    """
    hidden = hidden.reshape(-1, hidden.shape[-1])
    if not shared:
        return Law(hidden, head, pieces, top_k)
    N = hidden.shape[0]
    block = min(_BLOCK, N)
    order = jnp.argsort(~needed.reshape(-1), stable=True).astype(jnp.int32)

    def fill(i, kept):
        # The last block is shifted left to end at N.
        first = jnp.minimum(i * block, N - block)
        rows = jax.lax.dynamic_slice_in_dim(order, first, block)
        new = _distributions(hidden[rows], head, pieces, top_k)
        return jax.tree.map(lambda old, x: jax.lax.dynamic_update_slice_in_dim(old, x, first, 0), kept, new)

    shapes = jax.eval_shape(lambda: _distributions(hidden[:block], head, pieces, top_k))
    empty = jax.tree.map(lambda x: jnp.zeros((N, *x.shape[1:]), x.dtype), shapes)
    blocks = (jnp.sum(needed) + block - 1) // block
    best, table, ids, top = jax.lax.fori_loop(0, blocks, fill, empty)
    return Law(hidden, head, pieces, top_k, jnp.argsort(order).astype(jnp.int32), best, table, ids, top)


def _distributions(hidden, head, pieces: Pieces, top_k: int):
    """The first of the most likely tokens `[n]`; probabilities in tiles, or ids and probabilities of the top k."""
    z = project(hidden, head).astype(jnp.float32)
    largest = jnp.max(z, axis=1, keepdims=True)
    e = jnp.exp(z - largest)
    probabilities = e / jnp.sum(e, axis=1, keepdims=True)
    # Two plain reductions; an argmax is several times slower on a CPU.
    ids = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
    best = jnp.minimum(jnp.min(jnp.where(z == largest, ids, z.shape[1]), axis=1), z.shape[1] - 1)
    if top_k:
        top, ids = jax.lax.top_k(probabilities, min(top_k, z.shape[1]))
        return best, None, ids, top
    short = pieces.tile * pieces.tiles - z.shape[1]
    padded = jnp.pad(probabilities, ((0, 0), (0, short))) if short else probabilities
    return best, padded.reshape(-1, pieces.tiles, pieces.tile), None, None
