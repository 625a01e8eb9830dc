"""Acceptance: the walk against plain Python, and rejection against its exact law."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdlite.decoding.accept import rejection, sample_and_match, walk
from jdlite.decoding.tree import Tree
from tests.decoding.test_tree import B, N, rows

match = jax.jit(lambda parents, valid, tokens, drawn: sample_and_match(
    Tree.from_parents(parents, valid), tokens, drawn, N
))  # fmt: skip
reject = jax.jit(rejection, static_argnames="path_length")


def descend(parents, valid, tokens, drawn) -> tuple[list[int], list[int]]:
    """Longest path of matching nodes (lowest index among equals), by trying every way down; nodes and new tokens."""

    def deepest(node: int) -> list[int]:
        ways = [
            deepest(i)
            for i in range(1, len(parents))
            if parents[i] == node and valid[i] and tokens[i] == drawn[node]
        ]  # fmt: skip
        return [node, *max(ways, key=len, default=[])]

    path = deepest(0)
    return path, [drawn[i] for i in path]


@given(batch=st.lists(rows(), min_size=B, max_size=B), seed=st.integers(0, 2**31 - 1), vocab=st.integers(1, 3))
def test_sample_and_match_is_the_walk(batch, seed, vocab):
    """Random trees over few tokens, so that long matches and duplicate siblings are common."""
    rng = np.random.default_rng(seed)
    parents, valid = (np.array(x) for x in zip(*batch, strict=True))
    tokens, drawn = (rng.integers(0, vocab, (B, N)).astype(np.int32) for _ in range(2))
    got = match(parents.astype(np.int32), valid, tokens, drawn)
    for b in range(B):
        path, emitted = descend(parents[b], valid[b], tokens[b], drawn[b])
        accepted = int(got.accepted[b])
        assert accepted == len(path) - 1
        assert np.asarray(got.emitted[b])[: accepted + 1].tolist() == emitted
        # With duplicate siblings there may be several such paths; it must be one of them.
        nodes = np.asarray(got.path[b])[: accepted + 1].tolist()
        assert nodes[0] == 0
        for above, node in itertools.pairwise(nodes):
            assert parents[b, node] == above
            assert tokens[b, node] == drawn[b, above]
        assert set(np.flatnonzero(got.on_path[b])) == set(nodes)
        assert not np.asarray(got.path[b])[accepted + 1 :].any()


@jax.jit
def stepwise(parents, valid, tokens, drawn):
    def draw_at(node):
        return jnp.take_along_axis(drawn, node[:, None], axis=1)[:, 0]

    return walk(Tree.from_parents(parents, valid), tokens, draw_at, N)


@given(batch=st.lists(rows(), min_size=B, max_size=B), seed=st.integers(0, 2**31 - 1), vocab=st.integers(1, 4))
def test_stepwise_walk(batch, seed, vocab):
    """Node by node: a way down that ends where no child matches, and the same as at once where siblings differ."""
    rng = np.random.default_rng(seed)
    parents, valid = (np.array(x) for x in zip(*batch, strict=True))
    tokens, drawn = (rng.integers(0, vocab, (B, N)).astype(np.int32) for _ in range(2))
    got = stepwise(parents.astype(np.int32), valid, tokens, drawn)
    whole = match(parents.astype(np.int32), valid, tokens, drawn)
    for b in range(B):
        accepted = int(got.accepted[b])
        nodes = np.asarray(got.path[b])[: accepted + 1].tolist()
        assert nodes[0] == 0
        for above, node in itertools.pairwise(nodes):
            assert parents[b, node] == above
            assert valid[b, node]
            assert tokens[b, node] == drawn[b, above]
        assert np.asarray(got.emitted[b])[: accepted + 1].tolist() == drawn[b, nodes].tolist()
        assert set(np.flatnonzero(got.on_path[b])) == set(nodes)
        last = nodes[-1]
        assert not any(
            parents[b, i] == last and valid[b, i] and tokens[b, i] == drawn[b, last] for i in range(1, N)
        )  # fmt: skip
        siblings = [(parents[b, i], tokens[b, i]) for i in range(1, N)]
        if len(set(siblings)) == len(siblings):
            for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(whole), strict=True):
                keep = accepted + 1 if one.ndim > 1 and one.shape[1] == N and one.dtype == jnp.int32 else None
                np.testing.assert_array_equal(one[b] if one.ndim == 1 else one[b, :keep],
                                              other[b] if one.ndim == 1 else other[b, :keep])  # fmt: skip


# Rejection.

V, K = 3, 2
CHAIN = np.maximum(np.arange(K + 1) - 1, 0)


def chain_tree(batch: int, valid=True) -> Tree:
    parents = jnp.broadcast_to(jnp.asarray(CHAIN, jnp.int32), (batch, K + 1))
    return Tree.from_parents(parents, jnp.broadcast_to(jnp.asarray(valid), (batch, K + 1)))


def exact_law(p, q, first_q=None):
    """Law of the K + 1 next tokens when the drafts come from q and the decisions are `reject`'s, by enumeration.

    p and q give the law of the next token from the tokens before. All drafts are listed; the uniforms are integrated by
    one representative on each side of p / q, where alone a decision can change; the replacement's law is measured by
    `replacement_law`. Tokens after a rejected draft are completed with p.
    """
    law = dict.fromkeys(itertools.product(range(V), repeat=K + 1), 0.0)
    cases, weights = [], []
    for drafts in itertools.product(range(V), repeat=K):
        ps = [np.array(p(drafts[:i])) for i in range(K + 1)]
        qs = [np.array(q(drafts[:i])) for i in range(K)]
        for middle in itertools.product(range(2), repeat=K):
            # u in [0, ratio) and in [ratio, 1): one representative and the length of each.
            weight, us = 1.0, [0.5]
            for i, side in enumerate(middle):
                ratio = min(1.0, ps[i][drafts[i]] / qs[i][drafts[i]]) if qs[i][drafts[i]] > 0 else 0.0
                weight *= qs[i][drafts[i]] * (1 - ratio if side else ratio)
                us.append((ratio + 1) / 2 if side else ratio / 2)
            if weight > 0:
                cases.append((drafts, ps, qs, us))
                weights.append(weight)
    tokens = np.array([[0, *drafts] for drafts, *_ in cases], np.int32)
    with np.errstate(divide="ignore"):
        log_p = np.log(np.array([ps for _, ps, _, _ in cases]))
        log_q = np.log(np.array([[np.ones(V) / V, *qs] for _, _, qs, _ in cases]))
    uniforms = np.array([us for *_, us in cases])
    shares = replacement_law(tokens, log_p, log_q, uniforms)
    for case, (drafts, _, _, _), weight in zip(range(len(cases)), cases, weights, strict=True):
        for (accepted, new), share in shares[case].items():
            assert new[:accepted] == drafts[:accepted]
            rest = K + 1 - len(new)
            for tail in itertools.product(range(V), repeat=rest):
                whole, chance = new, share
                for token in tail:
                    chance *= p(whole)[token]
                    whole = (*whole, token)
                law[whole] += weight * chance
    return law


def replacement_law(tokens, log_p, log_q, uniforms):
    """For each case the law of (accepted, new tokens) over the Gumbel noise of `reject`.

    The draw is argmax(w + noise), so its law is softmax(w). How far w of a token lies below that of a base token is
    found by bisection: the least noise on the token that makes it win.
    """
    C = len(tokens)
    tree = chain_tree(C)

    def outcome(noise):
        got = reject(tree, tokens, log_p.astype(np.float32), log_q.astype(np.float32), uniforms.astype(np.float32),
                     noise.astype(np.float32), K + 1)  # fmt: skip
        accepted = np.asarray(got.accepted)
        emitted = np.asarray(got.emitted)
        return accepted, [tuple(emitted[c, : accepted[c] + 1].tolist()) for c in range(C)]

    accepted, _ = outcome(np.zeros((C, K + 1, V)))
    # Tokens that can be drawn at all: those that win with all the noise on them.
    possible = np.zeros((C, V), bool)
    for v in range(V):
        noise = np.full((C, K + 1, V), -200.0)
        noise[..., v] = 200.0
        _, new = outcome(noise)
        possible[:, v] = [n[-1] == v for n in new]
    base = possible.argmax(axis=1)
    low, high = np.full((C, V), -60.0), np.full((C, V), 60.0)
    for _ in range(50):
        middle = (low + high) / 2
        for v in range(V):
            noise = np.full((C, K + 1, V), -500.0)
            noise[np.arange(C), :, base] = 0.0
            noise[:, :, v] = middle[:, v][:, None]
            _, new = outcome(noise)
            wins = np.array([n[-1] == v for n in new]) & (base != v)
            high[:, v] = np.where(wins, middle[:, v], high[:, v])
            low[:, v] = np.where(wins, low[:, v], middle[:, v])
    weight = np.where(possible, np.exp(-high), 0.0)
    weight[np.arange(C), base] = 1.0
    weight /= weight.sum(axis=1, keepdims=True)
    _, new = outcome(np.zeros((C, K + 1, V)))
    return [{(int(accepted[c]), (*new[c][:-1], v)): weight[c, v] for v in range(V) if weight[c, v]} for c in range(C)]


def table_of(rng, sharpness: float):
    """A law of the next token for every text over V tokens."""
    tables = {}

    def law(text):
        if text not in tables:
            tables[text] = rng.dirichlet(np.full(V, sharpness)).astype(np.float32).astype(np.float64)
            tables[text] /= tables[text].sum()
        return tables[text]

    return law


def block_law(p):
    """Law of K + 1 tokens drawn from p one after the other."""
    return {
        text: float(np.prod([p(text[:i])[token] for i, token in enumerate(text)]))
        for text in itertools.product(range(V), repeat=K + 1)
    }


def distance(a, b) -> float:
    """Total variation."""
    return sum(abs(a[text] - b[text]) for text in a) / 2


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sharpness", [1.0, 0.2])
def test_rejection_is_exact_by_enumeration(seed, sharpness):
    rng = np.random.default_rng(seed)
    p, q = table_of(rng, sharpness), table_of(rng, sharpness)
    assert distance(exact_law(p, q), block_law(p)) < 1e-5


def test_rejection_is_exact_where_laws_have_zeros():
    p = lambda text: np.array([[0.0, 0.3, 0.7], [1.0, 0.0, 0.0], [0.5, 0.5, 0.0]][len(text) % 3])  # noqa: E731
    q = lambda text: np.array([[0.6, 0.4, 0.0], [0.2, 0.8, 0.0], [0.0, 0.0, 1.0]][len(text) % 3])  # noqa: E731
    assert distance(exact_law(p, q), block_law(p)) < 1e-6
    assert distance(exact_law(p, p), block_law(p)) < 1e-6


@pytest.mark.parametrize("bias", ["no residual", "stale q"])
def test_enumeration_catches_a_planted_bias(bias, monkeypatch):
    """The test's own power: the two classic mistakes move the law far beyond the tolerance."""
    p, q = table_of(np.random.default_rng(0), 1.0), table_of(np.random.default_rng(1), 1.0)

    def biased(tree, tokens, log_p, log_q, uniforms, gumbels, path_length):
        if bias == "stale q":  # accept with the q of another context
            return rejection(tree, tokens, log_p, jnp.roll(log_q, 1, axis=1), uniforms, gumbels, path_length)
        good = rejection(tree, tokens, log_p, log_q, uniforms, gumbels, path_length)
        drawn = jnp.argmax(log_p + gumbels, axis=-1)  # the replacement comes from p instead of the residual
        last = jnp.arange(path_length) == good.accepted[:, None]
        emitted = jnp.where(last, jnp.take_along_axis(drawn, good.path, axis=1), good.emitted)
        return type(good)(good.path, good.accepted, emitted, good.on_path)

    monkeypatch.setattr("tests.decoding.test_accept.reject", jax.jit(biased, static_argnames="path_length"))
    assert distance(exact_law(p, q), block_law(p)) > 0.02


