"""Times of the low-rank head; see `pallas_kernels.benchmark`."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdlite.decoding.sampling import DRAFT, gumbel, noise_key
from pallas_kernels.backends import MOSAIC_TPU
from pallas_kernels.benchmark import Case, Operation, Setting, main, normal
from pallas_kernels.low_rank_head import reference
from pallas_kernels.low_rank_head.api import _BACKENDS, HeadWeights, prepare, quantise

TEMPERATURE = 0.8
# What rounding may do: to u relative to the largest; to the score of a chosen token; to a log-probability with the same
# u (a tile of 128 ids that is left out changes it by more).
U_ROUNDING = {"bfloat16": 2e-2, "float32": 1e-4}
SCORE_ROUNDING, LOG_Q_ROUNDING = 1e-2, 5e-4


def random_weights(vocab: int, rank: int, width: int, dtype: Any, seed: int = 0) -> HeadWeights:
    """Random weights, so scaled that logits are of order one."""
    keys = iter(jax.random.split(jax.random.key(seed), 4))
    matrix = lambda *shape: normal(next(keys), shape, dtype, 1 / math.sqrt(shape[-1]))  # noqa: E731
    return HeadWeights(
        embed=normal(next(keys), (vocab, rank), dtype),
        state_weight=matrix(2 * rank, 2 * rank),
        state_bias=jnp.zeros(2 * rank, dtype),
        mix_weight=matrix(rank, rank + width),
        mix_bias=jnp.zeros(rank, dtype),
        output=matrix(vocab, rank) * 3,
    )


def cases(setting: Setting) -> Iterator[Case]:
    """Greedy and drawn drafts of all models and numbers of rows; the floor is W_o, and its scales, once per step."""
    for name, (_, c) in setting.models.items():
        for rows in setting.rows:
            for kind, drawn, output in (
                ("greedy", False, setting.dtype),
                ("greedy, int8", False, "int8"),
                ("drawn", True, setting.dtype),
            ):
                yield Case(
                    kind,
                    {"model": name, "batch": rows},
                    c.num_drafts * c.vocab_size * (c.rank * jnp.dtype(output).itemsize + 4 * (output == "int8")),
                    partial(
                        _arguments,
                        *(c.vocab_size, c.rank, c.hidden_size, c.num_drafts),
                        rows,
                        drawn,
                        setting.dtype,
                        output,
                    ),
                )


def _arguments(V: int, R: int, D: int, K: int, B: int, drawn: bool, dtype: str, output: str) -> tuple:
    weights = random_weights(V, R, D, dtype)
    if output != dtype:
        rounded, scale = quantise(weights.output, jnp.dtype(output))
        weights = dataclasses.replace(weights, output=rounded, output_scale=scale)
    args = (
        weights,
        normal(jax.random.key(1), (B, K, D), dtype),
        jnp.arange(B, dtype=jnp.int32) * 7 % V,
        jnp.zeros((B, R), jnp.float32),
    )
    if not drawn:
        return args
    rows = jax.random.split(jax.random.key(2, impl="threefry2x32"), B)
    keys = jax.vmap(jax.vmap(lambda key, at: noise_key(key, at, DRAFT), (None, 0)), (0, None))(rows, jnp.arange(K))
    return (*args, keys, jnp.full(B, TEMPERATURE, jnp.float32))


@jax.jit
def _off(got, wanted, weights, keys=None, temperature=None):
    B, K = got.tokens.shape
    scaled = reference.logits(weights, got.u) / (1.0 if temperature is None else temperature[:, None, None])
    score = scaled if keys is None else scaled + jax.vmap(jax.vmap(lambda key: gumbel(key, scaled.shape[-1])))(keys)
    at = lambda x: jnp.take_along_axis(x, got.tokens[..., None], axis=-1, mode="fill")[..., 0]  # noqa: E731
    below = jnp.max(score, axis=-1) - at(score)
    log_q = jnp.abs(at(scaled) - jax.nn.logsumexp(scaled, axis=-1) - got.log_q)
    # After another token, as rounding may choose, u is another.
    same = jnp.cumprod(got.tokens == wanted.tokens, axis=1, dtype=jnp.int32)
    same = jnp.concatenate([jnp.ones((B, 1), jnp.int32), same[:, : K - 1]], axis=1)
    wide = lambda x: x.astype(jnp.float32)  # noqa: E731
    u = jnp.abs(wide(got.u) - wide(wanted.u)) / jnp.max(jnp.abs(wide(wanted.u)))
    u = jnp.where(same[..., None] > 0, u, 0.0) / U_ROUNDING[weights.embed.dtype.name]
    return jnp.max(jnp.stack([jnp.max(below) / SCORE_ROUNDING, jnp.max(log_q) / LOG_Q_ROUNDING, jnp.max(u)]))


def off(got: Any, wanted: Any, args: tuple) -> float:
    """u against the reference's while the tokens are the same; tokens and log q against what u says."""
    return float(_off(got, wanted, args[0], *args[4:]))


def error(call: Callable[..., Any], dtype: Any) -> float:
    """How far the chosen tokens' logits are below the best ones, of float64 along the chosen tokens."""
    rng = np.random.default_rng(1)
    B, K, V, R, D = 2, 4, 1000, 64, 128
    weights = random_weights(V, R, D, dtype)
    hidden = jnp.asarray(rng.normal(size=(B, K, D)), dtype)
    anchor = jnp.asarray([3, V - 1], jnp.int32)
    got = jax.jit(call)(weights, hidden, anchor, jnp.zeros((B, R)))
    w = {f.name: np.asarray(getattr(weights, f.name), np.float64) for f in dataclasses.fields(weights)[:-1]}
    x, tokens, worst = np.asarray(hidden, np.float64), np.asarray(got.tokens), 0.0
    for b in range(B):
        s, previous = np.zeros(R), int(anchor[b])
        for i in range(K):
            z = w["state_weight"] @ np.concatenate([s, w["embed"][previous]]) + w["state_bias"]
            gate = 1 / (1 + np.exp(-z[:R]))
            s = gate * s + (1 - gate) * np.tanh(z[R:])
            logits = w["output"] @ (w["mix_weight"] @ np.concatenate([s, x[b, i]]) + w["mix_bias"])
            previous = int(tokens[b, i])
            worst = max(worst, float(logits.max() - logits[previous]))
    return worst


def packed(args: tuple, backend: str) -> tuple:
    """The weights as the backend reads them, as a decoder would keep them."""
    return (jax.jit(lambda w: prepare(w, backend))(args[0]), *args[1:]) if backend == MOSAIC_TPU else args


BENCH = Operation("low_rank_head", _BACKENDS, cases, off, error, packed)

if __name__ == "__main__":
    sys.exit(main(BENCH))
