"""Tree structure and ordering against plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdlite.decoding.policy import Reliability, calibrate, cells, conditional
from jdlite.decoding.tree import Tree, order_by_gain
from jdlite.drafters.base import Proposal

N, B = 9, 2
build = jax.jit(Tree.from_parents)


@st.composite
def rows(draw, nodes: int = N):
    """Parents (always before their child) and validity of a row."""
    parents = [0] + [draw(st.integers(0, i - 1)) for i in range(1, nodes)]
    return parents, [True] + [draw(st.booleans()) for _ in range(nodes - 1)]


def ancestors(parents: list[int], node: int) -> list[int]:
    """The node, its parent, and so on up to the anchor."""
    path = [node]
    while path[-1]:
        path.append(parents[path[-1]])
    return path


def paths(tokens, parents, valid) -> dict[tuple[int, ...], int]:
    """Token paths of the nodes whose whole path is valid, with the node."""
    found = {}
    for i in range(len(parents)):
        above = ancestors(parents, i)
        if all(valid[j] for j in above):
            found[tuple(tokens[j] for j in reversed(above))] = i
    return found


@given(st.lists(rows(), min_size=B, max_size=B))
def test_structure(batch):
    parents, valid = (np.array(x) for x in zip(*batch, strict=True))
    tree = build(parents.astype(np.int32), valid)
    for b in range(B):
        for i in range(N):
            above = ancestors(list(parents[b]), i)
            assert set(np.flatnonzero(tree.ancestors[b, i])) == set(above)
            assert tree.depth[b, i] == len(above) - 1
            assert bool(tree.valid[b, i]) == all(valid[b, j] for j in above)


@pytest.mark.parametrize("nodes", [1, 2, 3, 8, 33, 40])
def test_chain_of_any_length(nodes):
    """The deepest tree of each size, around the powers of two that the squaring counts in."""
    parents = np.maximum(np.arange(nodes) - 1, 0)[None].astype(np.int32)
    tree = build(parents, np.ones((1, nodes), bool))
    np.testing.assert_array_equal(tree.depth[0], np.arange(nodes))
    np.testing.assert_array_equal(tree.ancestors[0], np.tril(np.ones((nodes, nodes), bool)))
    first = tree.first(max(nodes // 2, 1))
    np.testing.assert_array_equal(first.ancestors[0], np.tril(np.ones((max(nodes // 2, 1),) * 2, bool)))


@jax.jit
def calibrated_order(tokens, parents, valid, gain, hits, trials):
    """What the loop does with a proposal before it cuts it."""
    source = jnp.zeros_like(tokens)
    tree = Tree.from_parents(parents, valid)
    prior = conditional(gain, tree)
    cell = cells(prior, source)
    worth = calibrate(prior, cell, Reliability(hits, trials), tree)
    return order_by_gain(Proposal(tokens, parents, tree.valid, worth, source), cell)


@given(
    batch=st.lists(rows(), min_size=B, max_size=B),
    seed=st.integers(0, 2**31 - 1),
    kind=st.sampled_from(["random", "ones", "zeros", "nan", "negative", "huge"]),
)
def test_order_keeps_the_tree(batch, seed, kind):
    """Whatever gains a drafter states: the same paths, parents before children, valid nodes first, falling gain."""
    rng = np.random.default_rng(seed)
    parents, valid = (np.array(x) for x in zip(*batch, strict=True))
    tokens = rng.permutation(100)[: B * N].reshape(B, N).astype(np.int32)
    gain = {
        "random": rng.random((B, N)),
        "ones": np.ones((B, N)),
        "zeros": np.zeros((B, N)),
        "nan": np.where(rng.random((B, N)) < 0.5, np.nan, rng.random((B, N))),
        "negative": -rng.random((B, N)),
        "huge": rng.choice([np.inf, -np.inf, 1e30, np.nan], (B, N)),
    }[kind].astype(np.float32)
    trials = (rng.integers(0, 50, (B, 65)) * (rng.random((B, 1)) < 0.7)).astype(np.float32)
    hits = np.floor(trials * rng.random((B, 65))).astype(np.float32)
    ordered, _ = calibrated_order(tokens, parents.astype(np.int32), valid, gain, hits, trials)
    for b in range(B):
        before = paths(list(tokens[b]), list(parents[b]), list(valid[b]))
        new_parents, new_valid = np.asarray(ordered.parents[b]), np.asarray(ordered.valid[b])
        after = paths(list(np.asarray(ordered.tokens[b])), list(new_parents), list(new_valid))
        assert set(before) == set(after)
        assert after[(tokens[b, 0],)] == 0
        assert new_valid.sum() == len(before)
        assert new_valid[: len(before)].all(), "invalid nodes go last"
        worth = np.asarray(ordered.gain[b])
        assert np.isfinite(worth).all()
        for i in range(1, len(before)):
            assert new_parents[i] < i
            assert worth[i] <= worth[i - 1]


def test_order_is_stable_for_chains():
    """A chain stays as it is, also where gains tie, so that its forward needs no other order."""
    chain = jnp.maximum(jnp.arange(N) - 1, 0)[None].astype(jnp.int32)
    tokens = jnp.arange(N, dtype=jnp.int32)[None]
    ones = jnp.ones((1, N), jnp.float32)
    ordered, extra = order_by_gain(Proposal(tokens, chain, ones.astype(bool), ones, tokens * 0), tokens)
    np.testing.assert_array_equal(ordered.tokens, tokens)
    np.testing.assert_array_equal(ordered.parents, chain)
    np.testing.assert_array_equal(extra, tokens)
