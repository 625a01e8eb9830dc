"""One prefill for several drafters gives each what its own prefill would; decoding leaves the shared history alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jdlite.decoding.policy import Costs, variants
from jdlite.decoding.request import make_request
from jdlite.decoding.session import Session
from jdlite.drafters.base import Drafter, Needs
from jdlite.drafters.lookup import PromptLookup
from jdlite.drafters.plain import Plain
from jdlite.errors import ConfigError
from jdlite.evaluation.broadcast import Broadcast, SharedSession
from jdlite.models.config import DecoderConfig
from jdlite.models.decoder import Decoder

CAPACITY, CHUNK = 40, 6
ROWS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 1, 2, 9]]
MORE = [[3, 4, 5], [1, 2, 9, 1, 2, 9, 1]]


@dataclasses.dataclass(frozen=True)
class Recorder(Plain):
    """Keeps everything that it is shown for the first position of each observation, and counts rounds for ever."""

    taps: tuple[int, ...] = ()
    top_k: int = 0
    name = "recorder"

    def needs(self, num_layers):
        return Needs(taps=self.taps, top_k=self.top_k)

    def init(self, batch, capacity, *, hidden_size, vocab_size, dtype):
        return {
            "states": jnp.zeros((batch, capacity, len(self.taps), hidden_size), dtype),
            "ids": jnp.zeros((batch, capacity, self.top_k), jnp.int32),
            "rounds": jnp.zeros(batch, jnp.int32),
        }

    def observe(self, memory, context, observation):
        assert len(observation.taps) == len(self.taps)
        assert observation.top_ids.shape[-1] == self.top_k
        P = observation.path.shape[1]
        slots = observation.start[:, None] + jnp.arange(P)
        slots = jnp.where(jnp.arange(P) < observation.count[:, None], slots, CAPACITY)
        put = jax.vmap(lambda kept, at, new: kept.at[at].set(new, mode="drop"))
        states, ids = memory["states"], memory["ids"]
        if self.taps:
            states = put(states, slots, observation.committed(jnp.stack(observation.taps, axis=2)))
        if self.top_k:
            ids = put(ids, slots, observation.committed(observation.top_ids))
        return {"states": states, "ids": ids, "rounds": memory["rounds"] + (observation.count > 0)}


DRAFTERS: dict[str, Drafter] = {
    "plain": Plain(),
    "a": Recorder(taps=(1, 0), top_k=2),
    "b": Recorder(taps=(1,), top_k=5),
    "c": Recorder(),
    "pld": PromptLookup(),
}


@pytest.fixture(scope="module")
def model():
    return Decoder(DecoderConfig.tiny(num_layers=2), rngs=nnx.Rngs(0))


def shared(model, **options):
    costs = {name: Costs.free(variants(d.max_nodes)) for name, d in DRAFTERS.items()}
    return SharedSession(model, DRAFTERS, costs, batch=2, capacity=CAPACITY, prefill_chunk=CHUNK, **options)


def request():
    config = DecoderConfig.tiny(num_layers=2)
    return make_request(Decoder(config, rngs=nnx.Rngs(0)), Plain(), 2, stop_ids=[[96], [96]])


def test_memories_equal_those_of_single_prefills(model):
    session = shared(model)
    for rows in (ROWS, MORE):
        session.append(rows)
    for name, drafter in DRAFTERS.items():
        alone = Session(model, drafter, batch=2, capacity=CAPACITY, prefill_chunk=CHUNK)
        for rows in (ROWS, MORE):
            alone.append(rows)
        # The tokens of another drafter's needs are computed by the same products, so equal means equal bits.
        got, want = session.lend(name).memory, alone.state.memory
        jax.tree.map(np.testing.assert_array_equal, got, want)


def test_decoding_repeats_exactly_and_leaves_the_history(model):
    session = shared(model)
    session.append(ROWS)
    lengths = session.lengths
    first = [session.decode(name, request(), [9, 5]) for name in DRAFTERS]
    again = [session.decode(name, request(), [9, 5]) for name in DRAFTERS]
    assert session.lengths == lengths
    assert [run.tokens for run in first] == [run.tokens for run in again]
    for one, other in zip(first, again, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one.stats, other.stats)
    fresh = Session(model, Plain(), batch=2, capacity=CAPACITY)
    fresh.append(ROWS)
    want = fresh.decode(max_new_tokens=[9, 5], stop_ids=[[96], [96]])
    assert all(run.tokens == want.tokens for run in first)
    assert first[0].finish == want.finish_reasons
    assert all(run.seconds > 0 for run in first)


def test_later_turns_equal_a_session_that_is_rolled_back(model):
    session = shared(model)
    alone = Session(model, PromptLookup(), batch=2, capacity=CAPACITY, prefill_chunk=CHUNK)
    for rows in (ROWS, MORE):
        session.append(rows)
        alone.append(rows)
        for keep in (False, True):
            run = session.decode("pld", request(), [6, 6], keep=keep)
        before = alone.lengths
        want = alone.decode(max_new_tokens=6, stop_ids=[[96], [96]])
        alone.rollback(before)
        assert run.tokens == want.tokens
        jax.tree.map(np.testing.assert_array_equal, run.stats, want.stats)


def test_only_kept_learning_lasts(model):
    session = shared(model)
    session.append(ROWS)
    before = np.asarray(session.lend("c").memory["rounds"])
    session.decode("c", request(), [4, 4])
    np.testing.assert_array_equal(session.lend("c").memory["rounds"], before)
    run = session.decode("c", request(), [4, 4], keep=True)
    np.testing.assert_array_equal(session.lend("c").memory["rounds"], before + run.stats.rounds)


def test_needs_are_the_union():
    needs = Broadcast(tuple(DRAFTERS.values()), num_layers=2).needs(2)
    assert needs == Needs(taps=(0, 1), top_k=5)


def test_costs_of_another_drafter_are_refused(model):
    costs = {name: Costs.free((1,)) for name in DRAFTERS}
    with pytest.raises(ConfigError, match="costs of pld"):
        SharedSession(model, DRAFTERS, costs, capacity=CAPACITY)
