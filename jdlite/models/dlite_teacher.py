"""The history teacher of DLite: the student's network plus a window of fused past states.

The teacher is a `DLite` whose config has a `draft_history`; this module holds what only the teacher needs: its config
from a student's, the windows of many anchors, and handing its head to the student.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jdlite.errors import ConfigError
from jdlite.models.dlite import DLite
from jdlite.models.dlite_config import DLiteConfig


def teacher_config(student: DLiteConfig, window: int = 128) -> DLiteConfig:
    """The isomorphic teacher: the student with a history window of `window` positions."""
    return dataclasses.replace(student, draft_history=window)


def history_windows(
    fused: Float[Array, "B T D"], anchors: Int[Array, "B P"], window: int
) -> tuple[Float[Array, "B P past D"], Bool[Array, "B P past"]]:
    """Past states of each anchor: positions a-W .. a-2, so `past` = W - 1.

    Args:
        fused: `DLite.fuse_history` of every position from 0 on.
        anchors: absolute positions a of the anchors.
        window: W.

    Returns:
        The states, and which of them exist (positions before 0 do not).
    """
    positions = anchors[..., None] + jnp.arange(-window, -1)
    B, P, past = positions.shape
    index = jnp.clip(positions, 0, fused.shape[1] - 1).reshape(B, P * past, 1)
    states = jnp.take_along_axis(fused, index, axis=1).reshape(B, P, past, fused.shape[2])
    return states, (positions >= 0) & (positions < fused.shape[1])


def copy_head(teacher: DLite, student: DLite) -> None:
    """Give the student the teacher's sequential head, as the warm-up stage of the distillation starts from.

    Raises:
        ConfigError: the heads differ in shape.
    """
    source, target = nnx.state(teacher.head, nnx.Param), nnx.state(student.head, nnx.Param)
    shapes = [{path: leaf.shape for path, leaf in nnx.to_flat_state(state)} for state in (source, target)]
    if shapes[0] != shapes[1]:
        raise ConfigError(
            f"Teacher and student heads must have the same shape: got rank {teacher.config.rank} and "
            f"{student.config.rank}, output {teacher.config.head_output} and {student.config.head_output}; "
            "give both the same rank, vocabulary and head_output."
        )
    nnx.update(student.head, nnx.map_state(lambda _, leaf: jnp.array(leaf[...]), source))
