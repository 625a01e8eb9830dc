"""Decoding on four virtual devices gives the tokens of one device."""

from tests.fresh_process import run_script

# The number of CPU devices is fixed when JAX starts, hence a process of its own.
_SCRIPT = """
import jax
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_disable_most_optimizations", True)
import dataclasses
import numpy as np
from jdlite.decoding.sampling import Sampling
from jdlite.drafters.registry import make_drafter
from jdlite.models.sharding import make_mesh, shard_cache, shard_model
from tests.decoding import oracle
from tests.toys import options, session, tiny_model

model = tiny_model(16)
mesh = make_mesh(data=2, model=2)
sharded = shard_model(model, mesh)
prompts = [[1, 2, 3, 4] * 4, [5], [6, 7] * 5, [9] * 9]
sampling = [Sampling(), Sampling(), Sampling(temperature=0.9, top_k=6), Sampling(temperature=1.1, top_p=0.9)]
drafter = make_drafter("adapld:copy_length=5,num_branches=3")
live = session(drafter, 4, model=sharded)
live.state = dataclasses.replace(live.state, cache=shard_cache(live.state.cache, mesh))
live.append(prompts)
result = live.decode(**options(4, max_new=16, sampling=sampling))
for b, prompt in enumerate(prompts):
    right = oracle.decode(model, prompt, 16, sampling=sampling[b], stream=b)[0]
    assert result.tokens[b] == right, (b, result.tokens[b], right)
assert result.tau > 1
assert live.state.cache.k.addressable_shards[0].data.shape == (2, 2, 1, 48, 8), live.state.cache.k.sharding
print("equal")
"""


def test_sharded_decode_equals_unsharded():
    assert run_script(_SCRIPT) == "equal"
