"""Adaptive suffix matching in plain Python."""

from __future__ import annotations

import math

import numpy as np


def common_suffix(tokens: list[int], end: int, match_depth: int) -> int:
    """Length of the common suffix of `tokens[:end + 1]` and all tokens."""
    length = 0
    while length < min(end + 1, match_depth) and tokens[end - length] == tokens[len(tokens) - 1 - length]:
        length += 1
    return length


def suffix_draft(tokens: list[int], options) -> list[int]:
    """The drafted tokens; `options` has the attributes of `Suffix`."""
    lengths = [common_suffix(tokens, j, options.match_depth) for j in range(len(tokens) - 1)]
    longest = max(lengths, default=0)
    if longest == 0:
        return []
    ends = [j for j in reversed(range(len(tokens) - 1)) if lengths[j] == longest]
    ends = ends[: options.max_matches] if options.vote else ends[:1]
    spans = [tokens[j + 1 :] for j in ends]
    draft, probability = [], np.float32(1)
    for depth in range(min(options.num_drafts, math.floor(options.factor * longest + options.offset))):
        spans = [span for span in spans if len(span) > depth]
        if not spans:
            break
        said = [span[depth] for span in spans]
        token = max(said, key=said.count)  # max keeps the first, which is the newest
        probability *= np.float32(said.count(token)) / np.float32(len(said))
        if probability < np.float32(options.min_probability):
            break
        draft.append(token)
        spans = [span for span in spans if span[depth] == token]
    return draft
