"""The jitted step: micro-batches, freezing, what is not a number, and the losses of each stage."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdlite.training.initialise import Template, random_params
from jdlite.training.stages import make_plan
from jdlite.training.step import Scalars, Step, jit_evaluate, jit_train, make_optimizer
from tests.training.tiny_run import MASK, config, target


def batch(rows, seed=0, length=32):
    """Two documents in each row."""
    rng = np.random.default_rng(seed)
    segments = np.repeat([[1] * 12 + [2] * 14 + [0] * (length - 26)], rows, axis=0).astype(np.int32)
    positions = np.concatenate([np.arange(12), np.arange(14), np.zeros(length - 26)]).astype(np.int32)
    return {
        "tokens": rng.integers(0, MASK, (rows, length)).astype(np.int32),
        "loss_mask": (segments > 0) & (rng.random((rows, length)) > 0.2),
        "segment_ids": segments,
        "positions": np.repeat(positions[None], rows, axis=0),
    }


def micro(values, size):
    return {name: jnp.asarray(v.reshape(-1, size, v.shape[-1])) for name, v in values.items()}


def setup(tmp_path, phase, index, *overrides):
    """The computation of one stage with what it needs."""
    c = config(tmp_path, *overrides)
    t = target().config
    d = c.teacher_dlite(t) if phase == "teacher" else c.dlite(t)
    plan = make_plan(phase, c.teacher, c.student, c.optimizer, 1)
    stage, template = plan.stages[index], Template(d)
    optimizer = make_optimizer(plan, c)
    teacher = Template(c.teacher_dlite(t)) if stage.uses_teacher else None
    step = Step(c, stage, template, teacher, optimizer, True)
    taught = None if teacher is None else random_params(teacher.config, 9)
    params = random_params(d, 0)
    blend = stage.blend(stage.begin)
    scalars = Scalars(*(jnp.float32(v) for v in dataclasses.astuple(blend)))

    compiled = jit_train(step)

    def run(params, opt_state, values):
        return compiled(target().model, taught, params, opt_state, values, jax.random.key(1), scalars)

    return run, params, optimizer.init(params), step


def copy(tree):
    return jax.tree.map(lambda x: jnp.array(x, copy=True), tree)


def test_micro_batches_add_up_to_one_batch(tmp_path):
    results = []
    for size in (1, 2):
        run, params, opt_state, _ = setup(tmp_path, "single", 0, f"batch.micro_rows={size}", "student.base_ce=0.1")
        results.append(run(params, opt_state, micro(batch(2), size)))
    for a, b in zip(jax.tree.leaves(results[0][2]), jax.tree.leaves(results[1][2]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    for a, b in zip(jax.tree.leaves(results[0][0]), jax.tree.leaves(results[1][0]), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)


@pytest.mark.parametrize(("recompute", "layers"), [("false", 0), ("true", 3)])
def test_layers_are_computed_again_where_it_is_asked_for(tmp_path, recompute, layers):
    given = ("drafter.num_layers=3", f"batch.recompute={recompute}")
    _, params, opt_state, step = setup(tmp_path, "single", 0, *given)
    scalars = Scalars(*(jnp.float32(v) for v in dataclasses.astuple(step.stage.blend(step.stage.begin))))
    args = (target().model, None, params, opt_state, micro(batch(2), 2), jax.random.key(1), scalars)
    # Of the backward pass: those of the forward pass are inlined.
    assert str(jax.make_jaxpr(step.train)(*args)).count("prevent_cse=True") == layers


def test_the_head_is_frozen_in_the_warm_up(tmp_path):
    run, params, opt_state, _ = setup(tmp_path, "student", 0, "optimizer.weight_decay=0.1")
    before = copy(params)
    after, _, sums = run(params, opt_state, micro(batch(2), 1))
    for a, b in zip(jax.tree.leaves(before["head"]), jax.tree.leaves(after["head"]), strict=True):
        np.testing.assert_array_equal(a, b)
    moved = [
        not np.array_equal(a, b)
        for a, b in zip(*map(jax.tree.leaves, (before["layers"], after["layers"])), strict=True)
    ]
    assert all(moved)
    assert sums["kl"] > 0
    np.testing.assert_allclose(sums["loss"], sums["kl"], rtol=1e-5)
    assert sums["l1"] == 0


@pytest.mark.parametrize(("phase", "index", "names"), [("student", 1, ("ce", "l1")), ("teacher", 0, ("ce",))])
def test_losses_of_other_stages(tmp_path, phase, index, names):
    run, params, opt_state, _ = setup(tmp_path, phase, index)
    before = copy(params)
    after, _, sums = run(params, opt_state, micro(batch(2), 1))
    for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True):
        assert not np.array_equal(a, b)
    weights = {"ce": 0.1, "l1": 1.0} if phase == "student" else {"ce": 1.0}
    np.testing.assert_allclose(sums["loss"], sum(weights[n] * sums[n] for n in names), rtol=1e-5)
    assert float(sums["finite"]) == 1


def test_training_lowers_the_loss(tmp_path):
    run, params, opt_state, _ = setup(tmp_path, "single", 0, "student.steps=40")
    values, losses = micro(batch(2), 1), []
    for _ in range(25):
        params, opt_state, sums = run(params, opt_state, values)
        losses.append(float(sums["loss"]))
    assert losses[-1] < 0.93 * losses[0]


def test_what_is_not_a_number_changes_nothing(tmp_path):
    run, params, opt_state, _ = setup(tmp_path, "single", 0)
    params["norm"]["scale"] = params["norm"]["scale"].at[0].set(jnp.nan)
    before = copy((params, opt_state))
    params, opt_state, sums = run(params, opt_state, micro(batch(2), 1))
    assert float(sums["finite"]) == 0
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves((params, opt_state)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_batch_without_anchors_is_harmless(tmp_path):
    run, params, opt_state, _ = setup(tmp_path, "single", 0)
    values = batch(2)
    values["loss_mask"][:] = False
    _, _, sums = run(params, opt_state, micro(values, 1))
    assert (float(sums["finite"]), float(sums["anchors"]), float(sums["loss"])) == (1, 0, 0)


def test_evaluation_compares_with_the_target(tmp_path):
    _, params, _, step = setup(tmp_path, "student", 0)
    sums = jit_evaluate(step)(target().model, params, micro(batch(2), 2), jax.random.key(0))
    accept = np.asarray(sums["accept"]) / np.asarray(sums["pairs"])
    assert np.all((accept > 0) & (accept < 1))
    assert 1 <= sums["tau"] / sums["whole"] <= 4


@pytest.mark.slow
def test_the_mesh_does_not_change_the_result(tmp_path):
    """Two devices in a process of its own, since their number is fixed when JAX starts."""
    import subprocess
    import sys

    code = """
