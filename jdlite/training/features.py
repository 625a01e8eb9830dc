"""What drafters read of the frozen target, from one forward over packed rows."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jdlite.models.decoder import Decoder
from jdlite.models.dlite import DLite
from jdlite.models.dlite_teacher import history_windows
from jdlite.training.anchors import Anchors


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TargetStates:
    """One forward of the target.

    Attributes:
        hidden: final-normed states; the LM head turns them into the target's logits.
        taps: outputs of the captured layers, by layer.
    """

    hidden: Float[Array, "B T D"]
    taps: dict[int, Float[Array, "B T D"]]


def document_mask(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T T"]:
    """Which positions see which: earlier ones of the same document, and themselves.

    Example: segments `1 1 2 0` give rows `1000`, `1100`, `0010`, `0001`.
    """
    T = segment_ids.shape[1]
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    own = jnp.eye(T, dtype=bool)
    return (same & (segment_ids > 0)[:, :, None] & jnp.tril(jnp.ones((T, T), bool))) | own


def target_states(target: Decoder, batch: dict[str, jax.Array], layers: tuple[int, ...]) -> TargetStates:
    """Run the target over packed rows; no gradient reaches it.

    Args:
        target: frozen.
        batch: `tokens`, `positions` and `segment_ids`, each `[B, T]`.
        layers: which outputs to keep.
    """
    B = batch["tokens"].shape[0]
    mask = document_mask(batch["segment_ids"])
    # Without cached slots the decoder's verify forward is a plain forward under any mask.
    out = target(batch["tokens"], batch["positions"], mask, target.init_cache(B, 0), taps=layers)
    out = jax.lax.stop_gradient((out.hidden, out.taps))
    return TargetStates(out[0], dict(zip(layers, out[1], strict=True)))


def stored_states(batch: dict[str, jax.Array], layers: tuple[int, ...]) -> TargetStates:
    """What `target_states` would give, from the field `states` `[B, T, M + 1, D]` of a batch.

    Args:
        batch: with `states`.
        layers: whose outputs they are; the final-normed states come after them.
    """
    states = batch["states"]
    return TargetStates(states[:, :, -1], {layer: states[:, :, i] for i, layer in enumerate(layers)})


def anchor_features(states: TargetStates, anchors: Anchors, layers: tuple[int, ...]) -> Float[Array, "B P M D"]:
    """The tapped states at the position before each anchor."""
    before = jnp.maximum(anchors.positions - 1, 0)[..., None]
    return jnp.stack([jnp.take_along_axis(states.taps[layer], before, axis=1) for layer in layers], axis=2)


def backbone_states(
    model: DLite,
    states: TargetStates,
    anchors: Anchors,
    segment_ids: Int[Array, "B T"],
    embedding: Float[Array, "V D"],
    *,
    recompute: bool = False,
) -> Float[Array, "N K D"]:
    """Backbone states of all drafts of all anchors, N = B P rows, each independent of the others.

    Args:
        model: the student, or a teacher or drafter with a history.
        states: must hold the model's captured layers.
        anchors: P of each row.
        segment_ids: a history ends where the anchor's document begins.
        embedding: the target's.
        recompute: as in `DLite.backbone`.
    """
    c = model.config
    B, P = anchors.positions.shape
    flat = lambda x: x.reshape(B * P, *x.shape[2:])  # noqa: E731
    extra: dict[str, jax.Array] = {}
    if c.anchor_group_size > 1:
        extra["token_valid"] = flat(anchors.token_valid)
    if c.draft_history:
        fused = model.fuse_history(jnp.stack([states.taps[layer] for layer in c.history_taps], axis=2))
        past, there = history_windows(fused, anchors.positions, c.draft_history)
        slots = jnp.maximum(anchors.positions[..., None] + jnp.arange(-c.draft_history, -1), 0).reshape(B, -1)
        documents = jnp.take_along_axis(segment_ids, slots, axis=1).reshape(there.shape)
        own = jnp.take_along_axis(segment_ids, anchors.positions, axis=1)
        extra["history"] = flat(past)
        extra["history_valid"] = flat(there & (documents == own[..., None]))
    features = flat(anchor_features(states, anchors, c.taps))
    return model.backbone(flat(anchors.tokens), features, embedding, recompute=recompute, **extra)


def head_outputs(model: DLite, hidden: Float[Array, "N K D"], anchors: Anchors) -> Float[Array, "N K U"]:
    """Outputs of the sequential head under teacher forcing; its output matrix turns them into logits."""
    tokens = anchors.tokens.reshape(-1, anchors.tokens.shape[-1])
    previous = anchors.previous.reshape(-1, anchors.previous.shape[-1])
    return model.head.teacher_forced(hidden, previous, model.head.start(tokens))
