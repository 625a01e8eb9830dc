"""Tiny random models of every supported family, run by transformers (the oracle) and by jdlite."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jdlite.models.decoder import Decoder

GOLDEN = Path(__file__).parents[1] / "golden"
ROW_LENGTHS = (19, 8, 1)

_SHAPE = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_QWEN3 = _SHAPE | {"model_type": "qwen3", "head_dim": 8, "rope_theta": 1_000_000.0, "tie_word_embeddings": True}
_QWEN2 = _SHAPE | {"model_type": "qwen2", "rope_theta": 1_000_000.0, "use_sliding_window": False}
_LLAMA = _SHAPE | {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": False}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

# Name to config.json. The four families, then one case for each option that they do not reach.
CASES: dict[str, dict] = {
    "qwen3": _QWEN3,
    "qwen2.5": _QWEN2 | {"tie_word_embeddings": True},
    "llama3": _LLAMA | {"rope_scaling": _LLAMA3_ROPE, "head_dim": 8},
    "smollm2": _LLAMA | {"tie_word_embeddings": True, "rope_theta": 100_000.0, "rope_interleaved": False},
    "qwen3-yarn": _QWEN3 | {"rope_scaling": _YARN, "tie_word_embeddings": False, "attention_bias": True},
    "qwen2.5-yarn": _QWEN2
    | {"rope_scaling": _YARN | {"beta_fast": 8.0, "beta_slow": 0.5, "truncate": False, "attention_factor": 1.3}},
    "llama-linear-biases": _LLAMA
    | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "attention_bias": True, "mlp_bias": True},
}


def rows_of(vocab_size: int) -> list[np.ndarray]:
    """Three rows of unequal length."""
    rng = np.random.default_rng(5)
    return [rng.integers(0, vocab_size, n) for n in ROW_LENGTHS]


def torch_model(config: dict, seed: int = 0):
    """A random transformers model; all values are exact in bfloat16, so a checkpoint can hold them in any dtype."""
    import torch
    import transformers

    fields = {**config}
    model_type = fields.pop("model_type")
    hf = transformers.AutoConfig.for_model(model_type, **fields)
    hf._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(hf, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        # Norm scales and biases too: transformers starts them at one and zero, where a mistake would not show.
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.25
            value = noise + 1 if name.endswith("norm.weight") else noise
            parameter.copy_(value.to(torch.bfloat16).float())
    return model


def torch_outputs(model, rows: list[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Per row, run alone: logits `[T, V]` and hidden states `[L, T, D]` (the embedding's left out)."""
    import torch

    outputs = []
    for row in rows:
        with torch.no_grad():
            out = model(torch.tensor(row)[None], output_hidden_states=True)
        outputs.append((out.logits[0].numpy(), np.stack([h[0].numpy() for h in out.hidden_states[1:]])))
    return outputs


@functools.partial(jax.jit, static_argnums=0)
def _chunk(graph, state, tokens, cache, count):
    model = nnx.merge(graph, state)
    B, N = tokens.shape
    positions = cache.lengths[:, None] + jnp.arange(N)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((N, N), bool)), (B, N, N))
    taps = tuple(range(model.config.num_layers))
    out = model(tokens, positions, mask, cache, taps)
    return model.logits(out.hidden), jnp.stack(out.taps), cache.append(out.k, out.v, count)


def jdlite_outputs(model: Decoder, rows: list[np.ndarray], chunk: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The same, all rows in one ragged batch, `chunk` tokens at a time on top of the cache."""
    lengths = np.array([len(row) for row in rows])
    steps = -(-lengths.max() // chunk)
    padded = np.zeros((len(rows), steps * chunk), np.int32)
    for b, row in enumerate(rows):
        padded[b, : len(row)] = row
    graph, state = nnx.split(model)
    cache = model.init_cache(len(rows), 32)
    logits, taps = [], []
    for i in range(steps):
        start = i * chunk
        count = jnp.asarray(np.clip(lengths - start, 0, chunk), jnp.int32)
        part = jnp.asarray(padded[:, start : start + chunk])
        new_logits, new_taps, cache = _chunk(graph, state, part, cache, count)
        logits.append(np.asarray(new_logits))
        taps.append(np.asarray(new_taps))
    np.testing.assert_array_equal(cache.lengths, lengths)
    logits, taps = np.concatenate(logits, axis=1), np.concatenate(taps, axis=2)
    return [(logits[b, :n], taps[:, b, :n]) for b, n in enumerate(lengths)]


def assert_parity(model: Decoder, rows, expected, chunk: int) -> None:
    """Logits and every hidden state agree within 1e-4."""
    for (logits, taps), (right_logits, right_taps) in zip(jdlite_outputs(model, rows, chunk), expected, strict=True):
        np.testing.assert_allclose(taps, right_taps, rtol=0, atol=1e-4)
        np.testing.assert_allclose(logits, right_logits, rtol=0, atol=1e-4)
