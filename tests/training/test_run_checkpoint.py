"""Checkpoints of a run: what is saved comes back; what does not fit is named."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdlite.checkpoints.dlite_orbax import load_dlite_orbax
from jdlite.errors import CheckpointError, ConfigError
from jdlite.models.dlite_config import DLiteConfig
from jdlite.training.initialise import random_params
from jdlite.training.run_checkpoint import RunCheckpoints, RunState

ADAM = optax.adamw(1e-3)


def state(step, config=None, seed=0):
    params = random_params(config or DLiteConfig.tiny(), seed)
    opt_state = ADAM.init(params)
    train = {"step": step, "interval": {"loss": 0.1 + step / 3}, "best": None}
    return RunState(params, opt_state, train, {"next": step})


def checkpoints(folder, config=None, said=None, **options):
    say = (said if said is not None else []).append
    fields = {"keep": 2, "dlite": config or DLiteConfig.tiny(), "info": {"who": "test"}, "say": say}
    return RunCheckpoints(folder, **(fields | options))


def test_what_is_saved_comes_back_exactly(tmp_path):
    store = checkpoints(tmp_path)
    for step in (1, 2, 3):
        store.save(state(step, seed=step))
    store.wait()
    assert (store.steps(), store.saved) == ([2, 3], 3)
    store.close()
    seen = []
    fresh, wanted = state(0), state(3, seed=3)
    again = checkpoints(tmp_path)
    restored = again.restore(fresh.params, fresh.opt_state, seen.append)
    assert restored is not None
    assert (restored.train, restored.data) == (wanted.train, wanted.data)
    for a, b in zip(
        *map(jax.tree.leaves, ((restored.params, restored.opt_state), (wanted.params, wanted.opt_state))), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    assert jax.tree.structure(restored.opt_state) == jax.tree.structure(wanted.opt_state)
    assert seen == [{"who": "test"}]
    again.close()
    # A step is a drafter's checkpoint too.
    network, info = load_dlite_orbax(tmp_path / "3")
    assert (network.config, info) == (DLiteConfig.tiny(), {"who": "test"})


def test_saving_copies(tmp_path):
    """The buffers may be given up or overwritten as soon as `save` returns."""
    store, one = checkpoints(tmp_path), state(1)
    wanted = jax.device_get(one.params)
    bump = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    store.save(one)
    one.params = bump(one.params)
    store.wait()
    restored = store.restore(one.params, one.opt_state, lambda info: None)
    assert restored is not None
    for a, b in zip(*map(jax.tree.leaves, (restored.params, wanted)), strict=True):
        np.testing.assert_array_equal(a, b)
    store.close()


def test_an_empty_folder_has_nothing_to_restore(tmp_path):
    store = checkpoints(tmp_path)
    assert store.restore({}, {}, lambda info: None) is None
    store.close()


@pytest.mark.parametrize("item", ["params", "train", "config"])
def test_damage_is_passed_over(tmp_path, item):
    said = []
    store = checkpoints(tmp_path, said=said)
    for step in (1, 2):
        store.save(state(step), wait=True)
    for path in (tmp_path / "2" / item).rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    fresh = state(0)
    restored = store.restore(fresh.params, fresh.opt_state, lambda info: None)
    assert restored is not None
    assert restored.step == 1
    assert "2 is damaged" in said[0]
    store.save(state(2), wait=True)
    assert store.steps() == [1, 2]
    store.close()


def test_nothing_but_damage_is_an_error(tmp_path):
    store = checkpoints(tmp_path)
    store.save(state(1), wait=True)
    for path in (tmp_path / "1").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    fresh = state(0)
    with pytest.raises(CheckpointError, match=r"all checkpoints .* are damaged"):
        store.restore(fresh.params, fresh.opt_state, lambda info: None)
    store.close()


def test_other_arrays_are_named(tmp_path):
    store = checkpoints(tmp_path)
    one = state(1)
    store.save(one, wait=True)
    other = {**one.params, "extra": jnp.zeros(2)}
    other["norm"] = {"scale": jnp.zeros(7)}
    other["context_norm"] = {"scale": one.params["context_norm"]["scale"].astype(jnp.bfloat16)}
    with pytest.raises(CheckpointError) as error:
        store.restore(other, one.opt_state, lambda info: None)
    for words in (
        "missing extra",
        "norm.scale is float32[32] instead of float32[7]",
        "context_norm.scale is float32[32] instead of bfloat16[32]",
    ):
        assert words in str(error.value)
    store.close()


def test_another_drafter_is_refused(tmp_path):
    store = checkpoints(tmp_path)
    one = state(1)
    store.save(one, wait=True)
    store.close()
    other = checkpoints(tmp_path, DLiteConfig.tiny(block_size=4))
    with pytest.raises(ConfigError, match="block_size: 8 is stored, 4 is configured"):
        other.restore(one.params, one.opt_state, lambda info: None)
    other.close()
