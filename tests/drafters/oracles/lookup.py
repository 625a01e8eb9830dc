"""Prompt lookup in plain Python."""

from __future__ import annotations


def prompt_lookup(
    tokens: list[int], *, num_drafts: int, ngram_max: int, ngram_min: int, match: str, full: bool
) -> list[int]:
    """The drafted tokens: windows of n tokens are compared with the last n, for n from long to short."""
    length = len(tokens)
    for n in range(min(ngram_max, length - 1), ngram_min - 1, -1):
        newest = tokens[length - n :]
        hits = []
        for index in range(length - n):  # the window at length - n is the newest n-gram itself
            start = index + n
            if tokens[index:start] != newest:
                continue
            if full and not (start + num_drafts <= length and start < length - n):
                continue
            hits.append(start)
        if hits:
            start = hits[0] if match == "first" else hits[-1]
            return tokens[start : start + num_drafts]
    return []
