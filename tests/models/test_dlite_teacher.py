"""The history teacher: its windows, and what it shares with the student."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jdlite.errors import ConfigError
from jdlite.models.dlite import DLite
from jdlite.models.dlite_teacher import copy_head, history_windows, teacher_config
from tests.models.dlite_models import inputs, quick_jit, random_model, small


def test_windows_hold_positions_before_the_features():
    fused = np.arange(2 * 10, dtype=np.float32).reshape(2, 10, 1)
    anchors = jnp.array([[9, 3], [1, 10]])
    states, there = history_windows(jnp.asarray(fused), anchors, 4)
    assert states.shape == (2, 2, 3, 1)
    for b in range(2):
        for i in range(2):
            a = int(anchors[b, i])
            wanted = [t for t in range(a - 4, a - 1) if t >= 0]
            assert (
                np.asarray(states)[b, i][np.asarray(there)[b, i]].ravel().tolist() == fused[b, wanted].ravel().tolist()
            )


def test_teacher_without_a_past_is_the_student():
    # For A = 2 the student's local positions are the teacher's true distances.
    student = random_model(small(anchor_group_size=2, num_layers=1))
    teacher = random_model(teacher_config(student.config, 6), seed=5)
    shared = nnx.to_flat_state(nnx.state(student, nnx.Param))
    nnx.update(teacher, nnx.from_flat_state([(path, leaf) for path, leaf in shared]))
    tokens, features, embedding, history = inputs(teacher.config, 3)
    nothing = jnp.zeros((3, 5), bool)
    np.testing.assert_allclose(
        quick_jit(DLite.backbone)(teacher, tokens, features, embedding, history=history, history_valid=nothing),
        quick_jit(DLite.backbone)(student, tokens, features, embedding),
        rtol=1e-5,
        atol=1e-5,
    )


def test_teacher_only_adds_the_fusion():
    config = small()
    names = [
        {path for path, _ in nnx.to_flat_state(nnx.state(random_model(c)))} for c in (config, teacher_config(config, 8))
    ]
    assert names[1] - names[0] == {("history_fuse", "weight"), ("history_norm", "scale")}
    assert not names[0] - names[1]


def test_copied_head_is_the_teachers_and_the_backbone_is_not():
    config = small()
    teacher, student = random_model(teacher_config(config, 8), seed=1), random_model(config, seed=2)
    before = jax.tree.map(np.asarray, nnx.state(student.layers))
    copy_head(teacher, student)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(student.head), nnx.state(teacher.head))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(student.layers), before)
    with pytest.raises(ConfigError, match="got rank 5 and 6"):
        copy_head(teacher, random_model(dataclasses.replace(config, rank=6)))
