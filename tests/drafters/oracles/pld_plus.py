"""PLD+ in plain Python and numpy float64."""

from __future__ import annotations

import numpy as np


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def best_occurrence(tokens: list[int], states: list[np.ndarray], token: int, query: np.ndarray) -> int | None:
    """Slot of the occurrence of `token` before the last slot whose preceding state is closest to the query."""
    slots = [j for j in range(1, len(tokens) - 1) if tokens[j] == token]
    return max(slots, key=lambda j: cosine(states[j - 1], query), default=None)


def pld_plus(tokens: list[int], states: list[np.ndarray], *, num_drafts: int) -> list[int]:
    """The drafted tokens."""
    if len(tokens) < 2:
        return []
    slot = best_occurrence(tokens, states, tokens[-1], states[len(tokens) - 2])
    return [] if slot is None else tokens[slot + 1 : slot + 1 + num_drafts]
