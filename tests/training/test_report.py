"""The report has the curves and the figures that were measured, and says when there are none."""

import json

import pytest

from jdlite.errors import CheckpointError
from jdlite.training.report import write_report


def metrics(folder, phase, stages):
    lines = []
    for step, stage in enumerate(stages, 1):
        line = {"step": step, "kind": "train", "stage": stage, "loss": 1 / step, "time": {"tokens_per_s": 5.0}}
        lines.append(line | ({"kl": 0.5} if stage == "warmup" else {"l1": 0.4}))
    held_out = {"step": len(stages), "kind": "held_out", "stage": stages[-1], "tau": 1.25, "greedy_tau": 1.5}
    lines.append(held_out | {"accept": [0.5, 0.25], "decoded": {"tau": 1.375}})
    path = folder / phase / "metrics.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_report(tmp_path):
    metrics(tmp_path, "teacher", ["teacher"] * 3)
    metrics(tmp_path, "student", ["warmup", "warmup", "stable"])
    path = write_report(tmp_path)
    text = path.read_text()
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    for words in ("teacher", "two-stage student", "1.250", "1.375", "1.500", "0.50 0.25", "data:image/png;base64,"):
        assert words in text
    assert "http" not in text.replace("http-equiv", "")


def test_a_folder_without_metrics(tmp_path):
    with pytest.raises(CheckpointError, match="holds no metrics"):
        write_report(tmp_path)
