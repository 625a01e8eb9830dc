"""The decoder with kernels: the same tokens as without, its own code where they refuse, programs for real models."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jdlite
from jdlite.decoding.request import make_request
from jdlite.drafters.adapld import AdaPLD
from jdlite.drafters.dlite import DLiteDrafter
from jdlite.drafters.lookup import PromptLookup
from jdlite.errors import ConfigError
from jdlite.models.cache import KVCache
from jdlite.models.decoder import Decoder
from jdlite.models.dlite import DLite
from jdlite.models.dlite_config import DLiteConfig
from jdlite.models.layers import cached_attention, swept_attention
from pallas_kernels import backends
from pallas_kernels.backends import candidates, dispatch, use_backend, with_kernel
from tests.fresh_process import run_script
from tests.pallas_kernels.harness import compile_for_tpu, copies_of, lowers_for_tpu, tpu_interpreter
from tests.toys import options, session, tiny_model

CHIP = "v6e:2x2"
WIDE = {"head_dim": 64}  # the narrowest heads that the kernels take


def custom_calls(text: str) -> dict[str, int]:
    """How often each kernel of the decoder stands in a lowered or compiled text."""
    return {name: text.count(f'kernel_name = "{name}"') for name in ("tree_attention", "commit_cache")}


def plain_step(model, tokens, cache):
    """One token of each row: logits, and the cache with it."""
    B = tokens.shape[0]
    out = model(tokens[:, None], cache.lengths[:, None], jnp.ones((B, 1, 1), bool), cache)
    path = jnp.zeros((B, 1), jnp.int32)
    return model.logits(out.hidden), cache.commit(out.k, out.v, path, jnp.ones(B, jnp.int32))


def round_of(model, drafter, batch, capacity):
    """Arguments of `one_round`, as shapes; those of model and drafter may be shapes too."""
    state = jax.eval_shape(lambda model, drafter: jdlite.init_state(model, drafter, batch, capacity), model, drafter)
    costs = jdlite.Costs.free((drafter.max_nodes,))
    request = make_request(model, drafter, batch, costs=costs)
    budget = jnp.full(batch, 8, jnp.int32)
    progress = jax.eval_shape(jdlite.start, model, drafter, state, request, budget)
    return model, drafter, state, request, progress


def one_round(model, drafter, state, request, progress):
    return jdlite.decode_rounds(model, drafter, state, request, progress, 1)


def cache_of(model, batch=2, capacity=48, dtype=jnp.float32):
    return model.init_cache(batch, capacity, dtype)


# Choosing.


def test_names_hold_while_tracing_and_jit_traces_again():
    traced = []

    @jax.jit
    def f(x):
        traced.append(candidates("op", ("reference", "mosaic_tpu", "mosaic_gpu"), None))
        return x

    for _ in range(2):
        f(1)
        with use_backend("mosaic_tpu"):
            f(1)
            with use_backend(None):
                f(1)
        with use_backend(["mosaic_gpu", "reference"]):
            f(1)
    assert traced == [("reference",), ("mosaic_tpu",), ("mosaic_gpu", "reference")]


def test_a_name_given_by_the_caller_comes_first():
    with use_backend("mosaic_tpu"):
        assert candidates("op", ("reference", "mosaic_tpu"), "reference") == ("reference",)


def test_names_that_nobody_has_are_refused():
    with pytest.raises(ConfigError, match="no backend 'triton'; choose from reference, mosaic_tpu, mosaic_gpu"):
        use_backend("triton").__enter__()
    with pytest.raises(ConfigError, match="in an empty list"):
        use_backend(()).__enter__()
    with use_backend("mosaic_gpu"), pytest.raises(NotImplementedError, match=r"op cannot run.* no backend mosaic_gpu"):
        dispatch("op", {"reference": lambda: 1}, None)


def test_the_device_decides_where_no_name_is_given(monkeypatch):
    own, operation = (lambda x: x), (lambda x, backend: x + len(backend))
    chosen = lambda: str(jax.make_jaxpr(lambda x: with_kernel(own, operation, x))(1))  # noqa: E731
    plain = chosen()
    assert "add" not in plain
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert chosen() == plain, "a platform that is not proven"
    monkeypatch.setattr(backends, "PROVEN", ("tpu",))
    assert "add" in chosen()
    with use_backend(("reference", "mosaic_tpu")):
        assert chosen() == plain
    with jax.default_device(jax.devices("cpu")[0]):
        assert chosen() == plain
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert chosen() == plain
    with use_backend("mosaic_tpu"):
        assert "add" in chosen()


def test_a_program_for_another_platform_runs_the_callers_code(monkeypatch):
    monkeypatch.setattr(backends, "PROVEN", ("tpu",))
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    model = tiny_model(**WIDE)
    args = (model, jnp.array([1, 2]), cache_of(model))
    assert custom_calls(lowers_for_tpu(plain_step, *args)) == {"tree_attention": 2, "commit_cache": 1}
    assert "custom_call" not in jax.jit(plain_step).lower(*args).as_text()


_SCRIPT = """
import sys
import jax
import jax.numpy as jnp
import jdlite
from jdlite.decoding.request import make_request
from jdlite.drafters.plain import Plain
from tests.toys import tiny_model

