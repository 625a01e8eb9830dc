"""Every drafter gives the tokens of plain decoding, and plain decoding those of a loop in plain Python."""

from __future__ import annotations

import numpy as np
import pytest

from jdlite.decoding.sampling import Sampling
from jdlite.drafters.registry import DRAFTERS, make_drafter
from tests.decoding import oracle
from tests.toys import VOCAB, run, tiny_model

NEW = 24
RNG = np.random.default_rng(0)
# Ragged on purpose. Every group is one batch of three rows.
PROMPTS = {
    "random": [RNG.integers(0, VOCAB, n).tolist() for n in (17, 9, 2)],
    "one token": [[0], [5], [VOCAB - 1]],
    "all the same": [[4] * 20, [0] * 3, [9] * 8],
    "repetitive": [[1, 2, 3, 4] * 5, [6, 7] * 9, [8, 8, 2, 8, 8, 2, 8, 8]],
    "around a prefill chunk": [RNG.integers(0, 3, n).tolist() for n in (8, 9, 10)],
}
MIXED = [
    Sampling(temperature=0.8, top_k=5, repetition_penalty=1.3),
    Sampling(),
    Sampling(
        temperature=1.3,
        top_p=0.8,
        min_p=0.05,
        presence_penalty=0.5,
        frequency_penalty=0.2,
        banned_ids=(2,),
        min_new_tokens=9,
    ),
]
# Options only where a default does not fit a vocabulary of 13.
NAMES = {name: name for name in DRAFTERS} | {
    "token_recycling": "token_recycling:num_nodes=20",
    "logit_spec": "logit_spec:top_k=12,num_nodes=24",
}
VARIANTS = [
    "pld:match=last,num_drafts=4",
    "adapld:successors=always,semantic=hidden,copy_length=5,num_branches=3",
    "adapld:successor_source=forward,copy_length=5,num_branches=3,successors=always",
    "adapld:context=2,window=3,top_delta=2,num_branches=3",
]


def expected(group: str, sampling=None, seed: int = 0, stop_ids=(None, None, None)):
    sampling = sampling or [Sampling()] * 3
    return [
        oracle.decode(tiny_model(), prompt, NEW, sampling=sampling[b], seed=seed, stream=b, stop_id=stop_ids[b])[0]
        for b, prompt in enumerate(PROMPTS[group])
    ]


def check_stats(result, batch):
    for b in range(batch):
        log = result.stats.log[b, : result.stats.rounds[b]]
        assert log[:, 2].sum() == len(result.tokens[b]) == result.stats.emitted[b]
        assert (log[:, 2] >= 1).all()


@pytest.mark.parametrize("name", NAMES)
def test_greedy(name):
    drafter = make_drafter(NAMES[name])
    rounds = []
    for group in PROMPTS:
        result = run(drafter, PROMPTS[group], max_new=NEW)
        assert result.tokens == expected(group), group
        check_stats(result, 3)
        rounds.append(result.stats.rounds.sum())
    if name == "plain":
        assert sum(rounds) == len(PROMPTS) * 3 * NEW
    else:
        assert sum(rounds) < len(PROMPTS) * 3 * NEW, "drafts are accepted somewhere"


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("pld", "pld_plus", "suffix", "logit_spec", *VARIANTS)]


@pytest.mark.parametrize("name", ["plain", "adapld", "token_recycling", *SLOW])
def test_sampled(name):
    """Temperature, truncation and penalties mixed over the rows, with the same keys: equal token for token."""
    drafter = make_drafter(NAMES.get(name, name))
    for seed, group in enumerate(PROMPTS):
        # The last row may not stop before its ninth token, by a token that it would like to emit often.
        result = run(drafter, PROMPTS[group], max_new=NEW, sampling=MIXED, seed=seed, stop_ids=[[], [], [10]])
        assert result.tokens == expected(group, MIXED, seed, (None, None, 10)), group
        assert len(result.tokens[2]) >= 9
        check_stats(result, 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_variants(name):
    for group in PROMPTS:
        assert run(make_drafter(name), PROMPTS[group], max_new=NEW).tokens == expected(group), group


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("name", NAMES)
def test_other_batch_sizes(name, batch):
    """The same rows alone and among seven others."""
    drafter = make_drafter(NAMES[name])
    rows = [prompt for group in PROMPTS.values() for prompt in group]
    rights = [right for group in PROMPTS for right in expected(group)]
    rows, rights = rows + rows[:1], rights + rights[:1]
    for first in range(0, len(rows), batch):
        assert run(drafter, rows[first : first + batch], max_new=NEW).tokens == rights[first : first + batch]


def test_a_row_does_not_depend_on_its_neighbours():
    """Rows in another order, with other neighbours and budgets: the same tokens, and with its own seed also sampled."""
    drafter = make_drafter("adapld")
    seeds = [11, 22, 33]
    rows = PROMPTS["repetitive"]
    first = run(drafter, rows, max_new=NEW, sampling=MIXED, seed=seeds)
    order = [2, 0, 1]
    turned = run(drafter, [rows[i] for i in order], max_new=NEW, sampling=[MIXED[i] for i in order],
                 seed=[seeds[i] for i in order])  # fmt: skip
    assert turned.tokens == [first.tokens[i] for i in order]
    other = run(drafter, [rows[0], [3] * 20, [1]], max_new=[NEW, 3, 1], sampling=[MIXED[0], MIXED[2], MIXED[1]],
                seed=[11, 5, 6])  # fmt: skip
    assert other.tokens[0] == first.tokens[0]
    assert first.tokens[0] == oracle.decode(tiny_model(), rows[0], NEW, sampling=MIXED[0], seed=11, stream=0)[0]


@pytest.mark.slow
def test_tiny_temperature_is_the_greedy_limit():
    cold = {"temperature": 1e-6}
    limit = [Sampling(**cold, top_p=0.999), Sampling(**cold, top_k=1), Sampling(temperature=1, top_k=1)]
    for sampling in (limit, [Sampling(**cold)] * 3):
        result = run(make_drafter("pld"), PROMPTS["random"], max_new=NEW, sampling=sampling)
        assert result.tokens == expected("random")
