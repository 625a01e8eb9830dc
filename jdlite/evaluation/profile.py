"""Time of the parts of a round, each compiled and timed by itself on a live state."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from jdlite.decoding.state import Request
from jdlite.drafters.base import Observation
from jdlite.evaluation.broadcast import SharedSession
from jdlite.timing import median_seconds, verify_forward


@jax.jit
def _propose(drafter, memory, context):
    proposal = drafter.propose(memory, context)
    if drafter.lookahead:  # without the target's forward in between, which counts as a forward
        proposal = drafter.extend(memory, context, proposal, proposal.tokens)
    return proposal


@partial(jax.jit, donate_argnames="memory")
def _observe(drafter, memory, context, observation):
    return drafter.observe(memory, context, observation)


def drafting_seconds(
    session: SharedSession, name: str, request: Request, *, committed: int = 2, repeats: int = 7
) -> dict[str, float]:
    """Seconds of `propose` and of `observe` of one drafter at the session's present history.

    Args:
        session: at the history to measure at; it is left as it was.
        name: of the drafter.
        request: for the context that the drafter is shown.
        committed: accepted nodes per row of the observation.
        repeats: timings of each; the median is taken.
    """
    drafter, model = session.drafters[name], session.model
    needs = drafter.needs(model.config.num_layers)
    context = session.context(request)
    B = context.lengths.shape[0]
    N, P, D = drafter.max_nodes, drafter.max_depth + 1, model.config.hidden_size
    key = jax.random.key(0)
    observation = Observation(
        tokens=jnp.broadcast_to(context.anchor[:, None], (B, N)),
        valid=jnp.ones((B, N), bool),
        path=jnp.broadcast_to(jnp.minimum(jnp.arange(P, dtype=jnp.int32), N - 1), (B, P)),
        start=context.lengths - 1,
        count=jnp.full(B, max(1, min(committed, P)), jnp.int32),
        taps=tuple(jax.random.normal(key, (B, N, D), model.dtype) for _ in needs.taps),
        top_ids=jnp.broadcast_to(jnp.arange(needs.top_k, dtype=jnp.int32), (B, N, needs.top_k)),
        next_tokens=jnp.broadcast_to(context.anchor[:, None], (B, P)),
    )
    memory = session.lend(name).memory
    seconds = {"propose": median_seconds(lambda: _propose(drafter, memory, context), repeats)}

    def observe():
        nonlocal memory
        memory = _observe(drafter, memory, context, observation)
        return memory

    return seconds | {"observe": median_seconds(observe, repeats)}


def forward_seconds(session: SharedSession, counts: tuple[int, ...], *, repeats: int = 3) -> dict[int, float]:
    """Seconds of a verify forward of each number of nodes at the session's present history, LM head included."""
    return {n: median_seconds(lambda n=n: verify_forward(session.model, session.cache, n), repeats) for n in counts}
