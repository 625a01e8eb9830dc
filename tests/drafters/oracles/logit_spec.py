"""LogitSpec in plain Python, with a pool of n-grams in place of a search."""

from __future__ import annotations


def ngram_pool(tokens: list[int], ngram_max: int, num_drafts: int) -> dict[tuple[int, ...], list[int]]:
    """Continuation of each n-gram: the last one that is not shorter than the ones before it."""
    pool: dict[tuple[int, ...], list[int]] = {}
    for n in range(1, ngram_max + 1):
        for start in range(n, len(tokens)):
            key, after = tuple(tokens[start - n : start]), tokens[start : start + num_drafts]
            if len(after) >= len(pool.get(key, [])):
                pool[key] = after
    return pool


def lookup(pool: dict[tuple[int, ...], list[int]], text: list[int], ngram_max: int) -> list[int]:
    """Continuation of the longest n-gram at the end of `text` that is in the pool."""
    for n in range(min(ngram_max, len(text)), 0, -1):
        if tuple(text[-n:]) in pool:
            return pool[tuple(text[-n:])]
    return []


def logit_spec(tokens: list[int], top_ids: list[list[int]], options) -> dict[tuple[int, ...], str]:
    """Paths of the drafted nodes and their sources; `options` has the attributes of `LogitSpec`."""
    pool = ngram_pool(tokens, options.ngram_max, options.num_drafts)
    main = lookup(pool, tokens, options.ngram_max)
    sequences = [(main, "lexical")]
    for rank, child in enumerate(top_ids[-1] if top_ids else []):
        if child == tokens[-1] or child == (main or [None])[0]:
            continue
        size = 1
        for bound, nodes in reversed(options.branch_lengths):
            if rank <= bound:
                size = nodes
        sequences.append((([child, *lookup(pool, [*tokens, child], options.ngram_max)])[:size], "branch"))
    found: dict[tuple[int, ...], str] = {}
    for sequence, source in sequences:
        for i in range(len(sequence)):
            if len(found) < options.num_nodes - 1:
                found[tuple(sequence[: i + 1])] = source
    return found
