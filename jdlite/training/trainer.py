"""One phase of a run: the loop over steps with metrics, evaluations, checkpoints and resumption."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdlite.checkpoints.dlite_orbax import load_dlite_orbax, params_tree, save_dlite_orbax
from jdlite.checkpoints.target import Target
from jdlite.errors import CheckpointError, ConfigError, JdliteError
from jdlite.models.sharding import here
from jdlite.training import processes
from jdlite.training.config import TrainConfig
from jdlite.training.data import Dataset, Split, held_out_prompts, make_dataset
from jdlite.training.evaluate import decoded_tau, held_out_figures
from jdlite.training.feature_store import ensure_features
from jdlite.training.features import target_states
from jdlite.training.identity import differences, tokenizer_hash
from jdlite.training.initialise import Params, Template, random_params, second_moment, target_params
from jdlite.training.metrics import TIME, Interval, Writers
from jdlite.training.placement import Placement
from jdlite.training.run_checkpoint import RunCheckpoints, RunState, quiet_orbax
from jdlite.training.stages import Phase, Stage, learning_rate, make_plan
from jdlite.training.step import Scalars, Step, jit_evaluate, jit_train, make_optimizer
from jdlite.training.yaml_config import to_dict

PHASES: tuple[Phase, ...] = ("teacher", "student", "single")
CHECKPOINTS, BEST = "checkpoints", "best"
# A step number that no run reaches: anchors of held-out rows are always the same.
_HELD_OUT = 2**31 - 1
# States that the low-rank head's start is fitted to.
_MOMENT_STATES = 4096


class TrainingError(JdliteError):
    """Training cannot go on: a loss that is not a number."""


@dataclasses.dataclass
class Report:
    """Where a phase tells what it does; of several processes the first speaks, and any can stop all.

    Attributes:
        say: a sentence.
        step: (steps made, steps in all, a few words).
        stop: asked after every step; True saves and returns.
    """

    say: Callable[[str], None] = lambda text: None
    step: Callable[[int, int, str], None] = lambda done, total, words: None
    stop: Callable[[], bool] = lambda: False


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a phase came to.

    Attributes:
        step: steps made.
        steps: steps of the phase.
        best: the best tau so far and its step, or None.
        stopped: it was asked to stop before its end.
    """

    step: int
    steps: int
    best: tuple[float, int] | None
    stopped: bool


