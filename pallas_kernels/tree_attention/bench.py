"""Times of tree attention; see `pallas_kernels.benchmark`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.benchmark import Case, Operation, Setting, main, normal
from pallas_kernels.tree_attention.api import _BACKENDS

# What rounding may do, relative to the largest output.
ROUNDING = {"bfloat16": 2e-2, "float32": 1e-4}
# Runs take turns with so many bytes of layers, so that none finds its own in the device's last cache.
COLD_BYTES, MAX_LAYERS = 1 << 28, 8
# The reference keeps all scores; a case whose scores are more bytes than this is left out.
MAX_SCORES = 1 << 32


def cases(setting: Setting) -> Iterator[Case]:
    """Chains over full rows; the floor is the keys and values of the cached tokens once."""
    for name, (c, _) in setting.models.items():
        for rows in setting.rows:
            for cached in setting.cached:
                for nodes in setting.nodes:
                    if 4 * rows * nodes * c.num_heads * cached > MAX_SCORES:
                        continue
                    floor = 2 * rows * c.num_kv_heads * cached * c.head_dim * jnp.dtype(setting.dtype).itemsize
                    layers = min(MAX_LAYERS, -(-COLD_BYTES // floor)) if cached > 1000 else 1
                    heads = c.num_heads, c.num_kv_heads, c.head_dim
                    yield Case(
                        f"of {nodes} nodes",
                        {"model": name, "batch": rows, "cached": cached},
                        floor,
                        partial(_arguments, *heads, layers, rows, nodes, cached, setting.dtype),
                        at=partial(_next_layer, layers),
                    )


def _arguments(H: int, G: int, h: int, L: int, B: int, N: int, S: int, dtype: str) -> tuple:
    keys = iter(jax.random.split(jax.random.key(0), 5))
    shapes = (B, N, H, h), (B, N, G, h), (B, N, G, h), (L, B, G, S, h), (L, B, G, S, h)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((N, N), bool)), (B, N, N))
    arrays = (normal(next(keys), shape, dtype) for shape in shapes)
    return (*arrays, jnp.int32(0), jnp.full(B, S, jnp.int32), mask)


def _next_layer(layers: int, args: tuple, i: jax.Array) -> tuple:
    return (*args[:5], jax.lax.rem(i, layers), *args[6:])


def off(got: Any, wanted: Any, args: tuple) -> float:
    """Largest difference relative to the largest output."""
    got, wanted = got.astype(jnp.float32), wanted.astype(jnp.float32)
    return float(jnp.max(jnp.abs(got - wanted)) / jnp.max(jnp.abs(wanted)) / ROUNDING[args[0].dtype.name])


def error(call: Callable[..., Any], dtype: Any) -> float:
    """Largest difference from float64, of outputs of order one."""
    rng = np.random.default_rng(0)
    B, N, H, G, S, h = 3, 9, 8, 2, 256, 128
    q, k, v = (rng.normal(size=(B, N, heads, h)) for heads in (H, G, G))
    caches = rng.normal(size=(2, 1, B, G, S, h))
    lengths, mask = np.array([0, 130, 256]), np.tril(np.ones((B, N, N), bool))
    rounded = [np.asarray(jnp.asarray(x, dtype), np.float64) for x in (q, k, v, *caches)]
    q, k, v, k_cache, v_cache = rounded
    wanted = np.zeros(q.shape)
    for b, n in enumerate(lengths):
        for head in range(H):
            g = head // (H // G)
            scores = q[b, :, head] @ np.concatenate([k_cache[0, b, g, :n], k[b, :, g]]).T / math.sqrt(h)
            scores[:, n:][~mask[b]] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            wanted[b, :, head] = weights @ np.concatenate([v_cache[0, b, g, :n], v[b, :, g]])
    args = (*(jnp.asarray(x, dtype) for x in rounded), 0, jnp.asarray(lengths, jnp.int32), jnp.asarray(mask))
    return float(np.abs(np.asarray(jax.jit(call)(*args), np.float64) - wanted).max())


BENCH = Operation("tree_attention", _BACKENDS, cases, off, error)

if __name__ == "__main__":
    sys.exit(main(BENCH))
