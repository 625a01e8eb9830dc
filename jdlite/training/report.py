"""Curves of a run: one HTML page without outside files, and the same figure as PNG."""

from __future__ import annotations

import base64
import html
import io
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jdlite.errors import CheckpointError
from jdlite.training.metrics import FILE, TIME, read_lines

Lines = Sequence[Mapping[str, Any]]
_NAMES = {"teacher": "teacher", "student": "two-stage student", "single": "single-stage student"}


def read_run(folder: str | Path) -> dict[str, list[dict[str, Any]]]:
    """Metrics of all phases of a run, by phase; phases without any are left out.

    Raises:
        CheckpointError: there are none at all.
    """
    found = {phase: read_lines(Path(folder) / phase / FILE) for phase in _NAMES}
    found = {phase: lines for phase, lines in found.items() if lines}
    if not found:
        raise CheckpointError(f"{folder} holds no metrics; give the folder of a training run.")
    return found


def write_report(folder: str | Path) -> Path:
    """Write `report.html` and `report.png` into the run's folder.

    Raises:
        CheckpointError: there are no metrics, or the folder cannot be written.
    """
    folder = Path(folder)
    run = read_run(folder)
    png = draw(run)
    try:
        (folder / "report.png").write_bytes(png)
        path = folder / "report.html"
        path.write_text(page(folder.name, run, png), encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot write the report in {folder} ({error.strerror or error}).") from error
    return path


def _series(lines: Lines, kind: str, *path: str | int) -> tuple[list[int], list[float]]:
    """Steps and values of one figure, where it was measured."""
    steps, values = [], []
    for line in lines:
        value: Any = line if line["kind"] == kind else None
        for key in path:
            if isinstance(value, Mapping):
                value = value.get(str(key))
            elif isinstance(value, list) and isinstance(key, int) and key < len(value):
                value = value[key]
            else:
                value = None
        if isinstance(value, int | float):
            steps.append(line["step"])
            values.append(float(value))
    return steps, values


def draw(run: Mapping[str, Lines]) -> bytes:
    """The curves as PNG: a row per phase with loss, tau, acceptance by position and speed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 3.6 * len(run)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(run), 4, squeeze=False)
    for row, (phase, lines) in zip(axes, run.items(), strict=True):
        loss, tau, accept, speed = row
        loss.set_title(f"{_NAMES[phase]}: loss")
        for name in ("loss", "ce", "l1", "kl"):
            steps, values = _series(lines, "train", name)
            if steps:
                loss.plot(steps, values, label=name, linewidth=1)
        tau.set_title("tau on held-out text")
        for label, path in {
            "decoded, greedy": ("decoded", "tau"),
            "expected, sampled": ("tau",),
            "expected, greedy": ("greedy_tau",),
        }.items():
            steps, values = _series(lines, "held_out", *path)
            if steps:
                tau.plot(steps, values, label=label, marker=".", linewidth=1)
        accept.set_title("1 - TV by draft, held-out text")
        for i in range(16):
            steps, values = _series(lines, "held_out", "accept", i)
            if steps:
                accept.plot(steps, values, label=f"draft {i + 1}", linewidth=1)
        speed.set_title("tokens per second")
        steps, values = _series(lines, "train", TIME, "tokens_per_s")
        if steps:
            speed.plot(steps, values, linewidth=1)
        for axis in row:
            axis.set_xlabel("step")
            axis.grid(alpha=0.3)
            if axis.get_legend_handles_labels()[0]:
                axis.legend(fontsize=7)
        _shade_stages(row, lines)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def _shade_stages(row: Any, lines: Lines) -> None:
    """A vertical line where a stage ends."""
    train = [line for line in lines if line["kind"] == "train"]
    for before, after in itertools.pairwise(train):
        if before["stage"] != after["stage"]:
            for axis in row:
                axis.axvline(before["step"], color="grey", linestyle=":", linewidth=1)


def page(title: str, run: Mapping[str, Lines], png: bytes) -> str:
    """The HTML page."""
    parts = [
        "<!doctype html><meta charset='utf-8'>",
        f"<title>{html.escape(title)}</title>",
        "<style>body{font:15px sans-serif;margin:2em;max-width:1400px}table{border-collapse:collapse}"
        "td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}img{max-width:100%}</style>",
        f"<h1>Training run {html.escape(title)}</h1>",
        f"<img alt='curves' src='data:image/png;base64,{base64.b64encode(png).decode()}'>",
    ]
    for phase, lines in run.items():
        parts.append(f"<h2>{_NAMES[phase]}</h2>")
        parts.append(_table([line for line in lines if line["kind"] == "held_out"][-20:]))
        last = next((line for line in reversed(lines) if line["kind"] == "train"), None)
        if last is not None:
            parts.append(f"<p>Last line of training metrics:</p><pre>{html.escape(json.dumps(last, indent=1))}</pre>")
    return "\n".join(parts) + "\n"


def _table(lines: Lines) -> str:
    if not lines:
        return "<p>Nothing was measured on held-out text.</p>"
    head = "<tr><th>step<th>stage<th>tau, decoded<th>tau, expected<th>tau, greedy expected<th>1 - TV by draft</tr>"
    rows = []
    for line in lines:
        decoded = line.get("decoded", {}).get("tau")
        accept = " ".join(f"{value:.2f}" for value in line.get("accept", []))
        cells = [
            line["step"],
            line["stage"],
            _number(decoded),
            _number(line.get("tau")),
            _number(line.get("greedy_tau")),
        ]
        rows.append("<tr>" + "".join(f"<td>{html.escape(str(cell))}" for cell in [*cells, accept]) + "</tr>")
    return f"<table>{head}{''.join(rows)}</table>"


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.3f}"
