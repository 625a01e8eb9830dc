"""Which positions become anchors, and what is gathered around them, against loops in plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdlite.training.anchors import choose, draft_weights, eligible, gather_anchors

B, T, K, A = 3, 24, 3, 2


def packed(seed=0):
    """Rows of documents of random lengths, padding at the end, random masks."""
    rng = np.random.default_rng(seed)
    segments = np.zeros((B, T), np.int32)
    for b in range(B):
        at, number = 0, 1
        while at < T - 4:
            size = int(rng.integers(1, 9))
            segments[b, at : min(at + size, T - 2)] = number
            at, number = at + size, number + 1
    return {
        "tokens": jnp.asarray(rng.integers(0, 50, (B, T)), jnp.int32),
        "loss_mask": jnp.asarray((rng.random((B, T)) > 0.3) & (segments > 0)),
        "segment_ids": jnp.asarray(segments),
    }


def allowed(batch, b, a, prompt_end):
    segments, mask = np.asarray(batch["segment_ids"])[b], np.asarray(batch["loss_mask"])[b]
    if a < 1 or a + 1 >= T or segments[a] == 0:
        return False
    together = segments[a - 1] == segments[a] == segments[a + 1]
    return bool(together and mask[a + 1] and (prompt_end or mask[a]))


@pytest.mark.parametrize("prompt_end", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_eligible(seed, prompt_end):
    batch = packed(seed)
    got = np.asarray(eligible(batch["loss_mask"], batch["segment_ids"], prompt_end=prompt_end))
    want = [[allowed(batch, b, a, prompt_end) for a in range(T)] for b in range(B)]
    np.testing.assert_array_equal(got, want)


def test_choose_draws_distinct_positions_of_the_candidates():
    candidates = np.random.default_rng(1).random((B, T)) > 0.5
    candidates[2] = False
    positions, valid = choose(jax.random.key(0), jnp.asarray(candidates), 30)
    assert positions.shape == (B, 30)
    for b in range(B):
        chosen = np.asarray(positions[b])[np.asarray(valid[b])]
        np.testing.assert_array_equal(chosen, np.flatnonzero(candidates[b]))  # there are fewer than 30


def test_every_candidate_is_as_likely_as_any_other():
    candidates = jnp.asarray(np.arange(T)[None] % 2 == 0)
    keys = jax.random.split(jax.random.key(3), 2000)
    positions, valid = jax.vmap(lambda key: choose(key, candidates, 3))(keys)
    assert np.all(np.asarray(valid))
    counts = np.bincount(np.asarray(positions).reshape(-1), minlength=T)
    assert not counts[1::2].any()
    # Standard deviation of each count is 19.4.
    assert np.all(np.abs(counts[::2] - 2000 * 3 / 12) < 90)


def test_a_row_does_not_depend_on_the_others():
    candidates = np.random.default_rng(1).random((B, T)) > 0.5
    other = candidates.copy()
    other[1:] = ~other[1:]
    first = choose(jax.random.key(0), jnp.asarray(candidates), 4)[0][0]
    np.testing.assert_array_equal(first, choose(jax.random.key(0), jnp.asarray(other), 4)[0][0])


def test_gathered_tokens():
    batch = packed()
    positions, valid = choose(jax.random.key(0), eligible(batch["loss_mask"], batch["segment_ids"]), 8)
    anchors = gather_anchors(positions, valid, batch, group=A, drafts=K)
    tokens, mask, segments = (np.asarray(batch[name]) for name in ("tokens", "loss_mask", "segment_ids"))
    seen = 0
    for b in range(B):
        for i in range(8):
            a = int(positions[b, i])
            if not valid[b, i]:
                assert not np.any(np.asarray(anchors.supervised[b, i]))
                continue
            seen += 1
            np.testing.assert_array_equal(anchors.tokens[b, i], [tokens[b, a - 1], tokens[b, a]])
            assert np.all(np.asarray(anchors.token_valid[b, i]))
            for k in range(K):
                label = a + 1 + k
                counts = label < T and segments[b, label] == segments[b, a] and mask[b, label]
                assert bool(anchors.supervised[b, i, k]) == counts
                if counts:
                    assert (anchors.labels[b, i, k], anchors.previous[b, i, k]) == (tokens[b, label], tokens[b, a + k])
    assert seen > 5


def test_weights_decay_and_may_end_at_a_gap():
    supervised = jnp.asarray([[[True, False, True], [False, True, True]]])
    decay = np.exp(-np.arange(3) / 4.0)
    np.testing.assert_allclose(draft_weights(supervised, 4.0)[0], [decay * [1, 0, 1], decay * [0, 1, 1]], rtol=1e-6)
    np.testing.assert_allclose(
        draft_weights(supervised, 4.0, contiguous=True)[0], [decay * [1, 0, 0], np.zeros(3)], rtol=1e-6
    )
