"""Packed rows give every document the features that it would have alone."""

import jax.numpy as jnp
import numpy as np
import pytest

from jdlite.checkpoints.dlite import abstract_dlite
from jdlite.models.dlite_teacher import teacher_config
from jdlite.training.anchors import gather_anchors
from jdlite.training.features import anchor_features, backbone_states, document_mask, head_outputs, target_states
from jdlite.training.initialise import Template, random_params
from tests.training.tiny_run import MASK, VOCAB, config, target


def rows(documents, length):
    """The documents packed into one row."""
    tokens, segments, positions = (np.zeros((1, length), np.int32) for _ in range(3))
    at = 0
    for number, document in enumerate(documents, 1):
        here = slice(at, at + len(document))
        tokens[0, here], segments[0, here], positions[0, here] = document, number, np.arange(len(document))
        at += len(document)
    return {
        "tokens": jnp.asarray(tokens),
        "segment_ids": jnp.asarray(segments),
        "positions": jnp.asarray(positions),
        "loss_mask": jnp.asarray(segments > 0),
    }


def test_document_mask():
    want = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    np.testing.assert_array_equal(document_mask(jnp.asarray([[1, 1, 2, 0]]))[0], np.array(want, bool))


@pytest.mark.parametrize("window", [0, 4])
def test_a_packed_document_is_as_if_alone(tmp_path, window):
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, MASK, size).tolist() for size in (7, 9)]
    t = target()
    d = config(tmp_path, "drafter.anchor_group_size=2").dlite(t.config)
    d = teacher_config(d, window) if window else d
    model = Template(d).build(random_params(d, 5))

    def outputs(batch, anchor):
        states = target_states(t.model, batch, d.captured_layers)
        anchors = gather_anchors(jnp.asarray([[anchor]]), jnp.asarray([[True]]), batch, group=2, drafts=d.num_drafts)
        hidden = backbone_states(model, states, anchors, batch["segment_ids"], t.model.embed.weight[...])
        return anchor_features(states, anchors, d.taps), head_outputs(model, hidden, anchors)

    packed = rows(documents, 20)
    for local in (1, 2, 5):
        alone = rows([documents[1]], 20)
        for got, want in zip(outputs(packed, 7 + local), outputs(alone, local), strict=True):
            np.testing.assert_allclose(got, want, atol=2e-5)


def test_features_are_the_taps_before_the_anchor(tmp_path):
    t = target()
    batch = rows([np.arange(9) % VOCAB], 9)
    d = config(tmp_path).dlite(t.config)
    states = target_states(t.model, batch, d.captured_layers)
    anchors = gather_anchors(jnp.asarray([[3, 6]]), jnp.ones((1, 2), bool), batch, group=1, drafts=2)
    features = anchor_features(states, anchors, d.taps)
    assert features.shape == (1, 2, d.num_taps, d.hidden_size)
    for slot, layer in enumerate(d.taps):
        np.testing.assert_array_equal(features[0, 1, slot], states.taps[layer][0, 5])
    # The last layer's tap is final-normed, as in the drafter at decode time.
    np.testing.assert_array_equal(states.taps[t.config.num_layers - 1], states.hidden)


def test_template_rebuilds_the_network(tmp_path):
    d = config(tmp_path).dlite(target().config)
    network = Template(d).build(random_params(d, 0), jnp.bfloat16)
    assert network.config == d
    assert network.dtype == jnp.bfloat16
    assert type(network) is type(abstract_dlite(d))
