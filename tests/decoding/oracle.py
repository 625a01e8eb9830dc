"""Plain decoding in plain Python: the whole text is run again for each token, and numpy chooses the next one."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jdlite.decoding.sampling import GREEDY, Sampling, gumbel, noise_key

LONGEST = 64


@functools.partial(jax.jit, static_argnums=0)
def _forward(graph, state, tokens):
    model = nnx.merge(graph, state)
    n = tokens.shape[1]
    out = model(tokens, jnp.arange(n)[None], jnp.tril(jnp.ones((1, n, n), bool)), model.init_cache(1, 0))
    return model.logits(out.hidden)[0], out.k[:, 0], out.v[:, 0]


@functools.lru_cache(maxsize=20_000)
def _run(model, text: tuple[int, ...]):
    padded = np.zeros((1, LONGEST), np.int32)
    padded[0, : len(text)] = text
    graph, state = nnx.split(model)
    logits, k, v = _forward(graph, state, padded)
    n = len(text)
    return np.asarray(logits)[:n], np.asarray(k)[:, :, :n], np.asarray(v)[:, :, :n]


def logits_after(model, text: Sequence[int]) -> np.ndarray:
    """Logits of the token after `text`, float64 `[V]`; no cache, no batch."""
    return _run(model, tuple(text))[0][-1].astype(np.float64)


def keys_and_values(model, text: Sequence[int]):
    """Keys and values of every token of `text`, each `[L, G, T, h]`."""
    return _run(model, tuple(text))[1:]


def law(logits: np.ndarray, sampling: Sampling, prompt: Sequence[int], generated: Sequence[int]) -> np.ndarray:
    """Processed logits in float64, as transformers' processors define them; -inf where a token may not be drawn."""
    x = logits.astype(np.float64).copy()
    for token in set(prompt) | set(generated):
        x[token] = x[token] * sampling.repetition_penalty if x[token] < 0 else x[token] / sampling.repetition_penalty
    for token in set(generated):
        x[token] -= sampling.presence_penalty + sampling.frequency_penalty * list(generated).count(token)
    x[list(sampling.banned_ids)] = -np.inf
    if sampling.temperature == 0:
        return x
    x = x / sampling.temperature
    if sampling.top_k:
        x[x < np.sort(x)[-min(sampling.top_k, len(x))]] = -np.inf
    if sampling.top_p < 1:
        order = np.argsort(x)
        p = np.exp(x - x.max())
        below = np.cumsum((p / p.sum())[order])
        drop = order[below <= 1 - sampling.top_p]
        x[[t for t in drop if t != order[-1]]] = -np.inf
    if sampling.min_p:
        p = np.exp(x - x.max())
        x[p < sampling.min_p] = -np.inf
    return x


@functools.lru_cache(maxsize=20_000)
def _noise(seed: int, stream: int, position: int, vocab: int) -> np.ndarray:
    key = jax.random.fold_in(jax.random.key(seed), stream)
    return np.asarray(gumbel(noise_key(key, position), vocab), np.float64)


def decode(
    model,
    prompt: Sequence[int],
    max_new: int,
    *,
    sampling: Sampling = GREEDY,
    seed: int = 0,
    stream: int = 0,
    stop_id: int | None = None,
    stop_sequence: Sequence[int] | None = None,
    capacity: int = LONGEST,
) -> tuple[list[int], str]:
    """New tokens of one row and why it stopped.

    Args:
        stream: the row's number where one seed was given for the batch.
    """
    new: list[int] = []
    while True:
        if len(new) >= max_new:
            return new, "length"
        if len(prompt) + len(new) >= capacity:
            return new, "capacity"
        logits = logits_after(model, [*prompt, *new])
        if stop_id is not None and len(new) < sampling.min_new_tokens:
            logits[stop_id] = -np.inf
        x = law(logits, sampling, prompt, new)
        if sampling.temperature > 0:
            x = x + _noise(seed, stream, len(prompt) + len(new), len(x))
        new.append(int(np.argmax(x)))
        if new[-1] == stop_id:
            return new, "stop_id"
        if stop_sequence and new[-len(stop_sequence) :] == list(stop_sequence):
            return new, "stop_sequence"
