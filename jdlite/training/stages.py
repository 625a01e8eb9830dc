"""Stages of a run: which losses hold at which step, what is frozen, and the learning rate."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp

from jdlite.errors import ConfigError
from jdlite.training.config import OptimizerOptions, StudentOptions, TeacherOptions

Phase = Literal["teacher", "student", "single"]


@dataclasses.dataclass(frozen=True)
class Blend:
    """Losses of one step.

    Attributes:
        ce, l1, kl, base_ce: weights.
        free_head: 1 when the head is trained, 0 when it is frozen.
    """

    ce: float = 0.0
    l1: float = 0.0
    kl: float = 0.0
    base_ce: float = 0.0
    free_head: float = 1.0


@dataclasses.dataclass(frozen=True)
class Stage:
    """Steps `begin <= step < end` of a phase.

    Attributes:
        name: warmup, transition, stable, teacher or single-stage.
        begin, end: steps.
        first, last: losses at its ends; in between along half a cosine.
    """

    name: str
    begin: int
    end: int
    first: Blend
    last: Blend

    @property
    def uses_teacher(self) -> bool:
        """Whether the teacher runs."""
        return self.first.kl > 0 or self.last.kl > 0

    @property
    def uses_tokens(self) -> bool:
        """Whether there is a token cross-entropy."""
        return any(b.ce > 0 or b.base_ce > 0 for b in (self.first, self.last))

    @property
    def uses_l1(self) -> bool:
        """Whether whole distributions of the target are compared with."""
        return self.first.l1 > 0 or self.last.l1 > 0

    @property
    def uses_base(self) -> bool:
        """Whether the auxiliary loss of the backbone is computed."""
        return self.first.base_ce > 0 or self.last.base_ce > 0

    @property
    def learns_head(self) -> bool:
        """Whether the head is ever free."""
        return self.first.free_head > 0 or self.last.free_head > 0

    def blend(self, step: int) -> Blend:
        """Losses of one step."""
        if self.first == self.last:
            return self.first
        share = 0.5 - 0.5 * math.cos(math.pi * (step - self.begin + 0.5) / (self.end - self.begin))
        mix = {
            name: (1 - share) * getattr(self.first, name) + share * getattr(self.last, name)
            for name in ("ce", "l1", "kl", "base_ce")
        }
        return Blend(**mix, free_head=self.last.free_head)


@dataclasses.dataclass(frozen=True)
class Plan:
    """All stages of a phase: one optimiser and one schedule run through them.

    Attributes:
        phase: `teacher`, `student` (two-stage) or `single`.
        stages: in order, without gaps.
        learning_rate: at its highest.
    """

    phase: Phase
    stages: tuple[Stage, ...]
    learning_rate: float

    @property
    def steps(self) -> int:
        """Steps of the phase."""
        return self.stages[-1].end

    def stage(self, step: int) -> Stage:
        """The stage of a step."""
        return next(s for s in self.stages if step < s.end)

    def begin_of(self, name: str) -> int:
        """Where a stage begins; 0 for a name that is not there."""
        return next((s.begin for s in self.stages if s.name == name), 0)

    def end_of(self, name: str) -> int:
        """Where a stage ends; the end of the phase for a name that is not there."""
        return next((s.end for s in self.stages if s.name == name), self.steps)


def make_plan(
    phase: Phase,
    teacher: TeacherOptions,
    student: StudentOptions,
    optimizer: OptimizerOptions,
    steps_per_epoch: int,
) -> Plan:
    """The stages of a phase in steps; each that has epochs has a step at least.

    Raises:
        ConfigError: it has no steps, fewer steps than stages, or no loss.
    """
    goal = Blend(ce=student.ce, l1=student.l1, base_ce=student.base_ce)
    rate = optimizer.learning_rate
    if phase == "teacher":
        blend = Blend(ce=teacher.ce, l1=teacher.l1)
        parts, wanted = [("teacher", teacher.epochs, blend, blend)], teacher.steps
        rate = rate if teacher.learning_rate is None else teacher.learning_rate
    elif phase == "single":
        epochs = student.warmup_epochs + student.transition_epochs + student.stable_epochs
        parts, wanted = [("single-stage", epochs, goal, goal)], student.steps
    else:
        warm = Blend(kl=1.0, free_head=0.0)
        parts = [
            ("warmup", student.warmup_epochs, warm, warm),
            ("transition", student.transition_epochs, Blend(kl=1.0), goal),
            ("stable", student.stable_epochs, goal, goal),
        ]
        wanted = student.steps
    parts = [part for part in parts if part[1] > 0]
    total = sum(epochs for _, epochs, _, _ in parts)
    steps = round(total * steps_per_epoch) if wanted is None else wanted
    if not parts or not steps:
        raise ConfigError(f"the {phase} has no steps; set its epochs or steps above 0.")
    if steps < len(parts):
        names = ", ".join(name for name, *_ in parts)
        raise ConfigError(f"the {phase} needs a step for each of {names} at least, but has {steps}; give it more.")
    stages, done, begin = [], 0.0, 0
    for i, (name, epochs, first, last) in enumerate(parts):
        if not any((b.ce, b.l1, b.kl, b.base_ce)[i] for b in (first, last) for i in range(4)):
            raise ConfigError(f"stage {name} has no loss: all weights are 0; set ce or l1 above 0.")
        done += epochs
        # A stage that would round to nothing takes a step from its neighbour.
        end = min(max(round(done / total * steps), begin + 1), steps - (len(parts) - 1 - i))
        stages.append(Stage(name, begin, end, first, last))
        begin = end
    return Plan(phase, tuple(stages), rate)


def learning_rate(step, plan: Plan, options: OptimizerOptions):
    """Linear rise over the first `warmup` share of the steps, then half a cosine down to `final`."""
    rise = max(1, round(options.warmup * plan.steps))
    step = jnp.asarray(step, jnp.float32)
    through = jnp.clip((step - rise) / max(1, plan.steps - rise), 0, 1)
    fall = options.final + (1 - options.final) * (0.5 + 0.5 * jnp.cos(jnp.pi * through))
    return plan.learning_rate * jnp.where(step < rise, (step + 1) / rise, fall)
