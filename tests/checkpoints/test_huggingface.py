"""Hugging Face folders: round trips are bit-exact, transformers loads the export, every fault is named."""

import importlib.util
import json
import shutil
import struct

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
from flax import nnx

from jdlite.checkpoints.assemble import all_finite, parameter_paths
from jdlite.checkpoints.huggingface import load_huggingface, save_huggingface
from jdlite.checkpoints.safetensors_file import read_safetensors, write_safetensors
from jdlite.errors import CheckpointError, ConfigError
from jdlite.models.config import DecoderConfig
from jdlite.models.decoder import Decoder
from tests.models.parity import CASES, GOLDEN, rows_of, torch_outputs

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


def raw_tensors(folder):
    """Name to (dtype, shape, bytes) of all safetensors of a folder, by a reader of the format that is not jdlite's."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, entry in safetensors.deserialize(path.read_bytes()):
            tensors[name] = entry["dtype"], tuple(entry["shape"]), bytes(entry["data"])
    return tensors


def edited(folder, tmp_path, edit):
    """A copy of a single-file folder whose tensors went through `edit(dict of numpy arrays)`."""
    copy = tmp_path / "edited"
    shutil.copytree(folder, copy)
    tensors = {name: tensor.read(()) for name, tensor in read_safetensors(copy / "model.safetensors").items()}
    edit(tensors)
    entries = [(name, a.dtype, a.shape, lambda a=a: a) for name, a in tensors.items()]
    write_safetensors(copy / "model.safetensors", entries)
    return copy


@pytest.fixture
def golden():
    return GOLDEN / "qwen3"


@pytest.mark.parametrize("name", CASES)
def test_round_trip_is_bit_exact(name, tmp_path):
    folder = GOLDEN / name
    model = load_huggingface(folder, "bfloat16")
    assert model.dtype == jnp.bfloat16
    saved = save_huggingface(model, tmp_path / "saved")
    assert raw_tensors(saved) == raw_tensors(folder)
    assert load_huggingface(saved, "bfloat16").config == model.config


def test_shards_hold_the_same_and_respect_the_limit(golden, tmp_path):
    model = load_huggingface(golden, "float16")
    whole = save_huggingface(model, tmp_path / "whole")
    sharded = save_huggingface(model, tmp_path / "sharded", max_shard_bytes=4000)
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    files = sorted(sharded.glob("*.safetensors"))
    assert len(files) > 2
    assert raw_tensors(sharded) == raw_tensors(whole)
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in raw_tensors(whole).values())
    for path in files:
        assert sum(len(entry["data"]) for _, entry in safetensors.deserialize(path.read_bytes())) <= 4000
    again = load_huggingface(sharded, "float16")
    for a, b in zip(parameter_paths(model).values(), parameter_paths(again).values(), strict=True):
        np.testing.assert_array_equal(a.get_value(), b.get_value())


@needs_torch
@pytest.mark.parametrize("name", CASES)
def test_transformers_loads_the_export(name, tmp_path):
    import transformers

    model = load_huggingface(GOLDEN / name)
    folder = save_huggingface(model, tmp_path / "saved", max_shard_bytes=9000, generation={"eos_token_id": 3})
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert theirs.generation_config.eos_token_id == 3
    rows = rows_of(CASES[name]["vocab_size"])
    with np.load(GOLDEN / name / "outputs.npz") as saved:
        for b, (logits, _) in enumerate(torch_outputs(theirs.eval().float(), rows)):
            np.testing.assert_allclose(logits, saved[f"logits_{b}"], rtol=0, atol=1e-5)


def test_values_are_cast(golden):
    wide, narrow = load_huggingface(golden), load_huggingface(golden, "bfloat16")
    np.testing.assert_array_equal(wide.embed.weight[...], narrow.embed.weight[...].astype(jnp.float32))


def test_loading_allocates_no_weights_before_it_reads_them(golden, tmp_path):
    """A config of hundreds of terabytes is compared with the file, which only a build of shapes survives."""
    shutil.copytree(golden, tmp_path / "huge")
    config = json.loads((golden / "config.json").read_text()) | {"vocab_size": 10**9, "hidden_size": 10**5}
    (tmp_path / "huge" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"mis-shaped .*\[61, 16\] instead of \[1000000000, 100000\]"):
        load_huggingface(tmp_path / "huge")


def test_a_stored_head_equal_to_the_tied_embedding_is_accepted(golden, tmp_path):
    def edit(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    load_huggingface(edited(golden, tmp_path, edit))


def test_a_stored_head_that_differs_from_the_tied_embedding_is_refused(golden, tmp_path):
    def edit(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    with pytest.raises(CheckpointError, match=r"ties the LM head to the embedding, but lm_head\.weight differs"):
        load_huggingface(edited(golden, tmp_path, edit))


def test_rotary_buffers_of_old_checkpoints_are_passed_over(tmp_path):
    def edit(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)

    load_huggingface(edited(GOLDEN / "smollm2", tmp_path, edit))


def test_all_faults_of_the_tensors_are_reported_together(golden, tmp_path):
    def edit(tensors):
        del tensors["model.norm.weight"]
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(32, np.float32)
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:-1]

    with pytest.raises(CheckpointError) as caught:
        load_huggingface(edited(golden, tmp_path, edit))
    message = str(caught.value)
    assert "missing model.layers.1.mlp.up_proj.weight, model.norm.weight;" in message
    assert "unknown model.layers.0.self_attn.q_proj.bias;" in message
    assert "mis-shaped model.embed_tokens.weight [60, 16] instead of [61, 16]" in message


def test_nan_weights_are_refused(golden, tmp_path):
    def edit(tensors):
        tensors["model.norm.weight"][3] = np.nan

    with pytest.raises(CheckpointError, match=r"tensor model\.norm\.weight of .* has values that are NaN or infinite"):
        load_huggingface(edited(golden, tmp_path, edit))


def test_values_too_large_for_the_dtype_are_refused(golden, tmp_path):
    def edit(tensors):
        tensors["model.norm.weight"] = np.full(16, 1e6, np.float32)

    with pytest.raises(CheckpointError, match="NaN or infinite as float16"):
        load_huggingface(edited(golden, tmp_path, edit), "float16")


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_all_finite(dtype, bad):
    good = np.array([0.0, -1.5, 60_000.0], dtype)
    assert all_finite(good)
    assert not all_finite(np.append(good, np.array([bad], dtype)))


@pytest.mark.parametrize("kept", [4, 100, 5000])
def test_a_truncated_file_is_refused(golden, tmp_path, kept):
    shutil.copytree(golden, tmp_path / "cut")
    path = tmp_path / "cut" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"truncated|not a complete safetensors file") as caught:
        load_huggingface(tmp_path / "cut")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}', "do not fit its shape"),
        (
            b'{"a": {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}}',
            r"dtype is not F32, F16 or BF16: a \(F8",
        ),
        (b'{"a": {"dtype": "F32"}}', "damaged entry for tensor a"),
        (b"[1, 2]", "its header is no table"),
        (b"{nonsense", "not a complete safetensors file"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, header, message):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(CheckpointError, match=message):
        read_safetensors(path)


def test_ranges_are_read(golden):
    tensor = read_safetensors(golden / "model.safetensors")["model.embed_tokens.weight"]
    np.testing.assert_array_equal(tensor.read((slice(3, 9), slice(2, 5))), tensor.read(())[3:9, 2:5])


def test_missing_shards_are_named(golden, tmp_path):
    folder = save_huggingface(load_huggingface(golden), tmp_path / "s", max_shard_bytes=9000)
    second = sorted(folder.glob("*.safetensors"))[1]
    second.unlink()
    with pytest.raises(CheckpointError, match=f"lacks the shards {second.name}"):
        load_huggingface(folder)


def test_an_index_at_odds_with_its_shards_is_refused(golden, tmp_path):
    folder = save_huggingface(load_huggingface(golden), tmp_path / "s", max_shard_bytes=9000)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.extra"] = min(index["weight_map"].values())
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"at odds with its shards: model\.extra not in model-00001"):
        load_huggingface(folder)


def test_a_folder_without_weights_is_refused(golden, tmp_path):
    shutil.copy(golden / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"has neither model.safetensors nor"):
        load_huggingface(tmp_path)


def test_unsupported_dtype_is_refused(golden):
    with pytest.raises(ConfigError, match="dtype must be one of float32, bfloat16, float16: got int8"):
        load_huggingface(golden, "int8")


def test_an_existing_folder_is_kept_unless_overwrite_is_asked(golden, tmp_path):
    model = load_huggingface(golden)
    folder = save_huggingface(model, tmp_path / "out")
    (folder / "mine.txt").write_text("keep")
    with pytest.raises(CheckpointError, match="already exists; choose another folder"):
        save_huggingface(model, folder)
    assert (folder / "mine.txt").exists()
    save_huggingface(model, folder, overwrite=True)
    assert not (folder / "mine.txt").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_nothing_is_left_of_an_interrupted_save(golden, tmp_path, failure):
    def finish(folder):
        assert (folder / "model.safetensors").is_file()
        raise failure

    with pytest.raises(CheckpointError if isinstance(failure, OSError) else KeyboardInterrupt):
        save_huggingface(load_huggingface(golden), tmp_path / "out", finish=finish)
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_place_is_refused(golden, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write to .*; choose a folder that you may write to"):
        save_huggingface(load_huggingface(golden), tmp_path / "file" / "out")


def test_untied_decoder_round_trips_without_a_file(tmp_path):
    model = Decoder(DecoderConfig.tiny(tie_embeddings=False, family="llama", qk_norm=False), rngs=nnx.Rngs(3))
    again = load_huggingface(save_huggingface(model, tmp_path / "m"))
    for a, b in zip(parameter_paths(model).values(), parameter_paths(again).values(), strict=True):
        np.testing.assert_array_equal(a.get_value(), b.get_value())
