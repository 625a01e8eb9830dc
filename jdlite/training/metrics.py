"""Metrics of a run: averages between two lines, JSON lines that a resumed run continues, TensorBoard, wandb."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jdlite.errors import CheckpointError
from jdlite.files import atomic_file
from jdlite.training.processes import is_first, on_first

FILE = "metrics.jsonl"
# Everything of a line that may differ between two runs of the same seed.
TIME = "time"


class Interval:
    """Sums of a step's figures since the last line, in float64; the state is JSON and exact.

    Attributes:
        sums: by name, a number or a list with an entry per draft.
    """

    def __init__(self, sums: Mapping[str, Any] | None = None):
        self.sums: dict[str, Any] = dict(sums or {})

    def add(self, figures: Mapping[str, Any]) -> None:
        """Add one step's sums."""
        for name, value in {**figures, "steps": 1.0}.items():
            value = np.asarray(value, np.float64)
            total = value + np.asarray(self.sums.get(name, 0.0))
            self.sums[name] = total.tolist()

    def means(self) -> dict[str, Any]:
        """What a line of metrics says, without what was not measured.

        Keys:
            loss, ce, l1, kl, base_ce: weighted means over drafts.
            accept: per draft, 1 - TV: the probability that rejection sampling keeps it. match: per draft, how often its
                most likely token is the target's.
            tau, greedy_tau: tokens per round that these give, given the data's tokens before each draft.
            gradient_norm, anchors, tokens: per step.
        """
        s = self.sums
        steps = s.get("steps", 0.0)
        if not steps:
            return {}
        out: dict[str, Any] = {}
        measured = [n for n in ("loss", "ce", "l1", "kl", "base_ce", "gradient_norm", "anchors", "tokens") if n in s]
        out |= {name: s[name] / steps for name in measured}
        pairs = np.maximum(np.asarray(s["pairs"]), 1.0)
        out |= {name: (np.asarray(s[name]) / pairs).tolist() for name in ("accept", "match")}
        out |= {name: s[name] / max(s["whole"], 1.0) for name in ("tau", "greedy_tau")}
        if not s["l1"]:  # the target was not looked at
            for name in ("l1", "accept", "tau"):
                out.pop(name)
        if not s["kl"]:
            out.pop("kl")
        return out


class MetricsFile:
    """JSON lines, one object each, with `step` and `kind` first.

    Args:
        path: of the file.
        step: steps that were made; later lines are what a killed run wrote after its last checkpoint, and are removed,
            as they will be written again.

    Raises:
        CheckpointError: the file cannot be written.
    """

    def __init__(self, path: str | Path, step: int):
        self.path = Path(path)
        with self._plain_errors():
            kept = [line for line in read_lines(self.path) if line["step"] <= step]
            with atomic_file(self.path) as file:
                file.writelines(json.dumps(line) + "\n" for line in kept)
            self._file = self.path.open("a", encoding="utf-8")

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line, at once.

        Raises:
            CheckpointError: the file cannot be written.
        """
        with self._plain_errors():
            self._file.write(json.dumps(dict(line)) + "\n")
            self._file.flush()

    def close(self) -> None:
        """No more lines."""
        with contextlib.suppress(OSError):
            self._file.close()

    @contextlib.contextmanager
    def _plain_errors(self):
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"cannot write {self.path} ({error.strerror or error}); free some space and run the same command again."
            ) from error


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """All whole lines of a metrics file; none when there is no file. A last line that was cut is left out."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    lines = []
    for line in text.split("\n"):
        with contextlib.suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict) and "step" in value:
                lines.append(value)
    return lines


class Writers:
    """The file, and TensorBoard and wandb where they are wanted and installed.

    The first process writes; the others must call the same and wait.

    Args:
        folder: of the phase.
        step: steps that were made.
        tensorboard: write event files.
        wandb: project, or None.
        say: called with a sentence when a package is absent.
    """

    def __init__(self, folder: Path, step: int, *, tensorboard: bool, wandb: str | None, say: Callable[[str], None]):
        on_first(lambda: self._open(folder, step, tensorboard, wandb, say))

    def _open(self, folder: Path, step: int, tensorboard: bool, wandb: str | None, say: Callable[[str], None]) -> None:
        self.file = MetricsFile(folder / FILE, step)
        self._board: Any = None
        self._wandb: Any = None
        if tensorboard:
            with contextlib.suppress(ImportError):  # it is an extra; the JSON lines hold everything
                from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]

                self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        if wandb is not None:
            try:
                import wandb as package  # pyright: ignore[reportMissingImports]

                self._wandb = package.init(project=wandb, name=f"{folder.parent.name}-{folder.name}", resume="allow")
            except ImportError:
                say("wandb is not installed; pip install 'jdlite[train-logs]' to log there.")

    def write(self, line: Mapping[str, Any]) -> None:
        """Write one line everywhere."""
        on_first(lambda: self._write(line))

    def _write(self, line: Mapping[str, Any]) -> None:
        self.file.write(line)
        if self._board is None and self._wandb is None:
            return
        flat = {f"{line['kind']}/{name}": value for name, value in flatten(line).items() if name not in ("step",)}
        if self._board is not None:
            for name, value in flat.items():
                self._board.add_scalar(name, value, line["step"])
        if self._wandb is not None:
            self._wandb.log(flat, step=line["step"])

    def close(self) -> None:
        """No more lines."""
        if not is_first():
            return
        self.file.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


def flatten(line: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Numbers of a line by name; entries of lists are numbered from 1, `accept/1`."""
    flat: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}/")
        elif isinstance(value, list):
            flat |= flatten({str(i): v for i, v in enumerate(value, 1)}, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            flat[prefix + name] = float(value)
    return flat
