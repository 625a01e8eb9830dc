"""States on disk: equal to a forward of each example alone, made once, resumed after a kill, remade for other data."""

import errno
import os

import jax.numpy as jnp
import numpy as np
import pytest

from jdlite.errors import CheckpointError
from jdlite.training import feature_store
from jdlite.training.feature_store import STATES, FeatureStore, ensure_features, store_bytes
from jdlite.training.records import Records
from jdlite.training.trainer import PhaseRun
from tests.training.tiny_run import config, store, target

DISK = ("features.source=disk", "features.dtype=float32")


def test_states_are_those_of_each_example_alone(tmp_path):
    store(tmp_path)
    found = ensure_features(config(tmp_path, *DISK), target())
    records, model = Records(tmp_path), target().model
    assert found.layers == (0, 1, 2)
    for i, example in enumerate(records):
        T = example.tokens.size
        mask = jnp.tril(jnp.ones((1, T, T), bool))
        out = model(
            jnp.asarray(example.tokens)[None], jnp.arange(T)[None], mask, model.init_cache(1, 0), taps=found.layers
        )
        wanted = jnp.stack([*out.taps, out.hidden], axis=2)[0]
        np.testing.assert_allclose(found[i], wanted, atol=1e-5)
    assert (tmp_path / "features" / STATES).stat().st_size == store_bytes(12 * 12, 3, 16, "float32")


@pytest.mark.parametrize("phase", ["teacher", "single"])
def test_training_from_disk_equals_training_online(tmp_path, phase):
    store(tmp_path)
    figures = []
    for overrides in ((), DISK):
        run = PhaseRun(config(tmp_path, f"folder={tmp_path}", *overrides), target(), phase)
        sums = [run._one_step() for _ in range(3)]
        figures.append([(s["loss"], s["ce"], s["gradient_norm"], *s["accept"]) for s in sums])
        held_out = run.evaluate()
        figures[-1].append((held_out["tau"], held_out["greedy_tau"], held_out["ce"], 0, 0, 0))
        run.close()
    np.testing.assert_allclose(np.array(figures[1]), np.array(figures[0]), rtol=1e-4)


class Killed(Exception):
    """Stands for the end of the process."""


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interrupted_writing_goes_on(tmp_path, monkeypatch, at):
    monkeypatch.setattr(feature_store, "_EVERY", 1)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        store(folder)
    ensure_features(config(whole, *DISK), target())
    calls = []

    def kill(done, total):
        calls.append(done)
        if len(calls) == at:
            raise Killed

    with pytest.raises(Killed):
        ensure_features(config(parts, *DISK), target(), kill)
    assert not (parts / "features").exists()
    rest = []
    ensure_features(config(parts, *DISK), target(), lambda done, total: rest.append(done))
    assert calls[:at] == sorted(calls)
    assert rest[0] > calls[-1]
    assert rest[-1] == 12 * 12
    assert (parts / "features" / STATES).read_bytes() == (whole / "features" / STATES).read_bytes()
    assert sorted(p.name for p in (parts / "features").iterdir()) == ["index.json", STATES]


def test_states_are_made_once_and_again_for_other_data(tmp_path):
    store(tmp_path)
    made = []
    progress = lambda done, total: made.append(done)  # noqa: E731
    ensure_features(config(tmp_path, *DISK), target(), progress)
    assert made
    made.clear()
    ensure_features(config(tmp_path, *DISK, "optimizer.learning_rate=0.5"), target(), progress)
    assert not made
    ensure_features(config(tmp_path, "features.source=disk", "features.dtype=bfloat16"), target(), progress)
    assert made
    made.clear()
    store(tmp_path, 9)
    found = ensure_features(config(tmp_path, *DISK), target(), progress)
    assert made
    assert found.sizes.tolist() == [12] * 9


def test_damaged_or_missing_states_are_one_sentence(tmp_path):
    with pytest.raises(CheckpointError, match="missing or damaged"):
        FeatureStore(tmp_path)
    store(tmp_path)
    ensure_features(config(tmp_path, *DISK), target())
    states = tmp_path / "features" / STATES
    states.write_bytes(states.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="delete that folder"):
        ensure_features(config(tmp_path, *DISK), target())


def test_no_space_left(tmp_path, monkeypatch):
    store(tmp_path)

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(feature_store.os, "fsync", full)
    with pytest.raises(CheckpointError, match="free some space and run the same command again"):
        ensure_features(config(tmp_path, *DISK), target())
