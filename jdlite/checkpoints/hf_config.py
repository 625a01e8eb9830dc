"""Hugging Face `config.json` to `DecoderConfig` and back, strictly: a field is used, is harmless, or is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jdlite.errors import ConfigError
from jdlite.models.config import DecoderConfig, RopeConfig

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

# What transformers assumes for a field that a config.json leaves out, and the fields that only some families have.
_COMMON = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_SLIDING = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}
_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": _COMMON
    | _SLIDING
    | {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768, "attention_bias": False},
    "qwen2": _COMMON | _SLIDING | {"num_key_value_heads": 32, "head_dim": None, "max_position_embeddings": 32768},
    "llama": _COMMON
    | {
        "num_key_value_heads": None,
        "head_dim": None,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "mlp_bias": False,
    },
}
_ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}

_ROPE_FIELDS = {"rope_theta", "rope_scaling", "rope_parameters"}

# Fields that cannot change the forward of an inference-time decoder: names, token ids, initialisation, dropout (a
# training-time operation), output switches of transformers, and sampling defaults of old configs.
# fmt: off
_INFORMATIONAL = frozenset({
    "model_type", "architectures", "torch_dtype", "dtype", "transformers_version", "_name_or_path", "name_or_path",
    "use_cache", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id",
    "sep_token_id", "cls_token_id", "decoder_start_token_id", "tokenizer_class", "prefix", "attention_dropout",
    "is_llama_config", "transformers.js_config", "_attn_implementation_autoset", "_attn_implementation",
    "attn_implementation", "output_attentions", "output_hidden_states", "return_dict", "use_return_dict",
    "torchscript", "use_bfloat16", "chunk_size_feed_forward", "id2label", "label2id", "num_labels", "problem_type",
    "task_specific_params", "finetuning_task", "tf_legacy_loss", "remove_invalid_values", "max_length",
    "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature",
    "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores",
    "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty",
    "suppress_tokens", "begin_suppress_tokens",
})
# fmt: on

# Fields that would change the forward, at the only value that leaves it alone.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "pretraining_tp": (1, None),
    "rope_interleaved": (False, None),
    "partial_rotary_factor": (1, None),
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": (None, {}),
    "quantization_config": (None,),
}


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a Hugging Face configuration of type `qwen3`, `qwen2` (Qwen2.5) or `llama` (Llama 3, SmolLM2).

    Both spellings of the rotary embedding are read: `rope_theta` with `rope_scaling`, and `rope_parameters`.

    Args:
        hf: the parsed `config.json`.

    Raises:
        ConfigError: the type is not supported, a required field is missing, an option has no counterpart here, or
            fields are unknown (all of them are named at once).
    """
    family = hf.get("model_type")
    if family not in _FAMILIES:
        raise ConfigError(f"model_type must be one of {', '.join(_FAMILIES)}: got {family!r}; use a supported target.")
    defaults = _FAMILIES[family]
    known = {*_REQUIRED, *defaults, *_ROPE_FIELDS, *_NEUTRAL, *_INFORMATIONAL}
    if unknown := sorted(set(hf) - known):
        raise ConfigError(
            f"config.json of a {family} model has fields that jdlite does not know: {', '.join(unknown)}; they may "
            "change the forward, so use a target without them or remove those that you know to be without effect."
        )
    if missing := [name for name in _REQUIRED if hf.get(name) is None]:
        raise ConfigError(f"config.json lacks {', '.join(missing)}; take the complete config.json of the model.")
    _check_numbers(hf, (*_REQUIRED, "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps"))
    for name, neutral in _NEUTRAL.items():
        if name in hf and hf[name] not in neutral:
            raise ConfigError(
                f"{name}={hf[name]!r} is not supported: use a model where it is {neutral[0]!r} or absent."
            )

    get = {**defaults, **hf}.__getitem__
    layers, heads = int(get("num_hidden_layers")), int(get("num_attention_heads"))
    if get("hidden_act") != "silu":
        raise ConfigError(f"hidden_act must be 'silu': got {get('hidden_act')!r}; use a SwiGLU model.")
    if "layer_types" in defaults:
        _refuse_sliding_window(get, layers)
    max_position = int(get("max_position_embeddings"))
    # Qwen2.5 always has biases on q, k and v and never on the output; in the other families one flag rules all four.
    bias = True if family == "qwen2" else bool(get("attention_bias"))
    return DecoderConfig(
        family=family,
        vocab_size=int(get("vocab_size")),
        hidden_size=int(get("hidden_size")),
        intermediate_size=int(get("intermediate_size")),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(get("num_key_value_heads") or heads),
        head_dim=int(get("head_dim") or int(get("hidden_size")) // heads),
        norm_eps=float(get("rms_norm_eps")),
        rope=_rope_from_hf(hf, max_position),
        qk_norm=family == "qwen3",
        qkv_bias=bias,
        output_bias=bias and family != "qwen2",
        mlp_bias=family == "llama" and bool(get("mlp_bias")),
        tie_embeddings=bool(get("tie_word_embeddings")),
        max_position=max_position,
    )


def _check_numbers(fields: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Raise `ConfigError` for fields that are there and no numbers."""
    for name in names:
        value = fields.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ConfigError(f"{name} must be a number: got {value!r}; check config.json.")


def _refuse_sliding_window(get, layers: int) -> None:
    """Raise `ConfigError` when any layer would use a sliding window."""
    types = get("layer_types")
    if types is not None:
        sliding = [t for t in types if t != "full_attention"]
        if len(types) != layers:
            raise ConfigError(f"layer_types must name {layers} layers: got {len(types)}; check config.json.")
    else:
        windowed = get("use_sliding_window") and get("sliding_window") is not None
        sliding = ["sliding_attention"] * max(0, layers - (get("max_window_layers") or 0)) if windowed else []
    if sliding:
        raise ConfigError(
            f"sliding window attention is not supported: {len(sliding)} of {layers} layers use {sliding[0]}; "
            "use a target where every layer has full attention (use_sliding_window: false)."
        )


def _rope_from_hf(hf: Mapping[str, Any], max_position: int) -> RopeConfig:
    scaling, parameters = hf.get("rope_scaling"), hf.get("rope_parameters")
    if scaling and parameters and dict(scaling) != dict(parameters):
        raise ConfigError("rope_scaling and rope_parameters of config.json disagree; keep the one that is right.")
    fields = dict(parameters or scaling or {})
    theta = fields.pop("rope_theta", None)
    outer = hf.get("rope_theta")
    if theta is not None and outer is not None and theta != outer:
        raise ConfigError(f"rope_theta is given twice, {theta} and {outer}; keep the one that is right in config.json.")
    _check_numbers({"rope_theta": theta}, ("rope_theta",))
    _check_numbers(hf, ("rope_theta",))
    theta = next((float(value) for value in (theta, outer) if value is not None), 10_000.0)

    kind = fields.pop("rope_type", None)
    legacy = fields.pop("type", None)
    kind = kind or legacy or "default"
    if fields.pop("partial_rotary_factor", 1) not in (1, None):
        raise ConfigError("partial_rotary_factor other than 1 is not supported; use a target that rotates whole heads.")
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ConfigError(f"rope type must be default, linear, llama3 or yarn: got {kind!r}; use another target.")

    names = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        "yarn": (
            *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate"),
            *("mscale", "mscale_all_dim"),
        ),
    }[kind]
    if unknown := sorted(set(fields) - set(names)):
        raise ConfigError(f"rope type {kind} has fields that jdlite does not know: {', '.join(unknown)}; remove them.")
    required = {"linear": names, "llama3": names[:3], "yarn": names[:1], "default": ()}[kind]
    given = {name: value for name, value in fields.items() if value is not None}
    if missing := [name for name in required if name not in given]:
        raise ConfigError(f"rope type {kind} lacks {', '.join(missing)}; take the complete config.json of the model.")

    _check_numbers(given, tuple(name for name in given if name != "truncate"))
    original = given.pop("original_max_position_embeddings", 0)
    mscale, mscale_all = given.pop("mscale", None), given.pop("mscale_all_dim", None)
    if mscale and mscale_all and "attention_factor" not in given:
        given["attention_factor"] = _mscale(given["factor"], mscale) / _mscale(given["factor"], mscale_all)
    # transformers reads 0 as absent for these two.
    given = {name: value for name, value in given.items() if value or name not in ("beta_fast", "beta_slow")}
    numbers: dict[str, Any] = {n: bool(v) if n == "truncate" else float(v) for n, v in given.items()}
    # An original length equal to the maximum is what absence means; one spelling keeps configs comparable.
    original = 0 if int(original) == max_position else int(original)
    return RopeConfig(theta=theta, kind=kind, original_max_position=original, **numbers)


def _mscale(factor: float, weight: float) -> float:
    """YaRN's magnitude `0.1 w ln(s) + 1` for a scale s above 1 (Peng et al. 2023, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The `config.json` that transformers (4 and 5) and other engines read as the same model.

    Raises:
        ConfigError: the family has no words for this combination of options.
    """
    if config.family not in _FAMILIES:
        raise ConfigError(f"family must be one of {', '.join(_FAMILIES)}: got {config.family!r}; choose the nearest.")
    hf: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_position,
        "rope_theta": config.rope.theta,
        "rope_scaling": _rope_to_hf(config.rope),
    }
    if config.family in ("qwen3", "qwen2"):
        hf["use_sliding_window"] = False
    if config.family in ("qwen3", "llama"):
        hf["attention_bias"] = config.qkv_bias
    if config.family == "llama":
        hf["mlp_bias"] = config.mlp_bias
    back = config_from_hf(hf)
    if back != config:
        differing = [name for name in vars(config) if getattr(back, name) != getattr(config, name)]
        raise ConfigError(
            f"a {config.family} config.json cannot express "
            f"{', '.join(f'{name}={getattr(config, name)!r}' for name in differing)}; choose a family that can."
        )
    return hf


def _rope_to_hf(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    fields: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind in ("llama3", "yarn") and rope.original_max_position:
        fields["original_max_position_embeddings"] = rope.original_max_position
    if rope.kind == "llama3":
        fields |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        fields |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        if rope.attention_factor is not None:
            fields["attention_factor"] = rope.attention_factor
    return fields
