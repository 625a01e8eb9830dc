"""One table of tensor names: Hugging Face, GGUF and path in `Decoder`, with the transforms between file and model."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import numpy as np

from jdlite.models.config import DecoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transform:
    """How a stored tensor becomes a parameter (`load`) and back (`save`); each undoes the other exactly."""

    load: Callable[[np.ndarray, DecoderConfig], np.ndarray]
    save: Callable[[np.ndarray, DecoderConfig], np.ndarray]


def _same(array: np.ndarray, config: DecoderConfig) -> np.ndarray:
    return array


# `Linear` stores `[out, in]` as Hugging Face does, so most rows of the table copy.
IDENTITY = Transform(load=_same, save=_same)


def _split_pairs(rows: np.ndarray, config: DecoderConfig) -> np.ndarray:
    """Interleaved rotary rows `(x0, y0, x1, y1, ...)` of each head to halves `(x0, x1, ..., y0, y1, ...)`.

    Worked example, one head of width 4: rows `[a, b, c, d]` become `[a, c, b, d]`.
    """
    heads = rows.reshape(-1, config.head_dim // 2, 2, *rows.shape[1:])
    return heads.swapaxes(1, 2).reshape(rows.shape)


def _join_pairs(rows: np.ndarray, config: DecoderConfig) -> np.ndarray:
    """Inverse of `_split_pairs`."""
    heads = rows.reshape(-1, 2, config.head_dim // 2, *rows.shape[1:])
    return heads.swapaxes(1, 2).reshape(rows.shape)


# GGUF files of the llama architecture hold q and k for a rotary embedding of neighbouring pairs.
ROTARY_PAIRS = Transform(load=_split_pairs, save=_join_pairs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """One row of the table; `{layer}` stands for a layer number in all three names.

    Attributes:
        hf: name in Hugging Face checkpoints.
        gguf: name in GGUF files.
        path: attribute path in `Decoder`.
        transform: between a Hugging Face tensor and the parameter.
        gguf_llama: between a tensor of a GGUF file of architecture llama and the parameter.
    """

    hf: str
    gguf: str
    path: str
    transform: Transform = IDENTITY
    gguf_llama: Transform = IDENTITY


def _layer(hf: str, gguf: str, path: str, *, bias: bool, pairs: bool = False) -> list[Rule]:
    """The weight row, and the bias row where the module may have one, of a module in a block."""
    norm = path.endswith("norm")
    rules = []
    for suffix in ("weight", "bias") if bias else ("weight",):
        rules.append(
            Rule(
                hf=f"model.layers.{{layer}}.{hf}.{suffix}",
                gguf=f"blk.{{layer}}.{gguf}.{suffix}",
                path=f"layers.{{layer}}.{path}.{'scale' if norm else suffix}",
                gguf_llama=ROTARY_PAIRS if pairs else IDENTITY,
            )
        )
    return rules


DECODER_TABLE: tuple[Rule, ...] = (
    Rule(hf="model.embed_tokens.weight", gguf="token_embd.weight", path="embed.weight"),
    Rule(hf="model.norm.weight", gguf="output_norm.weight", path="final_norm.scale"),
    Rule(hf="lm_head.weight", gguf="output.weight", path="lm_head.weight"),
    *_layer("input_layernorm", "attn_norm", "attention_norm", bias=False),
    *_layer("self_attn.q_proj", "attn_q", "attention.q", bias=True, pairs=True),
    *_layer("self_attn.k_proj", "attn_k", "attention.k", bias=True, pairs=True),
    *_layer("self_attn.v_proj", "attn_v", "attention.v", bias=True),
    *_layer("self_attn.o_proj", "attn_output", "attention.o", bias=True),
    *_layer("self_attn.q_norm", "attn_q_norm", "attention.q_norm", bias=False),
    *_layer("self_attn.k_norm", "attn_k_norm", "attention.k_norm", bias=False),
    *_layer("post_attention_layernorm", "ffn_norm", "mlp_norm", bias=False),
    *_layer("mlp.gate_proj", "ffn_gate", "mlp.gate", bias=True),
    *_layer("mlp.up_proj", "ffn_up", "mlp.up", bias=True),
    *_layer("mlp.down_proj", "ffn_down", "mlp.down", bias=True),
)

_BY_PATH = {rule.path: rule for rule in DECODER_TABLE}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def rule_for(path: str) -> tuple[Rule, Callable[[str], str]]:
    """The row of a parameter path, and the function that fills the layer number into the row's names.

    Raises:
        KeyError: the table has no row for the path, which is a mistake in the table and not in a file.
    """
    numbers = _NUMBER.findall(path)
    rule = _BY_PATH[_NUMBER.sub("{layer}", path)]
    return rule, lambda pattern: pattern.format(layer=numbers[0]) if numbers else pattern
