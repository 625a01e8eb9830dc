"""DLite checkpoints: the official layout and Orbax, written and read strictly and bit for bit."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import jdlite.checkpoints.dlite as layout
from jdlite.checkpoints.dlite import (
    abstract_dlite,
    dlite_config_from_hf,
    dlite_config_to_hf,
    load_dlite,
    save_dlite,
    tensor_names,
)
from jdlite.checkpoints.dlite_orbax import load_dlite_orbax, model_from_params, params_tree, save_dlite_orbax
from jdlite.errors import CheckpointError, ConfigError
from jdlite.models.dlite_config import DLiteConfig
from tests.models.dlite_models import random_model, small

VARIANTS = {
    "student": {},
    "group-6": {"anchor_group_size": 6, "block_size": 5},
    "explicit-taps": {"num_taps": 4, "tap_layers": (4, 0, 2, 3)},
    "teacher": {"draft_history": 128},
    "teacher-layers": {"draft_history": 8, "history_layers": (1, 3)},
    "ablations": {"feature_concat": "feature", "head_output": "lm_head", "context_mode": "stream", "qk_norm": False},
}

# A Qwen3-4B drafter's config.json, spelled out from the documented fields.
OFFICIAL = {
    "architectures": ["DLiteDraftModel"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "initializer_range": 0.02,
    "intermediate_size": 9728,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
    "num_target_layers": 36,
    "block_size": 8,
    "dlite_config": {
        "architecture_version": "dlite_v1",
        "model_role": "pivot_q_student",
        "anchor_group_size": 1,
        "chs_num_layers": 12,
        "target_layer_ids": [0, 1, 5, 8, 12, 16, 19, 23, 27, 30, 34, 35],
        "sequential_head": "rnn",
        "sequential_rank": 320,
        "mask_token_id": 151669,
    },
}


def official(**own) -> dict:
    return {**OFFICIAL, "dlite_config": {**OFFICIAL["dlite_config"], **own}}


def bits(model) -> dict:
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {path: (str(leaf.dtype), np.asarray(leaf.get_value()).tobytes()) for path, leaf in flat}


def test_official_config_is_the_preset():
    assert dlite_config_from_hf(OFFICIAL) == DLiteConfig.qwen3_4b()
    written = dlite_config_to_hf(DLiteConfig.qwen3_4b())
    assert written["dlite_config"] == OFFICIAL["dlite_config"]
    shared = set(OFFICIAL) & set(written) - {"max_position_embeddings", "tie_word_embeddings"}
    assert {key: written[key] for key in shared} == {key: OFFICIAL[key] for key in shared}


@pytest.mark.parametrize("name", VARIANTS)
def test_configs_round_trip_through_json(name):
    config = small(**VARIANTS[name])
    assert dlite_config_from_hf(json.loads(json.dumps(dlite_config_to_hf(config)))) == config


def test_anchor_group_size_may_be_absent():
    for version, group in (("dlite_v1", 1), ("dlite_v2", 2)):
        config = dlite_config_from_hf(official(architecture_version=version, anchor_group_size=None))
        assert config.anchor_group_size == group
    assert dlite_config_from_hf(official(anchor_group_size=6)).anchor_group_size == 6


def test_explicit_layers_of_the_second_version():
    ids = [0, 1, 3, 7, 11, 15, 19, 23, 27, 29, 30, 31]
    config = dlite_config_from_hf(
        official(architecture_version="dlite_v2", target_layer_ids=ids) | {"num_target_layers": 32}
    )
    assert config.taps == tuple(ids)


@pytest.mark.parametrize(
    ("hf", "sentence"),
    [
        (official(model_role="other"), "model_role 'other' is none of pivot_q_student, swa_teacher"),
        (official(sequential_head="markov"), "sequential_head 'markov' is none of rnn"),
        (official(sequential_rank=None, extra=1), "unknown extra; missing sequential_rank"),
        (official(jdlite={"colour": 1}), "unknown jdlite.colour"),
        (official(swa_window_size=32), "swa_window_size in a student"),
        (official(model_role="swa_teacher"), "missing swa_window_size"),
        (official(chs_num_layers=11), "tap_layers must list num_taps layers: got 12 and 11"),
        (official(target_layer_ids=[0, 99], chs_num_layers=2), "must be distinct layers 0..35"),
        ({**OFFICIAL, "block_size": None}, "lacks block_size"),
        ({k: v for k, v in OFFICIAL.items() if k != "dlite_config"}, "lacks dlite_config"),
        ({**OFFICIAL, "dlite_config": []}, "dlite_config must be a table"),
        ({**OFFICIAL, "flux": 1}, "does not know: flux"),
        (
            {**OFFICIAL, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "rope type 'linear'",
        ),
        ({**OFFICIAL, "attention_bias": True}, "attention_bias True"),
    ],
)
def test_configs_that_are_refused(hf, sentence):
    with pytest.raises(ConfigError, match=sentence):
        dlite_config_from_hf(hf)


def test_tensor_names_and_torch_orientation():
    names = tensor_names(abstract_dlite(DLiteConfig.qwen3_4b()))
    shapes = {
        names[path]: tuple(leaf.get_value().shape)
        for path, leaf in nnx.to_flat_state(nnx.state(abstract_dlite(DLiteConfig.qwen3_4b()), nnx.Param))
    }
    D, F, V, R = 2560, 9728, 151936, 320
    layer = {
        "self_attn.q_proj.weight": (4096, D),
        "self_attn.k_proj.weight": (1024, D),
        "self_attn.v_proj.weight": (1024, D),
        "self_attn.o_proj.weight": (D, 4096),
        "self_attn.q_norm.weight": (128,),
        "self_attn.k_norm.weight": (128,),
        "mlp.gate_proj.weight": (F, D),
        "mlp.up_proj.weight": (F, D),
        "mlp.down_proj.weight": (D, F),
        "input_layernorm.weight": (D,),
        "post_attention_layernorm.weight": (D,),
    }
    want = {f"layers.{i}.{name}": shape for i in range(5) for name, shape in layer.items()} | {
        "norm.weight": (D,),
        "layer_depth_embedding.weight": (36, D),
        "context_norm.weight": (D,),
        "sequential_head.prev_token_embedding.weight": (V, R),
        "sequential_head.output_proj.weight": (V, R),
        "sequential_head.state_proj.weight": (2 * R, 2 * R),
        "sequential_head.state_proj.bias": (2 * R,),
        "sequential_head.state_hidden_mlp.weight": (R, R + D),
        "sequential_head.state_hidden_mlp.bias": (R,),
    }
    assert len(want) == 64
    assert shapes == want


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", VARIANTS)
def test_official_layout_round_trip_is_bit_exact(tmp_path, name, dtype):
    model = random_model(small(**VARIANTS[name]), dtype=jnp.dtype(dtype))
    folder = save_dlite(model, tmp_path / "drafter")
    back = load_dlite(folder, dtype)
    assert back.config == model.config
    assert bits(back) == bits(model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drafter"]
    with safe_open(folder / "model.safetensors", framework="numpy") as file:  # another reader agrees on the names
        assert set(file.keys()) == set(tensor_names(model).values())
    again = save_dlite(back, tmp_path / "again")
    for file in ("config.json", "model.safetensors"):
        assert (folder / file).read_bytes() == (again / file).read_bytes()


def test_all_tensor_problems_are_reported_together(tmp_path):
    folder = save_dlite(random_model(small()), tmp_path / "drafter")
    tensors = load_file(folder / "model.safetensors")
    del tensors["norm.weight"], tensors["layers.1.mlp.up_proj.weight"]
    tensors["fc.weight"] = np.zeros((2, 2), np.float32)
    name = "sequential_head.state_proj.weight"
    tensors[name] = np.ascontiguousarray(tensors[name][:, 1:])
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_dlite(folder)
    for part in (
        "missing layers.1.mlp.up_proj.weight; missing norm.weight; unknown fc.weight",
        f"mis-shaped {name} ([10, 9] instead of [10, 10])",
    ):
        assert part in str(caught.value)


def test_rank_of_the_config_must_be_the_weights(tmp_path):
    folder = save_dlite(random_model(small()), tmp_path / "drafter")
    hf = json.loads((folder / "config.json").read_text())
    hf["dlite_config"]["sequential_rank"] = 6
    (folder / "config.json").write_text(json.dumps(hf))
    with pytest.raises(CheckpointError, match=r"prev_token_embedding.weight \(\[23, 5\] instead of \[23, 6\]\)"):
        load_dlite(folder)


def test_values_that_are_not_finite_are_refused(tmp_path):
    model = random_model(small())
    model.norm.scale[...] = model.norm.scale[...].at[3].set(jnp.nan)
    with pytest.raises(CheckpointError, match=r"norm.weight .* NaN or infinite"):
        load_dlite(save_dlite(model, tmp_path / "drafter"))


def test_failed_write_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    folder = save_dlite(random_model(small(), seed=1), tmp_path / "drafter")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    other = random_model(small(), seed=2)
    with pytest.raises(CheckpointError, match="already exists"):
        save_dlite(other, folder)

    def full_disk(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(layout, "write_safetensors", full_disk)
        with pytest.raises(CheckpointError, match="No space left on device"):
            save_dlite(other, folder, overwrite=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]
    save_dlite(other, folder, overwrite=True)
    assert bits(load_dlite(folder)) == bits(other)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["student", "teacher-layers", "ablations"])
def test_orbax_round_trip_is_bit_exact(tmp_path, name, dtype):
    model = random_model(small(**VARIANTS[name]), dtype=jnp.dtype(dtype))
    info = {"target": "tiny", "target_hash": "abc", "steps": 3}
    folder = save_dlite_orbax(model, tmp_path / "step", info=info)
    back, read = load_dlite_orbax(folder)
    assert back.config == model.config
    assert bits(back) == bits(model)
    assert read == info
    assert [path.name for path in tmp_path.iterdir()] == ["step"]


def test_orbax_casts_and_places(tmp_path):
    model = random_model(small())
    folder = save_dlite_orbax(model, tmp_path / "step")
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    asked = []
    back, _ = load_dlite_orbax(folder, "bfloat16", sharding=lambda path, shape: asked.append((path, shape)) or where)
    assert ("head.output.weight", (23, 5)) in asked
    for path, leaf in nnx.to_flat_state(nnx.state(back, nnx.Param)):
        value = leaf.get_value()
        assert value.sharding == where
        original = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))[path].get_value()
        np.testing.assert_array_equal(np.asarray(value), np.asarray(original.astype(jnp.bfloat16)))


def test_orbax_reads_a_step_with_other_items(tmp_path):
    model = random_model(small())
    config = {"schema": 1, "dlite": model.config.to_dict()}
    with ocp.CheckpointManager(tmp_path / "run", item_names=("params", "config", "opt_state")) as manager:
        items = ocp.args.Composite(
            params=ocp.args.StandardSave(params_tree(model)),
            config=ocp.args.JsonSave(config),
            opt_state=ocp.args.StandardSave({"step": jnp.zeros(())}),
        )
        manager.save(3, args=items)
        manager.wait_until_finished()
    assert bits(load_dlite_orbax(tmp_path / "run" / "3")[0]) == bits(model)


def test_orbax_refusals(tmp_path):
    model = random_model(small())
    with pytest.raises(CheckpointError, match="lacks the item params and config"):
        load_dlite_orbax(tmp_path)
    folder = save_dlite_orbax(model, tmp_path / "step")
    with pytest.raises(CheckpointError, match="already exists"):
        save_dlite_orbax(model, folder)
    save_dlite_orbax(model, folder, overwrite=True)
    tree = params_tree(model)
    del tree["norm"]
    tree["extra"] = jnp.zeros(3)
    tree["head"]["output"]["weight"] = jnp.zeros((23, 4))
    with pytest.raises(CheckpointError, match=r"missing norm.scale; unknown extra; mis-shaped head.output.weight"):
        model_from_params(model.config, tree)
    for config, sentence in (
        ({"schema": 9, "dlite": model.config.to_dict()}, "checkpoint schema 9: this version reads 1"),
        ({"other": 1}, "describes no DLite drafter"),
        ({"schema": 1, "dlite": dataclasses.replace(model.config, rank=6).to_dict()}, "mis-shaped head.mix.bias"),
    ):
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            args = ocp.args.Composite(
                params=ocp.args.StandardSave(params_tree(model)), config=ocp.args.JsonSave(config)
            )
            checkpointer.save(tmp_path / "other", args=args, force=True)
        with pytest.raises(CheckpointError, match=sentence):
            load_dlite_orbax(tmp_path / "other")
    for damaged in (folder / "params").rglob("*"):
        if damaged.is_file() and damaged.stat().st_size > 200:
            damaged.write_bytes(damaged.read_bytes()[:50])
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        load_dlite_orbax(folder)
