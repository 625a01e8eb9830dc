"""Losses over the vocabulary, computed in pieces so that no array of all anchors, drafts and tokens is ever held.

For a pair of an anchor and a draft let q be the drafter's law, p the target's (or t the teacher's) and x the label,
a token or p itself:

    ce = -log q(x) or -sum_v p(v) log q(v)      l1 = sum_v |p(v) - q(v)|      kl = sum_v t(v) (log t(v) - log q(v))

1 - l1 / 2 is the probability that rejection sampling keeps the draft.

The gradient is written out instead of being left to autodiff: one sweep over vocabulary tiles finds the normaliser of
q, a second l1 and kl, a third the gradient, whose products with W_o and u are summed at once. Nothing but a tile
`[pairs, tile]` is held, and the tile stays in a CPU's cache; with logits as cheap as `R` multiplications each,
computing them three times costs less than storing them. `surrogate` hands the gradient to autodiff.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jdlite.training.config import Label
from jdlite.training.law import Law, Pieces

_NEGATIVE = -1e30  # stands for minus infinity where a difference of two of them must not be NaN


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
    label: Label = "data",
    teacher: tuple[jax.Array, jax.Array] | None = None,
    learn_output: bool = True,
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
        label: of `ce`: the `data`'s token, the `target`'s most likely one, or the target's whole `distribution`; the
            latter two need `law`.
        teacher: head outputs and output matrix of the teacher.
        learn_output: whether the gradient of `output` is wanted.

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
        output=pieces.cut(still(output).astype(u.dtype)),
        teacher=None if teacher is None else pieces.cut(still(teacher[1]).astype(teacher[0].dtype)),
        vocab=output.shape[0],
        pieces=pieces,
        weights=weights,
        law=law,
        label=label,
        learn_output=learn_output,
    )

    def body(d_output, rows):
        loss, d_u, d_new, parts = sweep(rows)
        return None if d_output is None else d_output + d_new, (loss, d_u, parts)

    begin = jnp.zeros(sweep.output.shape, jnp.float32) if learn_output else None
    cut_rows = {name: cut(still(x)) for name, x in rows.items()}
    d_output, (losses, d_u, parts) = jax.lax.scan(body, begin, cut_rows)  # pyright: ignore[reportArgumentType]
    value = jnp.sum(u.astype(jnp.float32) * still(join(d_u)))
    if d_output is not None:
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
    label: Label
    learn_output: bool

    def __call__(self, rows):
        w, u, scale = self.weights, rows["u"], rows["scale"]
        n = u.shape[0]
        target = None if self.law is None else self.law.at(rows["index"])
        probabilities, best = (None, None) if target is None else (target.tile, target.best)
        flat = self.output.reshape(-1, u.shape[1])
        label = best if best is not None and self.label == "target" else rows["label"]
        # The soft label: p of a tile is read in the second and third sweep, as for l1.
        soft = probabilities if self.label == "distribution" else None
        zero = jnp.zeros(n, jnp.float32)
        low = jnp.full(n, _NEGATIVE)

        def normalise(carry, x):
            q_carry, t_carry, at_label, at_best = carry
            z, tile = self._logits(u, self.output, x)
            first = tile * self.pieces.tile
            at_label += _pick(z, label - first)
            if best is not None and self.label != "target":
                at_best += _pick(z, best - first)
            if self.teacher is not None:
                t_carry = _online(t_carry, self._logits(rows["teacher"], self.teacher, x)[0])
            return (_online(q_carry, z), t_carry, at_label, at_best), None

        tiles = jnp.arange(self.pieces.tiles)
        carry = ((low, zero), (low, zero), zero, zero)
        (q_carry, t_carry, at_label, at_best), _ = jax.lax.scan(normalise, carry, tiles)
        log_norm = q_carry[0] + jnp.log(q_carry[1])
        teacher_norm = t_carry[0] + jnp.log(t_carry[1])
        ce = log_norm - at_label
        match = (at_label if best is None or self.label == "target" else at_best) >= q_carry[0]

        def compare(carry, x):
            l1, pull, kl, cross = carry
            z, tile = self._logits(u, self.output, x)
            log_q = z - log_norm[:, None]
            q = jnp.exp(log_q)
            if probabilities is not None:
                p = probabilities(tile)
                d = q - p
                if soft is not None:
                    cross -= jnp.sum(p * log_q, axis=1)
                l1 += jnp.sum(jnp.abs(d), axis=1)
                pull += jnp.sum(jnp.where(d > 0, q, -q), axis=1)
            if self.teacher is not None:
                log_t = self._logits(rows["teacher"], self.teacher, x)[0] - teacher_norm[:, None]
                kl += jnp.sum(jnp.exp(log_t) * (log_t - log_q), axis=1)
            return (l1, pull, kl, cross), None

        l1 = pull = kl = cross = zero
        if probabilities is not None or self.teacher is not None:
            (l1, pull, kl, cross), _ = jax.lax.scan(compare, (zero, zero, zero, zero), tiles)
        if soft is not None:
            ce = cross

        rest, likely = zero, None
        if target is not None and target.ids is not None:
            likely = _compare_likely(u, flat[target.ids], target.top, log_norm)
            l1, pull, rest = likely.l1, likely.pull, likely.rest

        # d l1 / d z = q (s - sum_v s q) with s = sign(q - p).
        common = (scale * (w.ce + w.kl + w.l1 * (rest - pull)))[:, None]
        signed, taught = (scale * w.l1)[:, None], (scale * w.kl)[:, None]

        def differentiate(d_u, x):
            z, tile = self._logits(u, self.output, x)
            q = jnp.exp(z - log_norm[:, None])
            factor = common
            if probabilities is not None:
                factor = common + jnp.where(q > probabilities(tile), signed, -signed)
            d_z = q * factor
            if soft is not None:
                d_z -= at * soft(tile)
            if self.teacher is not None:
                log_t = self._logits(rows["teacher"], self.teacher, x)[0] - teacher_norm[:, None]
                d_z -= taught * jnp.exp(log_t)
            d_z = d_z.astype(u.dtype)
            d_u += jnp.matmul(d_z, self.output[x], preferred_element_type=jnp.float32)
            if not self.learn_output:
                return d_u, None
            return d_u, jnp.matmul(d_z.T, u, preferred_element_type=jnp.float32)

        at, d_flat = (scale * w.ce)[:, None], None
        d_u, d_output = jax.lax.scan(differentiate, jnp.zeros(u.shape, jnp.float32), tiles)
        wide = u.astype(jnp.float32)
        if d_output is not None:
            d_flat = d_output.reshape(flat.shape)
        if soft is None:
            d_u -= at * flat[label].astype(jnp.float32)
            if d_flat is not None:
                d_flat = d_flat.at[label].add(-at * wide)
        if target is not None and likely is not None:
            apart = signed * likely.apart
            d_u += jnp.einsum("nk,nku->nu", apart, flat[target.ids].astype(jnp.float32))
            if d_flat is not None:
                d_flat = d_flat.at[target.ids].add(apart[..., None] * wide[:, None])
        d_output = None if d_flat is None else d_flat.reshape(self.output.shape)
        loss = jnp.sum(jnp.where(scale > 0, scale * (w.ce * ce + w.l1 * l1 + w.kl * kl), 0.0))
        return loss, d_u, d_output, (ce, l1, kl, match.astype(jnp.float32))

    def _logits(self, u, matrix, tile):
        """Logits of one tile, `[n, tile]` float32; rows past the vocabulary are as good as impossible."""
        z = jnp.matmul(u, matrix[tile].T, preferred_element_type=jnp.float32)
        if self.pieces.tile * self.pieces.tiles > self.vocab:
            column = tile * self.pieces.tile + jnp.arange(self.pieces.tile)
            z = jnp.where(column < self.vocab, z, _NEGATIVE)
        return z, tile


@dataclasses.dataclass(frozen=True)
class _Likely:
    """Comparison on the target's k most likely tokens, all others counted as one.

    Attributes:
        l1, pull: as over the whole vocabulary; `pull` is sum_v s q.
        rest: the sign s of the others.
        apart: q (s - rest) of the k tokens, `[n, k]`: what their gradient has beyond that of the others.
    """

    l1: jax.Array
    pull: jax.Array
    rest: jax.Array
    apart: jax.Array


def _compare_likely(u, rows, top, log_norm) -> _Likely:
    z = jnp.einsum("nu,nku->nk", u, rows, preferred_element_type=jnp.float32)
    q = jnp.exp(z - log_norm[:, None])
    d, others = q - top, jnp.sum(top, axis=1) - jnp.sum(q, axis=1)
    signs, rest = jnp.where(d > 0, 1.0, -1.0), jnp.where(others > 0, 1.0, -1.0)
    pull = jnp.sum(signs * q, axis=1) + rest * (1 - jnp.sum(q, axis=1))
    l1 = jnp.sum(jnp.abs(d), axis=1) + jnp.abs(others)
    return _Likely(l1, pull, rest, q * (signs - rest[:, None]))


def _online(carry, z):
    """Running maximum and sum of exponentials, one more tile of logits."""
    top, total = carry
    new = jnp.maximum(top, jnp.max(z, axis=1))
    return new, total * jnp.exp(top - new) + jnp.sum(jnp.exp(z - new[:, None]), axis=1)


def _pick(z, column):
    """`z[i, column[i]]`, 0 where the column is outside."""
    ids = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
    return jnp.sum(jnp.where(ids == column[:, None], z, 0.0), axis=1)
