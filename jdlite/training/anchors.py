"""Anchors: the positions of packed rows that the drafter learns to draft from, and what it should draft there."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Anchors:
    """P anchors of each row.

    Example: tokens `q w e r t y` of one document, `r t y` supervised, K = 2. Anchor at `r` (position 3): it reads the
    target's states at `e`, is taught `t y`, and the head sees `r t` before them.

    Attributes:
        positions: slots of the anchors in their rows, ascending; where `valid` is false they are 1 and to be ignored.
        valid: which exist; a row may have fewer than P.
        tokens: the A newest known tokens, the anchor last.
        token_valid: those of them that belong to the anchor's document.
        previous: tokens before each draft: the anchor, then the known drafts.
        labels: the data's tokens at the drafted positions.
        supervised: labels that count: of the anchor's document, and in its loss mask.
    """

    positions: Int[Array, "B P"]
    valid: Bool[Array, "B P"]
    tokens: Int[Array, "B P A"]
    token_valid: Bool[Array, "B P A"]
    previous: Int[Array, "B P K"]
    labels: Int[Array, "B P K"]
    supervised: Bool[Array, "B P K"]


def eligible(
    loss_mask: Bool[Array, "B T"], segment_ids: Int[Array, "B T"], *, prompt_end: bool = False
) -> Bool[Array, "B T"]:
    """Positions that can be anchors.

    Both neighbours must be of the same document (the states come from the one before, the first label from the one
    after), and the anchor and the token after it must be supervised.

    Args:
        loss_mask: the supervised tokens.
        segment_ids: documents of a row, numbered from 1; 0 is padding.
        prompt_end: anchors need not be supervised themselves, which adds the last token before each answer.
    """
    same = segment_ids[:, 1:] == segment_ids[:, :-1]
    edge = jnp.zeros_like(loss_mask[:, :1])
    with_previous = jnp.concatenate([edge, same], axis=1)
    with_next = jnp.concatenate([same & loss_mask[:, 1:], edge], axis=1)
    own = jnp.ones_like(loss_mask) if prompt_end else loss_mask
    return own & with_previous & with_next & (segment_ids > 0)


def choose(key: jax.Array, candidates: Bool[Array, "B T"], count: int) -> tuple[jax.Array, jax.Array]:
    """Draw up to `count` positions of each row without replacement, all equally likely.

    Row b of the result depends on the key, b and row b of the candidates alone.

    Returns:
        Positions `[B, count]` int32, ascending, and which exist; those that do not are 1.
    """
    B, T = candidates.shape
    take = min(count, T)

    def row(b, candidates):
        noise = jax.random.uniform(jax.random.fold_in(key, b), (T,))
        score, index = jax.lax.top_k(jnp.where(candidates, noise, -1.0), take)
        return jnp.sort(jnp.where(score >= 0, index, T))

    index = jax.vmap(row)(jnp.arange(B), candidates)
    index = jnp.pad(index, ((0, 0), (0, count - take)), constant_values=T)
    valid = index < T
    return jnp.where(valid, index, 1).astype(jnp.int32), valid


def gather_anchors(
    positions: Int[Array, "B P"],
    valid: Bool[Array, "B P"],
    batch: dict[str, jax.Array],
    *,
    group: int,
    drafts: int,
) -> Anchors:
    """Tokens around the chosen positions.

    Args:
        positions, valid: from `choose`.
        batch: `tokens`, `loss_mask` and `segment_ids`, each `[B, T]`.
        group: A, known tokens that the drafter sees.
        drafts: K.
    """
    T = batch["tokens"].shape[1]

    def around(offsets):
        index = positions[..., None] + offsets
        flat = jnp.clip(index, 0, T - 1).reshape(index.shape[0], -1)
        take = lambda name: jnp.take_along_axis(batch[name], flat, axis=1).reshape(index.shape)  # noqa: E731
        return take, (index >= 0) & (index < T)

    own = jnp.take_along_axis(batch["segment_ids"], positions, axis=1)[..., None]
    known, inside = around(jnp.arange(1 - group, 1))
    before, _ = around(jnp.arange(drafts))
    after, there = around(jnp.arange(1, drafts + 1))
    return Anchors(
        positions=positions,
        valid=valid,
        tokens=known("tokens"),
        token_valid=inside & (known("segment_ids") == own),
        previous=before("tokens"),
        labels=after("tokens"),
        supervised=there & after("loss_mask") & (after("segment_ids") == own) & valid[..., None],
    )


def draft_weights(supervised: Bool[Array, "B P K"], gamma: float, *, contiguous: bool = False) -> Float[Array, "B P K"]:
    """`exp(-(i - 1) / gamma)` for draft i = 1..K where its label counts, 0 elsewhere.

    Args:
        supervised: labels that count.
        gamma: decay.
        contiguous: a label that does not count cuts those after it.
    """
    counts = supervised.astype(jnp.float32)
    if contiguous:
        counts = jnp.cumprod(counts, axis=-1)
    return counts * jnp.exp(-jnp.arange(supervised.shape[-1]) / gamma).astype(jnp.float32)
