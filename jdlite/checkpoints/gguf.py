"""GGUF files of the llama, qwen2 and qwen3 architectures: configuration, dequantised weights and tokenizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jdlite.checkpoints.assemble import StoredTensor, assemble
from jdlite.checkpoints.gguf_tokenizer import tokenizer_from_gguf
from jdlite.checkpoints.mapping import IDENTITY, Transform, rule_for
from jdlite.errors import CheckpointError
from jdlite.models.config import DecoderConfig, RopeConfig
from jdlite.models.decoder import Decoder

ARCHITECTURES = ("llama", "qwen2", "qwen3")
QUANTIZATIONS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")

# Per-architecture metadata that cannot change the forward of a dense model.
_INFORMATIONAL = frozenset({"vocab_size"})
# Metadata at the only value that leaves the forward alone.
_NEUTRAL = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True, "use_parallel_residual": False}


class GGUFFile:
    """An open GGUF file: its metadata as plain Python values and its tensors.

    Args:
        path: the file.

    Raises:
        CheckpointError: the file is missing, is no GGUF file or is truncated, or its architecture is not supported.
    """

    def __init__(self, path: str | Path):
        import gguf

        self.path = Path(path)
        if not self.path.is_file():
            raise CheckpointError(f"no GGUF file at {self.path}; check the path.")
        try:
            # The reader maps the file, checks nothing against its size and fails in many ways on a short one.
            self._reader = gguf.GGUFReader(self.path)
            self._fields = dict(self._reader.fields)
            self.architecture = str(self.get("general.architecture"))
        except Exception as error:
            raise CheckpointError(
                f"{self.path} is not a complete GGUF file ({type(error).__name__}: {error}); get a fresh copy."
            ) from error
        if self.architecture not in ARCHITECTURES:
            raise CheckpointError(
                f"GGUF architecture {self.architecture!r} of {self.path.name} is not supported: use a file of "
                f"{', '.join(ARCHITECTURES)}."
            )

    def get(self, key: str, default: Any = None) -> Any:
        """Value of a metadata key; `{arch}.` at its start stands for the architecture."""
        field = self._fields.get(key.replace("{arch}", getattr(self, "architecture", "")))
        return default if field is None else _plain(field.contents())

    @property
    def keys(self) -> set[str]:
        """All metadata keys."""
        return set(self._fields)

    def tensors(self) -> dict[str, StoredTensor]:
        """All tensors, dequantised to float32 when they are read.

        Raises:
            CheckpointError: a quantisation is not supported (all of them are named).
        """
        types = {t.tensor_type.name for t in self._reader.tensors}
        if unknown := sorted(types - set(QUANTIZATIONS)):
            raise CheckpointError(
                f"{self.path.name} holds tensors of type {', '.join(unknown)}: use a file of "
                f"{', '.join(QUANTIZATIONS)} tensors."
            )
        # GGUF lists dimensions from the fastest to the slowest.
        return {
            t.name: StoredTensor(tuple(int(n) for n in reversed(t.shape)), self._read(t)) for t in self._reader.tensors
        }

    def _read(self, tensor) -> Callable[[tuple], np.ndarray]:
        from gguf import quants

        shape = tuple(int(n) for n in reversed(tensor.shape))

        def read(index: tuple) -> np.ndarray:
            array = quants.dequantize(tensor.data, tensor.tensor_type)
            return np.array(array.reshape(shape)[index], np.float32)

        return read


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _shortest(value: Any) -> float:
    """The shortest decimal that is this float32: metadata stores 1e-5 as 9.99999974e-06."""
    return float(str(np.float32(value)))


def config_from_gguf(file: GGUFFile) -> DecoderConfig:
    """Read the model's shape strictly from GGUF metadata.

    Raises:
        CheckpointError: a key is missing, has a value that is not supported, or is unknown (all are named at once).
    """
    arch, used = file.architecture, set()

    def need(key: str) -> Any:
        value = optional(key)
        if value is None:
            raise CheckpointError(f"{file.path.name} lacks the metadata key {arch}.{key}; get a complete GGUF file.")
        return value

    def optional(key: str, default: Any = None) -> Any:
        used.add(key)
        return file.get(f"{{arch}}.{key}", default)

    names = {name for name in file.tensors() if name.startswith(("blk.0.", "output", "token_embd", "rope"))}
    heads, width = int(need("attention.head_count")), int(need("embedding_length"))
    head_dim = int(optional("attention.key_length") or width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if int(optional(key, head_dim)) != head_dim:
            raise CheckpointError(
                f"{arch}.{key} of {file.path.name} must be the head width {head_dim}: got {optional(key)}; "
                "use a model that rotates whole heads of one width."
            )
    vocab = len(file.get("tokenizer.ggml.tokens") or ()) or int(need("vocab_size"))
    embedding = file.tensors().get("token_embd.weight")
    max_position = int(need("context_length"))
    config = DecoderConfig(
        family=arch,
        # The table may be padded beyond the tokenizer's ids.
        vocab_size=embedding.shape[0] if embedding else vocab,
        hidden_size=width,
        intermediate_size=int(need("feed_forward_length")),
        num_layers=int(need("block_count")),
        num_heads=heads,
        num_kv_heads=int(optional("attention.head_count_kv", heads)),
        head_dim=head_dim,
        norm_eps=_shortest(need("attention.layer_norm_rms_epsilon")),
        rope=_rope_from_gguf(file, optional, head_dim, max_position),
        qk_norm=arch == "qwen3",
        qkv_bias="blk.0.attn_q.bias" in names,
        output_bias="blk.0.attn_output.bias" in names,
        mlp_bias="blk.0.ffn_up.bias" in names,
        tie_embeddings="output.weight" not in names,
        max_position=max_position,
    )
    own = {key.removeprefix(f"{arch}.") for key in file.keys if key.startswith(f"{arch}.")}
    unknown = sorted(own - used - _INFORMATIONAL - _NEUTRAL.keys())
    unknown += sorted(k for k, v in _NEUTRAL.items() if k in own and file.get(f"{arch}.{k}") != v)
    if unknown:
        raise CheckpointError(
            f"{file.path.name} has {arch} metadata that jdlite does not support: {', '.join(unknown)}; they may "
            "change the forward, so use another file."
        )
    return config


def _rope_from_gguf(file: GGUFFile, optional, head_dim: int, max_position: int) -> RopeConfig:
    theta = _shortest(optional("rope.freq_base", 10_000.0))
    kind = optional("rope.scaling.type", "none")
    factor = _shortest(optional("rope.scaling.factor", 1.0))
    original = int(optional("rope.scaling.original_context_length", 0))
    attention_factor = optional("rope.scaling.attn_factor")
    optional("rope.scaling.finetuned")
    factors = file.tensors().get("rope_freqs.weight")
    if factors is not None:
        return _llama3_from_factors(file, theta, factors.read(()), head_dim)
    if kind in ("none", "linear"):
        return RopeConfig(theta=theta) if kind == "none" else RopeConfig(theta=theta, kind="linear", factor=factor)
    if kind == "yarn":
        return RopeConfig(
            theta=theta,
            kind="yarn",
            factor=factor,
            original_max_position=0 if original == max_position else original,
            attention_factor=None if attention_factor in (None, 1.0) else _shortest(attention_factor),
        )
    raise CheckpointError(f"rope scaling {kind!r} of {file.path.name} is not supported: use none, linear or yarn.")


def _llama3_from_factors(file: GGUFFile, theta: float, factors: np.ndarray, head_dim: int) -> RopeConfig:
    """The Llama 3 rescaling whose per-frequency divisors the file stores instead of its parameters."""
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = 1.0, 4.0
    for original in (8192, 4096, 16384, 32768):
        factor = float(np.round(factors.max(), 3))
        smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
        expected = 1 / ((1 - smooth) / factor + smooth)
        if factors.shape == expected.shape and np.allclose(factors, expected, rtol=1e-4):
            return RopeConfig(theta=theta, kind="llama3", factor=factor, original_max_position=original)
    raise CheckpointError(
        f"the rope_freqs of {file.path.name} follow no known Llama 3 rescaling; use the Hugging Face checkpoint."
    )


def load_gguf(
    path: str | Path, dtype="float32", progress: Callable[[int, int], None] | None = None
) -> tuple[Decoder, Any, dict[str, Any]]:
    """Read a GGUF file: the decoder (weights dequantised, cast to `dtype`), its tokenizer, its generation config.

    Raises:
        CheckpointError: the file cannot be read or is not supported; the message names what to change.
    """
    file = GGUFFile(path)
    config = config_from_gguf(file)
    llama = file.architecture == "llama"

    def lookup(dotted: str) -> tuple[str, Transform]:
        rule, fill = rule_for(dotted)
        return fill(rule.gguf), rule.gguf_llama if llama else IDENTITY

    model = assemble(
        config,
        file.tensors(),
        lookup,
        dtype=dtype,
        source=file.path.name,
        ignore=lambda name: name == "rope_freqs.weight",
        progress=progress,
    )
    return model, tokenizer_from_gguf(file), generation_from_gguf(file)


def generation_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """The `generation_config.json` that a GGUF file implies: its special token ids."""
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {name: file.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    ends = [found["eos_token_id"], file.get("tokenizer.ggml.eot_token_id")]
    ends = sorted({int(e) for e in ends if e is not None})
    found["eos_token_id"] = ends[0] if len(ends) == 1 else ends or None
    return {name: value for name, value in found.items() if value is not None}


def convert_gguf(
    gguf_path: str | Path,
    out_folder: str | Path,
    dtype="float32",
    progress: Callable[[int, int], None] | None = None,
    *,
    finish: Callable[[Path], None] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a GGUF model as a Hugging Face folder, atomically.

    Args:
        gguf_path: the GGUF file.
        out_folder: the folder to create.
        dtype: of the written weights.
        progress: called with (tensors done, tensors in all) while reading.
        finish: called with the complete temporary folder before it gets its name, to add files.
        overwrite: replace an existing folder.

    Raises:
        CheckpointError: the file cannot be read, or the folder cannot be written.
    """
    from jdlite.checkpoints.huggingface import save_huggingface

    model, tokenizer, generation = load_gguf(gguf_path, dtype, progress)
    return save_huggingface(model, out_folder, tokenizer, generation=generation, finish=finish, overwrite=overwrite)
