"""Times of the head of a verify forward; see `pallas_kernels.benchmark`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdlite.decoding.accept import sample_and_match
from jdlite.decoding.sampling import Sampling, gumbel, noise_key, stack
from jdlite.decoding.tree import Tree
from pallas_kernels.benchmark import Case, Operation, Setting, main, normal
from pallas_kernels.verify_head import reference
from pallas_kernels.verify_head.api import _BACKENDS

TEMPERATURE = 0.8
TOP_K = 8
# Nodes of all rows in one case, at most: what the reference keeps of their logits and noise is gigabytes beyond.
MAX_NODES = 512
# What rounding may do to the score of a chosen token, and to a log-probability and a logit of the list (a tile of 128
# ids that is left out changes the former by more).
SCORE_ROUNDING, LOG_ROUNDING = 1e-2, 5e-4


def cases(setting: Setting) -> Iterator[Case]:
    """Greedy and drawn chains of all models, rows and nodes; the floor is W once."""
    for name, (c, _) in setting.models.items():
        for rows in setting.rows:
            for nodes in setting.nodes:
                for drawn in (False, True):
                    if rows * nodes <= MAX_NODES:
                        yield Case(
                            f"of {nodes} nodes, {'drawn' if drawn else 'greedy'}",
                            {"model": name, "batch": rows},
                            c.vocab_size * c.hidden_size * jnp.dtype(setting.dtype).itemsize,
                            partial(_arguments, c.vocab_size, c.hidden_size, rows, nodes, drawn, setting.dtype),
                        )


def _arguments(V: int, D: int, B: int, N: int, drawn: bool, dtype: Any) -> tuple:
    # Logits of order one.
    weight = normal(jax.random.key(0), (V, D), dtype, 3 / math.sqrt(D))
    hidden = normal(jax.random.key(1), (B, N, D), dtype)
    parents = jnp.broadcast_to(jnp.maximum(jnp.arange(N, dtype=jnp.int32) - 1, 0), (B, N))
    tree = Tree.from_parents(parents, jnp.ones((B, N), bool))
    # Half of the chain carries what greedy rows choose, so that there is a path to walk.
    first = jnp.argmax(reference.lm_head(weight, hidden[:, : N // 2]), axis=-1).astype(jnp.int32)
    drafts = jnp.concatenate([jnp.zeros((B, 1), jnp.int32), first, jnp.zeros((B, N), jnp.int32)], axis=1)[:, :N]
    sampling = stack(Sampling(temperature=TEMPERATURE if drawn else 0.0), B, V)
    keys = jax.random.split(jax.random.key(2, impl="threefry2x32"), B)
    return weight, hidden, tree, drafts, tree.depth + 5, sampling, keys


def _with_path(call: Callable[..., Any]) -> Callable[..., Any]:
    """An implementation as a function of arrays alone; a chain's path may be all of it."""

    def run(weight, hidden, tree, drafts, positions, sampling, keys, **blocks):
        args = (weight, hidden, tree, drafts, positions, sampling, keys if sampling.stochastic else None)
        return call(*args, min(TOP_K, weight.shape[0]), drafts.shape[1], None, None, False, **blocks)

    return run


@jax.jit
def _off(got, wanted, weight, hidden, tree, drafts, positions, sampling, keys):
    logits = reference.lm_head(weight, hidden)
    scaled = score = logits
    if sampling.stochastic:
        scaled = logits / sampling.temperature[:, None, None]
        noise = jax.vmap(jax.vmap(lambda key, at: gumbel(noise_key(key, at), logits.shape[-1]), (None, 0)))
        score = scaled + noise(keys, positions)
    at = lambda x, ids: jnp.take_along_axis(x, ids, axis=-1, mode="fill")  # noqa: E731
    chosen = got.tokens[..., None]
    below = jnp.max(score, axis=-1) - at(score, chosen)[..., 0]
    log_prob = at(scaled, chosen)[..., 0] - jax.nn.logsumexp(scaled, axis=-1) - got.log_prob
    # The values of the list are the reference's, and its ids have these values.
    listed = jnp.stack([got.top_logits - wanted.top_logits, at(logits, got.top_ids) - wanted.top_logits])
    walk = sample_and_match(tree, drafts, got.tokens, drafts.shape[1])
    pairs = zip(jax.tree.leaves(walk), jax.tree.leaves(got.acceptance), strict=True)
    other = sum(jnp.sum(a != b, dtype=jnp.int32) for a, b in pairs) + jnp.sum(got.broken != wanted.broken)
    errors = [jnp.max(below) / SCORE_ROUNDING, jnp.max(jnp.abs(log_prob)) / LOG_ROUNDING]
    errors += [jnp.max(jnp.abs(listed)) / LOG_ROUNDING, 2.0 * other]
    return jnp.max(jnp.stack(errors))


def off(got: Any, wanted: Any, args: tuple) -> float:
    """Tokens by their scores, log-probabilities, the list and the walk against what the reference's logits say."""
    return float(_off(got, wanted, *args))


def error(call: Callable[..., Any], dtype: Any) -> float:
    """How far the greedy tokens' logits are below the best ones, of float64."""
    args = _arguments(1000, 128, 2, 5, False, dtype)
    got = jax.jit(call)(*args)
    weight, hidden = (np.asarray(x, np.float64) for x in args[:2])
    logits, tokens = hidden @ weight.T, np.asarray(got.tokens)
    return float((logits.max(axis=-1) - np.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]).max())


BENCH = Operation("verify_head", {name: _with_path(call) for name, call in _BACKENDS.items()}, cases, off, error)

if __name__ == "__main__":
    sys.exit(main(BENCH))
