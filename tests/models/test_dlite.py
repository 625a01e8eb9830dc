"""The DLite network against a float64 oracle, its exact sizes, and the symmetries that its formulas promise."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jdlite.errors import ConfigError
from jdlite.models.dlite import DLite, Positions
from jdlite.models.dlite_config import DLiteConfig
from tests.models.dlite_models import inputs, parameters, quick_jit, random_model, small
from tests.models.oracles import dlite as oracle

VARIANTS = {
    "paper": {},
    "group-2": {"anchor_group_size": 2},
    "group-6": {"anchor_group_size": 6, "num_layers": 1},
    "explicit-taps": {"num_layers": 1, "tap_layers": (4, 0, 2, 3), "num_taps": 4},
    "stream": {"context_mode": "stream"},
    "feature-axis": {"num_layers": 1, "feature_concat": "feature"},
    "lm-head": {"num_layers": 1, "head_output": "lm_head"},
    "no-qk-norm": {"num_layers": 1, "qk_norm": False},
    "history": {"draft_history": 6},
    "history-group-2": {"num_layers": 1, "draft_history": 4, "anchor_group_size": 2},
    "history-stream": {"draft_history": 4, "context_mode": "stream", "feature_concat": "feature"},
    "block-3": {"num_layers": 1, "block_size": 3},
}


@pytest.mark.parametrize(
    ("config", "count"), [(DLiteConfig.qwen3_4b(), 603_322_560), (DLiteConfig.qwen3_8b(), 1_123_879_680)]
)
def test_parameter_counts(config, count):
    leaves = jax.tree.leaves(nnx.eval_shape(lambda: DLite(config, rngs=nnx.Rngs(0))))
    assert len(leaves) == 64
    assert sum(math.prod(leaf.shape) for leaf in leaves) == count


@pytest.mark.parametrize(
    ("group", "context", "tokens", "masks"),
    [
        (1, 0, [0], [1, 2, 3, 4, 5, 6, 7]),
        (2, 0, [0, 1], [2, 3, 4, 5, 6, 7, 8]),
        (6, 4, [0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11, 12]),
    ],
)
def test_position_tables(group, context, tokens, masks):
    table = Positions.of(DLiteConfig.tiny(anchor_group_size=group))
    assert (table.context, table.tokens.tolist(), table.masks.tolist()) == (context, tokens, masks)
    assert len(table.history) == 0


@pytest.mark.parametrize("group", [1, 2, 6])
def test_teacher_positions_are_true_distances(group):
    a, window = 50, 5  # absolute position of the anchor
    table = Positions.of(DLiteConfig.tiny(anchor_group_size=group, draft_history=window))
    first = a - group + 1
    assert (table.history + first).tolist() == [45, 46, 47, 48]
    assert table.context + first == 49
    assert (table.tokens + first).tolist() == list(range(first, 51))
    assert (table.masks + first).tolist() == list(range(51, 58))


@quick_jit
def run(model, tokens, features, embedding, history=None, **kwargs):
    return model.backbone(tokens, features, embedding, history=history, **kwargs)


@pytest.mark.parametrize("name", VARIANTS)
def test_equals_oracle(name):
    config = small(**VARIANTS[name])
    model = random_model(config)
    p = parameters(model)
    B, A, W = 3, config.anchor_group_size, config.draft_history
    tokens, features, embedding, history = inputs(config, B)
    lm_head = 0.3 * np.random.default_rng(9).normal(size=embedding.shape) if config.head_output == "lm_head" else None
    anchors = [30, 2, 3]  # rows 1 and 2 have fewer past positions and tokens than asked for
    exists = np.array([[a - A + 1 + i >= 0 for i in range(A)] for a in anchors])
    kwargs = {"token_valid": jnp.asarray(exists)}
    if W:
        there = np.array([[a - W + i >= 0 for i in range(W - 1)] for a in anchors])
        kwargs["history_valid"] = jnp.asarray(there)
        history = np.where(there[..., None], history, np.nan)  # nobody may read what does not exist
    head = None if lm_head is None else jnp.asarray(lm_head, jnp.float32)

    @quick_jit
    def draft(model, tokens, *args, **kwargs):
        hidden = model.backbone(tokens, *args, **kwargs)
        choose = lambda logits, step: (jnp.argmax(logits, axis=-1), logits)  # noqa: E731
        return hidden, *model.head.unroll(hidden, tokens[:, -1], model.head.start(tokens), choose, head)

    hidden, drafts, logits = draft(model, tokens, features, embedding, history=history, **kwargs)
    assert hidden.shape == (B, config.num_drafts, config.hidden_size)
    for b, a in enumerate(anchors):
        past = {a - W + i: np.float64(history[b, i]) for i in range(W - 1)} if W else None
        known = tokens[b][exists[b]]
        want = oracle.backbone(p, config, a, known, np.float64(features[b]), np.float64(embedding), past)
        np.testing.assert_allclose(hidden[b], want, rtol=1e-5, atol=1e-5)
        chosen, seen = oracle.draft(p, config, want, known, lambda logits, _: logits.argmax(), lm_head)
        np.testing.assert_allclose(logits[b], seen, rtol=1e-5, atol=1e-5)
        assert drafts[b].tolist() == chosen


def test_history_states_equal_oracle():
    config = small(draft_history=4)
    model = random_model(config)
    states = np.random.default_rng(3).normal(size=(2, 5, 3, config.hidden_size)).astype(np.float32)
    fused = quick_jit(DLite.fuse_history)(model, states)
    p = parameters(model)
    for b in range(2):
        for t in range(5):
            want = oracle.history_state(p, config, np.float64(states[b, t]))
            np.testing.assert_allclose(fused[b, t], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["kv", "stream"])
def test_slots_may_be_permuted_with_their_ids(mode):
    config = small(num_layers=1, num_taps=4, tap_layers=(0, 1, 3, 4), context_mode=mode)
    order = [2, 0, 3, 1]
    permuted = dataclasses.replace(config, tap_layers=tuple(config.taps[i] for i in order))
    model, other = random_model(config), random_model(permuted)  # the same parameters
    tokens, features, embedding, _ = inputs(config, 2)
    want = run(model, tokens, features, embedding, None)
    np.testing.assert_allclose(run(other, tokens, features[:, order], embedding, None), want, rtol=1e-5, atol=1e-5)
    # The ids matter: without them the same permutation changes the result.
    assert np.abs(run(model, tokens, features[:, order], embedding, None) - want).max() > 0.01


@pytest.mark.parametrize("change", [{}, {"anchor_group_size": 2, "draft_history": 4}])
def test_global_shift_changes_nothing(change):
    config = small(**change)
    model = random_model(config)
    args = inputs(config, 3)
    want = run(model, *args)
    shifted = run(model, *args, shift=jnp.array([0, 17, 300]))
    np.testing.assert_allclose(shifted, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("change", [{}, {"anchor_group_size": 2, "draft_history": 4}])
def test_anchors_are_independent(change):
    config = small(**change)
    model = random_model(config)
    tokens, features, embedding, history = inputs(config, 4)
    want = run(model, tokens, features, embedding, history)
    tokens2, features2, _, history2 = inputs(config, 4, seed=7)
    tokens2[2], features2[2] = tokens[2], features[2]
    features2[0] = np.nan
    if history is not None:
        history2[2] = history[2]
    other = run(model, tokens2, features2, embedding, history2)
    np.testing.assert_array_equal(other[2], want[2])
    assert np.isnan(other[0]).all()
    assert np.abs(other[3] - want[3]).max() > 0.01


def test_embedding_gets_no_gradient():
    config = small(num_layers=1)
    model = random_model(config)
    tokens, features, embedding, _ = inputs(config, 2)
    tokens, features = jnp.asarray(tokens), jnp.asarray(features)
    loss = lambda model, embedding: model.backbone(tokens, features, embedding).sum()  # noqa: E731
    gradients, of_embedding = quick_jit(jax.grad(loss, argnums=(0, 1)))(model, jnp.asarray(embedding))
    assert not np.asarray(of_embedding).any()
    table = np.asarray(gradients.depth_embedding[...])
    used = np.abs(table).sum(axis=1) > 0
    assert used.tolist() == [layer in config.taps for layer in range(config.num_target_layers)]


@pytest.mark.parametrize("change", [{}, {"context_mode": "stream"}], ids=["kv", "stream"])
def test_recomputing_changes_no_gradient(change):
    model = random_model(small(num_layers=3, **change))
    tokens, features, embedding = map(jnp.asarray, inputs(model.config, 4)[:3])

    def gradient(recompute):
        loss = lambda model: jnp.sum(model.backbone(tokens, features, embedding, recompute=recompute) ** 2)  # noqa: E731
        return jax.tree.leaves(quick_jit(jax.grad(loss))(model))

    for a, b in zip(gradient(False), gradient(True), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_bfloat16_stays_bfloat16():
    config = small(anchor_group_size=2, num_layers=1)
    args = inputs(config, 2)[:3]

    @quick_jit
    def forward(model, tokens, *args):
        hidden = model.backbone(tokens, *args)
        u = model.head.teacher_forced(hidden, jnp.zeros(hidden.shape[:2], jnp.int32), model.head.start(tokens))
        return hidden, u, model.head.logits(u)

    hidden, u, logits = forward(random_model(config, dtype=jnp.bfloat16), *args)
    assert (hidden.dtype, u.dtype, logits.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    exact = forward(random_model(config), *args)
    np.testing.assert_allclose(np.float32(hidden), exact[0], atol=0.25)
    np.testing.assert_allclose(logits, exact[2], atol=0.25)


def test_inputs_that_do_not_fit_are_named():
    config = small(draft_history=4)
    model = random_model(config)
    tokens, features, embedding, history = map(jnp.asarray, inputs(config, 2))
    with pytest.raises(ConfigError, match="history positions 0, want 3"):
        model.backbone(tokens, features, embedding)
    with pytest.raises(ConfigError, match="feature slots 2, want 3; history positions 2, want 3"):
        model.backbone(tokens, features[:, :2], embedding, history=history[:, :2])
    with pytest.raises(ConfigError, match="no draft history"):
        random_model(small()).fuse_history(jnp.zeros((1, 1, 3, 12)))
