"""`python -m jdlite.train`: from a target and prompts to a trained DLite drafter."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jdlite import cli
from jdlite.errors import ConfigError

if TYPE_CHECKING:
    from jdlite.checkpoints.target import Target
    from jdlite.training.config import TrainConfig
    from jdlite.training.stages import Phase
    from jdlite.training.trainer import Outcome

Stages = Literal["all", "regenerate", "teacher", "warmup", "stable", "single-stage"]
# What a shell reports for a process that SIGTERM ended.
STOPPED = 143


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Train a DLite drafter: the target answers prompts, a teacher learns from the answers, the drafter from both.

    Run the same command again after an interruption, and it goes on as if nothing had happened. Everything is kept in
    the `folder` of the configuration. Settings can be changed on the command line:
    `optimizer.learning_rate=1e-4 batch.rows=8`. See docs/training.md.

    Attributes:
        config: YAML file, for example configs/dlite-smollm2-135m.yaml.
        stage: what to run; `all` is regenerate, teacher, warmup and stable. `single-stage` trains the drafter without a
            teacher.
        dry_run: print shapes, parameters, memory, bytes on disk, steps and hours, and stop.
        show_sample: print one example with its supervised tokens coloured, and stop.
        cache_dir: folder for compiled programs and the demo target (default: the user's cache folder).
        distributed: train in several processes, found by JAX (SLURM, Open MPI, TPU pods); run the same command in each.
        coordinator: the same where JAX knows no cluster: where process 0 can be reached by all.
        processes: how many processes there are, with --coordinator.
        process: which of them this is, from 0, with --coordinator.
        overrides: settings as dotted.name=value.
    """

    config: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    stage: Stages = "all"
    dry_run: bool = False
    show_sample: bool = False
    cache_dir: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    distributed: bool = False
    coordinator: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT")] = None
    processes: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    process: Annotated[int | None, tyro.conf.arg(metavar="I")] = None
    overrides: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="NAME=VALUE ...")] = ()


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 0, 2 for bad input, 143 when it was asked to stop."""
    return cli.run(_train, Arguments, arguments, prog="python -m jdlite.train")


def _train(arguments: Arguments) -> int | None:
    from jdlite.training import processes
    from jdlite.training.config import TrainConfig
    from jdlite.training.yaml_config import load

    config = load(TrainConfig, arguments.config, arguments.overrides)
    _join(arguments)
    folder = cli.cache_folder(arguments.cache_dir)
    cli.use_compile_cache(folder)
    if arguments.dry_run:
        from jdlite.training.dry_run import dry_run

        return dry_run(config, arguments.stage, lambda: _load_target(config, folder))
    with processes.together():
        target = _load_target(config, folder)
    dlite = config.dlite(target.config)  # its errors come before anything slow
    check_mask(target, dlite.mask_token_id)
    if arguments.show_sample:
        from jdlite.training.records import Records
        from jdlite.training.sample import show

        show(Records(Path(config.folder).expanduser())[0], target.need_tokenizer())
        return None
    stages = _phases(arguments.stage, config)
    if "regenerate" in stages:
        processes.on_first(lambda: _regenerate(config, target))
    phases = [(p, u) for p, u in stages.items() if p != "regenerate"]
    if phases and config.features.source == "disk":
        from jdlite.training.feature_store import ensure_features

        with cli.stage("Storing the target's states") as update, _now_and_then(update, "tokens") as update:
            ensure_features(config, target, update)
    for phase, until in phases:
        after = "stable" if arguments.stage == "stable" else None
        outcome = _run_phase(config, target, phase, until, after)  # pyright: ignore[reportArgumentType]
        if outcome.stopped:
            _note(
                f"stopped at step {outcome.step} of {outcome.steps} of the {phase}, which is saved; run the same "
                "command to go on."
            )
            return STOPPED
    return None


def _join(arguments: Arguments) -> None:
    """Find the other processes, if there are to be any; the first speaks for all."""
    from jdlite.training import processes

    where = (arguments.coordinator, arguments.processes, arguments.process)
    if not arguments.distributed and where == (None, None, None):
        return
    if arguments.dry_run or arguments.show_sample:
        raise ConfigError("--dry-run and --show-sample are for one process; leave out the options of several.")
    processes.start(*where)
    if not processes.is_first():
        cli.hush()


def _load_target(config: TrainConfig, folder: Path) -> Target:
    from jdlite.training import processes
    from jdlite.training.placement import training_mesh

    devices = training_mesh(config.mesh)
    if devices is None:
        return cli.load_target(config.target.path, config.target.dtype, folder)
    from jdlite.checkpoints.demo import fetch_demo_target
    from jdlite.checkpoints.target import load_target
    from jdlite.models.sharding import placement, shard_model

    if config.target.path == cli.DEMO:
        processes.on_first(lambda: str(cli.fetch_demo(folder, fetch_demo_target)))
        target = cli.load_target(config.target.path, config.target.dtype, folder)
        return dataclasses.replace(target, model=shard_model(target.model, devices))
    with cli.stage("Loading the target") as update:
        return load_target(config.target.path, config.target.dtype, placement=placement(devices), progress=update)


def check_mask(target: Target, mask_token_id: int) -> None:
    """Refuse a mask row that ordinary text uses.

    Raises:
        ConfigError: the token stands for a piece of text.
    """
    tokenizer = target.tokenizer
    if tokenizer is None or mask_token_id >= len(tokenizer):
        return
    special = set(getattr(tokenizer, "all_special_ids", ())) | set(getattr(tokenizer, "added_tokens_decoder", {}))
    piece = tokenizer.convert_ids_to_tokens(mask_token_id)
    used = mask_token_id in {*target.eos_ids, tokenizer.bos_token_id}
    used |= piece in str(getattr(tokenizer, "chat_template", ""))
    if mask_token_id not in special or used:
        raise ConfigError(
            f"drafter.mask_token_id {mask_token_id} is {piece!r}, which texts use; choose an unused special token, or "
            "a row of the embedding past the tokenizer's tokens."
        )


def _phases(stage: Stages, config: TrainConfig) -> dict[str, str | None]:
    """What to run in order: `regenerate`, and phases with the stage that they end after (None: all of it)."""
    if stage == "regenerate":
        return {"regenerate": None}
    if stage == "teacher":
        return {"teacher": None}
    if stage == "single-stage":
        return {"single": None}
    if stage == "warmup":
        if not config.student.warmup_epochs:
            raise ConfigError("there is no warm-up: student.warmup_epochs is 0; run --stage stable.")
        return {"student": "warmup"}
    if stage == "stable":
        return {"student": None}
    taught = config.student.warmup_epochs + config.student.transition_epochs > 0
    begin: dict[str, str | None] = {"regenerate": None} if config.prompts.path else {}
    return begin | ({"teacher": None} if taught else {}) | {"student": None}


def _regenerate(config: TrainConfig, target: Target) -> None:
    from jdlite.training.prompts import read_prompts
    from jdlite.training.regenerate import regenerate

    if not config.prompts.path:
        raise ConfigError("prompts.path is missing; name a JSON Lines file of conversations.")
    p = config.prompts
    prompts = read_prompts(p.path, p.on_error, limit=p.limit)
    note = _note
    if prompts.skipped:
        note(f"{len(prompts.skipped)} malformed rows are left out, the first: {prompts.skipped[0]}")
    if prompts.duplicates:
        note(f"{prompts.duplicates} rows repeat earlier ones and are left out.")
    with cli.stage("Regenerating the answers") as update, _now_and_then(update) as update:
        summary = regenerate(
            target,
            target.need_tokenizer(),
            prompts,
            config.regenerate,
            config.folder,
            turns=p.turns,
            on_error=p.on_error,
            progress=update,
        )
    finish = ", ".join(f"{count} {reason}" for reason, count in sorted(summary.finish.items()))
    note(f"{summary.records} answers ({finish}), {summary.supervised} tokens to learn from.")
    for reason, count in sorted(summary.left_out.items()):
        note(f"{count} prompts are left out: {reason}.")


def _run_phase(config: TrainConfig, target: Target, phase: Phase, until: str | None, after: str | None) -> Outcome:
    from jdlite.training import processes
    from jdlite.training.metrics import FILE, read_lines
    from jdlite.training.report import write_report
    from jdlite.training.trainer import PhaseRun, Report

    with _stop_on_signals() as asked, _bar(phase) as (step, say):
        report = Report(say=say, step=step, stop=asked)
        run = PhaseRun(config, target, phase, report)
        try:
            if after is not None and run.state.step < run.plan.begin_of(after):
                raise ConfigError(
                    f"stage {after} begins at step {run.plan.begin_of(after)}, and this run stands at "
                    f"{run.state.step}; run --stage warmup first."
                )
            used = run.dataset.counts
            left_out = ", ".join(f"{n} {reason}" for reason, n in used.items() if n and reason != "used")
            say(f"{phase}: {used['used']} examples, left out {left_out or 'none'}; {run.plan.steps} steps.")
            outcome = run.run(until)
        finally:
            run.close()

    def report_path() -> str | None:
        # A run that was stopped early may have no line of metrics yet.
        return str(write_report(Path(config.folder).expanduser())) if read_lines(run.folder / FILE) else None

    path = processes.on_first(report_path)
    if path is not None:
        best = (
            f"best tau {outcome.best[0]:.3f} at step {outcome.best[1]}, in {run.folder / 'best'}; "
            if outcome.best
            else ""
        )
        _note(f"{phase}: {best}report: {path}")
    return outcome


@contextlib.contextmanager
def _now_and_then(update: cli.Update, what: str = "answers") -> Iterator[cli.Update]:
    """Where there is no terminal for a bar, a line a minute: the stage may take hours."""
    last = time.monotonic()

    def count(done: int, total: int) -> None:
        nonlocal last
        update(done, total)
        now = time.monotonic()
        if now - last > 60 and not cli.stderr_console().is_terminal:
            last = now
            _note(f"{done}/{total} {what}")

    yield count


def _note(text: str) -> None:
    cli.stderr_console().print(text, markup=False, soft_wrap=True)


@contextlib.contextmanager
def _bar(what: str) -> Iterator[tuple[Callable[[int, int, str], None], Callable[[str], None]]]:
    """A progress bar with the time left on a terminal, a line each time elsewhere; and what prints beside it."""
    console = cli.stderr_console()

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    if not console.is_terminal:
        yield lambda done, total, words: say(f"{done}/{total} {words}"), say
        return
    columns = (
        TextColumn("{task.fields[name]}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=None, name=what)
        yield lambda done, total, words: bar.update(task, completed=done, total=total, description=words), say


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[Callable[[], bool]]:
    """SIGTERM and the first Ctrl-C ask to stop after the current step; a second Ctrl-C interrupts at once."""
    asked = False

    def handle(number, frame):
        nonlocal asked
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked = True

    old = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: asked
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
