"""Times of committing to the cache; see `pallas_kernels.benchmark`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.benchmark import Case, Operation, Setting, main, normal
from pallas_kernels.commit_cache.api import _BACKENDS

# Nodes of a path, and slots that a cache has besides the cached ones.
MAX_PATH, ROOM = 16, 128


def cases(setting: Setting) -> Iterator[Case]:
    """Whole paths committed behind the fewest cached tokens, since these do not matter; the floor is the kept rows,
    read and written."""
    cached = setting.cached[0]
    for name, (c, _) in setting.models.items():
        for rows in setting.rows:
            for nodes in setting.nodes:
                path = min(nodes, MAX_PATH)
                size = c.num_layers * rows * c.num_kv_heads * c.head_dim * jnp.dtype(setting.dtype).itemsize
                shape = c.num_layers, rows, c.num_kv_heads, cached, c.head_dim
                yield Case(
                    f"of {path} of {nodes} nodes",
                    {"model": name, "batch": rows, "cached": cached},
                    4 * path * size,
                    partial(_arguments, shape, nodes, path, setting.dtype),
                    fed=2,
                )


def _arguments(shape: tuple[int, ...], N: int, P: int, dtype: str) -> tuple:
    L, B, G, cached, h = shape
    caches = (jnp.zeros((L, B, G, cached + ROOM, h), dtype) for _ in range(2))
    new = (normal(jax.random.key(i), (L, B, G, N, h), dtype) for i in range(2))
    path = jnp.broadcast_to(jnp.arange(N - P, N, dtype=jnp.int32), (B, P))
    # Rows begin at different places of a tile.
    lengths = cached + jnp.arange(B, dtype=jnp.int32) % 16
    return (*caches, *new, path, lengths, jnp.full(B, P, jnp.int32))


@jax.jit
def _differing(got, wanted):
    # A slot of one row and layer; NaN differs from itself and is not expected.
    differs = [jnp.any(a != b, axis=(2, 4)) for a, b in zip(got, wanted, strict=True)]
    return sum(jnp.sum(x, dtype=jnp.int32) for x in differs)


def off(got: Any, wanted: Any, args: tuple) -> float:
    """0 where the caches are the same to the last bit, else one more than how many slots are not."""
    del args
    slots = int(_differing(got, wanted))
    return 1.0 + slots if slots else 0.0


def error(call: Callable[..., Any], dtype: Any) -> float:
    """Numbers that differ from copying slots one by one."""
    rng = np.random.default_rng(2)
    L, B, G, S, N, P, h = 2, 3, 2, 64, 9, 4, 128
    k, v = (np.array(jnp.asarray(rng.normal(size=(L, B, G, S, h)), dtype)) for _ in range(2))
    new = [np.asarray(jnp.asarray(rng.normal(size=(L, B, G, N, h)), dtype)) for _ in range(2)]
    path, lengths, count = rng.integers(0, N, (B, P)), np.array([0, 7, 60]), np.array([4, 0, 3])
    arrays = [jnp.asarray(x) for x in (k, v, *new)]
    whole = (jnp.asarray(x, jnp.int32) for x in (path, lengths, count))
    got = jax.jit(call, donate_argnums=(0, 1))(*arrays, *whole)
    for b in range(B):
        for i in range(count[b]):
            for cache, x in ((k, new[0]), (v, new[1])):
                cache[:, b, :, lengths[b] + i] = x[:, b, :, path[b, i]]
    return float(sum((np.asarray(a) != b).sum() for a, b in zip(got, (k, v), strict=True)))


BENCH = Operation("commit_cache", _BACKENDS, cases, off, error)

if __name__ == "__main__":
    sys.exit(main(BENCH))
