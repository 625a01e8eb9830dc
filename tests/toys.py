"""A tiny model, drafters that do what a table says, and one way to decode with them that shares compilations."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jdlite.decoding.policy import Costs
from jdlite.decoding.sampling import GREEDY, Sampling
from jdlite.decoding.session import Result, Session
from jdlite.drafters.base import LEXICAL, Context, Drafter, Proposal
from jdlite.models.config import DecoderConfig
from jdlite.models.decoder import Decoder

VOCAB, CAPACITY, CHUNK, ROUNDS = 13, 48, 8, 48
NEVER = 10_000  # a stop token that no vocabulary has


@functools.cache
def tiny_model(vocab: int = VOCAB, *, seed: int = 0, **shape) -> Decoder:
    """A random model of width 16 whose weights are large enough for lively text."""
    fields = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "tie_embeddings": False,
        "max_position": 256,
    }
    model = Decoder(DecoderConfig.tiny(vocab_size=vocab, **(fields | shape)), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(seed)

    def lively(path, leaf):
        noise = rng.normal(size=leaf.shape) * 0.4
        return jnp.asarray(1 + noise / 2 if leaf.ndim == 1 else noise, leaf.dtype)

    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree_util.tree_map_with_path(lively, state))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Script(Drafter, static=False):
    """Proposes for row b, when it knows n tokens, what the tables say at `[b, n]`; node 0 becomes the anchor.

    Attributes:
        tokens, parents, valid, gain: `[B, S + 1, N]`.
        log_q: `[B, S + 1, N, V]` or None.
    """

    tokens: Any
    parents: Any
    valid: Any
    gain: Any
    log_q: Any = None
    depth: int = dataclasses.field(metadata={"static": True})

    name = "script"

    @property
    def max_nodes(self) -> int:
        return self.tokens.shape[2]

    @property
    def max_depth(self) -> int:
        return self.depth

    def propose(self, memory, context: Context) -> Proposal:
        at = lambda table: None if table is None else table[jnp.arange(table.shape[0]), context.lengths]  # noqa: E731
        tokens = at(self.tokens)
        return Proposal(
            tokens=tokens.at[:, 0].set(context.anchor),
            parents=at(self.parents),
            valid=at(self.valid).at[:, 0].set(True),
            gain=at(self.gain).at[:, 0].set(1.0),
            source=jnp.full(tokens.shape, LEXICAL, jnp.int32),
            log_q=at(self.log_q),
        )


Node = tuple[int, int, float]  # token, parent, gain


def script(batch: int, nodes: int, table: Callable[[int, int], Sequence[Node]], capacity: int = CAPACITY) -> Script:
    """A `Script` from a function `(row, known tokens) -> drafted nodes`, which are numbered from 1."""
    shape = (batch, capacity + 1, nodes)
    tokens, parents = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    valid, gain = np.zeros(shape, bool), np.zeros(shape, np.float32)
    for b in range(batch):
        for n in range(capacity + 1):
            for i, (token, parent, worth) in enumerate(table(b, n), start=1):
                tokens[b, n, i], parents[b, n, i], valid[b, n, i], gain[b, n, i] = token, parent, True, worth
    leaves = (jnp.asarray(x) for x in (tokens, parents, valid, gain))
    return Script(**dict(zip(("tokens", "parents", "valid", "gain"), leaves, strict=True)), depth=nodes - 1)


def chain(tokens: Sequence[int], gain: float = 0.9) -> list[Node]:
    """Nodes of a chain."""
    return [(token, i, gain ** (i + 1)) for i, token in enumerate(tokens)]


def padded_stops(stop_ids, stop_sequences, batch: int):
    """Stop rules of a fixed shape: one id per row, two sequences of up to three tokens."""
    ids = [list(row) or [NEVER] for row in (stop_ids or [[]] * batch)]
    sequences = []
    for row in stop_sequences or [[]] * batch:
        assert len(row) <= 1
        sequences.append([*(list(s) for s in row), *[[NEVER] * 3] * (2 - len(row))])
    assert all(len(row) == 1 for row in ids)
    return ids, sequences


def session(drafter: Drafter, batch: int, *, model=None, capacity: int = CAPACITY, counts=None) -> Session:
    """A session in which all that is drafted is verified."""
    return Session(
        tiny_model() if model is None else model,
        drafter,
        batch=batch,
        capacity=capacity,
        prefill_chunk=CHUNK,
        costs=Costs.free(counts or (drafter.max_nodes,)),
    )


def options(
    batch: int,
    *,
    sampling: Sampling | Sequence[Sampling] = GREEDY,
    max_new: int | Sequence[int] = 20,
    stop_ids=None,
    stop_sequences=None,
    seed: int | Sequence[int] = 0,
) -> dict:
    """Options of `Session.decode` in shapes that are always the same."""
    ids, sequences = padded_stops(stop_ids, stop_sequences, batch)
    return {
        "sampling": sampling,
        "max_new_tokens": max_new,
        "stop_ids": ids,
        "stop_sequences": sequences,
        "seed": seed,
        "log_rounds": ROUNDS,
    }


def run(drafter: Drafter, prompts, *, model=None, capacity: int = CAPACITY, counts=None, **kwargs) -> Result:
    """Decode prompts in a fresh session."""
    live = session(drafter, len(prompts), model=model, capacity=capacity, counts=counts)
    live.append(prompts)
    return live.decode(**options(len(prompts), **kwargs))
