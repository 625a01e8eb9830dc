"""What may change between two invocations of a run."""

import pytest

from jdlite.training.identity import differences, flatten_config

INFO = {
    "target": "a",
    "target_hash": "1",
    "steps": 8,
    "train": {
        "seed": 0,
        "target": {"path": "here", "dtype": "float32"},
        "optimizer": {"learning_rate": 0.1},
        "student": {"ce": 0.1},
        "teacher": {"window": 4},
        "checkpoint": {"every": 2},
        "data": {"prefetch": 2, "truncated": "drop"},
        "batch": {"recompute": False},
        "drafter": {"rank": 4},
    },
}


def changed(**values):
    """`INFO` with some values of `train`, by dotted name with `__`."""
    train = {name: dict(v) if isinstance(v, dict) else v for name, v in INFO["train"].items()}
    for name, value in values.items():
        group, _, key = name.partition("__")
        if key:
            train[group][key] = value
        else:
            train[group] = value
    return {**INFO, "train": train}


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"checkpoint__every": 9},
        {"target__path": "there"},
        {"data__prefetch": 0},
        {"batch__recompute": True},
        {"teacher__window": 5},
    ],
)
def test_harmless(values):
    assert differences(INFO, changed(**values), "student") == []


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"optimizer__learning_rate": 0.2}, "optimizer.learning_rate was 0.1, is 0.2"),
        ({"student__ce": 1.0}, "student.ce was 0.1, is 1.0"),
        ({"target__dtype": "bfloat16"}, "target.dtype was 'float32', is 'bfloat16'"),
        ({"seed": 1}, "seed was 0, is 1"),
        ({"student__new": 1}, "student.new was None, is 1"),
    ],
)
def test_refused(values, words):
    assert differences(INFO, changed(**values), "student") == [words]


def test_target_and_length():
    wrong = differences(INFO, {**INFO, "target_hash": "2", "steps": 9}, "single")
    assert wrong == [
        "the target was a with other weights, is a",
        "the phase had 8 steps, has 9 (other data?)",
    ]
    assert differences(INFO, changed(student__ce=1.0), "teacher") == []


def test_flatten():
    assert flatten_config({"a": {"b": (1, 2), "c": {"d": None}}}) == {"a.b": [1, 2], "a.c.d": None}
