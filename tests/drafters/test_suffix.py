"""Suffix against a plain-Python oracle, and the measuring of suffixes against counting by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jdlite.drafters.retrieval import newest_slots, suffix_length_at, suffix_lengths
from jdlite.drafters.suffix import Suffix
from jdlite.errors import ConfigError
from tests.drafters.harness import Player, chain_paths, paths, play
from tests.drafters.oracles.suffix import common_suffix, suffix_draft
from tests.drafters.strategies import VOCAB, batches, seeds

DRAFTERS = [
    Suffix(),
    Suffix(vote=False, num_drafts=6),
    Suffix(num_drafts=8, match_depth=3, factor=1.5, offset=2, max_matches=5, min_probability=0.31),
    Suffix(num_drafts=2, match_depth=12, factor=0.5, min_probability=0.0),
]


@pytest.mark.parametrize("drafter", DRAFTERS, ids=str)
@given(texts=batches(), seed=seeds)
@settings(max_examples=15, deadline=None)
def test_equals_oracle(drafter, texts, seed):
    play(drafter, texts, lambda row: chain_paths(suffix_draft(row.tokens, drafter)), seed=seed, vocab=VOCAB)


def drafts(drafter: Suffix, text: list[int]) -> list[int]:
    player = Player(drafter, [text], seed=0, vocab=VOCAB)
    player.prefill([len(text)])
    found = list(paths(player.propose(), 0))
    return list(found[-1]) if found else []


@pytest.mark.parametrize(
    ("drafter", "text", "expected"),
    [
        # Two matched tokens, so two drafted ones.
        (Suffix(), [1, 2, 3, 4, 5, 1, 2], [3, 4]),
        (Suffix(offset=1), [1, 2, 3, 4, 5, 1, 2], [3, 4, 5]),
        # The older match is longer and wins over the newer one.
        (Suffix(), [1, 2, 3, 7, 2, 4, 1, 2], [3, 7]),
        # Equal lengths: two say 4, the newest says 5.
        (Suffix(), [2, 4, 2, 4, 2, 5, 2], [4]),
        (Suffix(vote=False), [2, 4, 2, 4, 2, 5, 2], [5]),
        # A tie of votes goes to the newest.
        (Suffix(), [2, 4, 0, 2, 5, 2], [5]),
        (Suffix(min_probability=0.6), [2, 4, 0, 2, 5, 2], []),
        (Suffix(factor=0.5), [1, 2], []),
        (Suffix(), [3, 3], [3]),
        (Suffix(), [3, 3, 3, 3], [3]),
        (Suffix(), [1], []),
    ],
)
def test_by_hand(drafter, text, expected):
    assert drafts(drafter, text) == expected


@pytest.mark.parametrize("max_length", [1, 8, 9, 64])
@given(texts=batches())
@settings(max_examples=20, deadline=None)
def test_suffix_lengths(max_length, texts):
    """Both forms, unrolled and looped, and the one for a single slot, equal counting."""
    B, S = len(texts), 24
    tokens, lengths = np.full((B, S), 1, np.int32), np.array([len(text) for text in texts], np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    got = np.asarray(_suffix_lengths(tokens, lengths, max_length))
    ends = lengths // 2
    one = np.asarray(_suffix_length_at(tokens, lengths, ends, max_length))
    for b, text in enumerate(texts):
        expected = [common_suffix(text, j, max_length) for j in range(len(text) - 1)]
        assert got[b].tolist() == expected + [0] * (S - len(expected))
        if ends[b] < len(text) - 1:
            assert one[b] == expected[ends[b]]


_suffix_lengths = jax.jit(suffix_lengths, static_argnums=2)
_suffix_length_at = jax.jit(suffix_length_at, static_argnums=3)


@pytest.mark.parametrize("slots", [1, 64, 65, 200])
def test_newest_slots(slots):
    mask = np.random.default_rng(slots).random((4, slots)) < np.array([[0.0], [0.05], [0.6], [1.0]])
    got, exist = (np.asarray(x) for x in jax.jit(newest_slots, static_argnums=1)(jnp.asarray(mask), 70))
    for b in range(4):
        assert got[b][exist[b]].tolist() == np.flatnonzero(mask[b])[::-1][:70].tolist()
        assert ((got[b] >= 0) & (got[b] < slots)).all()


@pytest.mark.parametrize(
    "options", [{"num_drafts": 0}, {"match_depth": 0}, {"max_matches": 0}, {"factor": -1.0}, {"min_probability": 1.5}]
)
def test_refuses_bad_options(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        Suffix(**options)
