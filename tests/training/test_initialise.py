"""Weights from the target, against numpy."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jdlite.errors import ConfigError
from jdlite.models.config import DecoderConfig
from jdlite.models.decoder import Decoder
from jdlite.models.dlite_config import DLiteConfig
from jdlite.training.initialise import Template, lm_head, random_params, second_moment, target_params
from tests.models.dlite_models import random_model


def pair(**overrides):
    t = DecoderConfig.tiny(vocab_size=40, qk_norm=True, tie_embeddings=False)
    model = Decoder(t, rngs=nnx.Rngs(3))
    d = DLiteConfig.for_target(t, mask_token_id=39, num_layers=2, num_taps=3, rank=5, **overrides)
    return d, model


def test_layers_and_norms_are_the_targets_last():
    d, target = pair()
    target.layers[3].attention_norm.scale[...] = jnp.full(d.hidden_size, 3.0)
    target.final_norm.scale[...] = jnp.arange(d.hidden_size, dtype=jnp.float32)
    params = target_params(d, target, 0)
    begin = target.config.num_layers - 2
    for i in range(2):
        ours, theirs = params["layers"][str(i)], target.layers[begin + i]
        np.testing.assert_array_equal(ours["attention"]["q"]["weight"], theirs.attention.q.weight[...])
        np.testing.assert_array_equal(ours["attention"]["k_norm"]["scale"], theirs.attention.k_norm.scale[...])
        np.testing.assert_array_equal(ours["mlp"]["down"]["weight"], theirs.mlp.down.weight[...])
    np.testing.assert_array_equal(params["norm"]["scale"], np.arange(d.hidden_size))
    np.testing.assert_allclose(params["context_norm"]["scale"], np.full(d.hidden_size, 2.0))


def test_the_head_starts_as_the_best_approximation_of_the_lm_head():
    d, target = pair()
    params = target_params(d, target, 0)
    head = np.asarray(lm_head(target), np.float64)
    u, s, vt = np.linalg.svd(head, full_matrices=False)
    best = (u[:, : d.rank] * s[: d.rank]) @ vt[: d.rank]
    ours = np.asarray(params["head"]["output"]["weight"]) @ np.asarray(params["head"]["mix"]["weight"])[:, d.rank :]
    np.testing.assert_allclose(ours, best, atol=1e-4)
    embedding = np.asarray(params["head"]["prev_embedding"])
    assert np.sqrt(np.mean(embedding**2)) == pytest.approx(1, rel=1e-3)


def test_the_head_starts_as_the_best_approximation_on_the_targets_states():
    """Against the truncated SVD of the logits themselves (Eckart and Young)."""
    d, target = pair()
    rng = np.random.default_rng(0)
    head = np.asarray(lm_head(target), np.float64)
    _, _, vt = np.linalg.svd(head)
    D = d.hidden_size
    states = rng.normal(size=(500, D)) * np.linspace(0.02, 1, D) @ vt + vt[-1]
    moment = second_moment([states[:100], states[100:]])
    np.testing.assert_allclose(moment, states.T @ states / 500)
    logits = states @ head.T
    u, s, wt = np.linalg.svd(logits, full_matrices=False)
    least = np.linalg.norm(logits - (u[:, : d.rank] * s[: d.rank]) @ wt[: d.rank])

    def error(moment):
        own = target_params(d, target, 0, moment)["head"]
        mix = np.asarray(own["mix"]["weight"])[:, d.rank :]
        return np.linalg.norm(logits - states @ (np.asarray(own["output"]["weight"]) @ mix).T)

    assert error(moment) == pytest.approx(least, rel=0.02)
    assert error(None) > 1.1 * least


@pytest.mark.parametrize(
    "overrides",
    [{"head_output": "lm_head"}, {"feature_concat": "feature"}, {"draft_history": 4}, {"rank": 70}],
    ids=["lm_head", "feature", "history", "wide rank"],
)
def test_every_kind_of_drafter(overrides):
    d, target = pair()
    d = DLiteConfig.from_dict({**d.to_dict(), **overrides})
    params = target_params(d, target, 0)
    assert Template(d).build(params).config == d
    flat = jnp.concatenate([jnp.ravel(x) for x in [params["head"]["mix"]["weight"], params["norm"]["scale"]]])
    assert np.all(np.isfinite(flat))


def test_other_layers_are_refused():
    d, target = pair(qk_norm=False)
    with pytest.raises(ConfigError, match="qk_norm False instead of True"):
        target_params(d, target, 0)
    d, target = pair()
    many = DLiteConfig.from_dict({**d.to_dict(), "num_layers": 9})
    with pytest.raises(ConfigError, match="num_layers 9 of the target's 4"):
        target_params(many, target, 0)


def test_random_params_are_the_constructors():
    d, _ = pair()
    params = random_params(d, 0)
    assert abs(float(jnp.std(params["head"]["output"]["weight"])) - 0.02) < 0.005
    np.testing.assert_array_equal(params["norm"]["scale"], np.ones(d.hidden_size))
    assert Template(d).build(params).config == random_model(d).config