@functools.partial(jax.jit, static_argnums=3)
def simulate(key, log_p, log_q, count):
    """Many blocks with fixed p and q per depth: new tokens `[count, K + 1]`, -1 after the accepted part."""
    draft_key, accept_key, residual_key = jax.random.split(key, 3)
    drafts = jax.random.categorical(draft_key, log_q, axis=-1, shape=(count, K + 1)).astype(jnp.int32)
    uniforms = jax.random.uniform(accept_key, (count, K + 1))
    noise = jax.random.gumbel(residual_key, (count, K + 1, V))
    wide = lambda x: jnp.broadcast_to(x, (count, K + 1, V))  # noqa: E731
    got = rejection(chain_tree(count), drafts, wide(log_p), wide(log_q), uniforms, noise, K + 1)
    return jnp.where(jnp.arange(K + 1) <= got.accepted[:, None], got.emitted, -1)


def g_test(counts, expected) -> float:
    """p value of the likelihood ratio test."""
    from scipy.stats import chi2

    counts, expected = np.asarray(counts, float), np.asarray(expected, float)
    assert counts[expected == 0].sum() == 0
    seen = counts > 0
    statistic = 2 * np.sum(counts[seen] * np.log(counts[seen] / expected[seen]))
    return float(chi2.sf(statistic, (expected > 0).sum() - 1))


