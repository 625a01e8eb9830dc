"""Steps, losses and learning rate of the stages."""

import math

import numpy as np
import pytest

from jdlite.errors import ConfigError
from jdlite.training.config import OptimizerOptions, StudentOptions, TeacherOptions
from jdlite.training.stages import learning_rate, make_plan
from tests.training.tiny_run import config

TEACHER, ADAM = TeacherOptions(), OptimizerOptions(learning_rate=2e-3)


def test_stages_follow_each_other():
    plan = make_plan("student", TEACHER, StudentOptions(transition_epochs=1), ADAM, 10)
    assert [(s.name, s.begin, s.end) for s in plan.stages] == [
        ("warmup", 0, 20),
        ("transition", 20, 30),
        ("stable", 30, 90),
    ]
    assert (plan.end_of("warmup"), plan.begin_of("stable"), plan.steps) == (20, 30, 90)
    assert [plan.stage(step).name for step in (0, 19, 20, 29, 30, 89)] == [
        "warmup", "warmup", "transition", "transition", "stable", "stable",
    ]  # fmt: skip


def test_losses_of_each_stage():
    plan = make_plan("student", TEACHER, StudentOptions(transition_epochs=1, base_ce=0.06), ADAM, 10)
    warm, mixed, stable = (plan.stage(step).blend(step) for step in (5, 25, 50))
    assert (warm.ce, warm.l1, warm.kl, warm.free_head) == (0, 0, 1, 0)
    assert (stable.ce, stable.l1, stable.kl, stable.base_ce, stable.free_head) == (0.1, 1.0, 0, 0.06, 1)
    share = 0.5 - 0.5 * math.cos(math.pi * 5.5 / 10)
    assert mixed.kl == pytest.approx(1 - share)
    assert mixed.l1 == pytest.approx(share)
    assert mixed.free_head == 1


def test_a_number_of_steps_is_shared_out_by_epochs():
    plan = make_plan("student", TEACHER, StudentOptions(steps=100), ADAM, 7)
    assert [(s.name, s.end) for s in plan.stages] == [("warmup", 25), ("stable", 100)]
    single = make_plan("single", TEACHER, StudentOptions(), ADAM, 10)
    assert [(s.name, s.end) for s in single.stages] == [("single-stage", 80)]
    teacher = make_plan("teacher", TeacherOptions(learning_rate=1e-4), StudentOptions(), ADAM, 10)
    assert (teacher.steps, teacher.learning_rate) == (80, 1e-4)


@pytest.mark.parametrize("steps", [2, 3, 4, 5, 50])
@pytest.mark.parametrize(("warmup", "stable"), [(2, 6), (0.01, 6), (6, 0.01)])
def test_no_stage_is_rounded_away(steps, warmup, stable):
    options = StudentOptions(warmup_epochs=warmup, stable_epochs=stable, steps=steps)
    plan = make_plan("student", TEACHER, options, ADAM, 7)
    assert [s.name for s in plan.stages] == ["warmup", "stable"]
    assert plan.stages[0].begin == 0
    assert plan.stages[0].end == plan.stages[1].begin
    assert all(s.begin < s.end for s in plan.stages)
    assert plan.steps == steps
    assert abs(plan.stages[0].end - steps * warmup / (warmup + stable)) <= 1


def test_fewer_steps_than_stages_are_refused():
    with pytest.raises(ConfigError, match="a step for each of warmup, transition, stable at least, but has 2"):
        make_plan("student", TEACHER, StudentOptions(transition_epochs=1, steps=2), ADAM, 7)


def test_a_phase_without_losses_or_steps_is_refused():
    with pytest.raises(ConfigError, match="no loss"):
        make_plan("single", TEACHER, StudentOptions(ce=0, l1=0), ADAM, 10)
    with pytest.raises(ConfigError, match="no steps"):
        make_plan("teacher", TeacherOptions(epochs=0), StudentOptions(), ADAM, 10)
    with pytest.raises(ConfigError, match="no epochs"):
        StudentOptions(warmup_epochs=0, stable_epochs=0)


def test_one_schedule_over_all_stages():
    plan = make_plan("student", TEACHER, StudentOptions(steps=1000), ADAM, 1)
    rates = np.array([float(learning_rate(step, plan, ADAM)) for step in range(1000)])
    rise = 40  # 4%
    np.testing.assert_allclose(rates[:rise], 2e-3 * np.arange(1, rise + 1) / rise, rtol=1e-5)
    fall = 2e-3 * (0.5 + 0.5 * np.cos(np.pi * (np.arange(rise, 1000) - rise) / (1000 - rise)))
    np.testing.assert_allclose(rates[rise:], fall, atol=1e-9)


@pytest.mark.parametrize("group", ["loss", "teacher"])
def test_a_soft_label_needs_the_whole_vocabulary(tmp_path, group):
    config(tmp_path, f"{group}.label=distribution")
    with pytest.raises(ConfigError, match=r"label distribution needs the whole vocabulary: got loss.top_k 4"):
        config(tmp_path, f"{group}.label=distribution", "loss.top_k=4")
