"""DLite drafters in the official layout: a folder of `config.json` with a `dlite_config`, and safetensors."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jdlite.checkpoints.assemble import DTYPES, all_finite, check_dtype
from jdlite.checkpoints.atomic import atomic_folder
from jdlite.checkpoints.hf_config import config_from_hf, config_to_hf
from jdlite.checkpoints.huggingface import read_json, stored_tensors
from jdlite.checkpoints.safetensors_file import write_safetensors
from jdlite.errors import CheckpointError, ConfigError
from jdlite.models.dlite import DLite
from jdlite.models.dlite_config import DLiteConfig, target_layer_ids

# Path in `DLite` to tensor name; `{i}` is the layer. Every matrix is stored [out, in] on both sides, so nothing is
# transposed. The last two are used by ablations of this library only.
TENSOR_NAMES = {
    "layers.{i}.attention.q.weight": "layers.{i}.self_attn.q_proj.weight",
    "layers.{i}.attention.k.weight": "layers.{i}.self_attn.k_proj.weight",
    "layers.{i}.attention.v.weight": "layers.{i}.self_attn.v_proj.weight",
    "layers.{i}.attention.o.weight": "layers.{i}.self_attn.o_proj.weight",
    "layers.{i}.attention.q_norm.scale": "layers.{i}.self_attn.q_norm.weight",
    "layers.{i}.attention.k_norm.scale": "layers.{i}.self_attn.k_norm.weight",
    "layers.{i}.mlp.gate.weight": "layers.{i}.mlp.gate_proj.weight",
    "layers.{i}.mlp.up.weight": "layers.{i}.mlp.up_proj.weight",
    "layers.{i}.mlp.down.weight": "layers.{i}.mlp.down_proj.weight",
    "layers.{i}.attention_norm.scale": "layers.{i}.input_layernorm.weight",
    "layers.{i}.mlp_norm.scale": "layers.{i}.post_attention_layernorm.weight",
    "norm.scale": "norm.weight",
    "depth_embedding": "layer_depth_embedding.weight",
    "context_norm.scale": "context_norm.weight",
    "head.prev_embedding": "sequential_head.prev_token_embedding.weight",
    "head.output.weight": "sequential_head.output_proj.weight",
    "head.state_proj.weight": "sequential_head.state_proj.weight",
    "head.state_proj.bias": "sequential_head.state_proj.bias",
    "head.mix.weight": "sequential_head.state_hidden_mlp.weight",
    "head.mix.bias": "sequential_head.state_hidden_mlp.bias",
    "history_fuse.weight": "history_fuse.weight",
    "history_norm.scale": "history_norm.weight",
    "feature_fuse.weight": "feature_fuse.weight",
}
_STUDENT, _TEACHER = "pivot_q_student", "swa_teacher"
# Options that the official layout has no words for, written only where they are not the default.
_EXTENSIONS = ("qk_norm", "context_mode", "feature_concat", "head_output")
_OWN_KEYS = ("block_size", "num_target_layers", "dlite_config")
# Where transformers finds the classes of custom code; there is no code in an architecture that is built in.
_IGNORED_KEYS = ("auto_map",)
_DLITE_KEYS = {
    "architecture_version": ("dlite_v1", "dlite_v2"),
    "model_role": (_STUDENT, _TEACHER),
    "sequential_head": ("rnn", "rnn_easy"),
    "sequential_rank": None,
    "mask_token_id": None,
    "anchor_group_size": None,
    "chs_num_layers": None,
    "target_layer_ids": None,
    "swa_window_size": None,
    "history_layer_ids": None,
    "jdlite": None,
}


def dlite_config_from_hf(hf: Mapping[str, Any]) -> DLiteConfig:
    """Read the `config.json` of an official drafter: a Qwen3 config with `block_size`, `num_target_layers` and a
    `dlite_config`.

    `anchor_group_size` may be absent: it is then 1, or 2 for `dlite_v2`, whose drafter reads two known tokens.

    Raises:
        ConfigError: a field is missing, unknown, or has no counterpart here.
    """
    if missing := [key for key in _OWN_KEYS if hf.get(key) is None]:
        raise ConfigError(f"config.json of a DLite drafter lacks {', '.join(missing)}; take the drafter's config.json.")
    own = hf["dlite_config"]
    if not isinstance(own, Mapping):
        raise ConfigError(f"dlite_config must be a table of fields: got {own!r}; take the drafter's config.json.")
    problems = [f"unknown {key}" for key in sorted(set(own) - set(_DLITE_KEYS))]
    needed = ("architecture_version", "model_role", "sequential_head", "sequential_rank", "mask_token_id")
    problems += [f"missing {key}" for key in needed if own.get(key) is None]
    for key, choices in _DLITE_KEYS.items():
        if choices and own.get(key) is not None and own[key] not in choices:
            problems.append(f"{key} {own[key]!r} is none of {', '.join(choices)}")
    extensions = own.get("jdlite") or {}
    problems += [f"unknown jdlite.{key}" for key in sorted(set(extensions) - set(_EXTENSIONS))]
    teacher = own.get("model_role") == _TEACHER
    if teacher and not own.get("swa_window_size"):
        problems.append("missing swa_window_size")
    if not teacher and own.get("swa_window_size"):
        problems.append("swa_window_size in a student")
    if problems:
        raise ConfigError(f"dlite_config cannot be used: {'; '.join(problems)}; take a released drafter's config.json.")

    base = config_from_hf({key: value for key, value in hf.items() if key not in _OWN_KEYS + _IGNORED_KEYS})
    if base.rope.kind != "default" or base.qkv_bias or not base.qk_norm:
        raise ConfigError(
            f"A DLite drafter has Qwen3 layers with plain rotary embeddings and no biases: got model_type "
            f"{hf.get('model_type')!r}, rope type {base.rope.kind!r} and attention_bias {base.qkv_bias}; take the "
            "drafter's own config.json."
        )
    ids = own.get("target_layer_ids")
    past = own.get("history_layer_ids") if teacher else None
    group = own.get("anchor_group_size")
    if group is None:
        group = 2 if own["architecture_version"] == "dlite_v2" else 1
    config = DLiteConfig.from_dict(
        {
            "vocab_size": base.vocab_size,
            "hidden_size": base.hidden_size,
            "intermediate_size": base.intermediate_size,
            "num_heads": base.num_heads,
            "num_kv_heads": base.num_kv_heads,
            "head_dim": base.head_dim,
            "norm_eps": base.norm_eps,
            "rope_theta": base.rope.theta,
            "num_layers": base.num_layers,
            "num_target_layers": hf["num_target_layers"],
            "mask_token_id": own["mask_token_id"],
            "num_taps": own.get("chs_num_layers") or (len(ids) if ids else DLiteConfig.num_taps),
            "tap_layers": ids,
            "rank": own["sequential_rank"],
            "block_size": hf["block_size"],
            "anchor_group_size": group,
            "draft_history": own.get("swa_window_size") or 0,
            "history_layers": past,
            **extensions,
        }
    )
    # The file spells out what the rules would give; one spelling keeps configs comparable.
    plain = dataclasses.replace(config, tap_layers=None) if _by_rule(config) else config
    if dataclasses.replace(plain, history_layers=None).history_taps == plain.history_taps:
        plain = dataclasses.replace(plain, history_layers=None)
    return plain


def _by_rule(config: DLiteConfig) -> bool:
    return config.taps == target_layer_ids(config.num_target_layers, config.num_taps)


def dlite_config_to_hf(config: DLiteConfig) -> dict[str, Any]:
    """The `config.json` of the official layout. `dlite_v2` marks tapped layers that do not follow the rule."""
    own: dict[str, Any] = {
        "architecture_version": "dlite_v1" if _by_rule(config) else "dlite_v2",
        "model_role": _TEACHER if config.draft_history else _STUDENT,
        "anchor_group_size": config.anchor_group_size,
        "chs_num_layers": config.num_taps,
        "target_layer_ids": list(config.taps),
        "sequential_head": "rnn",
        "sequential_rank": config.rank,
        "mask_token_id": config.mask_token_id,
    }
    if config.draft_history:
        own |= {"swa_window_size": config.draft_history, "history_layer_ids": list(config.history_taps)}
    defaults = {name: getattr(DLiteConfig, name) for name in _EXTENSIONS}
    chosen = {name: getattr(config, name) for name in _EXTENSIONS if getattr(config, name) != defaults[name]}
    if chosen:
        own["jdlite"] = chosen
    # A network without q/k-norm is still written as Qwen3 layers; the extension says what is missing.
    base = config_to_hf(DLiteConfig.from_dict({**config.to_dict(), "qk_norm": True}).layer_config)
    return {
        **base,
        "architectures": ["DLiteDraftModel"],
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "dlite_config": own,
    }


def abstract_dlite(config: DLiteConfig, dtype="float32") -> DLite:
    """A `DLite` of shapes only."""
    return nnx.eval_shape(lambda: DLite(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0)))


def tensor_names(model: DLite) -> dict[tuple, str]:
    """Path of every parameter of `model` to its tensor name, layers in order."""
    names = {}
    for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        layer = path[1] if path[0] == "layers" else None
        dotted = ".".join("{i}" if i == 1 and layer is not None else str(part) for i, part in enumerate(path))
        names[path] = TENSOR_NAMES[dotted].format(i=layer)
    return names


def check_tensors(found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Compare names and shapes.

    Raises:
        CheckpointError: tensors are missing, unknown or mis-shaped; all of them are named at once.
    """
    problems = [f"missing {name}" for name in sorted(wanted.keys() - found.keys())]
    problems += [f"unknown {name}" for name in sorted(found.keys() - wanted.keys())]
    problems += [
        f"mis-shaped {name} ({list(found[name])} instead of {list(shape)})"
        for name, shape in sorted(wanted.items())
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    if problems:
        raise CheckpointError(
            f"The tensors of {source} do not fit its configuration: {'; '.join(problems)}. "
            "Check that rank, layers, vocabulary and weights belong together."
        )


def load_dlite(folder: str | Path, dtype="float32") -> DLite:
    """Read a drafter or a history teacher from a folder in the official layout.

    Args:
        folder: holds `config.json` and safetensors (one file, or shards with their index).
        dtype: of the parameters: float32, bfloat16 or float16; stored values are cast.

    Raises:
        CheckpointError: files are absent or damaged, tensors do not fit the config, or a value is not finite.
        ConfigError: the config cannot be used.
    """
    folder = Path(folder).expanduser()
    dtype = check_dtype(dtype)
    config = dlite_config_from_hf(read_json(folder / "config.json"))
    tensors = stored_tensors(folder)
    abstract = abstract_dlite(config, dtype)
    graph, state = nnx.split(abstract)
    names, flat = tensor_names(abstract), list(nnx.to_flat_state(state))
    wanted = {names[path]: tuple(leaf.get_value().shape) for path, leaf in flat}
    check_tensors({name: tuple(t.shape) for name, t in tensors.items()}, wanted, str(folder))
    filled = []
    for path, leaf in flat:
        array = np.ascontiguousarray(tensors[names[path]].read(()).astype(DTYPES[dtype], copy=False))
        if not all_finite(array):
            raise CheckpointError(
                f"Tensor {names[path]} of {folder} has values that are NaN or infinite as {dtype}; get a sound copy of "
                "the checkpoint, or load it in a wider dtype."
            )
        filled.append((path, leaf.replace(jnp.asarray(array))))
    return nnx.merge(graph, nnx.from_flat_state(filled))


def save_dlite(model: DLite, folder: str | Path, *, overwrite: bool = False) -> Path:
    """Write a drafter in the official layout, atomically and bit for bit, one tensor in memory at a time.

    Raises:
        CheckpointError: the folder exists (without `overwrite`) or cannot be written.
    """
    path = Path(folder).expanduser().absolute()
    hf = dlite_config_to_hf(model.config) | {"dtype": np.dtype(model.dtype).name}
    with atomic_folder(path, overwrite=overwrite) as temporary:
        write_safetensors(temporary / "model.safetensors", _entries(model))
        (temporary / "config.json").write_text(json.dumps(hf, indent=2) + "\n", encoding="utf-8")
    return path


def _entries(model: DLite) -> Iterator[tuple]:
    names = tensor_names(model)
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        value = leaf.get_value()
        yield names[path], np.dtype(value.dtype), tuple(value.shape), lambda v=value: np.asarray(jax.device_get(v))
