"""The plan of an epoch: in which order examples come and which of them share a row."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

_U64 = np.uint64


def mixed(*parts: int, count: int) -> np.ndarray:
    """`[count]` uint64 that look random and depend on `parts` and their place alone.

    SplitMix64 (Steele, Lea and Flood, 2014), since NumPy's generators may change from version to version and a resumed
    run must see the order that it had.
    """
    with np.errstate(over="ignore"):
        base = np.zeros((), _U64)
        for part in parts:
            base = _mix(base + _U64(0x9E3779B97F4A7C15) + _U64(part & 0xFFFFFFFFFFFFFFFF))
        return _mix(base + (np.arange(1, count + 1, dtype=_U64) * _U64(0x9E3779B97F4A7C15)))


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x ^ (x >> _U64(31))


def shuffled(count: int, *parts: int) -> np.ndarray:
    """A permutation of `0 ... count - 1` that depends on `parts` alone."""
    return np.argsort(mixed(*parts, count=count), kind="stable")


def pack(lengths: Sequence[int], length: int) -> list[list[int]]:
    """Put items into rows of `length`: each goes, in order, into the row where it leaves the least room (best fit).

    Example: `pack([6, 3, 4, 2], 8)` gives `[[0, 3], [1, 2]]`.

    Args:
        lengths: of the items, 1 to `length`.
        length: of a row.

    Returns:
        The items of each row.
    """
    smallest = min(lengths, default=0)
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (free places, row), sorted; rows that nothing fits into are left out
    for item, size in enumerate(lengths):
        at = bisect.bisect_left(rooms, (size, -1))
        if at < len(rooms):
            room, row = rooms.pop(at)
        else:
            room, row = length, len(rows)
            rows.append([])
        rows[row].append(item)
        if room - size >= smallest:
            bisect.insort(rooms, (room - size, row))
    return rows
