"""Averages, and a metrics file that a resumed run continues."""

import json

import numpy as np
import pytest

from jdlite.errors import CheckpointError
from jdlite.training.metrics import Interval, MetricsFile, flatten, read_lines


def figures(scale=1.0):
    return {
        "loss": 2.0 * scale,
        "ce": 1.0,
        "l1": 0.5,
        "kl": 0.0,
        "accept": np.array([6.0, 3.0]),
        "match": np.array([4.0, 0.0]),
        "pairs": np.array([8.0, 6.0]),
        "tau": 10.0,
        "greedy_tau": 9.0,
        "whole": 5.0,
        "anchors": 8.0,
        "tokens": 60.0,
        "gradient_norm": 3.0,
    }


def test_means():
    interval = Interval()
    interval.add(figures())
    interval.add(figures(2.0))
    means = interval.means()
    assert means["loss"] == 3.0
    assert means["accept"] == [0.75, 0.5]
    assert means["match"] == [0.5, 0.0]
    assert (means["tau"], means["greedy_tau"]) == (2.0, 1.8)
    assert (means["anchors"], means["tokens"]) == (8.0, 60.0)
    assert "kl" not in means


def test_sums_survive_json_exactly():
    interval = Interval()
    interval.add({name: value / 3 for name, value in figures().items()})
    again = Interval(json.loads(json.dumps(interval.sums)))
    for each in (interval, again):
        each.add({name: value / 7 for name, value in figures().items()})
    assert interval.sums == again.sums


def test_what_was_not_measured_is_left_out():
    interval = Interval()
    interval.add({**figures(), "l1": 0.0, "kl": 0.4})
    means = interval.means()
    assert {"accept", "tau", "l1"}.isdisjoint(means)
    assert means["kl"] == 0.4
    assert Interval().means() == {}


def test_lines_after_the_checkpoint_are_written_again(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    file = MetricsFile(path, 0)
    for step in (2, 4, 6):
        file.write({"step": step, "kind": "train"})
    file.close()
    with path.open("a") as end:
        end.write('{"step": 8, "ki')  # killed while writing
    file = MetricsFile(path, 4)
    file.write({"step": 6, "kind": "again"})
    file.close()
    assert [(line["step"], line["kind"]) for line in read_lines(path)] == [(2, "train"), (4, "train"), (6, "again")]


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write"):
        MetricsFile(tmp_path / "file" / "metrics.jsonl", 0)


def test_flatten():
    assert flatten({"a": 1, "b": [2.0, 3.0], "c": {"d": 4}, "e": "x", "f": True}) == {
        "a": 1.0,
        "b/1": 2.0,
        "b/2": 3.0,
        "c/d": 4.0,
    }
