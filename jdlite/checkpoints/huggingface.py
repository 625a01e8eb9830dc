"""Hugging Face folders: read into a `Decoder`, and written so that transformers and other engines load them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jdlite.checkpoints.assemble import Placement, StoredTensor, assemble, parameter_paths
from jdlite.checkpoints.atomic import atomic_folder
from jdlite.checkpoints.hf_config import config_from_hf, config_to_hf
from jdlite.checkpoints.mapping import Transform, rule_for
from jdlite.checkpoints.safetensors_file import read_safetensors, write_safetensors
from jdlite.errors import CheckpointError, JdliteError
from jdlite.models.decoder import Decoder

# What a target needs from a hub repository; weights in other formats are not fetched.
HUB_FILES = ("*.json", "*.safetensors", "tokenizer*", "*.model", "*.jinja", "merges.txt", "vocab.txt")
INDEX_FILE = "model.safetensors.index.json"
# Buffers that old Llama checkpoints carry; they are recomputed from the config.
_BUFFER = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def resolve_folder(path_or_repo: str | Path) -> Path:
    """A local folder as it is, or a hub id (`owner/name`) as the folder that it was downloaded to.

    Raises:
        CheckpointError: there is no such folder, and no such repository can be fetched.
    """
    path = Path(path_or_repo).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{path} is a file; give the folder that holds config.json, a hub id or a .gguf file.")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path_or_repo)) or str(path_or_repo).startswith("."):
        raise CheckpointError(f"no folder at {path}; check the path, or give a hub id such as Qwen/Qwen3-0.6B.")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path_or_repo), allow_patterns=list(HUB_FILES)))
    except Exception as error:  # many kinds: connection, missing repository, gated repository, offline mode
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{path_or_repo} is no local folder and could not be fetched from the hub ({reason}); check the name and "
            "the connection, or give a folder."
        ) from error


def read_json(path: Path, *, required: bool = True) -> dict[str, Any]:
    """A JSON object; `{}` for an absent file that is not required.

    Raises:
        CheckpointError: the file is absent though required, or damaged.
    """
    if not path.is_file():
        if not required:
            return {}
        raise CheckpointError(f"{path.parent} has no {path.name}; give a complete Hugging Face model folder.")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable JSON ({error}); get a fresh copy.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object: got a {type(value).__name__}; get a fresh copy.")
    return value


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a folder's safetensors files; only headers are read.

    Raises:
        CheckpointError: there are no safetensors, or shards are absent, damaged or at odds with the index.
    """
    index = folder / INDEX_FILE
    if not index.is_file():
        single = folder / "model.safetensors"
        if not single.is_file():
            raise CheckpointError(
                f"{folder} has neither model.safetensors nor {INDEX_FILE}; convert its weights to safetensors first."
            )
        return read_safetensors(single)
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f"{index} has no weight_map; get a fresh copy.")
    shards = sorted(set(names.values()))
    if absent := [shard for shard in shards if not (folder / shard).is_file()]:
        raise CheckpointError(f"{folder} lacks the shards {', '.join(absent)} that {INDEX_FILE} names; fetch them.")
    tensors: dict[str, StoredTensor] = {}
    astray = []
    for shard in shards:
        for name, tensor in read_safetensors(folder / shard).items():
            tensors[name] = tensor
            if names.get(name) != shard:
                astray.append(f"{name} in {shard}")
    astray += [f"{name} not in {shard}" for name, shard in sorted(names.items()) if name not in tensors]
    if astray:
        raise CheckpointError(
            f"{INDEX_FILE} of {folder} is at odds with its shards: {', '.join(astray[:20])}; get a fresh copy."
        )
    return tensors


def _lookup(dotted: str) -> tuple[str, Transform]:
    rule, fill = rule_for(dotted)
    return fill(rule.hf), rule.transform


