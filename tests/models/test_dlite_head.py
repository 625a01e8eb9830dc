"""The sequential head: teacher forcing against stepwise drafting, priming, and its outputs."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jdlite.errors import ConfigError
from jdlite.models.dlite_head import SequentialHead
from tests.models.dlite_models import quick_jit, random_model, small


@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize("output", ["low_rank", "lm_head"])
def test_teacher_forced_equals_stepwise(group, output):
    config = small(anchor_group_size=group, head_output=output)
    head = random_model(config).head
    rng = np.random.default_rng(0)
    B, K = 4, config.num_drafts
    hidden = jnp.asarray(rng.normal(size=(B, K, config.hidden_size)), jnp.float32)
    tokens = jnp.asarray(rng.integers(0, config.vocab_size, (B, group)))
    lm_head = None if output == "low_rank" else jnp.asarray(rng.normal(size=(config.vocab_size, 12)), jnp.float32)
    noise = jnp.asarray(rng.gumbel(size=(K, B, config.vocab_size)), jnp.float32)

    def both(head, hidden, tokens):
        choose = lambda logits, step: (jnp.argmax(logits + noise[step], axis=-1), logits)  # noqa: E731
        state = head.start(tokens)
        drafts, logits = head.unroll(hidden, tokens[:, -1], state, choose, lm_head)
        previous = jnp.concatenate([tokens[:, -1:], drafts[:, :-1]], axis=1)
        return drafts, logits, head.logits(head.teacher_forced(hidden, previous, state), lm_head)

    drafts, stepwise, forced = quick_jit(both)(head, hidden, tokens)
    assert drafts.shape == (B, K)
    assert stepwise.shape == forced.shape == (B, K, config.vocab_size)
    assert stepwise.dtype == forced.dtype == jnp.float32
    np.testing.assert_allclose(forced, stepwise, rtol=1e-5, atol=1e-5)
    assert len({tuple(row) for row in np.asarray(drafts).tolist()}) > 1


def test_priming_is_one_step_on_the_token_before_the_anchor():
    head = random_model(small(anchor_group_size=3)).head
    tokens = jnp.array([[5, 7, 9], [1, 2, 3]])
    np.testing.assert_array_equal(head.start(tokens), head.step(jnp.zeros((2, 5)), tokens[:, 1]))
    assert not np.asarray(head.start(tokens[:, -1:])).any()


def test_state_does_not_depend_on_hidden():
    head = random_model(small()).head
    previous, state = jnp.array([[3, 4, 5]]), jnp.zeros((1, 5))
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(1, 3, 12)), jnp.float32)
    changed = hidden.at[:, 0].add(1.0)
    forced = quick_jit(SequentialHead.teacher_forced)
    one, other = (np.asarray(forced(head, h, previous, state)) for h in (hidden, changed))
    np.testing.assert_array_equal(one[:, 1:], other[:, 1:])
    assert np.abs(one[:, 0] - other[:, 0]).max() > 0.01


def test_lm_head_must_go_with_its_option():
    u, table = jnp.zeros((1, 5)), jnp.zeros((23, 12))
    with pytest.raises(ConfigError, match="an output matrix of its own and was given an LM head; leave out lm_head"):
        random_model(small()).head.logits(u, table)
    with pytest.raises(ConfigError, match="no output matrix of its own and was given no LM head; pass lm_head"):
        random_model(small(head_output="lm_head")).head.logits(u)
