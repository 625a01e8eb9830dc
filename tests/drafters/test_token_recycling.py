"""TokenRecycling against a plain-Python oracle; its template, its update rule and its hot start."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jdlite.drafters.base import Observation
from jdlite.drafters.token_recycling import TokenRecycling, TokenRecyclingMemory, rank_prior, tree_template
from jdlite.errors import ConfigError
from tests.drafters.harness import LAYERS, Player, paths, play, to_context
from tests.drafters.oracles.token_recycling import likeliest_paths, successor_table, unroll
from tests.drafters.strategies import VOCAB, batches, seeds


def rank_paths(drafter: TokenRecycling) -> set[tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {0: ()}
    for i in range(1, drafter.max_nodes):
        found[i] = (*found[drafter.template.parents[i]], drafter.template.ranks[i])
    return set(found.values()) - {()}


DRAFTERS = [
    TokenRecycling(top_k=VOCAB),
    TokenRecycling(num_nodes=12, depth=3, top_k=2),
    TokenRecycling(num_nodes=1),
    TokenRecycling(num_nodes=50, depth=1, top_k=3),
]


@pytest.mark.parametrize("drafter", DRAFTERS, ids=str)
@given(texts=batches(), seed=seeds)
@settings(max_examples=15, deadline=None)
def test_equals_oracle(drafter, texts, seed):
    ranks = rank_paths(drafter)

    def oracle(history):
        # The table outlives a rollback on purpose: it holds guesses, and `nodes` is never cut.
        found = unroll(history.tokens[-1], successor_table(history.nodes), ranks)
        return dict.fromkeys(found, "branch")

    play(drafter, texts, oracle, seed=seed, vocab=VOCAB)


@pytest.mark.parametrize(("num_nodes", "depth", "top_k"), [(80, 6, 4), (80, 3, 8), (12, 2, 3), (2, 1, 1), (1, 6, 8)])
def test_template_is_the_likeliest_tree(num_nodes, depth, top_k):
    drafter = TokenRecycling(num_nodes=num_nodes, depth=depth, top_k=top_k)
    probability = lambda ranks: float(np.prod([rank_prior(r) for r in ranks]))  # noqa: E731
    got, best = rank_paths(drafter), likeliest_paths(num_nodes, depth, top_k, rank_prior)
    # Ties (permuted ranks) may be broken either way, the probabilities may not differ.
    np.testing.assert_allclose(sorted(map(probability, got)), sorted(map(probability, best)))


def test_template_shape():
    template = tree_template(80, 6, 8)
    assert len(template.parents) == 80
    assert max(template.depths) == 6
    assert sum(d == 1 for d in template.depths) == 8
    assert all(parent < node for node, parent in enumerate(template.parents) if node)
    assert list(template.gains) == sorted(template.gains, reverse=True)
    # Fewer nodes where depth and width allow no more: 1 + 2 + 4.
    assert TokenRecycling(num_nodes=80, depth=2, top_k=2).max_nodes == 7


def observation(tokens, valid, top_ids, count):
    B = tokens.shape[0]
    zeros = jnp.zeros(B, jnp.int32)
    return Observation(
        tokens=jnp.asarray(tokens, jnp.int32),
        valid=jnp.asarray(valid),
        path=jnp.zeros((B, 1), jnp.int32),
        start=zeros,
        count=jnp.asarray(count, jnp.int32),
        taps=(),
        top_ids=jnp.asarray(top_ids, jnp.int32),
        next_tokens=jnp.zeros((B, 1), jnp.int32),
    )


def test_last_node_of_a_token_wins():
    """A long chunk full of repeats, some nodes not run, one row finished."""
    drafter = TokenRecycling(top_k=2)
    rng = np.random.default_rng(0)
    B, N = 3, 400
    tokens, valid = rng.integers(0, 20, (B, N)), rng.random((B, N)) < 0.5
    top_ids = rng.integers(0, 20, (B, N, 2))
    memory = drafter.init(B, 8, hidden_size=4, vocab_size=20, dtype=jnp.float32)
    context = to_context(Player(drafter, [[0]] * B, seed=0, vocab=20).context())
    memory = jax.jit(drafter.observe)(memory, context, observation(tokens, valid, top_ids, [1, 0, 1]))
    for b in range(B):
        expected = {int(tokens[b, n]): top_ids[b, n] for n in range(N) if valid[b, n] and b != 1}
        assert np.flatnonzero(memory.known[b]).tolist() == sorted(expected)
        for token, ids in expected.items():
            np.testing.assert_array_equal(memory.table[b, token], ids)


def test_hot_start():
    drafter = TokenRecycling(num_nodes=4, depth=1, top_k=3)
    player = Player(drafter, [[5], [6]], seed=0, vocab=VOCAB)
    player.prefill([1, 1])
    assert paths(player.propose(), 0) == {}
    table = jnp.zeros((VOCAB, 3), jnp.int32).at[5].set(jnp.array([2, 0, 7]))
    assert isinstance(player.memory, TokenRecyclingMemory)
    player.memory = drafter.hot_start(player.memory, table, jnp.arange(VOCAB) == 5)
    proposal = player.propose()
    assert list(paths(proposal, 0)) == [(2,), (0,), (7,)]
    assert paths(proposal, 1) == {}
    with pytest.raises(ConfigError, match="shape"):
        drafter.hot_start(player.memory, table[:-1], jnp.arange(VOCAB - 1) == 5)


def test_refuses_bad_options():
    for option in ("num_nodes", "depth", "top_k"):
        with pytest.raises(ConfigError, match=option):
            TokenRecycling(**{option: 0})
    with pytest.raises(ConfigError, match="vocabulary"):
        TokenRecycling().init(1, 8, hidden_size=4, vocab_size=7, dtype=jnp.float32)
    assert TokenRecycling().needs(LAYERS).top_k == 8