def load_huggingface(
    path_or_repo: str | Path,
    dtype="float32",
    *,
    placement: Placement | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Decoder:
    """Read a Hugging Face folder (or hub id) into a decoder, one tensor at a time.

    Args:
        path_or_repo: local folder with `config.json` and safetensors (one file, or shards with their index), or hub id.
        dtype: of the parameters: float32, bfloat16 or float16; stored values are cast.
        placement: where each parameter goes (`jdlite.models.sharding.placement`); each device's part is read by range.
        progress: called with (tensors done, tensors in all).

    Raises:
        CheckpointError: files are absent or damaged, or the tensors do not fit the config (all differences at once).
        ConfigError: the config is not supported.
    """
    folder = resolve_folder(path_or_repo)
    config = config_from_hf(read_json(folder / "config.json"))
    tensors = stored_tensors(folder)
    tied = config.tie_embeddings and "lm_head.weight" in tensors
    if tied:
        _check_tied(tensors, folder)
    return assemble(
        config,
        tensors,
        _lookup,
        dtype=dtype,
        source=str(folder),
        ignore=lambda name: bool(_BUFFER.fullmatch(name)) or (tied and name == "lm_head.weight"),
        placement=placement,
        progress=progress,
    )


def _check_tied(tensors: Mapping[str, StoredTensor], folder: Path) -> None:
    """A stored head beside a tied embedding is fine as long as it is the same table."""
    head, table = tensors["lm_head.weight"], tensors.get("model.embed_tokens.weight")
    if table is None:
        return  # reported with the other missing tensors
    rows = 4096  # compared in parts, to stay small in memory
    same = head.shape == table.shape and all(
        np.array_equal(head.read((slice(i, i + rows),)), table.read((slice(i, i + rows),)))
        for i in range(0, head.shape[0], rows)
    )
    if not same:
        raise CheckpointError(
            f"config.json of {folder} ties the LM head to the embedding, but lm_head.weight differs from "
            "model.embed_tokens.weight; set tie_word_embeddings to false if the separate head is meant."
        )


def save_huggingface(
    model: Decoder,
    path: str | Path,
    tokenizer=None,
    *,
    generation: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    finish: Callable[[Path], None] | None = None,
) -> Path:
    """Write a decoder as a Hugging Face folder, atomically; transformers' `AutoModelForCausalLM` loads it.

    Args:
        model: the decoder; weights are written in its dtype, bit for bit.
        path: the folder to create.
        tokenizer: a transformers tokenizer to save along.
        generation: contents of `generation_config.json` (token ids, sampling defaults).
        max_shard_bytes: a new safetensors file starts where this would be passed.
        overwrite: replace an existing folder.
        finish: called with the complete temporary folder before it gets its name, to add files.

    Returns:
        The folder.

    Raises:
        CheckpointError: the folder exists or cannot be written.
        ConfigError: no Hugging Face config can express the model.
    """
    path = Path(path).expanduser().absolute()
    config = model.config
    hf = config_to_hf(config) | {"dtype": np.dtype(model.dtype).name}
    ids = {k: v for k, v in (generation or {}).items() if k in ("bos_token_id", "eos_token_id", "pad_token_id")}

    entries = []
    for dotted, leaf in parameter_paths(model).items():
        name, transform = _lookup(dotted)
        value = leaf.get_value()

        def get(value=value, transform=transform):
            return transform.save(np.asarray(jax.device_get(value)), config)

        entries.append((name, np.dtype(value.dtype), tuple(value.shape), get))
    shards = _shards(entries, max_shard_bytes)
    with atomic_folder(path, overwrite=overwrite) as folder:
        _write_json(folder / "config.json", hf | ids)
        _write_json(folder / "generation_config.json", dict(generation or {}))
        for filename, part in shards.items():
            write_safetensors(folder / filename, part)
        if len(shards) > 1:
            total = sum(_size(entry) for entry in entries)
            weight_map = {entry[0]: filename for filename, part in shards.items() for entry in part}
            _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        if finish is not None:
            finish(folder)
    return path


def _size(entry) -> int:
    return int(np.prod(entry[2], dtype=np.int64)) * entry[1].itemsize


def _shards(entries: list, limit: int) -> dict[str, list]:
    """Entries in order, cut where a file would pass `limit` bytes; a larger tensor gets a file of its own."""
    parts: list[list] = [[]]
    filled = 0
    for entry in entries:
        size = _size(entry)
        if parts[-1] and filled + size > limit:
            parts.append([])
            filled = 0
        parts[-1].append(entry)
        filled += size
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {f"model-{i:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts, 1)}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def load_tokenizer(folder: Path):
    """The folder's transformers tokenizer, or None when it has none.

    Raises:
        CheckpointError: tokenizer files are there and cannot be read.
    """
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except JdliteError:
        raise
    except Exception as error:  # transformers raises many kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"the tokenizer of {folder} cannot be read ({reason}); get a fresh copy.") from error
