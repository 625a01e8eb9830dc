"""The choice of how many nodes to verify, and the learning of how often drafts are right."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdlite.decoding.policy import (
    BINS,
    EDGES,
    MARGIN,
    MEMORY,
    MIN_GAIN,
    PRIOR_STRENGTH,
    Costs,
    Earnings,
    Reliability,
    calibrate,
    cells,
    choose,
    conditional,
    variants,
)
from jdlite.decoding.tree import Tree
from jdlite.drafters.base import BRANCH, LEXICAL, MODEL, SOURCES
from tests.decoding.test_loop import NEW, PROMPTS, future, greedy
from tests.toys import CHUNK, VOCAB, chain, options, script, tiny_model

COUNTS = (1, 4, 8)
picked = jax.jit(choose, static_argnames="counts")


def chain_tree(batch: int, nodes: int, valid=True) -> Tree:
    parents = jnp.broadcast_to(jnp.maximum(jnp.arange(nodes) - 1, 0), (batch, nodes))
    return Tree.from_parents(parents, jnp.broadcast_to(jnp.asarray(valid), (batch, nodes)))


def test_variants():
    assert variants(1) == (1,)
    assert variants(4) == (1, 4)
    assert variants(39) == (1, 4, 8, 16, 39)
    assert variants(40) == (1, 4, 8, 16, 40)
    assert variants(80) == (1, 4, 8, 16, 40, 80)
    for n in range(1, 100):
        counts = variants(n)
        assert list(counts) == sorted(set(counts))
        assert counts[-1] == n


def test_costs_of_other_numbers_of_nodes():
    """Numpy's interpolation between the measured numbers, the last line's slope beyond them."""
    measured = (1, 4, 8, 16, 40)
    fixed, slope = np.array([1, 1.4, 1.6, 2.4, 4.8]), np.array([0.1, 0.1, 0.2, 0.4, 0.5])
    costs = Costs(jnp.asarray(fixed, jnp.float32), jnp.asarray(slope, jnp.float32), measured)
    assert costs.resample(measured) is costs
    got = costs.resample((1, 4, 11, 39, 64))
    assert got.counts == (1, 4, 11, 39, 64)
    for values, expected in ((got.fixed, fixed), (got.per_token, slope)):
        np.testing.assert_allclose(values[:4], np.interp([1, 4, 11, 39], measured, expected), rtol=1e-6)
        beyond = expected[-1] + (expected[-1] - expected[-2]) / 24 * 24
        np.testing.assert_allclose(values[4], beyond, rtol=1e-6)
    lone = Costs.free((1,)).resample((1, 8))
    np.testing.assert_array_equal(lone.fixed, [1, 1])


@given(seed=st.integers(0, 2**31 - 1), rows=st.integers(1, 3))
def test_choose_is_the_best_ratio(seed, rows):
    """Expected tokens per cost by counting, rows that are not active left out; a dearer forward must be worth it."""
    rng = np.random.default_rng(seed)
    gain = np.sort(rng.random((3, 8)) * (rng.random((3, 1)) < 0.8), axis=1)[:, ::-1].astype(np.float32)
    gain[:, 0] = 1
    active = np.arange(3) < rows
    cost = np.cumsum(rng.random(3) + 0.05).astype(np.float32)
    rates = [float(gain[active, :n].astype(np.float64).sum() / cost[i]) for i, n in enumerate(COUNTS)]
    rates[1:] = [rate / MARGIN for rate in rates[1:]]
    got = int(picked(gain, active, cost, COUNTS))
    assert rates[got] == pytest.approx(max(rates), rel=1e-6)


def test_ties_go_to_the_smaller():
    gain, active = np.zeros((2, 8), np.float32), np.ones(2, bool)
    gain[:, 0] = 1
    assert int(picked(gain, active, np.ones(3, np.float32), COUNTS)) == 0, "no drafts: a plain step"
    gain[:, :4] = 1
    assert int(picked(gain, active, np.ones(3, np.float32), COUNTS)) == 1
    assert int(picked(gain, active, np.array([1, 4, 4], np.float32), COUNTS)) == 0, "4 tokens for 4 times the cost"
    near = np.array([1, 4 / MARGIN, 5], np.float32)
    assert int(picked(gain, active, near * [1, 1.001, 1], COUNTS)) == 0, "too little gained"
    assert int(picked(gain, active, near * [1, 0.999, 1], COUNTS)) == 1
    assert int(picked(gain, active & False, np.ones(3, np.float32), COUNTS)) == 0


def test_conditional_and_cells():
    tree = chain_tree(1, 5)
    gain = jnp.array([[np.nan, 0.5, 0.25, np.nan, 0.3]], jnp.float32)
    np.testing.assert_allclose(conditional(gain, tree)[0], [1, 0.5, 0.5, 0, 1])
    # Every class is met, edges belong to the class below them.
    prior = jnp.array([[0.0, *EDGES, *(e + 1e-4 for e in EDGES), 1.0]], jnp.float32)
    right = [0, *range(BINS - 1), *range(1, BINS), BINS - 1]
    for source in range(len(SOURCES)):
        got = cells(prior, jnp.full(prior.shape, source))
        np.testing.assert_array_equal(got[0], np.array(right) + source * BINS)


@given(seed=st.integers(0, 2**31 - 1))
def test_calibrated_gain_is_the_product_along_the_path(seed):
    """Each node's corrected rate times its parent's gain; unseen classes keep the prior."""
    rng = np.random.default_rng(seed)
    parents = np.array([[0] + [int(rng.integers(0, i)) for i in range(1, 8)]], np.int32)
    valid = rng.random((1, 8)) < 0.8
    valid[:, 0] = True
    tree = built(parents, valid)
    prior = rng.random((1, 8)).astype(np.float32)
    cell = rng.integers(0, len(SOURCES) * BINS, (1, 8)).astype(np.int32)
    shape = (1, len(SOURCES) * BINS)
    trials = (30 * rng.random(shape) * (rng.random(shape) < 0.5)).astype(np.float32)
    hits = trials * rng.random(trials.shape).astype(np.float32)
    got = np.asarray(calibrated(prior, cell, Reliability(hits, trials), tree))[0]
    right = [1.0]
    for i in range(1, 8):
        h, t = float(hits[0, cell[0, i]]), float(trials[0, cell[0, i]])
        right.append(right[parents[0, i]] * (PRIOR_STRENGTH * float(prior[0, i]) + h) / (PRIOR_STRENGTH + t))
    np.testing.assert_allclose(
        got, np.where(np.asarray(tree.valid)[0], np.maximum(right, MIN_GAIN), 0), rtol=1e-4, atol=1e-7
    )


calibrated, built = jax.jit(calibrate), jax.jit(Tree.from_parents)
learn = jax.jit(lambda r, cell, tried, hit, active: r.update(cell, tried, hit, active))


def corrected(reliability, prior: float) -> float:
    tree = chain_tree(1, 2)
    priors = jnp.array([[1.0, prior]], jnp.float32)
    return float(calibrated(priors, cells(priors, jnp.zeros((1, 2), jnp.int32)), reliability, tree)[0, 1])


@pytest.mark.parametrize("rate", [0.0, 0.15, 0.9, 1.0])
@pytest.mark.parametrize("prior", [0.05, 0.5, 0.95])
def test_calibration_converges_to_the_true_rate(prior, rate):
    """Four nodes of a class per round, right with `rate`: the estimate comes near it, whatever the prior was."""
    rng = np.random.default_rng(0)
    priors = jnp.array([[1.0, prior, prior, prior, prior]], jnp.float32)
    cell = cells(priors, jnp.zeros((1, 5), jnp.int32))
    tried, active = jnp.array([[False] + [True] * 4]), jnp.array([True])
    reliability = Reliability.zeros(1)
    assert corrected(reliability, prior) == pytest.approx(prior, abs=1e-6)
    for _ in range(300):
        hit = np.r_[True, rng.random(4) < rate][None]
        reliability = learn(reliability, cell, tried, jnp.asarray(hit), active)
    # Some 4 / (1 - MEMORY) = 200 effective trials: one standard deviation is at most 0.036.
    assert corrected(reliability, prior) == pytest.approx(rate, abs=0.09)


def test_old_evidence_fades():
    """A class that failed for long is believed again soon after it succeeds; one not tried returns to its prior."""
    priors = jnp.array([[1.0, 0.6]], jnp.float32)
    cell = cells(priors, jnp.zeros((1, 2), jnp.int32))
    tried, active = jnp.array([[False, True]]), jnp.array([True])
    reliability = Reliability.zeros(1)
    for _ in range(400):
        reliability = learn(reliability, cell, tried, jnp.array([[True, False]]), active)
    low = corrected(reliability, 0.6)
    assert low < 0.06
    again = reliability
    for _ in range(60):
        again = learn(again, cell, tried, jnp.array([[True, True]]), active)
    assert corrected(again, 0.6) > 0.6
    for _ in range(400):
        reliability = learn(reliability, cell, tried & False, jnp.array([[True, False]]), active)
    assert corrected(reliability, 0.6) == pytest.approx(0.6, abs=0.01)


def test_update_counts_by_class_and_row():
    """By hand: fading, classes, rows at rest."""
    rng = np.random.default_rng(0)
    cell = rng.integers(0, 3, (2, 6)).astype(np.int32)
    reliability = Reliability.zeros(2)
    hits, trials = np.zeros((2, len(SOURCES) * BINS)), np.zeros((2, len(SOURCES) * BINS))
    for _, rest in itertools.product(range(4), (False, True)):
        tried, hit, active = rng.random((2, 6)) < 0.6, rng.random((2, 6)) < 0.5, np.array([True, rest])
        reliability = learn(reliability, cell, tried, hit, active)
        for b in range(2):
            if active[b]:
                hits[b] *= MEMORY
                trials[b] *= MEMORY
                for i in range(6):
                    trials[b, cell[b, i]] += tried[b, i]
                    hits[b, cell[b, i]] += tried[b, i] and hit[b, i]
    np.testing.assert_allclose(reliability.hits, hits, rtol=1e-5)
    np.testing.assert_allclose(reliability.trials, trials, rtol=1e-5)


def test_costs():
    costs = Costs(jnp.array([1.0, 2.0]), jnp.array([0.5, 0.25]), (1, 4))
    np.testing.assert_allclose(costs.at(jnp.float32(8)), [5, 4])
    np.testing.assert_allclose(Costs.free((1, 4)).at(jnp.float32(99)), [1, 1])
    np.testing.assert_allclose(Costs.typical((1, 4, 11)).at(jnp.float32(0)), [1, 1.18, 1.6], rtol=1e-6)


# Whether a network is worth running.


def played(rounds, draft, offered, *, rows=2, others=0.0, surplus=0.0, active=None):
    """Which of many rounds the network ran in. `offered(i)` says how many of its two drafts are accepted in round i,
    and `others` how many tokens of another source are in each."""
    source = jnp.tile(jnp.array([MODEL, MODEL, LEXICAL, LEXICAL, LEXICAL]), (rows, 1))
    active = jnp.ones(rows, bool) if active is None else active
    own = jnp.array([True, True, False, False, False])

    @jax.jit
    def step(earnings, accepted):
        ran = earnings.worth_running(active, draft)
        verified = jnp.broadcast_to((own & ran) | (~own & (others > 0)), source.shape)
        hit = jnp.where(own, jnp.cumsum(own) <= accepted, jnp.cumsum(~own) <= others)
        return earnings.update(source, verified, verified & hit, jnp.float32(surplus), ran, active), ran

    earnings, ran = Earnings.zeros(rows), []
    for i in range(rounds):
        earnings, now = step(earnings, offered(i))
        ran.append(bool(now))
    return np.array(ran), earnings


def test_a_network_that_earns_nothing_runs_now_and_then():
    ran, _ = played(400, 0.2, lambda i: 0)
    assert ran[:4].all(), "it is given a try"
    assert 0.04 < ran[50:].mean() < 0.12


def test_a_network_that_earns_more_than_it_costs_always_runs():
    assert played(200, 0.3, lambda i: i % 2)[0].all()
    assert played(200, 0.9, lambda i: 1)[0].all()


def test_a_draft_that_costs_nothing_is_always_made():
    assert played(100, 0.0, lambda i: 0, surplus=0.5)[0].all()


def test_a_network_that_begins_to_earn_comes_back():
    ran, _ = played(300, 0.2, lambda i: 2 * (i >= 200))
    assert ran[100:200].mean() < 0.12
    assert ran[240:].all()


def test_success_of_the_others_makes_a_draft_dearer():
    """Half a token per draft is worth 0.3 plain steps, but not where the other sources give three tokens a step."""
    assert played(200, 0.3, lambda i: i % 2)[0].all()
    assert played(200, 0.3, lambda i: i % 2, others=2)[0][50:].mean() < 0.5


def test_verifying_its_nodes_is_charged_to_the_network():
    assert played(200, 0.3, lambda i: i % 2, surplus=0.4)[0][50:].mean() < 0.5


def test_rows_that_have_finished_count_for_nothing():
    active = jnp.array([True, False])
    ran, earnings = played(60, 0.2, lambda i: 0, active=active)
    np.testing.assert_array_equal(ran, played(60, 0.2, lambda i: 0, rows=1)[0])
    for sums in jax.tree.leaves(earnings):
        assert sums[1] == 0


def test_earnings_by_hand():
    earnings = Earnings(*(jnp.array([x, x]) for x in (1.0, 2.0, 3.0, 4.0)))
    source = jnp.array([[LEXICAL, MODEL, MODEL, LEXICAL, BRANCH]] * 2)
    verified = jnp.array([[False, True, True, True, False]] * 2)
    accepted = jnp.array([[False, True, False, False, False]] * 2)
    after = earnings.update(source, verified, accepted, jnp.float32(0.6), jnp.array(True), jnp.array([True, False]))
    # Two of three verified nodes are the network's, so it bears two thirds of the surplus.
    np.testing.assert_allclose(after.earned, [0.98 + 1 - 0.4, 1.0], rtol=1e-6)
    np.testing.assert_allclose(after.run, [2 * 0.98 + 1, 2.0], rtol=1e-6)
    np.testing.assert_allclose(after.others, [3 * 0.98, 3.0], rtol=1e-6)
    np.testing.assert_allclose(after.rounds, [4 * 0.98 + 1, 4.0], rtol=1e-6)


# In the loop.


@pytest.fixture(scope="module")
def live():
    """A session with three compiled numbers of nodes; costs are an argument, so all tests share its compilation."""
    from jdlite.decoding.session import Session

    def decode(table, cost, budget=NEW):
        costs = Costs(jnp.asarray(cost, jnp.float32), jnp.zeros(3, jnp.float32), (1, 3, 6))
        fresh = Session(
            tiny_model(), script(3, 6, table), batch=3, capacity=48, prefill_chunk=CHUNK, costs=costs
        )  # fmt: skip
        fresh.append(PROMPTS)
        return fresh.decode(**options(3, max_new=budget))

    return decode


def test_loop_takes_plain_steps_without_drafts(live):
    result = live(lambda b, n: [], [1, 1, 1])
    assert result.stats.uses.tolist() == [NEW, 0, 0]


def test_loop_verifies_all_when_forwards_are_free(live):
    result = live(lambda b, n: chain(future(b, n), 0.01), [1, 1, 1])
    assert result.tokens == [greedy(b) for b in range(3)]
    assert result.stats.uses[0] <= 1
    assert result.tau > 4


def test_free_forwards_verify_drafts_of_any_low_gain(live):
    """`Costs.free` promises the largest tau: even drafts that were always wrong, and ones of gain 0, are verified."""
    switch = len(PROMPTS[2]) + 8

    def table(b, n):
        right = future(b, n)
        return chain(right if n >= switch else [(t + 1) % VOCAB for t in right], 1e-4)

    result = live(table, [1, 1, 1])
    assert result.tokens == [greedy(b) for b in range(3)]
    nodes = result.stats.log[2, : result.stats.rounds[2], 0]
    assert (nodes[:8] == 6).all(), nodes


def test_loop_avoids_what_costs_too_much(live):
    """Drafts that are always right, at costs that make each number of nodes the best one."""
    perfect = lambda b, n: chain(future(b, n), 1.0)  # noqa: E731
    assert live(perfect, [1, 10, 20]).stats.uses.tolist() == [NEW, 0, 0]
    middle = live(perfect, [1, 1.5, 6]).stats.uses
    assert middle[1] >= NEW // 3 - 1
    assert middle[2] == 0
    assert live(perfect, [1, 1.5, 1.6], 18).stats.uses.tolist() == [0, 0, 3]


def test_loop_learns_to_stop_drafting(live):
    """Always wrong but sure of itself: after some rounds plain steps are taken."""
    wrong = lambda b, n: chain([(t + 1) % VOCAB for t in future(b, n)], 0.9)  # noqa: E731
    result = live(wrong, [1, 1.5, 2], 30)
    first, last = result.stats.log[1, :5, 0], result.stats.log[1, 20:28, 0]
    assert (first > 1).any()
    assert (last == 1).sum() >= 6, "it may look again now and then"
    assert result.tokens == [greedy(b, 30) for b in range(3)]
