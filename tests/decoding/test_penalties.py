"""Penalties against a float64 oracle that walks each node's own text."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jdlite.decoding.penalties import History, node_history, penalised

V = 11
NODES = 6


def oracle(logits, prompt, generated, r, p, f):
    """One vector of logits after `prompt` and `generated`, token by token."""
    out = logits.astype(np.float64)
    for t in range(V):
        if t in prompt or t in generated:
            out[t] = out[t] * r if out[t] < 0 else out[t] / r
        count = generated.count(t)
        out[t] -= f * count + (p if count else 0)
    return out


@jax.jit
def tree_penalised(logits, prompt, prompt_length, text, count, tokens, ancestors, r, p, f):
    history = History.from_prompt(prompt, prompt_length, V).update(text, count)
    history = node_history(history, tokens, ancestors)
    return penalised(logits, history, repetition=r, presence=p, frequency=f)


jitted = jax.jit(penalised)

TOKENS = st.lists(st.integers(0, V - 1), max_size=5)
NUMBER = st.sampled_from([0.0, 0.6, -0.4, 1.5])
ROW = st.tuples(
    st.lists(st.integers(0, V - 1), min_size=1, max_size=5),
    TOKENS,
    st.lists(st.integers(0, 3), min_size=NODES, max_size=NODES),  # few ids: tokens recur along a path
    st.tuples(*(st.integers(0, i) for i in range(NODES - 1))),
    st.tuples(st.sampled_from([1.0, 1.4, 0.7]), NUMBER, NUMBER),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(ROW, min_size=2, max_size=2), st.integers(0, 10**6))
def test_each_node_sees_its_own_path(rows, seed):
    """Random trees; node 0 is the anchor, the last token of the committed text."""
    logits = np.random.default_rng(seed).normal(size=(2, NODES, V)).astype(np.float32)
    prompt, text = np.full((2, 5), 3), np.full((2, 5), 3)  # unused slots hold a real token
    tokens, ancestors = np.zeros((2, NODES), np.int32), np.zeros((2, NODES, NODES), bool)
    want = np.zeros((2, NODES, V))
    for b, (given_, generated, drafts, parents, (r, p, f)) in enumerate(rows):
        prompt[b, : len(given_)], text[b, : len(generated)] = given_, generated
        tokens[b] = drafts
        tokens[b, 0] = (given_ + generated)[-1]
        paths = [[]]
        for i, parent in enumerate(parents, start=1):
            ancestors[b, i] = ancestors[b, parent]
            ancestors[b, i, parent] = True
            paths.append([*paths[parent], int(tokens[b, i])])
        for i, path in enumerate(paths):
            want[b, i] = oracle(logits[b, i], given_, generated + path, r, p, f)
    lengths = lambda k: jnp.array([len(row[k]) for row in rows])  # noqa: E731
    r, p, f = (jnp.array(x, jnp.float32) for x in zip(*[row[4] for row in rows], strict=True))
    arrays = [jnp.asarray(x) for x in (logits, prompt, lengths(0), text, lengths(1), tokens, ancestors)]
    np.testing.assert_allclose(tree_penalised(*arrays, r, p, f), want, rtol=1e-5, atol=1e-5)


def test_two_branches_of_different_history():
    """Anchor 0, branches 1-1 and 2: the first ends with two counts of token 1, the second with one of token 2."""
    history = History.from_prompt(jnp.array([[0]]), jnp.array([1]), 3)
    ancestors = jnp.array([[[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0]]], bool)
    history = node_history(history, jnp.array([[0, 1, 1, 2]]), ancestors)
    one = jnp.ones(1)
    got = jitted(jnp.zeros((1, 4, 3)), history, repetition=one, presence=0 * one, frequency=one)
    want = np.array([[0, 0, 0], [0, -1, 0], [0, -2, 0], [0, 0, -1]])
    np.testing.assert_array_equal(got[0], want)
    for node in range(4):
        alone = history.at_node(jnp.array([node]))
        got = jitted(jnp.zeros((1, 1, 3)), alone, repetition=one, presence=0 * one, frequency=one)
        np.testing.assert_array_equal(got[0, 0], want[node])


def test_tree_path_equals_plain_decoding_of_the_same_text():
    """A chain of drafts gives at each node what plain decoding gives after committing the tokens before it."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(1, 5, V)), jnp.float32)
    tokens = jnp.array([[4, 7, 7, 2, 4]])
    start = History.from_prompt(jnp.array([[1, 4]]), jnp.array([2]), V)
    options = {"repetition": jnp.array([1.3]), "presence": jnp.array([0.3]), "frequency": jnp.array([0.7])}
    nodes = node_history(start, tokens, jnp.tril(jnp.ones((1, 5, 5), bool)))
    tree = jitted(logits, nodes, **options)
    for i in range(5):
        plain = jitted(logits[:, i : i + 1], start.update(tokens[:, 1:], jnp.array([i])), **options)
        np.testing.assert_allclose(tree[:, i : i + 1], plain, rtol=1e-6)


def test_padding_nodes_change_nothing():
    """Tokens -1 of unused nodes neither wrap to the end of the vocabulary nor count."""
    history = History.from_prompt(jnp.array([[0, -1]]), jnp.array([2]), V).update(
        jnp.array([[-1, V - 1]]), jnp.array([1])
    )
    assert not history.prompt_seen[0, 1:].any()
    assert not history.generated_counts.any()
    nodes = node_history(history, jnp.array([[0, -1, -1]]), jnp.zeros((1, 3, 3), bool))
    one = jnp.ones(1)
    got = jitted(jnp.ones((1, 3, V)), nodes, repetition=one, presence=one, frequency=one)
    np.testing.assert_array_equal(got, np.ones((1, 3, V)))
