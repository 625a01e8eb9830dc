"""Token Recycling in plain Python."""

from __future__ import annotations


def successor_table(nodes: list[tuple[int, tuple[int, ...]]]) -> dict[int, tuple[int, ...]]:
    """Last-seen successors by token, from all nodes in the order they were run."""
    return dict(nodes)


def likeliest_paths(num_nodes: int, depth: int, top_k: int, prior) -> set[tuple[int, ...]]:
    """Rank paths of the best tree, by listing all paths and sorting them by probability."""
    every = [((), 1.0)]
    level = every
    for _ in range(depth):
        level = [((*path, rank), p * prior(rank)) for path, p in level for rank in range(top_k)]
        every = every + level
    return {path for path, _ in sorted(every, key=lambda item: -item[1])[1:num_nodes]}


def unroll(anchor: int, table: dict[int, tuple[int, ...]], rank_paths: set[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Token paths of the drafted nodes."""
    found = set()
    for ranks in rank_paths:
        token, path = anchor, []
        for rank in ranks:
            if token not in table:
                break
            token = table[token][rank]
            path.append(token)
        else:
            found.add(tuple(path))
    return found