def test_rejection_by_simulation():
    """First token against p; second token, where the block reached it, against p whatever the first was."""
    p = np.array([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.3, 0.3, 0.4]])
    q = np.array([[1 / 3] * 3, [0.2, 0.2, 0.6], [0.6, 0.3, 0.1]])
    new = np.asarray(simulate(jax.random.key(3), np.log(p).astype(np.float32), np.log(q).astype(np.float32), 200_000))
    assert g_test(np.bincount(new[:, 0], minlength=V), p[0] * len(new)) > 1e-3
    for first in range(V):
        second = new[(new[:, 0] == first) & (new[:, 1] >= 0), 1]
        assert g_test(np.bincount(second, minlength=V), p[1] * len(second)) > 1e-3
    # The test notices a law that is off by 0.01.
    assert g_test(np.bincount(new[:, 0], minlength=V), (p[0] + [0.01, 0, -0.01]) * len(new)) < 1e-6


def one(drafts, p, q, uniforms, valid=(True, True, True), noise=None):
    """One block; accepted and new tokens."""
    with np.errstate(divide="ignore"):
        log_p, log_q = np.log(np.array([p], np.float32)), np.log(np.array([q], np.float32))
    noise = np.zeros((1, K + 1, V), np.float32) if noise is None else noise
    got = reject(
        chain_tree(1, np.array(valid)),
        np.array([[0, *drafts]], np.int32),
        log_p,
        log_q,
        np.array([[0.0, *uniforms]], np.float32),
        noise,
        K + 1,
    )
    accepted = int(got.accepted[0])
    return accepted, np.asarray(got.emitted[0])[: accepted + 1].tolist()


