"""DLite networks that have learnt the toy target, without training: which token tends to follow which."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

from jdlite.checkpoints.dlite_orbax import model_from_params, params_tree
from jdlite.models.dlite import DLite
from jdlite.models.dlite_config import DLiteConfig
from tests.decoding import oracle
from tests.models.dlite_models import random_model
from tests.toys import tiny_model


def config(vocab: int, **overrides) -> DLiteConfig:
    """For `tiny_model(vocab)`; the head's rank is the vocabulary."""
    fields = {"mask_token_id": vocab - 1, "num_layers": 1, "num_taps": 2, "rank": vocab, "block_size": 4}
    return DLiteConfig.for_target(tiny_model(vocab).config, **{**fields, **overrides})


@functools.cache
def successors(vocab: int) -> np.ndarray:
    """Mean logits of the toy target after each token, `[V, V]`, over random texts."""
    rng = np.random.default_rng(0)
    total, seen = np.zeros((vocab, vocab)), np.zeros((vocab, 1))
    for _ in range(30):
        text = rng.integers(0, rng.integers(1, vocab) + 1, 40)
        logits = oracle._run(tiny_model(vocab), tuple(text.tolist()))[0]
        np.add.at(total, text, logits)
        np.add.at(seen, text, 1)
    return total / np.maximum(seen, 1)


def learnt(vocab: int, *, seed: int = 0, noise: float = 0.02, **overrides) -> DLite:
    """A random network whose head forgets its state and looks the successor of the newest token up.

    Args:
        vocab: of the toy target.
        seed: of the backbone and of its small say in the logits.
        noise: how much the backbone matters.
        overrides: of the config.
    """
    made = config(vocab, **overrides)
    tree, V, D = params_tree(random_model(made, seed)), vocab, made.hidden_size
    rng = np.random.default_rng(seed)
    head = tree["head"]
    one, zero = np.eye(V), np.zeros((V, V))
    head["prev_embedding"] = one
    head["state_proj"] = {
        "weight": np.block([[zero, zero], [zero, one]]),  # the gate looks at nothing, the candidate at the token
        "bias": np.concatenate([np.full(V, -30.0), np.zeros(V)]),
    }
    # The state after token y is tanh(1) at y.
    table = successors(V).T / np.tanh(1.0)
    if made.head_output == "lm_head":
        lm_head = tiny_model(V).lm_head
        assert lm_head is not None
        lookup = np.linalg.pinv(np.asarray(lm_head.weight[...], np.float64)) @ table
    else:
        head["output"]["weight"], lookup = table, one
    backbone = noise * rng.normal(size=(len(lookup), D))
    head["mix"] = {"weight": np.concatenate([lookup, backbone], axis=1), "bias": np.zeros(len(lookup))}
    tree["head"] = {
        name: {k: jnp.asarray(x, jnp.float32) for k, x in part.items()}
        if isinstance(part, dict)
        else jnp.asarray(part, jnp.float32)
        for name, part in head.items()
    }
    return model_from_params(made, tree)
