"""Strict YAML configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest

from jdlite.errors import ConfigError
from jdlite.models.dlite_config import DLiteConfig
from jdlite.training.yaml_config import from_dict, load, to_dict


@dataclasses.dataclass(frozen=True)
class Optimizer:
    learning_rate: float = 5e-4
    betas: tuple[float, float] = (0.9, 0.999)
    name: str = "adamw"

    def __post_init__(self):
        if self.learning_rate <= 0:
            raise ConfigError(f"learning_rate must be positive: got {self.learning_rate}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    target: str
    steps: int = 10
    fast: bool = False
    mode: Literal["off", "on", "auto"] = "auto"
    width: Literal[8, 16] = 8
    layers: tuple[int, ...] | None = None
    limit: int | Literal["all"] = "all"
    folder: Path = Path("out")
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer, metadata={"doc": "how to step"})
    teacher: Optimizer | None = None
    free: dict[str, Any] = dataclasses.field(default_factory=dict)
    drafter: Mapping[str, Any] = dataclasses.field(
        default_factory=dict, metadata={"partial": DLiteConfig, "extra": ("preset",)}
    )


FULL = """\
# a comment
target: some/model
steps: 1_000
fast: true
mode: off
width: 16
layers: [0, 3]
limit: 7
folder: runs/a
optimizer:
  learning_rate: 1e-4
  betas: [0.9, 1]
teacher: {name: "123"}
free: {a: 1, b: [x, 2.5], c: null}
drafter:
  preset: tiny
  rank: 4
  norm_eps: 1e-6
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def test_every_type_is_read(tmp_path):
    assert load(Run, write(tmp_path, FULL)) == Run(
        target="some/model",
        steps=1000,
        fast=True,
        mode="off",
        width=16,
        layers=(0, 3),
        limit=7,
        folder=Path("runs/a"),
        optimizer=Optimizer(1e-4, (0.9, 1.0)),
        teacher=Optimizer(name="123"),
        free={"a": 1, "b": ["x", 2.5], "c": None},
        drafter={"preset": "tiny", "rank": 4, "norm_eps": 1e-6},
    )


def test_dictionaries_round_trip(tmp_path):
    run = load(Run, write(tmp_path, FULL))
    values = to_dict(run)
    assert values["optimizer"] == {"learning_rate": 1e-4, "betas": [0.9, 1.0], "name": "adamw"}
    assert values["layers"] == [0, 3]
    assert values["folder"] == "runs/a"
    assert from_dict(Run, values) == run
    assert from_dict(Run, {"target": "no", "fast": True, "teacher": None}) == Run(target="no", fast=True)


def test_overrides_are_read_by_the_type_of_their_field(tmp_path):
    path = write(tmp_path, "target: a\noptimizer:\n  name: sgd\n")
    run = load(
        Run,
        path,
        [
            "optimizer.learning_rate=1e-4",
            "layers=[1, 2]",
            "fast=true",
            "teacher.name=lion",
            "target=x=y",
            "drafter.rank=2",
            "mode=on",
            "steps=1",
            "steps=2",
        ],
    )
    assert run.optimizer == Optimizer(1e-4, name="sgd")
    assert run.teacher == Optimizer(name="lion")
    assert (run.layers, run.fast, run.target, run.mode, run.steps) == ((1, 2), True, "x=y", "on", 2)
    assert run.drafter == {"rank": 2}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("target: a\nstep: 3\n", r"run.yaml, line 2: 'step' is unknown; known are target, steps"),
        ("target: a\noptimizer:\n  lr: 3\n", r"line 3: 'lr' is unknown in optimizer; known are learning_rate"),
        ("target: a\nsteps: 1.5\n", r"line 2: steps must be a whole number: got 1.5\.$"),
        ("target: a\nsteps: '3'\n", r"line 2: steps must be a whole number: got '3'"),
        ("target: a\n\nfast: 1\n", r"line 3: fast must be true or false: got 1"),
        ("target: a\nfast: yes\n", r"line 2: fast must be true or false: got yes"),
        ("target: 12\n", r"line 1: target must be a text \(put it in quotes\): got 12"),
        ("target: a\nsteps: null\n", r"line 2: steps must be a whole number: got null"),
        ("target: a\nmode: maybe\n", r"line 2: mode must be one of off, on, auto: got 'maybe'"),
        ("target: a\nwidth: 9\n", r"line 2: width must be one of 8, 16: got 9"),
        ("target: a\nlimit: 1.5\n", r"line 2: limit must be "),
        ("target: a\nlayers: 3\n", r"line 2: layers must be a list, written \[a, b\]: got 3"),
        ("target: a\nlayers:\n - 0\n - x\n", r"line 4: layers\[1\] must be a whole number: got 'x'"),
        ("target: a\noptimizer: {betas: [1]}\n", r"line 2: optimizer.betas must have 2 entries: got 1"),
        ("target: a\noptimizer: fast\n", r"line 2: optimizer must be a mapping of settings: got 'fast'"),
        ("target: a\nsteps: {a: 1}\n", r"line 2: steps must be a whole number: got a mapping"),
        ("target: a\n\noptimizer:\n  learning_rate: -1\n", r"line 3: optimizer: learning_rate must be positive"),
        ("target: a\ndrafter:\n  ranks: 3\n", r"line 3: 'ranks' is unknown in drafter; known are preset, vocab_size"),
        ("target: a\ndrafter:\n  rank: big\n", r"line 3: drafter.rank must be a whole number: got 'big'"),
        ("target: a\ntarget: b\n", r"line 2: 'target' is given twice"),
        ("steps: 3\n", r"target is missing; give it a value"),
        ("", r"target is missing"),
        ("- 3\n", r"the configuration must be a mapping of settings: got a list"),
        ("target: [a\n", r"line 2: not valid YAML"),
        ("target: a\n? [x]\n: 3\n", r"line 2: a key must be a name"),
    ],
)
def test_errors_name_file_line_and_key(tmp_path, text, expected):
    with pytest.raises(ConfigError, match=expected):
        load(Run, write(tmp_path, text))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("steps", r"an override must be written dotted.name=value: got 'steps'"),
        ("optimizer..x=3", "dotted.name=value"),
        ("steps=many", r"override 'steps=many': steps must be a whole number"),
        ("optimizer.rate=3", r"override 'optimizer.rate=3': 'rate' is unknown in optimizer"),
        ("target.name=3", r"override 'target.name=3': target is 'a', not a group"),
        ("layers=[1", "the value is not valid YAML"),
    ],
)
def test_errors_name_the_override(tmp_path, override, expected):
    with pytest.raises(ConfigError, match=expected):
        load(Run, write(tmp_path, "target: a\n"), [override])


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none.yaml cannot be read .*; give a YAML file"):
        load(Run, tmp_path / "none.yaml")