UNIFORM = [1 / 3] * 3


def test_accepted_drafts_are_emitted():
    """What is emitted for an accepted draft is the draft, never what would have replaced it."""
    noise = np.zeros((1, K + 1, V), np.float32)
    noise[..., 2] = 50.0
    p = [[0.9, 0.05, 0.05], [0.05, 0.9, 0.05], UNIFORM]
    assert one([0, 1], p, [UNIFORM] * 3, [0.5, 0.5], noise=noise) == (2, [0, 1, 2])
    assert one([0, 0], p, [UNIFORM] * 3, [0.5, 0.5], noise=noise) == (1, [0, 1])  # the residual is on token 1 only


def test_zero_probability_is_never_accepted():
    """u = 0 is a possible uniform."""
    p = [[0.0, 0.5, 0.5], UNIFORM, UNIFORM]
    accepted, new = one([0, 1], p, [UNIFORM] * 3, [0.0, 0.0])
    assert accepted == 0
    assert new[0] in (1, 2)
    # Nor where q is a point mass on it.
    assert one([0, 1], p, [UNIFORM, [1.0, 0.0, 0.0], UNIFORM], [0.0, 0.0])[0] == 0


def test_equal_laws_leave_no_residual():
    """p = q: everything is accepted, even with the largest uniform, and nothing is NaN."""
    laws = [[0.2, 0.3, 0.5], [0.2, 0.3, 0.5], [0.2, 0.3, 0.5]]
    largest = float(np.nextafter(np.float32(1), np.float32(0)))
    accepted, new = one([0, 1], laws, laws, [largest, largest])
    assert accepted == 2
    assert new[:2] == [0, 1]
    assert 0 <= new[2] < V


def test_invalid_drafts_are_not_looked_at():
    """A draft that is not there neither is accepted nor takes its mass out of the replacement's law."""
    p = [[0.1, 0.1, 0.8]] * 3
    q = [[0.0, 0.0, 1.0]] * 3
    assert one([2, 2], p, q, [0.0, 0.0], valid=(True, False, True)) == (0, [2])
    assert one([2, 2], p, q, [0.0, 0.0], valid=(True, True, False)) == (1, [2, 2])


@pytest.mark.parametrize("bad", ["all", "one"])
def test_nan_law_is_a_point_mass(bad):
    """With q a point mass on the draft: accept with p(x), and on rejection never x again."""
    p = [[0.3, 0.3, 0.4], UNIFORM, UNIFORM]
    q = np.array([UNIFORM] * 3)
    q[1, 0 if bad == "one" else slice(None)] = np.nan
    assert one([2, 1], p, q, [0.39, 0.99])[0] >= 1
    for seed in range(20):
        noise = np.random.default_rng(seed).gumbel(size=(1, K + 1, V)).astype(np.float32)
        accepted, new = one([2, 1], p, q, [0.41, 0.0], noise=noise)
        assert accepted == 0
        assert new[0] != 2


@given(seed=st.integers(0, 2**31 - 1))
@settings(max_examples=30)
def test_one_hot_law_of_greedy_rows(seed):
    """Temperature 0 gives a one-hot p: the longest prefix of the greedy text is accepted, whatever q is."""
    rng = np.random.default_rng(seed)
    best, drafts = rng.integers(0, V, K + 1), rng.integers(0, V, K)
    noise = rng.gumbel(size=(1, K + 1, V)).astype(np.float32)
    got = one(drafts, np.eye(V)[best], rng.dirichlet(np.ones(V), K + 1), rng.random(K), noise=noise)
    right = next((i for i in range(K) if drafts[i] != best[i]), K)
    assert got == (right, best[: right + 1].tolist())
