"""Reading config.json strictly, in both spellings, and writing it."""

import importlib.util
import json

import pytest

from jdlite.checkpoints.hf_config import config_from_hf, config_to_hf
from jdlite.errors import ConfigError
from jdlite.models.config import DecoderConfig, RopeConfig
from tests.models.parity import CASES

# As published with SmolLM2-135M-Instruct, Qwen3-0.6B, Qwen2.5-0.5B and Llama 3.2 1B (shapes and options).
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 49152,
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN25 = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA32 = {
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
PUBLISHED = {"smollm2": SMOLLM2, "qwen3": QWEN3, "qwen2.5": QWEN25, "llama3.2": LLAMA32}


def test_published_configs_equal_the_presets():
    assert config_from_hf(SMOLLM2) == DecoderConfig.smollm2_135m()
    assert config_from_hf(QWEN3) == DecoderConfig.qwen3_0_6b()


def test_published_qwen25_and_llama3():
    qwen = config_from_hf(QWEN25)
    assert (qwen.head_dim, qwen.qkv_bias, qwen.output_bias, qwen.qk_norm) == (64, True, False, False)
    llama = config_from_hf(LLAMA32)
    assert llama.rope == RopeConfig(theta=500_000.0, kind="llama3", factor=32.0, original_max_position=8192)
    assert (llama.qkv_bias, llama.mlp_bias, llama.tie_embeddings) == (False, False, True)


@pytest.mark.parametrize("hf", [*PUBLISHED.values(), *CASES.values()], ids=[*PUBLISHED, *CASES])
def test_written_config_reads_back(hf):
    config = config_from_hf(hf)
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config)))) == config


@pytest.mark.parametrize("hf", CASES.values(), ids=CASES)
def test_both_spellings_of_rope_agree(hf):
    new = {name: value for name, value in hf.items() if name not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {"rope_type": "default", **(hf.get("rope_scaling") or {}), "rope_theta": hf["rope_theta"]}
    assert config_from_hf(new) == config_from_hf(hf)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize("model_type", ["qwen3", "qwen2", "llama"])
def test_absent_fields_take_the_defaults_of_transformers(model_type):
    import transformers

    sizes = {"vocab_size": 61, "hidden_size": 4096, "intermediate_size": 24, "num_hidden_layers": 2}
    sizes["num_attention_heads"] = 32
    ours = config_from_hf({"model_type": model_type, **sizes})
    theirs = transformers.AutoConfig.for_model(model_type, **sizes)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 128)
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.tie_embeddings == theirs.tie_word_embeddings


def test_yarn_mscale_becomes_the_attention_factor():
    scaling = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5}
    # (0.1 ln 4 + 1) / (0.05 ln 4 + 1)
    assert config_from_hf(QWEN3 | {"rope_scaling": scaling}).rope.attention_factor == pytest.approx(1.0648, abs=1e-4)


def test_all_unknown_fields_are_named_at_once():
    with pytest.raises(ConfigError, match=r"does not know: logit_softcap, num_experts;"):
        config_from_hf(QWEN3 | {"num_experts": 8, "logit_softcap": 30.0})


def test_missing_fields_are_named_at_once():
    hf = {name: value for name, value in QWEN3.items() if name not in ("hidden_size", "vocab_size")}
    with pytest.raises(ConfigError, match="lacks vocab_size, hidden_size"):
        config_from_hf(hf)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma3"}, "model_type must be one of qwen3, qwen2, llama: got 'gemma3'"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu': got 'gelu'"),
        ({"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20}, "8 of 28 layers"),
        ({"layer_types": ["full_attention"] * 27 + ["sliding_attention"]}, "1 of 28 layers use sliding_attention"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types must name 28 layers: got 3"),
        ({"pretraining_tp": 2}, "pretraining_tp=2 is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config=.* is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type must be .*: got 'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope type linear lacks factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "slope": 1}}, "does not know: slope"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "lacks low_freq_factor, high_freq_factor"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "rope_theta is given twice"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"type": "linear", "factor": 4.0}},
            "rope_scaling and rope_parameters of config.json disagree",
        ),
        ({"hidden_size": "1024"}, "hidden_size must be a number: got '1024'"),
        ({"rope_theta": "1e6"}, "rope_theta must be a number: got '1e6'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor must be a number: got '2'"),
        ({"num_key_value_heads": 3}, "num_kv_heads must divide num_heads"),
    ],
)
def test_what_cannot_be_run_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        config_from_hf(QWEN3 | changes)


def test_harmless_sliding_window_fields_are_accepted():
    off = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 0}
    full = {"layer_types": ["full_attention"] * 28}
    assert config_from_hf(QWEN3 | off) == config_from_hf(QWEN3 | full) == config_from_hf(QWEN3)


def test_what_a_family_cannot_express_is_not_exported():
    with pytest.raises(ConfigError, match=r"a qwen2 config\.json cannot express qk_norm=True, qkv_bias=False"):
        config_to_hf(DecoderConfig.tiny(family="qwen2"))
