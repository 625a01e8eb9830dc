"""Losses over the vocabulary, computed in pieces so that no array of all anchors, drafts and tokens is ever held.

For a pair of an anchor and a draft let q be the drafter's law, p the target's (or t the teacher's) and x the label:

    ce = -log q(x)          l1 = sum_v |p(v) - q(v)|          kl = sum_v t(v) (log t(v) - log q(v))

1 - l1 / 2 is the probability that rejection sampling keeps the draft.

The gradient is written out instead of being left to autodiff: one sweep over vocabulary tiles finds the normaliser of q,
a second l1 and kl, a third the gradient, whose products with W_o and u are summed at once. Nothing but a tile
`[pairs, tile]` is held, and the tile stays in a CPU's cache; with logits as cheap as `R` multiplications each,
computing them three times costs less than storing them. `surrogate` hands the gradient to autodiff.
"""

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
_NEGATIVE = -1e30  # stands for minus infinity where a difference of two of them must not be NaN


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Law:
    """The target's next-token distributions of one micro-batch.

    Attributes:
        hidden: final-normed states of all positions, `[B T, D]`.
        head: the LM head.
        table: probabilities of the positions that are needed, in vocabulary tiles, or None: then they are computed for
            every pair from `hidden`.
        best: most likely token of each row of the table.
        rank: row of the table of each position.
    """

    hidden: Float[Array, "BT D"]
    head: Float[Array, "V D"]
    table: Float[Array, "BT tiles tile"] | None = None
    best: Int[Array, " BT"] | None = None
    rank: Int[Array, " BT"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Parts:
    """Losses of each pair, unweighted, float32 `[B, P, K]`; those that were not asked for are 0.

    Attributes:
        ce, l1, kl: see the module.
        match: 1 where the drafter's most likely token is the target's (the label, where the target is not looked at).
    """

    ce: Float[Array, "B P K"]
    l1: Float[Array, "B P K"]
    kl: Float[Array, "B P K"]
    match: Float[Array, "B P K"]


@dataclasses.dataclass(frozen=True)
class Weights:
    """Weights of the losses; numbers or traced scalars."""

    ce: float | jax.Array = 0.0
    l1: float | jax.Array = 0.0
    kl: float | jax.Array = 0.0


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


def make_law(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    needed: Bool[Array, "B T"],
    pieces: Pieces,
    *,
    shared: bool,
) -> Law:
    """The target's distributions at the needed positions.

    Args:
        hidden: final-normed states.
        head: the LM head.
        needed: positions that some draft is compared with.
        pieces: sizes.
        shared: compute each position once and keep it (one LM-head row per position), instead of once per pair.
    """
    hidden = hidden.reshape(-1, hidden.shape[-1])
    if not shared:
        return Law(hidden, head)
    N, V = hidden.shape[0], head.shape[0]
    block = min(_BLOCK, N)
    order = jnp.argsort(~needed.reshape(-1), stable=True).astype(jnp.int32)
    rank = jnp.argsort(order).astype(jnp.int32)

    def fill(i, carry):
        table, best = carry
        # The last block is shifted left to end at N.
        first = jnp.minimum(i * block, N - block)
        rows = jax.lax.dynamic_slice_in_dim(order, first, block)
        probabilities, top = _probabilities(hidden[rows], head)
        padded = jnp.pad(probabilities, ((0, 0), (0, pieces.tile * pieces.tiles - V)))
        padded = padded.reshape(block, pieces.tiles, pieces.tile)
        return (
            jax.lax.dynamic_update_slice(table, padded, (first, 0, 0)),
            jax.lax.dynamic_update_slice(best, top, (first,)),
        )

    blocks = (jnp.sum(needed) + block - 1) // block
    empty = jnp.zeros((N, pieces.tiles, pieces.tile)), jnp.zeros(N, jnp.int32)
    table, best = jax.lax.fori_loop(0, blocks, fill, empty)
    return Law(hidden, head, table, best, rank)


def _probabilities(hidden, head):
    """Softmax of the LM head's logits, `[n, V]` float32, and the first of the most likely tokens."""
    z = project(hidden, head).astype(jnp.float32)
    top = jnp.max(z, axis=1, keepdims=True)
    e = jnp.exp(z - top)
    # Two plain reductions; an argmax is several times slower on a CPU.
    ids = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
    best = jnp.min(jnp.where(z == top, ids, z.shape[1]), axis=1)
    return e / jnp.sum(e, axis=1, keepdims=True), jnp.minimum(best, z.shape[1] - 1)


def surrogate(
    u: Float[Array, "B P K U"],
    output: Float[Array, "V U"],
    index: Int[Array, "B P K"],
    labels: Int[Array, "B P K"],
    scale: Float[Array, "B P K"],
    weights: Weights,
    pieces: Pieces,
    *,
    law: Law | None = None,
    label_is_target: bool = False,
    teacher: tuple[jax.Array, jax.Array] | None = None,
    learn_output: bool = True,
    top_k: int = 0,
) -> tuple[Float[Array, ""], Float[Array, ""], Parts]:
    """`sum over pairs of scale (w_ce ce + w_l1 l1 + w_kl kl)`, in a form that autodiff can use.

    Args:
        u: head outputs; `output @ u` are the drafter's logits.
        output: W_o, or the target's LM head.
        index: position of the target's distribution of each pair, counted over all rows of the micro-batch.
        labels: the data's tokens.
        scale: weight of each pair, normaliser included.
        weights: of the losses. `l1` needs `law`, `kl` needs `teacher`.
        pieces: sizes.
        law: the target's distributions; without one `l1` is 0.
        label_is_target: the label of `ce` is the target's most likely token.
        teacher: head outputs and output matrix of the teacher.
        learn_output: whether the gradient of `output` is wanted.
        top_k: compare with the target on its k most likely tokens; 0 compares all.

    Returns:
        A number whose gradient is that of the loss (its value means nothing), the loss, and the losses of each pair.
    """
    B, P, K, U = u.shape
    c = min(pieces.anchors, P)
    chunks = math.ceil(P / c)
    still = jax.lax.stop_gradient

    def cut(x):
        x = jnp.pad(x, ((0, 0), (0, chunks * c - P), *((0, 0),) * (x.ndim - 2)))
        x = x.reshape(B, chunks, c, *x.shape[2:]).swapaxes(0, 1)
        return x.reshape(chunks, B * c * K, *x.shape[4:])

    def join(x):
        return x.reshape(chunks, B, c, K, *x.shape[2:]).swapaxes(0, 1).reshape(B, chunks * c, K, *x.shape[2:])[:, :P]

    rows = {"u": u, "index": index, "label": labels, "scale": scale}
    if teacher is not None:
        rows["teacher"] = teacher[0].reshape(B, P, K, -1)
    sweep = _Sweep(
        output=pieces.cut(still(output)),
        teacher=None if teacher is None else pieces.cut(still(teacher[1])),
        vocab=output.shape[0],
        pieces=pieces,
        weights=weights,
        law=law,
        label_is_target=label_is_target,
        learn_output=learn_output,
        top_k=top_k,
    )

    def body(d_output, rows):
        loss, d_u, d_new, parts = sweep(rows)
        return None if d_output is None else d_output + d_new, (loss, d_u, parts)

    begin = jnp.zeros(sweep.output.shape, jnp.float32) if learn_output else None
    d_output, (losses, d_u, parts) = jax.lax.scan(body, begin, {name: cut(still(x)) for name, x in rows.items()})
    value = jnp.sum(u.astype(jnp.float32) * still(join(d_u)))
    if learn_output:
        d_output = d_output.reshape(-1, U)[: output.shape[0]]
        value += jnp.sum(output.astype(jnp.float32) * still(d_output))
    return value, jnp.sum(losses), Parts(*(join(x) for x in parts))


@dataclasses.dataclass(frozen=True, eq=False)
class _Sweep:
    """Losses and gradients of one chunk of n pairs; fields as in `surrogate`, matrices in tiles."""

    output: jax.Array
    teacher: jax.Array | None
    vocab: int
    pieces: Pieces
    weights: Weights
    law: Law | None
    label_is_target: bool
    learn_output: bool
    top_k: int

    def __call__(self, rows):
        w, u, scale = self.weights, rows["u"], rows["scale"]
        n = u.shape[0]
        probabilities, best = self._target(rows["index"])
        label = rows["label"] if best is None or not self.label_is_target else best
        zero = jnp.zeros(n, jnp.float32)
        low = jnp.full(n, _NEGATIVE)

        def normalise(carry, x):
            q_carry, t_carry, at_label, at_best = carry
            z, tile = self._logits(u, self.output, x)
            first = tile * self.pieces.tile
            at_label += _pick(z, label - first)
            if best is not None and not self.label_is_target:
                at_best += _pick(z, best - first)
            if self.teacher is not None:
                t_carry = _online(t_carry, self._logits(rows["teacher"], self.teacher, x)[0])
            return (_online(q_carry, z), t_carry, at_label, at_best), None

        tiles = jnp.arange(self.pieces.tiles)
        carry = ((low, zero), (low, zero), zero, zero)
        (q_carry, t_carry, at_label, at_best), _ = jax.lax.scan(normalise, carry, tiles)
        log_norm = q_carry[0] + jnp.log(q_carry[1])
        teacher_norm = None if self.teacher is None else t_carry[0] + jnp.log(t_carry[1])
        ce = log_norm - at_label
        match = (at_label if best is None or self.label_is_target else at_best) >= q_carry[0]

        def compare(carry, x):
            l1, pull, kl = carry
            z, tile = self._logits(u, self.output, x)
            log_q = z - log_norm[:, None]
            q = jnp.exp(log_q)
            if probabilities is not None:
                d = q - probabilities(tile)
                l1 += jnp.sum(jnp.abs(d), axis=1)
                pull += jnp.sum(jnp.where(d > 0, q, -q), axis=1)
            if self.teacher is not None:
                log_t = self._logits(rows["teacher"], self.teacher, x)[0] - teacher_norm[:, None]
                kl += jnp.sum(jnp.exp(log_t) * (log_t - log_q), axis=1)
            return (l1, pull, kl), None

        l1 = pull = kl = zero
        if probabilities is not None or self.teacher is not None:
            (l1, pull, kl), _ = jax.lax.scan(compare, (zero, zero, zero), tiles)

        # d l1 / d z = q (s - sum_v s q) with s = sign(q - p).
        common = (scale * (w.ce + w.kl - w.l1 * pull))[:, None]
        signed, taught = (scale * w.l1)[:, None], (scale * w.kl)[:, None]

        def differentiate(d_u, x):
            z, tile = self._logits(u, self.output, x)
            q = jnp.exp(z - log_norm[:, None])
            factor = common
            if probabilities is not None:
                factor = common + jnp.where(q > probabilities(tile), signed, -signed)
            d_z = q * factor
            if self.teacher is not None:
                log_t = self._logits(rows["teacher"], self.teacher, x)[0] - teacher_norm[:, None]
                d_z -= taught * jnp.exp(log_t)
            d_z = d_z.astype(u.dtype)
            d_u += jnp.matmul(d_z, self.output[x], preferred_element_type=jnp.float32)
            if not self.learn_output:
                return d_u, None
            return d_u, jnp.matmul(d_z.T, u, preferred_element_type=jnp.float32)

        d_u, d_output = jax.lax.scan(differentiate, jnp.zeros(u.shape, jnp.float32), tiles)
        at = (scale * w.ce)[:, None]
        flat = self.output.reshape(-1, u.shape[1])
        d_u -= at * flat[label].astype(jnp.float32)
        if self.learn_output:
            flat = d_output.reshape(flat.shape).at[label].add(-at * u.astype(jnp.float32))
            d_output = flat.reshape(d_output.shape)
        loss = jnp.sum(jnp.where(scale > 0, scale * (w.ce * ce + w.l1 * l1 + w.kl * kl), 0.0))
        return loss, d_u, d_output, (ce, l1, kl, match.astype(jnp.float32))

    def _logits(self, u, matrix, tile):
        """Logits of one tile, `[n, tile]` float32; rows past the vocabulary are as good as impossible."""
        z = jnp.matmul(u, matrix[tile].T, preferred_element_type=jnp.float32)
        if self.pieces.tile * self.pieces.tiles > self.vocab:
            column = tile * self.pieces.tile + jnp.arange(self.pieces.tile)
            z = jnp.where(column < self.vocab, z, _NEGATIVE)
        return z, tile

    def _target(self, index) -> tuple[Callable[[jax.Array], jax.Array] | None, jax.Array | None]:
        """The target's probabilities of a tile, `[n, tile]`, and its most likely tokens."""
        law, pieces = self.law, self.pieces
        if law is None:
            return None, None
        if law.table is not None and law.best is not None and law.rank is not None:
            row, table = law.rank[index], law.table
            return (lambda tile: table[row, tile]), law.best[row]
        all_tokens, best = _probabilities(law.hidden[index], law.head)
        short = pieces.tile * pieces.tiles - self.vocab
        all_tokens = jnp.pad(all_tokens, ((0, 0), (0, short))).reshape(-1, pieces.tiles, pieces.tile)
        return (lambda tile: all_tokens[:, tile]), best


def _online(carry, z):
    """Running maximum and sum of exponentials, one more tile of logits."""
    top, total = carry
    new = jnp.maximum(top, jnp.max(z, axis=1))
    return new, total * jnp.exp(top - new) + jnp.sum(jnp.exp(z - new[:, None]), axis=1)


def _pick(z, column):
    """`z[i, column[i]]`, 0 where the column is outside."""
    ids = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
    return jnp.sum(jnp.where(ids == column[:, None], z, 0.0), axis=1)
