"""Losses and their gradients against autodiff of the plain formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdlite.training.law import Law, Pieces, make_law
from jdlite.training.losses import Weights, surrogate

B, T, P, K, R, D, V = 2, 9, 5, 3, 4, 6, 23


def example(seed=0, vocab=V):
    rng = np.random.default_rng(seed)
    normal = lambda *shape, s=1.0: jnp.asarray(s * rng.normal(size=shape), jnp.float32)  # noqa: E731
    index = rng.integers(0, B * T, (B, P, K))
    return {
        "u": normal(B, P, K, R),
        "output": normal(vocab, R),
        "hidden": normal(B, T, D),
        "head": normal(vocab, D),
        "teacher": (normal(B, P, K, R + 1), normal(vocab, R + 1)),
        "index": jnp.asarray(index, jnp.int32),
        "labels": jnp.asarray(rng.integers(0, vocab, (B, P, K)), jnp.int32),
        "scale": jnp.asarray(rng.random((B, P, K)) * (rng.random((B, P, K)) > 0.3), jnp.float32),
    }


def plain(u, output, x, weights, *, law, label, teacher, top_k=0):
    """The formulas of the module, on whole arrays."""
    log_q = jax.nn.log_softmax(u @ output.T)
    p = jax.nn.softmax(x["hidden"].reshape(B * T, D) @ x["head"].T)[x["index"]]
    token = jnp.argmax(p, axis=-1) if label == "target" else x["labels"]
    ce = -jnp.take_along_axis(log_q, token[..., None], axis=-1)[..., 0]
    if label == "distribution":
        ce = -jnp.sum(p * log_q, axis=-1)
    q = jnp.exp(log_q)
    l1 = jnp.sum(jnp.abs(p - q), axis=-1) if law else jnp.zeros_like(ce)
    if top_k:
        kept = p >= jnp.sort(p, axis=-1)[..., -top_k, None]
        rest = jnp.abs(jnp.sum(jnp.where(kept, 0, p - q), axis=-1))
        l1 = jnp.sum(jnp.where(kept, jnp.abs(p - q), 0), axis=-1) + rest
    log_t = jax.nn.log_softmax(x["teacher"][0] @ x["teacher"][1].T)
    kl = jnp.sum(jnp.exp(log_t) * (log_t - log_q), axis=-1) if teacher else jnp.zeros_like(ce)
    best = jnp.argmax(p, axis=-1) if law else token
    match = (jnp.argmax(log_q, axis=-1) == best).astype(jnp.float32)
    return jnp.sum(x["scale"] * (weights.ce * ce + weights.l1 * l1 + weights.kl * kl)), (ce, l1, kl, match)


CASES = {
    "ce": (Weights(ce=1.0), {"law": False, "label": "data", "teacher": False}),
    "ce and l1": (Weights(ce=0.1, l1=1.0), {"law": True, "label": "target", "teacher": False}),
    "top k": (Weights(ce=0.1, l1=1.0), {"law": True, "label": "target", "teacher": False, "top_k": 4}),
    "data label": (Weights(ce=0.4, l1=0.7), {"law": True, "label": "data", "teacher": False}),
    "kl": (Weights(kl=1.0), {"law": False, "label": "data", "teacher": True}),
    "soft label": (Weights(ce=0.4), {"law": True, "label": "distribution", "teacher": False}),
    "soft label and l1": (Weights(ce=0.4, l1=0.7), {"law": True, "label": "distribution", "teacher": False}),
    "soft label and all": (Weights(ce=0.4, l1=0.7, kl=0.3), {"law": True, "label": "distribution", "teacher": True}),
    "all": (Weights(ce=0.2, l1=0.3, kl=0.6), {"law": True, "label": "target", "teacher": True}),
}


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "per pair"])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case, shared):
    weights, options = CASES[case]
    x = example()
    # 23 tokens in tiles of 6 leave one column over; 5 anchors in chunks of 2 leave one anchor over.
    pieces = Pieces.of(V, B, K, pairs=2 * B * K, tile=6)
    assert (pieces.tile * pieces.tiles, pieces.anchors) == (24, 2)
    needed = jnp.zeros(B * T, bool).at[x["index"].reshape(-1)].set(True).reshape(B, T)

    def ours(u, output):
        law = None
        if options["law"]:
            law = make_law(x["hidden"], x["head"], needed, pieces, shared=shared, top_k=options.get("top_k", 0))
        value, loss, parts = surrogate(
            u,
            output,
            x["index"],
            x["labels"],
            x["scale"],
            weights,
            pieces,
            law=law,
            label=options["label"],
            teacher=x["teacher"] if options["teacher"] else None,
        )
        return value, (loss, parts)

    (_, (loss, parts)), gradients = jax.jit(jax.value_and_grad(ours, argnums=(0, 1), has_aux=True))(x["u"], x["output"])
    (want, want_parts), want_gradients = jax.value_and_grad(plain, argnums=(0, 1), has_aux=True)(
        x["u"], x["output"], x, weights, **options
    )
    np.testing.assert_allclose(loss, want, rtol=2e-5)
    for got, wanted in zip((parts.ce, parts.l1, parts.kl, parts.match), want_parts, strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-5)
    for got, wanted in zip(gradients, want_gradients, strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-5)


def test_a_frozen_output_gets_no_gradient():
    x = example()
    pieces = Pieces.of(V, B, K, pairs=100, tile=0)

    def ours(output):
        args = (x["index"], x["labels"], x["scale"], Weights(ce=1.0), pieces)
        return surrogate(x["u"], output, *args, learn_output=False)[0]

    assert not np.any(jax.grad(ours)(x["output"]))


def test_only_needed_positions_are_filled():
    x = example()
    pieces = Pieces.of(V, B, K, pairs=100, tile=0)
    needed = jnp.zeros((B, T), bool).at[1, 4].set(True).at[0, 2].set(True)
    law = make_law(x["hidden"], x["head"], needed, pieces, shared=True)
    table = np.asarray(law.table)[np.asarray(law.rank)].reshape(B * T, -1)[:, :V]
    want = np.asarray(jax.nn.softmax(x["hidden"].reshape(B * T, D) @ x["head"].T))
    np.testing.assert_allclose(table[[2, T + 4]], want[[2, T + 4]], atol=1e-6)
    np.testing.assert_array_equal(np.asarray(law.best)[np.asarray(law.rank)][[2, T + 4]], want[[2, T + 4]].argmax(-1))


def test_large_logits_stay_finite():
    x = example()
    pieces = Pieces.of(V, B, K, pairs=100, tile=5)
    law = Law(x["hidden"].reshape(B * T, D) * 1e3, x["head"], pieces)

    def ours(u):
        args = (x["output"], x["index"], x["labels"], x["scale"], Weights(ce=0.1, l1=1.0, kl=1.0), pieces)
        return surrogate(u, *args, law=law, teacher=(1e3 * x["teacher"][0], x["teacher"][1]))[:2]

    (_, loss), gradient = jax.value_and_grad(ours, has_aux=True)(1e3 * x["u"])
    assert np.isfinite(loss)
    assert np.all(np.isfinite(gradient))
