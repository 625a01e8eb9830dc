"""Random DLite networks that are far from their initial state, and their parameters in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jdlite.checkpoints.dlite import abstract_dlite, tensor_names
from jdlite.models.dlite import DLite
from jdlite.models.dlite_config import DLiteConfig

# Compiling is most of these tests' time, and tiny shapes gain nothing from the optimiser.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def small(**overrides) -> DLiteConfig:
    """A config small enough for loops in Python."""
    fields = {
        "vocab_size": 23,
        "hidden_size": 12,
        "intermediate_size": 20,
        "head_dim": 8,
        "mask_token_id": 21,
        "rank": 5,
    }
    fields |= {"num_target_layers": 5, "norm_eps": 1e-5}
    return DLiteConfig.tiny(**{**fields, **overrides})


def random_model(config: DLiteConfig, seed: int = 0, dtype=jnp.float32) -> DLite:
    """Weights of order one over the square root of the width; norms and biases are random too."""
    rng = np.random.default_rng(seed)
    graph, state = nnx.split(abstract_dlite(config, dtype))

    def randomise(path, leaf):
        shape = leaf.get_value().shape
        if path[-1] == "scale":
            return leaf.replace(jnp.asarray(1 + 0.3 * rng.normal(size=shape), dtype))
        spread = 0.7 if len(shape) == 1 else 1.2 / np.sqrt(shape[1])
        return leaf.replace(jnp.asarray(spread * rng.normal(size=shape), dtype))

    return nnx.merge(graph, nnx.map_state(randomise, state))


def parameters(model: DLite) -> dict[str, np.ndarray]:
    """Parameters by official name, float64."""
    names = tensor_names(model)
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {names[path]: np.asarray(jax.device_get(leaf.get_value()), np.float64) for path, leaf in flat}


def inputs(config: DLiteConfig, batch: int, seed: int = 1):
    """tokens `[B, A]`, features `[B, M, D]`, embedding `[V, D]`, history `[B, W - 1, D]` or None (numpy)."""
    rng = np.random.default_rng(seed)
    D, past = config.hidden_size, max(config.draft_history - 1, 0)
    tokens = rng.integers(0, config.vocab_size, (batch, config.anchor_group_size)).astype(np.int32)
    features = (3 * rng.normal(size=(batch, config.num_taps, D))).astype(np.float32)
    embedding = rng.normal(size=(config.vocab_size, D)).astype(np.float32)
    history = rng.normal(size=(batch, past, D)).astype(np.float32) if past else None
    return tokens, features, embedding, history
