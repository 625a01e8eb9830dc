"""LogitSpec against a plain-Python oracle that keeps a pool of n-grams."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jdlite.drafters.logit_spec import LogitSpec, LogitSpecMemory
from jdlite.errors import ConfigError
from tests.drafters.harness import LAYERS, Player, paths, play
from tests.drafters.oracles.logit_spec import logit_spec
from tests.drafters.strategies import VOCAB, batches, seeds

DRAFTERS = [
    LogitSpec(top_k=VOCAB),
    LogitSpec(top_k=5, num_nodes=9, num_drafts=4, branch_lengths=((0, 5), (2, 3))),
    LogitSpec(top_k=1, num_nodes=30, num_drafts=2, ngram_max=1, branch_lengths=()),
    LogitSpec(top_k=3, num_nodes=1),
]


@pytest.mark.parametrize("drafter", DRAFTERS, ids=str)
@given(texts=batches(), seed=seeds)
@settings(max_examples=15, deadline=None)
def test_equals_oracle(drafter, texts, seed):
    play(drafter, texts, lambda row: logit_spec(row.tokens, row.top_ids, drafter), seed=seed, vocab=VOCAB)


def test_by_hand():
    """Text 1 2 3 4 1 2 and guesses 5, 2, 3, 4, 1 of what follows the 2."""
    drafter = LogitSpec(top_k=5, num_nodes=10, num_drafts=3, branch_lengths=((3, 3),))
    player = Player(drafter, [[1, 2, 3, 4, 1, 2]], seed=0, vocab=VOCAB)
    player.prefill([6])
    assert isinstance(player.memory, LogitSpecMemory)
    player.memory = LogitSpecMemory(jnp.asarray(player.memory.top_ids).at[0, 4].set(jnp.array([5, 2, 3, 4, 1])))
    proposal = player.propose()
    assert paths(proposal, 0) == {
        # The bigram 1 2 was followed by 3 4 1.
        (3,): "lexical",
        (3, 4): "lexical",
        (3, 4, 1): "lexical",
        # 5 is new; 2 is the anchor's token and 3 is there already; 4 was followed by 1 2.
        (5,): "branch",
        (4,): "branch",
        (4, 1): "branch",
        (4, 1, 2): "branch",
        # Rank 4 may have one node only.
        (1,): "branch",
    }
    np.testing.assert_array_equal(proposal.parents[0, :9], [0, 0, 1, 2, 0, 0, 5, 6, 0])


def test_refuses_bad_options():
    for option in ("num_nodes", "num_drafts", "ngram_max", "top_k"):
        with pytest.raises(ConfigError, match=option):
            dataclasses.replace(LogitSpec(), **{option: 0})
    with pytest.raises(ConfigError, match="branch_lengths"):
        LogitSpec(branch_lengths=((3, 0),))
    with pytest.raises(ConfigError, match="vocabulary"):
        LogitSpec().init(1, 8, hidden_size=4, vocab_size=63, dtype=jnp.float32)
    assert LogitSpec().needs(LAYERS).top_k == 64
