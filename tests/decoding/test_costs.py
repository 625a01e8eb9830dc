"""Measured costs and the file that keeps them."""

from __future__ import annotations

import json
import os

import jax.numpy as jnp
import numpy as np
import pytest

from jdlite.decoding.costs import costs_file, draft_file, load_costs, load_draft, measure_costs, save_costs, save_draft
from jdlite.decoding.policy import Costs
from jdlite.drafters.dlite import DLiteDrafter
from tests.learnt import config
from tests.models.dlite_models import random_model
from tests.toys import VOCAB, tiny_model

COSTS = Costs(jnp.array([1.0, 1.25, 3.5]), jnp.array([0.0, 1e-5, 0.3]), (1, 4, 39))


def test_round_trip(tmp_path):
    path = tmp_path / "deep" / "costs.json"
    save_costs(path, COSTS)
    loaded = load_costs(path)
    assert loaded is not None
    assert loaded.counts == COSTS.counts
    np.testing.assert_array_equal(loaded.fixed, COSTS.fixed)
    np.testing.assert_array_equal(loaded.per_token, COSTS.per_token)
    save_costs(path, Costs.free((1, 2)))
    again = load_costs(path)
    assert again is not None
    assert again.counts == (1, 2)
    assert os.listdir(path.parent) == ["costs.json"], "no temporary file is left"


GOOD = {"counts": [1, 4], "fixed": [1.0, 2.0], "per_token": [0.0, 0.0]}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "null",
        "[]",
        "3",
        json.dumps(GOOD | {"counts": None}),
        json.dumps(GOOD | {"counts": ["a", "b"]}),
        json.dumps(GOOD | {"fixed": [1.0]}),
        json.dumps(GOOD | {"fixed": [[1.0, 2.0]]}),
        json.dumps(GOOD | {"fixed": "abc"}),
        json.dumps(GOOD | {"per_token": {}}),
        json.dumps({k: v for k, v in GOOD.items() if k != "per_token"}),
        json.dumps(GOOD | {"fixed": [1.0, float("nan")]}),
        json.dumps(GOOD | {"fixed": [0.0, 1.0]}),
        json.dumps(GOOD | {"fixed": [1.0, -1.0]}),
        json.dumps(GOOD | {"counts": [4, 1]}),
        json.dumps(GOOD | {"counts": [], "fixed": [], "per_token": []}),
        b"\xff\xfe\x00",
    ],
    ids=str,
)
def test_damaged_file_is_no_table(tmp_path, content):
    """A file that cannot be read, or holds costs that make no sense, counts as absent."""
    path = tmp_path / "costs.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert load_costs(path) is None


def test_absent_file_and_folder(tmp_path):
    assert load_costs(tmp_path / "none.json") is None
    assert load_costs(tmp_path) is None


def test_file_name_tells_apart_what_costs_differently(tmp_path):
    model = tiny_model()
    names = {
        costs_file(tmp_path, model, 1),
        costs_file(tmp_path, model, 2),
        costs_file(tmp_path, tiny_model(num_layers=1), 1),
    }
    assert len(names) == 3
    assert costs_file(tmp_path, tiny_model(seed=5), 1) in names, "weights do not matter"


def test_draft_file_tells_apart_what_costs_differently(tmp_path):
    model, network = tiny_model(), random_model(config(VOCAB))
    drafters = [
        DLiteDrafter(model=network),
        DLiteDrafter(model=network, mode="rejection"),
        DLiteDrafter(model=random_model(config(VOCAB, block_size=3))),
        DLiteDrafter(model=random_model(config(VOCAB, rank=5))),
    ]
    names = {draft_file(tmp_path, model, drafter, batch) for drafter in drafters for batch in (1, 2)}
    assert len(names) == 8
    again = DLiteDrafter(model=random_model(config(VOCAB), seed=3))
    assert draft_file(tmp_path, model, again, 1) in names, "weights do not matter"


def test_draft_round_trip(tmp_path):
    path = tmp_path / "deep" / "draft.json"
    assert load_draft(path) is None
    save_draft(path, 0.25)
    assert load_draft(path) == 0.25
    assert os.listdir(path.parent) == ["draft.json"], "no temporary file is left"


@pytest.mark.parametrize("content", ["", "null", "[]", "{}", '{"draft": null}', '{"draft": -1}', '{"draft": NaN}'])
def test_damaged_draft_file_is_none(tmp_path, content):
    path = tmp_path / "draft.json"
    path.write_text(content)
    assert load_draft(path) is None


def test_measured_costs_are_usable():
    said = []
    costs = measure_costs(tiny_model(), (1, 3), capacity=24, repeats=2, progress=said.append)
    fixed, slope = np.asarray(costs.fixed), np.asarray(costs.per_token)
    assert costs.counts == (1, 3)
    assert fixed[0] == 1
    assert fixed[1] >= fixed[0]
    assert (slope >= 0).all()
    assert slope[1] >= slope[0]
    assert np.isfinite(fixed).all()
    assert np.isfinite(slope).all()
    assert said


def test_a_noisy_clock_gives_usable_costs(monkeypatch):
    """Whatever the clock says, costs are positive and more nodes never cost less."""
    rng = np.random.default_rng(0)
    for scale in (1e-3, 10.0):
        now = iter(np.cumsum(scale * rng.random(1000) ** 8))
        monkeypatch.setattr("jdlite.timing.time.perf_counter", lambda now=now: next(now))
        costs = measure_costs(tiny_model(), (1, 3), capacity=24, repeats=2)
        fixed, slope = np.asarray(costs.fixed), np.asarray(costs.per_token)
        assert fixed[0] == 1
        assert fixed[1] >= 1
        assert 0 <= slope[0] <= slope[1]
