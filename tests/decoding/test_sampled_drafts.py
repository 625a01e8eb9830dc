"""Drafts drawn from a known law, through the whole loop: the law of the output is the target's."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdlite.decoding.policy import Costs
from jdlite.decoding.sampling import DRAFT, Sampling, gumbel, noise_key
from jdlite.decoding.session import Session
from jdlite.drafters.base import MODEL, Context, Drafter, Proposal
from tests.decoding import oracle
from tests.decoding.test_accept import g_test
from tests.toys import tiny_model

V, K, B, CAPACITY, TOKENS = 3, 2, 1024, 8, 3
PROMPT = [1, 0]
HOT = Sampling(temperature=1.5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dice(Drafter):
    """Draws each draft from a law that depends on the token before it.

    Attributes:
        lie: report another law than the one drawn from.
        broken: report NaN instead of the law; the drafts are then taken for point masses.
    """

    lie: bool = False
    broken: bool = False

    name = "dice"

    @property
    def max_nodes(self) -> int:
        return K + 1

    def propose(self, memory, context: Context) -> Proposal:
        law = jnp.log(jnp.array([[0.6, 0.3, 0.1], [0.1, 0.1, 0.8], [0.25, 0.5, 0.25]]))
        tokens, laws = [context.anchor], []

        def noise(step: int):
            return jax.vmap(lambda key, n: gumbel(noise_key(key, n + step, DRAFT), V))(context.keys, context.lengths)

        for step in range(K):
            log_q = law[tokens[-1]]
            tokens.append(jnp.argmax(log_q + noise(step), axis=-1).astype(jnp.int32))
            laws.append(jnp.roll(log_q, 1, axis=-1) if self.lie else log_q)
        drafts = jnp.stack(tokens[1:], axis=1)
        chain = Proposal.chain(
            context.anchor, drafts, jnp.ones(drafts.shape, bool), jnp.full(drafts.shape, 0.5, jnp.float32), MODEL
        )
        log_q = jnp.pad(jnp.stack(laws, axis=1), ((0, 0), (1, 0), (0, 0)))
        return dataclasses.replace(chain, log_q=log_q * jnp.nan if self.broken else log_q)


@functools.cache
def law() -> dict[tuple[int, ...], float]:
    """Probability of each text of three tokens."""
    found = {}
    for text in itertools.product(range(V), repeat=TOKENS):
        chance = 1.0
        for i, token in enumerate(text):
            x = oracle.law(oracle.logits_after(tiny_model(V), [*PROMPT, *text[:i]]), HOT, PROMPT, text[:i])
            p = np.exp(x - x.max())
            chance *= float((p / p.sum())[token])
        found[text] = chance
    return found


@functools.cache
def texts(drafter: Dice, repeats: int, temperature: float = HOT.temperature):
    """Many texts, and the share of drafts that was accepted."""
    found, drafted, accepted = [], 0, 0
    for seed in range(repeats):
        live = Session(
            tiny_model(V), drafter, batch=B, capacity=CAPACITY, prefill_chunk=2, costs=Costs.free((drafter.max_nodes,))
        )  # fmt: skip
        live.append([PROMPT] * B)
        # One token more than is counted, so that blocks end at different places.
        result = live.decode(sampling=Sampling(temperature=temperature), max_new_tokens=TOKENS + 2, seed=seed)
        found += [tuple(tokens[:TOKENS]) for tokens in result.tokens]
        drafted += result.stats.drafted.sum()
        accepted += result.stats.accepted_at.sum()
    return found, accepted / drafted


def p_value(found, depth: int) -> float:
    """Of the texts' first `depth` tokens against the target's law."""
    expected: dict[tuple[int, ...], float] = {}
    for text, chance in law().items():
        expected[text[:depth]] = expected.get(text[:depth], 0.0) + chance * len(found)
    counts = dict.fromkeys(expected, 0)
    for text in found:
        counts[text[:depth]] += 1
    return g_test(list(counts.values()), list(expected.values()))


def test_law_is_the_targets():
    """First token, pairs (the second given the first) and triples; and the drafts do matter."""
    found, share = texts(Dice(), 20)
    assert 0.1 < share < 0.95
    for depth in (1, 2, 3):
        assert p_value(found, depth) > 1e-3


@pytest.mark.slow
def test_many_texts():
    found, _ = texts(Dice(), 100)
    for depth in (1, 2, 3):
        assert p_value(found, depth) > 1e-3


@pytest.mark.slow
def test_broken_law_is_still_exact():
    found, _ = texts(Dice(broken=True), 20)
    for depth in (1, 2, 3):
        assert p_value(found, depth) > 1e-3


@pytest.mark.slow
def test_a_lie_about_the_law_is_caught():
    """The test's own power."""
    found, _ = texts(Dice(lie=True), 6)
    assert p_value(found, 2) < 1e-6


def test_greedy_rows_are_plain():
    """At temperature 0 the rejection rule gives the greedy text."""
    live = Session(tiny_model(V), Dice(), batch=B, capacity=CAPACITY, prefill_chunk=2, costs=Costs.free((K + 1,)))
    live.append([PROMPT] * B)
    mixed = [Sampling() if b % 2 else HOT for b in range(B)]
    result = live.decode(sampling=mixed, max_new_tokens=TOKENS + 2, seed=1)
    right = oracle.decode(tiny_model(V), PROMPT, TOKENS + 2)[0]
    assert all(tokens == right for tokens in result.tokens[1::2])
    assert any(tokens != right for tokens in result.tokens[::2])
