"""Decoding in a refilled batch, compared with `Session`, one prompt at a time."""

from __future__ import annotations

import numpy as np
import pytest

from jdlite.decoding.sampling import GREEDY, Sampling
from jdlite.decoding.session import Session
from jdlite.drafters.plain import Plain
from jdlite.errors import CapacityError, ConfigError
from jdlite.training.refill import Job, decode_jobs
from tests.toys import CAPACITY, VOCAB, tiny_model

HOT = Sampling(temperature=0.7, top_k=8, top_p=0.9)
STOP = 3


def make_jobs(count, seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 20, count)
    return [Job(rng.integers(0, VOCAB, n).tolist(), 100 + i, f"job{i}") for i, n in enumerate(lengths)]


def one_by_one(jobs, sampling, max_new, capacity=CAPACITY):
    """The same answers through sessions of one row."""
    found = {}
    for job in jobs:
        live = Session(tiny_model(), Plain(), capacity=capacity, prefill_chunk=8)
        live.append([job.tokens])
        result = live.decode(sampling=sampling, max_new_tokens=max_new, stop_ids=[[STOP]], seed=[job.seed])
        found[job.name] = (result.tokens[0], result.finish_reasons[0])
    return found


def refilled(jobs, sampling, max_new, batch_size=3, capacity=CAPACITY):
    answers = decode_jobs(
        tiny_model(),
        jobs,
        sampling=sampling,
        stop_ids=[STOP],
        max_new_tokens=max_new,
        batch_size=batch_size,
        capacity=capacity,
        prefill_chunk=8,
    )
    return {answer.job.name: (answer.tokens, answer.finish) for answer in answers}


@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "sampled"])
def test_answers_equal_those_of_single_sessions(sampling):
    jobs = make_jobs(10)
    found = refilled(jobs, sampling, 15)
    assert found == one_by_one(jobs, sampling, 15)
    assert {finish for _, finish in found.values()} == {"stop_id", "length"}


def test_an_answer_depends_on_neither_order_nor_batch():
    jobs = make_jobs(7)
    found = refilled(jobs, HOT, 15)
    assert refilled(jobs[::-1], HOT, 15) == found
    assert refilled(jobs[2:5], HOT, 15) == {job.name: found[job.name] for job in jobs[2:5]}


def test_seeds_change_samples():
    tokens = [1, 2, 4]
    jobs = [Job(tokens, seed, str(seed)) for seed in range(6)]
    assert len({tuple(answer) for answer, _ in refilled(jobs, HOT, 15).values()}) > 3


def test_a_row_that_fills_its_capacity_ends():
    job = Job(list(range(10)) * 4, 0, "long")
    ((tokens, finish),) = refilled([job], Sampling(banned_ids=(STOP,)), 30).values()
    assert (len(tokens), finish) == (CAPACITY - 40, "capacity")


def test_penalties_are_refused():
    with pytest.raises(ConfigError, match="cannot be sampled with penalties"):
        refilled(make_jobs(1), Sampling(repetition_penalty=1.1), 5)


def test_no_jobs_and_too_long_jobs():
    assert refilled([], GREEDY, 5) == {}
    with pytest.raises(CapacityError, match="a prompt has 48 tokens but a row holds 48"):
        refilled([Job([1] * 48, 0)], GREEDY, 5)