import jax, jax.numpy as jnp, numpy as np, pathlib, sys
from jdlite.models.sharding import make_mesh, shard_model
from jdlite.training.step import jit_train
from jdlite.training.placement import Placement
from tests.training import test_step as t
path = pathlib.Path(sys.argv[1])
out = []
for mesh in ([], ["mesh.data=2"]):
    run, params, state, step = t.setup(path, "single", 0, "batch.micro_rows=2", *mesh)
    place = Placement(step.config)
    model = t.target().model
    if place.mesh is not None:
        model = shard_model(model, place.mesh)
        params, state = place.whole(params), place.whole(state)
    blend = step.stage.blend(0)
    scalars = t.Scalars(*(jnp.float32(v) for v in t.dataclasses.astuple(blend)))
    values = place.rows(t.batch(2))
    out.append(jax.device_get(jit_train(step)(model, None, params, state, values, jax.random.key(1), scalars)))
for a, b in zip(*map(jax.tree.leaves, (out[0][2], out[1][2])), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
for a, b in zip(*map(jax.tree.leaves, (out[0][0], out[1][0])), strict=True):
    np.testing.assert_allclose(a, b, atol=2e-4)
print("same")
"""
    import os

    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=env, capture_output=True, text=True)
    assert done.stdout.endswith("same\n"), done.stderr[-2000:]
