"""Sharding rules, and a sharded forward on four virtual devices that equals the unsharded one."""

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jdlite.errors import ConfigError
from jdlite.models.sharding import make_mesh, placement, spec_for

# The number of CPU devices is fixed when JAX starts, hence a process of its own.
_SCRIPT = """
import jax
jax.config.update("jax_num_cpu_devices", 4)
import sys
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P
from jdlite.checkpoints.assemble import parameter_paths
from jdlite.checkpoints.huggingface import load_huggingface, save_huggingface
from jdlite.errors import ConfigError
from jdlite.models.config import DecoderConfig
from jdlite.models.decoder import Decoder
from jdlite.models.sharding import make_mesh, placement, shard_cache, shard_model

biases = {"qkv_bias": True, "output_bias": True}
model = Decoder(DecoderConfig.tiny(vocab_size=96, num_layers=2, tie_embeddings=False, **biases), rngs=nnx.Rngs(0))
mesh = make_mesh(data=2, model=2)
sharded = shard_model(model, mesh)
rows = lambda x: jax.device_put(x, NamedSharding(mesh, P("data")))
tokens = jax.random.randint(jax.random.key(1), (4, 5), 0, 96)
mask = jnp.broadcast_to(jnp.tril(jnp.ones((5, 5), bool)), (4, 5, 5))
count = jnp.array([5, 2, 3, 4])

@jax.jit
def forward(model_state, tokens, mask, cache, count):
    model = nnx.merge(graph, model_state)
    positions = cache.lengths[:, None] + jnp.arange(5)
    out = model(tokens, positions, mask, cache, (0,))
    return model.logits(out.hidden), out.taps[0], cache.append(out.k, out.v, count)

graph, state = nnx.split(model)
_, sharded_state = nnx.split(sharded)
cache, sharded_cache = model.init_cache(4, 16), shard_cache(model.init_cache(4, 16), mesh)
for _ in range(2):  # on an empty cache, then on ragged rows
    logits, tap, cache = forward(state, tokens, mask, cache, count)
    inputs = rows(tokens), rows(mask), sharded_cache, rows(count)
    other_logits, other_tap, sharded_cache = forward(sharded_state, *inputs)
    np.testing.assert_allclose(other_logits, logits, rtol=0, atol=1e-5)
    np.testing.assert_allclose(other_tap, tap, rtol=0, atol=1e-5)
np.testing.assert_array_equal(sharded_cache.lengths, cache.lengths)
# Each device really holds a quarter or a half.
assert sharded.embed.weight[...].addressable_shards[0].data.shape == (48, 32)
assert sharded.layers[0].mlp.down.weight[...].addressable_shards[0].data.shape == (32, 32)
assert sharded_cache.k.addressable_shards[0].data.shape == (2, 2, 1, 16, 16)

# Read from disk by range, straight to the mesh.
folder = save_huggingface(model, sys.argv[1])
loaded = load_huggingface(folder, placement=placement(mesh))
for (path, a), (_, b) in zip(parameter_paths(sharded).items(), parameter_paths(loaded).items()):
    assert a.get_value().sharding == b.get_value().sharding, path
    np.testing.assert_array_equal(a.get_value(), b.get_value())

# Two key/value heads over four devices, and a head and its width over the same axis.
for bad, message in (
    (lambda: shard_model(model, make_mesh(model=4)), "does not divide"),
    (lambda: shard_model(model, mesh, {"mlp": "model", "embed": "model"}), "would split two dimensions"),
    (lambda: shard_cache(model.init_cache(3, 16), mesh), "does not divide"),
):
    try:
        bad()
    except ConfigError as error:
        assert message in str(error), error
    else:
        raise AssertionError(message)
print("equal")
"""


def test_sharded_equals_unsharded_on_four_devices(tmp_path):
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(tmp_path / "model")], capture_output=True, text=True, cwd=root, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "equal"


@pytest.fixture
def mesh():
    # Rules need only the mesh's shape, which one device repeated cannot give; sizes of 1 always divide.
    return make_mesh(data=1, model=1, devices=jax.devices()[:1])


def test_rules_name_mesh_axes(mesh):
    assert spec_for(("vocab", "embed"), (96, 32), mesh) == PartitionSpec("model", None)
    assert spec_for(("heads", None), (4, 3), mesh, {"heads": None}) == PartitionSpec(None, None)


def test_collision_is_an_error(mesh):
    with pytest.raises(ConfigError, match="mesh axis model would split two dimensions of w, vocab and embed"):
        spec_for(("vocab", "embed"), (96, 32), mesh, {"vocab": "model", "embed": "model"}, name="w")


def test_unknown_mesh_axis_is_an_error(mesh):
    with pytest.raises(ConfigError, match="rule vocab -> tensor names no axis of the mesh"):
        spec_for(("vocab", "embed"), (96, 32), mesh, {"vocab": "tensor"})


def test_axes_must_name_each_dimension(mesh):
    with pytest.raises(ConfigError, match="2 dimensions but 1 logical axes"):
        spec_for(("vocab",), (96, 32), mesh)


def test_mesh_must_fit_the_devices():
    with pytest.raises(ConfigError, match="needs 6 devices: got 1"):
        make_mesh(data=2, model=3, devices=jax.devices()[:1])


def test_explicit_mesh_is_refused():
    explicit = Mesh(
        np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2
    )
    with pytest.raises(ConfigError, match="axes of type Auto"):
        placement(explicit)
