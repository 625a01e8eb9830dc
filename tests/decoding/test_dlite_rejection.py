"""DLite in rejection mode, through the whole loop: the law of the text is the target's, and a bias would be seen."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdlite.decoding.policy import Costs, variants
from jdlite.decoding.sampling import Sampling
from jdlite.decoding.session import Session
from jdlite.drafters.base import Context, Proposal
from jdlite.drafters.dlite import DLiteDrafter
from tests.decoding import oracle
from tests.decoding.test_sampled_drafts import HOT, PROMPT, TOKENS, V, p_value
from tests.learnt import learnt
from tests.toys import tiny_model

B, CAPACITY = 1024, 8
DRAFTERS = {
    "paper": {},
    "group 2": {"anchor_group_size": 2},
    "history": {"draft_history": 2},
    "group 2, history": {"anchor_group_size": 2, "draft_history": 3},
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Biased(DLiteDrafter, static=False):
    """Makes a mistake on purpose.

    Attributes:
        mistake: "lie" reports another law than the one drawn from; "peek" verifies a draft only if the network finds
            it likely; "gain" lets what was drawn decide how many nodes are worth verifying.
    """

    mistake: str = dataclasses.field(metadata={"static": True})

    def propose(self, memory, context: Context) -> Proposal:
        made = super().propose(memory, context)
        assert made.log_q is not None
        if self.mistake == "lie":
            return dataclasses.replace(made, log_q=jnp.roll(made.log_q, 1, axis=-1))
        drawn = jnp.exp(jnp.take_along_axis(made.log_q, made.tokens[..., None], axis=-1)[..., 0])
        likely = (drawn > 0.4).at[:, 0].set(True)
        if self.mistake == "peek":
            return dataclasses.replace(made, valid=made.valid & jnp.cumprod(likely, axis=1).astype(bool))
        return dataclasses.replace(made, gain=jnp.cumprod(jnp.where(likely, 1.0, 1e-3), axis=1))


def drafter_of(name: str, mistake: str = "") -> DLiteDrafter:
    # The backbone has a large say, so that the network is far from the target.
    options = {"model": learnt(V, block_size=3, noise=0.3, **DRAFTERS[name]), "mode": "rejection"}
    return Biased(mistake=mistake, **options) if mistake else DLiteDrafter(**options)


def live_session(drafter: DLiteDrafter, batch: int = B, costs: Costs | None = None) -> Session:
    live = Session(tiny_model(V), drafter, batch=batch, capacity=CAPACITY, prefill_chunk=2,
                   costs=costs or Costs.free((drafter.max_nodes,)))  # fmt: skip
    live.append([PROMPT] * batch)
    return live


def texts(drafter: DLiteDrafter, repeats: int):
    """Many sampled texts, and the share of drafts that was accepted."""
    found, drafted, accepted = [], 0, 0
    for seed in range(repeats):
        live = live_session(drafter)
        # More tokens than are counted, so that blocks end at different places.
        result = live.decode(sampling=HOT, max_new_tokens=TOKENS + 2, seed=seed)
        found += [tuple(tokens[:TOKENS]) for tokens in result.tokens]
        drafted += result.stats.drafted.sum()
        accepted += result.stats.accepted_at.sum()
    return found, accepted / drafted


@pytest.mark.parametrize(
    "name", ["group 2, history", *(pytest.param(n, marks=pytest.mark.slow) for n in ("paper", "group 2", "history"))]
)
def test_law_is_the_targets(name):
    """First token, pairs and triples; the drafts are neither all accepted nor all refused."""
    found, share = texts(drafter_of(name), 20)
    assert 0.2 < share < 0.95
    for depth in (1, 2, 3):
        assert p_value(found, depth) > 1e-3


@pytest.mark.parametrize("mistake", ["lie", "peek"])
def test_a_planted_bias_is_caught(mistake):
    """The same test with as many texts sees it."""
    found, _ = texts(drafter_of("group 2, history", mistake), 20)
    assert min(p_value(found, depth) for depth in (1, 2, 3)) < 1e-6


def test_greedy_rows_among_sampled_ones():
    """At temperature 0 the rejection rule gives the greedy text."""
    live = live_session(drafter_of("paper"), batch=8)
    mixed = [Sampling() if b % 2 else HOT for b in range(8)]
    result = live.decode(sampling=mixed, max_new_tokens=TOKENS + 2, seed=1)
    greedy = oracle.decode(tiny_model(V), PROMPT, TOKENS + 2)[0]
    assert all(tokens == greedy for tokens in result.tokens[1::2])
    assert any(tokens != greedy for tokens in result.tokens[::2])


@pytest.mark.slow
def test_law_after_rollbacks_and_forks():
    """Rows forked and rolled back in the middle of a text go on by the target's law."""
    drafter, found = drafter_of("group 2, history"), []
    for seed in range(20):
        live = live_session(drafter)
        live.decode(sampling=HOT, max_new_tokens=TOKENS + 1, seed=1000 + seed)
        live = live.fork(list(reversed(range(B))))
        live.rollback([len(PROMPT)] * B)
        result = live.decode(sampling=HOT, max_new_tokens=TOKENS + 2, seed=seed)
        found += [tuple(tokens[:TOKENS]) for tokens in result.tokens]
    for depth in (1, 2, 3):
        assert p_value(found, depth) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(("mistake", "draft"), [("", 0.0), ("gain", 0.0), ("", 0.4)])
def test_choosing_how_many_to_verify(mistake, draft):
    """With costs that make the choice matter, what is verified still does not depend on what was drawn, and neither
    does whether the network is run.

    One row at a time, since the choice is made for the batch as a whole.
    """
    drafter = drafter_of("paper", mistake)
    counts = variants(drafter.max_nodes)
    costs = Costs(jnp.asarray(1 + 0.3 * (np.asarray(counts) - 1), jnp.float32), jnp.zeros(len(counts)), counts, draft)
    found = []
    for seed in range(3000):
        live = live_session(drafter, batch=1, costs=costs)
        result = live.decode(sampling=HOT, max_new_tokens=TOKENS + 2, seed=seed)
        found.append(tuple(result.tokens[0][:TOKENS]))
    least = min(p_value(found, depth) for depth in (1, 2, 3))
    assert least < 1e-6 if mistake else least > 1e-3
