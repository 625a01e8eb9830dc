"""Merging two draft trees in plain Python: nodes are paths of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

Path = tuple[int, ...]


class Node(NamedTuple):
    """One node of a draft tree; node 0 is the anchor and the parent of the first ones."""

    token: int
    parent: int
    valid: bool
    gain: float
    source: int


class Merged(NamedTuple):
    """A node of the merged tree."""

    gain: float
    source: int


def offered(tree: Sequence[Node]) -> dict[Path, tuple[float, int]]:
    """The path of every valid node with its probability given its parent, and its source."""
    paths: dict[int, Path] = {0: ()}
    found = {}
    for i, node in enumerate(tree):
        if i and node.valid and node.parent in paths:
            path = paths[i] = (*paths[node.parent], node.token)
            above = tree[node.parent].gain if node.parent else 1.0
            found[path] = (min(1.0, node.gain / max(above, 1e-6)), node.source)
    return found


def merge(first: Sequence[Node], second: Sequence[Node], agreed: int, max_depth: int) -> dict[Path, Merged]:
    """All nodes of both trees up to a depth, without the limit on their number.

    A node of both trees is believed with 1 - (1 - p)(1 - q); siblings that sum to more than 1 are scaled to 1.
    """
    one, other = offered(first), offered(second)
    belief: dict[Path, float] = {}
    for path in [*one, *other]:
        if len(path) <= max_depth:
            belief[path] = 1 - math.prod(1 - tree[path][0] for tree in (one, other) if path in tree)
    merged = {}
    for path in belief:
        gain = 1.0
        for n in range(1, len(path) + 1):
            part = path[:n]
            siblings = sum(p for other_path, p in belief.items() if other_path[:-1] == part[:-1])
            gain *= belief[part] / max(1.0, siblings)
        both = path in one and path in other
        merged[path] = Merged(gain, agreed if both else (one.get(path) or other[path])[1])
    return merged
