"""How good a drafter is: on held-out text in parallel, and by real decoding of held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from jdlite.api import bucket, decode
from jdlite.checkpoints.target import Target
from jdlite.drafters.dlite import DLiteDrafter
from jdlite.models.dlite import DLite
from jdlite.training.initialise import lm_head
from jdlite.training.metrics import Interval


def held_out_figures(evaluate: Callable[[dict, jax.Array], dict], batches: Iterable[dict], key: jax.Array):
    """Averages over held-out batches; the same anchors whenever it is called.

    Args:
        evaluate: from `step.jit_evaluate`, given batch and key.
        batches: as training takes them.
        key: for the anchors.
    """
    interval = Interval()
    for number, batch in enumerate(batches):
        interval.add(jax.device_get(evaluate(batch, jax.random.fold_in(key, number))))
    figures = interval.means()
    return {name: value for name, value in figures.items() if name not in ("anchors", "tokens")}


def decoded_tau(
    target: Target,
    network: DLite,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    max_prompt_tokens: int,
) -> dict[str, Any]:
    """Greedy decoding of prompts with the network as drafter, all drafts verified.

    Returns:
        tau: tokens per round, pooled. accepted_at: share of rounds in which at least 1, 2, ... drafts were kept.
        rounds: how many.
    """
    drafter = DLiteDrafter.create(network, target.config, lm_head=lm_head(target.model))
    # One capacity for all evaluations of a run, so that they share one compilation.
    capacity = bucket(max_prompt_tokens + max_new_tokens + drafter.max_nodes, target.config.max_position)
    result = decode(
        target,
        [list(prompt) for prompt in prompts],
        drafter=drafter,
        max_new_tokens=max_new_tokens,
        capacity=capacity,
        budget="full",
    )
    rounds = max(int(result.stats.rounds.sum()), 1)
    kept = result.stats.accepted_at.sum(axis=0)
    return {"tau": result.tau, "accepted_at": [int(x) / rounds for x in kept], "rounds": rounds}
