"""PLDPlus against a float64 oracle, and the shared rerank on its edges."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jdlite.drafters.pld_plus import PLDPlus
from jdlite.drafters.retrieval import default_rerank_layer, normalise, rerank
from jdlite.errors import ConfigError
from tests.drafters.harness import LAYERS, Player, chain_paths, paths, play
from tests.drafters.oracles.pld_plus import cosine, pld_plus
from tests.drafters.strategies import VOCAB, batches, seeds


@pytest.mark.parametrize("drafter", [PLDPlus(num_drafts=4), PLDPlus(num_drafts=30, rerank_layer=0)], ids=str)
@given(texts=batches(), seed=seeds)
@settings(max_examples=25, deadline=None)
def test_equals_oracle(drafter, texts, seed):
    def oracle(history):
        return chain_paths(pld_plus(history.tokens, history.states, num_drafts=drafter.num_drafts))

    play(drafter, texts, oracle, seed=seed, vocab=VOCAB)


def test_first_slot_alone_is_no_hit():
    player = Player(PLDPlus(num_drafts=4), [[3, 1, 2, 3], [5], [5, 5], [5, 5, 5]], seed=0, vocab=VOCAB)
    player.prefill([4, 1, 2, 3])
    proposal = player.propose()
    assert [len(paths(proposal, b)) for b in range(4)] == [0, 0, 0, 1]


def test_gain_grows_with_the_match():
    """The same copy is believed more where more tokens before it agree."""
    player = Player(PLDPlus(num_drafts=4), [[7, 1, 2, 3, 4, 5, 6, 3], [7, 1, 2, 3, 4, 5, 1, 2, 3]], seed=0, vocab=VOCAB)
    player.prefill([8, 9])
    gain = player.propose().gain
    assert (gain[1, 1:] > gain[0, 1:]).all()


@pytest.mark.parametrize("capacity", [1, 63, 64, 65, 300, 700])
@pytest.mark.parametrize("chunk", [7, 64])
def test_rerank_equals_argmax(capacity, chunk):
    """Any number of candidates around the block and chunk sizes; 700 takes the dense way."""
    rng = np.random.default_rng(capacity)
    B, Q, D = 2, 4, 5
    states = normalise(jnp.asarray(rng.normal(size=(B, capacity, D)), jnp.float32))
    query = normalise(jnp.asarray(rng.normal(size=(B, Q, D)), jnp.float32))
    mask = rng.random((B, Q, capacity)) < np.array([0.0, 0.02, 0.5, 1.0])[:, None]
    slot, hit, value = (np.asarray(x) for x in jax.jit(functools.partial(rerank, chunk=chunk))(states, mask, query))
    for b in range(B):
        for q in range(Q):
            slots = [j for j in range(1, capacity) if mask[b, q, j]]
            assert hit[b, q] == bool(slots)
            if slots:
                cosines = [cosine(np.asarray(states[b, j - 1]), np.asarray(query[b, q])) for j in slots]
                assert slot[b, q] == slots[int(np.argmax(cosines))]
                assert value[b, q] == pytest.approx(max(cosines), abs=1e-6)


@pytest.mark.parametrize(("capacity", "every"), [(200, 3), (1000, 1)])
def test_rerank_ties_and_nan(capacity, every):
    """Equal states: the lowest slot wins, also across chunks. NaN states never win."""
    states, query = jnp.ones((1, capacity, 4)) / 2, jnp.ones((1, 1, 4)) / 2
    mask = (jnp.arange(capacity) % every == every - 1)[None, None]
    first = max(every - 1, 1)
    search = jax.jit(functools.partial(rerank, chunk=16))
    slot, hit, _ = search(states, mask, query)
    assert (int(slot[0, 0]), bool(hit[0, 0])) == (first, True)
    slot, hit, _ = search(states.at[0, :first].set(jnp.nan), mask, query)
    assert (int(slot[0, 0]), bool(hit[0, 0])) == (first + every, True)
    slot, hit, _ = search(states * jnp.nan, mask, query)
    assert (int(slot[0, 0]), bool(hit[0, 0])) == (0, False)


def test_default_rerank_layer():
    """Published indices count the embedding output as 0; taps do not."""
    assert default_rerank_layer(36) == 28
    assert default_rerank_layer(32, 9 / 32) == 8
    assert [default_rerank_layer(n) for n in (1, 2)] == [0, 1]
    assert all(0 <= default_rerank_layer(n, f) < n for n in range(1, 70) for f in (0.0, 0.3, 1.0))


def test_refuses_bad_options():
    with pytest.raises(ConfigError, match="num_drafts"):
        PLDPlus(num_drafts=0)
    with pytest.raises(ConfigError, match="state_dtype"):
        PLDPlus(state_dtype="int32")
    for layer in (-1, LAYERS):
        with pytest.raises(ConfigError, match="rerank_layer"):
            PLDPlus(rerank_layer=layer).needs(LAYERS)
    assert PLDPlus().needs(LAYERS).taps == (2,)