class PhaseRun:
    """A phase, set up and, if there is a checkpoint, at where it was left.

    Args:
        config: of the run.
        target: the frozen target.
        phase: `teacher`, `student` or `single`.
        report: see there.
        dataset: what to train on; by default the records of `config.folder`. Of several processes each gets its rows.

    Raises:
        ConfigError: the configuration differs from that of the checkpoint, or does not fit the target.
        CheckpointError: a checkpoint, the records or the teacher cannot be read.
    """

    def __init__(
        self,
        config: TrainConfig,
        target: Target,
        phase: Phase,
        report: Report | None = None,
        dataset: Dataset | None = None,
    ):
        quiet_orbax()
        self.config, self.target, self.phase = config, target, phase
        report = report or Report()
        self.report = report if processes.is_first() else Report(stop=report.stop)
        self.folder = Path(config.folder).expanduser().absolute() / phase
        number = PHASES.index(phase)
        # Two-stage and single-stage training see the same data in the same order.
        self._key = jax.random.fold_in(jax.random.key(config.seed), min(number, 1))
        self._place = Placement(config)
        self._features = ensure_features(config, target) if config.features.source == "disk" else None
        with processes.together():
            self.dataset = dataset or self._make_dataset(config.batch.rows, config.seed + min(number, 1), "train")
        self.plan = make_plan(phase, config.teacher, config.student, config.optimizer, self.dataset.steps())
        self.dlite = config.teacher_dlite(target.config) if phase == "teacher" else config.dlite(target.config)
        self.template = Template(self.dlite)
        info = self._info()
        processes.check_same(info, "target, data or configuration", "run the same command in all, on the same files")
        # What this process can compute with by itself.
        self._own_target = target if processes.count() == 1 else dataclasses.replace(target, model=here(target.model))
        self._optimizer = make_optimizer(self.plan, config)
        self._teacher_template: Template | None = None
        self._teacher: Params | None = None
        if any(stage.uses_teacher for stage in self.plan.stages):
            self._load_teacher()
        self._batches = iter(self.dataset)
        self._steps: dict[Any, Callable] = {}
        self._evaluate: Callable | None = None
        self._prompts: list[list[int]] | None = None
        self.checkpoints = RunCheckpoints(
            self.folder / CHECKPOINTS,
            keep=config.checkpoint.keep,
            dlite=self.dlite,
            info=info,
            say=self.report.say,
        )
        self.state = self._begin()
        self.interval = Interval(self.state.train["interval"])

    # Setting up.

    def _make_dataset(self, rows: int, seed: int, split: Split) -> Dataset:
        c = self.config
        return make_dataset(
            c.folder,
            c.data,
            batch=rows,
            length=c.batch.length,
            seed=seed,
            micro_rows=c.batch.micro,
            process_index=processes.index(),
            process_count=processes.count(),
            split=split,
            states=self._features,
        )

    def _info(self) -> dict[str, Any]:
        return {
            "target": self.config.target.path,
            "target_hash": self.target.weights_hash,
            "target_fingerprint": self.target.fingerprint,
            "tokenizer_hash": tokenizer_hash(self.target.tokenizer),
            "taps": list(self.dlite.captured_layers),
            "block_size": self.dlite.block_size,
            "phase": self.phase,
            "steps": self.plan.steps,
            "data": getattr(self.dataset, "fingerprint", ""),
            "train": to_dict(self.config),
        }

    def _load_teacher(self) -> None:
        folder = self.folder.parent / "teacher" / CHECKPOINTS
        steps = sorted(int(p.name) for p in folder.glob("*") if p.name.isdigit()) if folder.is_dir() else []
        if not steps:
            raise CheckpointError(
                f"the warm-up needs a teacher, and {folder} holds none; run --stage teacher first, set "
                "student.warmup_epochs=0, or use --stage single-stage."
            )
        network, info = load_dlite_orbax(folder / str(steps[-1]))
        if steps[-1] != info["steps"]:
            raise CheckpointError(
                f"the teacher stands at step {steps[-1]} of {info['steps']}; finish --stage teacher first."
            )
        self._check_origin(info, folder)
        wanted = self.config.teacher_dlite(self.target.config)
        if network.config != wanted:
            raise ConfigError(
                f"the teacher in {folder} has another shape than the configuration gives; train it again in another "
                "folder, or configure it as it was."
            )
        self._teacher_template, self._teacher = Template(network.config), self._place.whole(params_tree(network))

    def _check_origin(self, info: Mapping[str, Any], folder: str | Path) -> None:
        """Refuse a network that was trained for other weights than the target's."""
        theirs, ours = info.get("target_hash"), self.target.weights_hash
        if theirs is not None and theirs != ours:
            raise ConfigError(
                f"the network in {folder} was trained for the target {info.get('target')} with other weights "
                f"({theirs[:12]} instead of {ours[:12]}); use that target, or train anew."
            )

    def _begin(self) -> RunState:
        # Machines of different kinds may round differently.
        params = self._place.whole(processes.broadcast(self._start_params(self.config, self._own_target.model)))
        opt_state = self._place.whole(self._optimizer.init(params))
        restored = self.checkpoints.restore(params, opt_state, self._accept)
        if restored is None:
            train = {"step": 0, "interval": {}, "best": None}
            return RunState(params, opt_state, train, self._batches.get_state())
        self._batches.set_state(restored.data)
        self.report.say(f"{self.phase}: going on at step {restored.step} of {self.plan.steps}.")
        return restored

    def _start_params(self, config: TrainConfig, target) -> Params:
        if config.start is not None and self.phase != "teacher":
            network, info = load_dlite_orbax(config.start, "float32")
            self._check_origin(info, config.start)
            if network.config != self.dlite:
                raise ConfigError(
                    f"start: the drafter in {config.start} has another shape than the configuration gives; configure "
                    "rank, block size, layers and taps as in the checkpoint."
                )
            params = params_tree(network)
        elif config.initialise == "target":
            params = target_params(self.dlite, target, config.seed, self._moment())
        else:
            params = random_params(self.dlite, config.seed)
        if self._teacher is not None:
            # The warm-up starts from the teacher's head, and does not move it.
            params["head"] = jax.tree.map(lambda x: jnp.array(x, copy=True), self._teacher["head"])
        return params

    def _moment(self) -> np.ndarray | None:
        """Second moment of the target's states on the first supervised positions of the data; None on resumption, where
        the parameters only lend their shapes."""
        if self.checkpoints.steps():
            return None
        batches = iter(self.dataset)
        layers = (self.target.config.num_layers - 1,)
        forward = jax.jit(lambda model, batch: target_states(model, batch, layers).hidden)

        def states():
            found = 0
            for batch in map(self._place.rows, batches):
                for number in range(len(batch["tokens"])):
                    part = {name: x[number] for name, x in batch.items()}
                    hidden = part["states"][..., -1, :] if "states" in part else forward(self.target.model, part)
                    hidden, mask = self._place.fetch((hidden, part["loss_mask"]))
                    yield np.asarray(hidden, np.float32)[mask]
                    found += int(mask.sum())
                if found >= _MOMENT_STATES:
                    return

        try:
            return second_moment(states())
        finally:
            batches.close()

    def _accept(self, info: Mapping[str, Any]) -> None:
        """Refuse to go on with another configuration, target or data."""
        wrong = differences(info, self._info(), self.phase)
        if wrong:
            raise ConfigError(
                f"{self.folder} holds a run with another configuration: {'; '.join(wrong)}; configure it as it was, or "
                "choose another folder."
            )

    # Running.

    def run(self, until: str | None = None) -> Outcome:
        """Make steps up to the end of the stage `until`, or of the phase, or until asked to stop.

        Raises:
            TrainingError: a loss is not a number; the step before is saved.
            CheckpointError: something cannot be written; says which step is safe.
        """
        last = self.plan.steps if until is None else self.plan.end_of(until)
        e, every = self.config.evaluation, self.config.checkpoint.every
        writers = Writers(self.folder, self.state.step, tensorboard=e.tensorboard, wandb=e.wandb, say=self.report.say)
        # A line averages steps of one stage only.
        ends = {stage.end for stage in self.plan.stages}
        stopped = False
        began, tokens = time.monotonic(), 0.0
        try:
            while self.state.step < last:
                figures = self._one_step()
                step = self.state.step
                tokens += float(figures["tokens"])
                self.interval.add(figures)
                if step % e.log_every == 0 or step in ends:
                    now = time.monotonic()
                    self._log(writers, now - began, tokens)
                    began, tokens = now, 0.0
                if step % e.every == 0 or step == self.plan.steps:
                    before = time.monotonic()
                    self._watch(writers)
                    began += time.monotonic() - before
                stopped = processes.agree(self.report.stop()) and step < last
                if step % every == 0 or step == last or stopped:
                    self._save(wait=step == last or stopped)
                if stopped:
                    break
            self.checkpoints.wait()
        finally:
            writers.close()
        best = self.state.train["best"]
        return Outcome(self.state.step, self.plan.steps, None if best is None else tuple(best), stopped)

    def close(self) -> None:
        """Give files and threads back."""
        self._batches.close()
        self.checkpoints.close()

    def _save(self, *, wait: bool) -> None:
        self.state.train["interval"] = dict(self.interval.sums)
        self.checkpoints.save(self.state, wait=wait)

    def _one_step(self) -> dict[str, Any]:
        state, step = self.state, self.state.step
        stage = self.plan.stage(step)
        batch = self._place.rows(next(self._batches))
        blend = stage.blend(step)
        scalars = Scalars(*(jnp.float32(v) for v in (blend.ce, blend.l1, blend.kl, blend.base_ce, blend.free_head)))
        teacher = self._teacher if stage.uses_teacher else None
        state.params, state.opt_state, sums = self._train(stage)(
            self.target.model,
            teacher,
            state.params,
            state.opt_state,
            batch,
            jax.random.fold_in(self._key, step),
            scalars,
        )
        figures = jax.device_get(sums)
        if not figures.pop("finite"):
            self._refuse(batch, step, figures)
        state.train["step"] = step + 1
        state.data = self._batches.get_state()
        return figures

    def _refuse(self, batch: Mapping[str, jax.Array], step: int, figures: Mapping[str, Any]) -> None:
        """A loss or gradient that is not a number: nothing was changed by this step; save the one before and stop."""
        path = self.folder / f"bad_batch_{step + 1}.npz"
        self._save(wait=True)
        rows = {name: x.reshape(-1, *x.shape[2:]) for name, x in self._place.fetch(batch).items()}

        def keep() -> str:
            try:
                np.savez_compressed(path, **rows)  # pyright: ignore[reportArgumentType]
                return f"is kept in {path}"
            except OSError as error:
                return f"could not be written to {path} ({error.strerror or error})"

        kept = processes.on_first(keep)
        raise TrainingError(
            f"loss {figures['loss']:.4g} and gradient norm {figures['gradient_norm']:.4g} of step {step + 1} are not "
            f"finite, so training stopped; step {step} is saved and unharmed, and the batch {kept}: lower "
            "optimizer.learning_rate, use float32, or look at that batch."
        )

    def _train(self, stage: Stage) -> Callable:
        kind = (stage.uses_teacher, stage.uses_tokens, stage.uses_l1, stage.uses_base, stage.learns_head)
        if kind not in self._steps:
            self._steps[kind] = jit_train(self.step_of(stage), self._place.replicated)
        return self._steps[kind]

    def step_of(self, stage: Stage) -> Step:
        """The computation of a stage."""
        label = self.config.teacher.label if self.phase == "teacher" else self.config.loss.label
        stored = None if self._features is None else self._features.layers
        return Step(self.config, stage, self.template, self._teacher_template, self._optimizer, label, stored)

    # Watching.

    def _log(self, writers: Writers, seconds: float, tokens: float) -> None:
        state, step = self.state, self.state.step
        stage = self.plan.stage(step - 1)
        means = self.interval.means()
        rate = max(seconds, 1e-9)
        timing = {
            "seconds": seconds,
            "tokens_per_s": tokens / rate,
            "anchors_per_s": self.interval.sums["anchors"] / rate,
        }
        line = {
            "step": step,
            "kind": "train",
            "phase": self.phase,
            "stage": stage.name,
            "epoch": step / self.dataset.steps(),
            "learning_rate": float(learning_rate(step - 1, self.plan, self.config.optimizer)),
            **means,
        }
        writers.write({**line, TIME: timing})
        tau = f", tau {means['tau']:.2f}" if "tau" in means else ""
        words = f"{stage.name}: loss {means['loss']:.4f}{tau}, greedy {means['greedy_tau']:.2f}, "
        words += f"{timing['anchors_per_s']:.0f} anchors/s, {timing['tokens_per_s']:.0f} tokens/s"
        self.report.step(step, self.plan.steps, words)
        self.interval = Interval()
        state.train["interval"] = {}

    def _watch(self, writers: Writers) -> None:
        """Evaluate on held-out text, and keep the drafter if it is the best so far."""
        before = time.monotonic()
        figures = self.evaluate()
        if not figures:
            return
        step = self.state.step
        line = {"step": step, "kind": "held_out", "phase": self.phase, "stage": self.plan.stage(step - 1).name}
        writers.write({**line, **figures, TIME: {"seconds": time.monotonic() - before}})
        score = figures["decoded"]["tau"] if "decoded" in figures else figures["greedy_tau"]
        decoded = f"tau {figures['decoded']['tau']:.3f} by decoding, " if "decoded" in figures else ""
        expected = f"{figures['tau']:.3f} expected" if "tau" in figures else ""
        self.report.say(f"{self.phase}, step {step}: {decoded}{expected} on held-out text.")
        best = self.state.train["best"]
        if best is None or score > best[0]:
            self.state.train["best"] = [score, step]
            processes.on_first(lambda: self._save_best({**self._info(), "step": step, "held_out": figures}))

    def _save_best(self, info: Mapping[str, Any]) -> None:
        network = self.template.build(jax.tree.map(jnp.copy, here(self.state.params)))
        save_dlite_orbax(network, self.folder / BEST, info=info, overwrite=True)

    def evaluate(self) -> dict[str, Any]:
        """Figures on held-out text; empty where nothing is held out."""
        c, e = self.config, self.config.evaluation
        if not c.data.held_out_fraction:
            return {}
        if self._prompts is None:
            prompts = held_out_prompts(c.folder, c.data) if e.prompts else []
            self._prompts = [p for p in prompts if 2 <= len(p) <= e.max_prompt_tokens][: e.prompts]
        figures: dict[str, Any] = {}
        if e.batches:
            figures |= held_out_figures(
                self._held_out_step(), self._held_out(), jax.random.fold_in(self._key, _HELD_OUT)
            )
        if self._prompts:
            figures["decoded"] = processes.on_first(self._decode)
        return figures

    def _decode(self) -> dict[str, Any]:
        e = self.config.evaluation
        network = self.template.build(here(self.state.params), jnp.dtype(self.config.compute_dtype))
        return decoded_tau(
            self._own_target,
            network,
            self._prompts or [],
            max_new_tokens=e.max_new_tokens,
            max_prompt_tokens=e.max_prompt_tokens,
        )

    def _held_out(self):
        batches = iter(self._make_dataset(self.config.batch.micro, self.config.seed, "held_out"))
        try:
            for _, batch in zip(range(self.config.evaluation.batches), batches, strict=False):
                yield self._place.rows(batch)
        finally:
            batches.close()

    def _held_out_step(self) -> Callable:
        if self._evaluate is None:
            step = jit_evaluate(self.step_of(self.plan.stages[-1]), self._place.replicated)
            self._evaluate = step
        return lambda batch, key: self._evaluate(self.target.model, self.state.params, batch, key)  # pyright: ignore
