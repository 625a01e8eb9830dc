"""GGUF files: weights equal the Hugging Face original's, blocks are decoded as the format says, faults are named."""

import json
import struct

import gguf
import numpy as np
import pytest

from jdlite.checkpoints.assemble import parameter_paths
from jdlite.checkpoints.gguf import GGUFFile, config_from_gguf, convert_gguf, load_gguf
from jdlite.checkpoints.huggingface import load_huggingface
from jdlite.checkpoints.safetensors_file import read_safetensors
from jdlite.checkpoints.target import load_target
from jdlite.errors import CheckpointError
from tests.checkpoints.tiny_tokenizer import TOKENIZER
from tests.models.parity import CASES, GOLDEN

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(hf: str) -> str:
    module, suffix = hf.rsplit(".", 1)
    if not module.startswith("model.layers."):
        return f"{_NAMES[module]}.{suffix}"
    _, _, layer, module = module.split(".", 3)
    return f"blk.{layer}.{_NAMES[module]}.{suffix}"


def llama_rows(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: row i of a head's first half and of its second become neighbours."""
    out = np.empty_like(rows)
    for head in range(0, len(rows), head_dim):
        for i in range(head_dim // 2):
            out[head + 2 * i] = rows[head + i]
            out[head + 2 * i + 1] = rows[head + head_dim // 2 + i]
    return out


def write_gguf(path, name, *, arch=None, tensors=(), skip=(), metadata=None, tokenizer=TOKENIZER, **changes):
    """A golden checkpoint as a GGUF file, with metadata changed, keys left out (`skip`) or tensors added."""
    config = CASES[name] | changes
    arch = arch or config["model_type"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer = gguf.GGUFWriter(path, arch)
    keys = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
    }
    for key, value in keys.items():
        if key not in skip:
            writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.rope.freq_base", config["rope_theta"])
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", config.get("rms_norm_eps", 1e-6))
    for key, value in (tokenizer | (metadata or {})).items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add.get(type(value), writer.add_array)(key.replace("{arch}", arch), value)
    for hf, stored in read_safetensors(GOLDEN / name / "model.safetensors").items():
        array = stored.read(()).astype(np.float32)
        if arch == "llama" and ("q_proj" in hf or "k_proj" in hf):
            array = llama_rows(array, head_dim)
        writer.add_tensor(gguf_name(hf), array)
    for extra, array in tensors:
        writer.add_tensor(extra, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", ["qwen3", "qwen2.5", "smollm2", "llama-linear-biases"])
def test_weights_and_config_equal_the_huggingface_original(name, tmp_path):
    scaling = CASES[name].get("rope_scaling") or {}
    metadata = {"{arch}.rope.scaling.type": "linear", "{arch}.rope.scaling.factor": 2.0} if scaling else {}
    model, tokenizer, generation = load_gguf(write_gguf(tmp_path / "m.gguf", name, metadata=metadata))
    right = load_huggingface(GOLDEN / name)
    assert model.config == right.config
    assert generation == {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    assert tokenizer.eos_token_id == 1
    ours, theirs = parameter_paths(model), parameter_paths(right)
    assert ours.keys() == theirs.keys()
    for path, leaf in ours.items():
        np.testing.assert_array_equal(leaf.get_value(), theirs[path].get_value(), err_msg=path)


def test_yarn_scaling(tmp_path):
    metadata = {"{arch}.rope.scaling.type": "yarn", "{arch}.rope.scaling.factor": 4.0}
    metadata["{arch}.rope.scaling.original_context_length"] = 16
    rope = config_from_gguf(GGUFFile(write_gguf(tmp_path / "m.gguf", "qwen3", metadata=metadata))).rope
    assert (rope.kind, rope.factor, rope.original_max_position, rope.theta) == ("yarn", 4.0, 16, 1e6)


def test_llama3_scaling_is_found_from_its_frequency_divisors(tmp_path):
    # Llama 3.2's rule for head width 8 and theta 500,000, by its definition.
    divisors = []
    for i in range(4):
        wavelength = 2 * np.pi * 500_000.0 ** (2 * i / 8)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(32.0)
        else:
            smooth = (8192 / wavelength - 1) / 3
            divisors.append(1 / ((1 - smooth) / 32 + smooth))
    extra = [("rope_freqs.weight", np.array(divisors, np.float32))]
    model, _, _ = load_gguf(write_gguf(tmp_path / "m.gguf", "llama3", tensors=extra))
    rope = model.config.rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("llama3", 32.0, 8192)
    extra = [("rope_freqs.weight", np.array([1, 2, 3, 4], np.float32))]
    with pytest.raises(CheckpointError, match="follow no known Llama 3 rescaling"):
        load_gguf(write_gguf(tmp_path / "bad.gguf", "llama3", tensors=extra))


def half(data, at):
    return struct.unpack_from("<e", data, at)[0]


def decode_block(kind: str, data: bytes) -> list[float]:
    """One block of a quantised tensor, number by number, from the format's definition."""
    if kind == "Q8_0":
        return [half(data, 0) * q for q in struct.unpack_from("<32b", data, 2)]
    if kind == "Q4_0":
        low = [half(data, 0) * ((b & 15) - 8) for b in data[2:]]
        return low + [half(data, 0) * ((b >> 4) - 8) for b in data[2:]]
    if kind == "Q4_1":
        low = [half(data, 0) * (b & 15) + half(data, 2) for b in data[4:]]
        return low + [half(data, 0) * (b >> 4) + half(data, 2) for b in data[4:]]
    if kind == "Q4_K":  # d, dmin, 12 bytes of 6-bit scales and minima, 128 bytes of nibbles; 8 groups of 32
        d, dmin, packed, out = half(data, 0), half(data, 2), data[4:16], []
        for group in range(8):
            if group < 4:
                scale, low = packed[group] & 63, packed[group + 4] & 63
            else:
                scale = (packed[group + 4] & 15) | (packed[group - 4] >> 6) << 4
                low = (packed[group + 4] >> 4) | (packed[group] >> 6) << 4
            nibbles = data[16 + 32 * (group // 2) : 16 + 32 * (group // 2) + 32]
            out += [d * scale * ((b >> 4) if group % 2 else (b & 15)) - dmin * low for b in nibbles]
        return out
    assert kind == "Q6_K"  # 128 bytes of low nibbles, 64 of high pairs, 16 signed scales, d
    low, high, scales, d = data[:128], data[128:192], struct.unpack_from("<16b", data, 192), half(data, 208)
    out = []
    for i in range(256):
        part, j = divmod(i, 128)
        quarter, k = divmod(j, 32)
        byte = low[64 * part + 32 * (quarter % 2) + k]
        nibble = byte >> 4 if quarter >= 2 else byte & 15
        q = (nibble | ((high[32 * part + k] >> (2 * quarter)) & 3) << 4) - 32
        out.append(d * scales[i // 16] * q)
    return out


BLOCKS = {"Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q4_K": (256, 144), "Q6_K": (256, 210)}


@pytest.mark.parametrize("kind", BLOCKS)
def test_quantised_blocks(kind, tmp_path):
    width, size = BLOCKS[kind]
    rng = np.random.default_rng(1)
    data = rng.integers(0, 256, (3, 512 // width, size), np.uint8)
    scale = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    for at in {"Q6_K": (208,), "Q4_1": (0, 2), "Q4_K": (0, 2)}.get(kind, (0,)):
        data[:, :, at : at + 2] = scale  # random bytes would make NaN scales
    expected = np.array([[x for block in row for x in decode_block(kind, block.tobytes())] for row in data])
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_tensor("x", data.reshape(3, -1), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = GGUFFile(tmp_path / "q.gguf").tensors()["x"]
    assert tensor.shape == (3, 512)
    np.testing.assert_allclose(tensor.read(()), expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(tensor.read((slice(1, 2), slice(5, 9))), tensor.read(())[1:2, 5:9])


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_half_precision_tensors(kind, tmp_path):
    values = np.array([[1.0, -0.5, 3.0, 0.0078125]], np.float32)
    packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    path = write_gguf(tmp_path / "m.gguf", "qwen3")
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_tensor("x", packed, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    np.testing.assert_array_equal(GGUFFile(path).tensors()["x"].read(()), values)


def test_conversion_writes_a_folder_that_loads_the_same(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "smollm2")
    folder = convert_gguf(path, tmp_path / "hf")
    ours, direct = load_target(folder), load_target(path)
    assert ours.weights_hash == direct.weights_hash
    assert ours.eos_ids == direct.eos_ids == (1,)
    text = "ab 12<|end|>"
    assert ours.encode(text) == direct.encode(text)
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "m.gguf"]


def test_an_unsupported_architecture_is_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "qwen3", arch="gemma3")
    with pytest.raises(
        CheckpointError, match=r"'gemma3' of m\.gguf is not supported: use a file of llama, qwen2, qwen3"
    ):
        load_gguf(path)


def test_an_unsupported_quantisation_is_refused(tmp_path):
    data = np.zeros((1, 84), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_tensor("x", data, raw_dtype=gguf.GGMLQuantizationType.Q2_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="holds tensors of type Q2_K: use a file of F32"):
        GGUFFile(tmp_path / "q.gguf").tensors()


@pytest.mark.parametrize("part", [0.0, 0.01, 0.3, 0.9])
def test_a_truncated_file_is_refused(tmp_path, part):
    path = write_gguf(tmp_path / "m.gguf", "qwen3")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * part)])
    with pytest.raises(CheckpointError, match=r"is not a complete GGUF file") as caught:
        load_gguf(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no GGUF file at"):
        load_gguf(tmp_path / "none.gguf")


def test_a_missing_key_is_named(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "qwen3", skip=("block_count",))
    with pytest.raises(CheckpointError, match=r"lacks the metadata key qwen3\.block_count"):
        load_gguf(path)


def test_unknown_keys_are_named_at_once(tmp_path):
    extra = {"{arch}.attention.sliding_window": 128, "{arch}.logit_scale": 0.5}
    path = write_gguf(tmp_path / "m.gguf", "qwen3", metadata=extra)
    with pytest.raises(CheckpointError, match=r"does not support: attention\.sliding_window, logit_scale"):
        load_gguf(path)


def test_partial_rotation_is_refused(tmp_path):
    path = write_gguf(
        tmp_path / "m.gguf", "qwen3", skip=("rope.dimension_count",), metadata={"{arch}.rope.dimension_count": 4}
    )
    with pytest.raises(CheckpointError, match=r"rope\.dimension_count of m\.gguf must be the head width 8: got 4"):
        load_gguf(path)


def test_wrong_tensors_are_reported(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "qwen3", tensors=[("blk.0.odd.weight", np.zeros((2, 2), np.float32))])
    with pytest.raises(CheckpointError, match=r"unknown blk\.0\.odd\.weight"):
        load_gguf(path)