model, drafter = tiny_model(), Plain()
state, request = jdlite.init_state(model, drafter, 1, 16), make_request(model, drafter, 1)
progress = jdlite.start(model, drafter, state, request, jnp.ones(1, jnp.int32))
jax.jit(jdlite.decode_rounds).trace(model, drafter, state, request, progress)
assert not [name for name in sys.modules if name.startswith("jax.experimental.pallas")]
print("none")
"""


def test_without_a_name_a_cpu_runs_no_kernel_and_does_not_import_pallas():
    assert run_script(_SCRIPT) == "none"


def test_without_a_name_a_cpu_traces_the_callers_code_and_nothing_else():
    model = tiny_model()
    cache, q = cache_of(model), jnp.ones((2, 3, 4, 8))
    args = (q, q[:, :, :2], q[:, :, :2], cache.k, cache.v, 1, cache.lengths, jnp.ones((2, 3, 3), bool))
    assert str(jax.make_jaxpr(cached_attention)(*args)) == str(jax.make_jaxpr(swept_attention)(*args))


# Running.


@pytest.mark.parametrize("drafter", [PromptLookup(), AdaPLD()], ids=lambda drafter: drafter.name)
def test_decoding_gives_the_same_tokens(drafter):
    model = tiny_model(**WIDE)
    prompts = [[1, 2, 3, 4, 1, 2, 3], [5, 6, 5, 6, 5, 6, 5, 6, 5, 7, 1]]

    def decode():
        talk = session(drafter, 2, model=model)
        talk.append(prompts)
        result = talk.decode(**options(2, max_new=[14, 9]))
        return result, talk.state.cache

    expected, cache = decode()
    with use_backend("mosaic_tpu"), tpu_interpreter():
        result, written = jax.block_until_ready(decode())
    assert result.tokens == expected.tokens
    assert [len(row) for row in result.tokens] == [14, 9]
    assert result.tau == expected.tau > 1
    np.testing.assert_array_equal(written.lengths, cache.lengths)
    for b, length in enumerate(cache.lengths):
        np.testing.assert_allclose(written.k[:, b, :, :length], cache.k[:, b, :, :length], atol=1e-4)
        np.testing.assert_allclose(written.v[:, b, :, :length], cache.v[:, b, :, :length], atol=1e-4)


def test_both_kernels_are_in_the_program_of_a_round():
    model, drafter = tiny_model(**WIDE), PromptLookup()
    with use_backend("mosaic_tpu"):
        text = lowers_for_tpu(one_round, *round_of(model, drafter, 2, 48))
    # One verify forward of two layers: all that is drafted is verified, so only one width is compiled.
    assert custom_calls(text) == {"tree_attention": 2, "commit_cache": 1}


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="the Hopper kernels need JAX 0.12")
def test_both_hopper_kernels_are_in_the_program_of_a_round():
    args = round_of(tiny_model(**WIDE), PromptLookup(), 2, 48)
    with use_backend("mosaic_gpu"):
        text = jax.jit(one_round).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 3


def test_where_the_kernels_refuse_the_decoders_own_code_runs():
    # Heads of 8 and a capacity of 43 are refused.
    args = round_of(tiny_model(), PromptLookup(), 2, 43)
    lowered = lambda: jax.jit(one_round).lower(*args).as_text()  # noqa: E731
    own = lowered()
    with use_backend("mosaic_tpu"):
        assert lowered() == own


def test_too_many_nodes_are_refused_and_fewer_in_the_same_program_are_not():
    model = tiny_model(**WIDE)

    def forward(model, cache, n):
        at = jnp.zeros((2, n), jnp.int32)
        return model(at, at, jnp.ones((2, n, n), bool), cache).hidden

    with use_backend("mosaic_tpu"):
        text = lowers_for_tpu(
            lambda model, cache: (forward(model, cache, 65), forward(model, cache, 64)), model, cache_of(model)
        )
    assert custom_calls(text)["tree_attention"] == 2


def test_commit_keeps_what_the_path_says():
    rng = np.random.default_rng(0)
    k, v = jnp.asarray(rng.normal(size=(2, 2, 3, 2, 5, 64)), jnp.float32)
    lengths, path = jnp.array([0, 7, 14], jnp.int32), jnp.array([[0, 2, 4], [0, 3, 3], [0, 1, 1]], jnp.int32)
    count = jnp.array([3, 0, 2], jnp.int32)
    zeros = jnp.zeros((2, 3, 2, 16, 64))
    commit = jax.jit(lambda *args: KVCache(zeros, zeros, lengths).commit(*args))
    own = commit(k, v, path, count)
    with use_backend("mosaic_tpu"), tpu_interpreter():
        with_kernels = jax.block_until_ready(commit(k, v, path, count))
    wanted = np.zeros(zeros.shape, np.float32)
    for b in range(3):
        for p in range(int(count[b])):
            wanted[:, b, :, int(lengths[b]) + p] = k[:, b, :, int(path[b, p])]
    for cache in (own, with_kernels):
        np.testing.assert_array_equal(cache.k, wanted)
        np.testing.assert_array_equal(cache.lengths, [3, 7, 16])
    np.testing.assert_array_equal(own.v, with_kernels.v)


# Real models, compiled.


@pytest.fixture(scope="module")
def qwen3_4b():
    """Shapes of Qwen3-4B in bfloat16."""
    config = jdlite.DecoderConfig.qwen3_4b()
    return nnx.eval_shape(lambda: Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))


@pytest.mark.slow
def test_a_plain_step_of_qwen3_4b_compiles(qwen3_4b):
    cache = jax.eval_shape(lambda: cache_of(qwen3_4b, 1, 4096, jnp.bfloat16))
    tokens = jax.ShapeDtypeStruct((1,), jnp.int32)
    with use_backend("mosaic_tpu"):
        compiled = compile_for_tpu(plain_step, CHIP, qwen3_4b, tokens, cache, donate_argnums=(2,))
    assert_kernels_without_copies(compiled, cache)


@pytest.mark.slow
def test_a_round_of_qwen3_4b_with_dlite_compiles(qwen3_4b):
    config = DLiteConfig.qwen3_4b()
    network = nnx.eval_shape(lambda: DLite(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    args = round_of(qwen3_4b, DLiteDrafter(model=network).fit(qwen3_4b), 1, 4096)
    with use_backend("mosaic_tpu"):
        compiled = compile_for_tpu(one_round, CHIP, *args, donate_argnums=(2, 4))
    assert_kernels_without_copies(compiled, args[2].cache)


def assert_kernels_without_copies(compiled, cache):
    text = compiled.as_text()
    assert text.count("tpu_custom_call") == 37, "36 layers and one commit"
    assert not copies_of(text, cache)
