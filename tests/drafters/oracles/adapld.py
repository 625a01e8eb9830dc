"""AdaPLD in plain Python and numpy float64, from the paper's text (arXiv 2606.05742 v1, section 3, Algorithm 1)."""

from __future__ import annotations

from tests.drafters.oracles.pld_plus import cosine


def _similar(options, tokens, states, embedding, newest, token: int, query) -> list[int]:
    """Semantic candidates for a token: earlier positions that are similar enough (0-based, the first one excluded)."""
    scores = {}
    for j in range(1, len(tokens) - 1):
        if options.semantic == "embedding":
            scores[j] = cosine(embedding[tokens[j]], embedding[token])
        else:
            scores[j] = cosine(states[j - 1], query)
    found = [j for j in scores if scores[j] >= options.threshold and j in newest]
    if options.top_delta is not None:
        least = sorted((scores[j] for j in found), reverse=True)[: options.top_delta]
        # Occurrences of one token have one similarity, whatever the rounding; they stay or go together.
        found = [j for j in found if scores[j] >= least[-1] - 1e-5]
    return found


def _closest(states, candidates: list[int], query) -> int | None:
    """The candidate whose state before it is closest to the query; the earliest on a tie."""
    return max(candidates, key=lambda j: (cosine(states[j - 1], query), -j), default=None)


def adapld(options, tokens, states, top_ids, embedding, newest, next_token=None) -> dict[tuple[int, ...], str]:
    """Paths of the drafted nodes and their sources.

    Args:
        options: an `AdaPLD`.
        tokens: known tokens, the anchor last.
        states: rerank states of all tokens but the anchor.
        top_ids: most likely next ids after each of them.
        embedding: `[V, D]`.
        newest: positions that semantic retrieval may use (all, or those of the newest forwards).
        next_token: with `successor_source="forward"`, the target's next token after each branch.
    """
    n = len(tokens)
    if n < 2:
        return {}
    query, anchor = states[n - 2], tokens[-1]
    c = options.context
    lexical = [j for j in range(1, n - 1) if j + 1 >= c and tokens[j + 1 - c : j + 1] == tokens[n - c :] and n > c]
    candidates = lexical or _similar(options, tokens, states, embedding, newest, anchor, query)
    best = _closest(states, candidates, query)
    if best is None:
        return {}

    found: dict[tuple[int, ...], str] = {}
    main = tokens[best + 1 : best + 1 + options.copy_length] if lexical else []
    for i in range(len(main)):
        found[tuple(main[: i + 1])] = "lexical"
    branches = [t for t in top_ids[best] if t != (main or [None])[0]]
    for branch in branches:
        found[(branch,)] = "branch" if lexical else "semantic"
    if options.successors == "never" or (options.successors == "semantic" and lexical):
        return found
    for branch in branches:
        if next_token is not None:
            found[(branch, next_token(branch))] = "successor"
            continue
        places = [j for j in range(1, n - 1) if tokens[j] == branch]
        places = places or _similar(options, tokens, states, embedding, newest, branch, states[best])
        place = _closest(states, places, states[best])
        if place is not None:
            found[(branch, tokens[place + 1])] = "successor"
    return found
