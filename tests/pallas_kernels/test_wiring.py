"""The decoder with kernels: the same tokens as without, its own code where they refuse, programs for real models."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jdlite
from jdlite.decoding.request import make_request
from jdlite.decoding.sampling import GREEDY, Sampling
from jdlite.drafters.adapld import AdaPLD
from jdlite.drafters.dlite import DLiteDrafter
from jdlite.drafters.lookup import PromptLookup
from jdlite.errors import ConfigError
from jdlite.models.cache import KVCache
from jdlite.models.decoder import Decoder
from jdlite.models.dlite import DLite
from jdlite.models.dlite_config import DLiteConfig
from jdlite.models.layers import cached_attention, swept_attention
from jdlite.models.sharding import make_mesh, shard_cache, shard_model
from pallas_kernels import backends
from pallas_kernels.backends import candidates, dispatch, use_backend, with_kernel
from pallas_kernels.low_rank_head.api import output_logits
from tests.fresh_process import run_script
from tests.learnt import config, learnt
from tests.models.dlite_models import random_model
from tests.pallas_kernels.harness import compile_for_tpu, copies_of, lowers_for_tpu, tpu_devices, tpu_interpreter
from tests.toys import options, session, tiny_model

CHIP = "v6e:2x2"
WIDE = {"head_dim": 64}  # the narrowest heads that the kernels take
DRAFTED = 16  # tokens of a vocabulary whose toy drafter has a rank that the kernels take


def custom_calls(text: str) -> dict[str, int]:
    """How often each kernel of the decoder stands in a lowered or compiled text."""
    names = ("low_rank_head", "tree_attention", "verify_head", "commit_cache")
    return {name: text.count(f'kernel_name = "{name}"') for name in names if f'kernel_name = "{name}"' in text}


def plain_step(model, tokens, cache):
    """One token of each row: logits, and the cache with it."""
    B = tokens.shape[0]
    out = model(tokens[:, None], cache.lengths[:, None], jnp.ones((B, 1, 1), bool), cache)
    path = jnp.zeros((B, 1), jnp.int32)
    return model.logits(out.hidden), cache.commit(out.k, out.v, path, jnp.ones(B, jnp.int32))


def round_of(model, drafter, batch, capacity, sampling=GREEDY):
    """Arguments of `one_round`, as shapes; those of model and drafter may be shapes too."""
    state = jax.eval_shape(lambda model, drafter: jdlite.init_state(model, drafter, batch, capacity), model, drafter)
    costs = jdlite.Costs.free((drafter.max_nodes,))
    request = make_request(model, drafter, batch, costs=costs, sampling=sampling)
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


def dlite(mode="match", **options) -> DLiteDrafter:
    """Of a rank that the kernel takes."""
    return DLiteDrafter(model=learnt(DRAFTED, **options), mode=mode)


# Models with wide heads run the kernels of attention and commit too, and cost more in the interpreter.
@pytest.mark.parametrize(
    ("drafter", "wide", "sampling"),
    [
        (AdaPLD(), WIDE, GREEDY),
        (dlite(), {}, [Sampling(temperature=0.7), GREEDY]),
        (dlite("rejection", anchor_group_size=2), {}, [Sampling(temperature=0.7), GREEDY]),
    ],
    ids=["adapld", "dlite", "rejection"],
)
def test_decoding_gives_the_same_tokens(drafter, wide, sampling):
    model = tiny_model(DRAFTED, **wide)
    prompts = [[1, 2, 3, 4, 1, 2, 3], [5, 6, 5, 6, 5, 6, 5, 6, 5, 7, 1]]

    def decode():
        talk = session(drafter, 2, model=model)
        talk.append(prompts)
        result = talk.decode(**options(2, max_new=[14, 9], sampling=sampling))
        return result, talk.state.cache

    expected, cache = decode()
    with use_backend("mosaic_tpu"), tpu_interpreter():
        result, written = jax.block_until_ready(decode())
    assert result.tokens == expected.tokens
    assert [len(row) for row in result.tokens] == [14, 9]
    assert result.tau == expected.tau > 1
    np.testing.assert_array_equal(result.stats.accepted_from, expected.stats.accepted_from)
    # Exact rejection needs the target's whole law, which no kernel gives.
    fused = 0 if drafter.samples else int(result.stats.forwards)
    assert (int(result.stats.fused_heads), int(expected.stats.fused_heads)) == (fused, 0)
    np.testing.assert_array_equal(written.lengths, cache.lengths)
    for b, length in enumerate(cache.lengths):
        np.testing.assert_allclose(written.k[:, b, :, :length], cache.k[:, b, :, :length], atol=1e-4)
        np.testing.assert_allclose(written.v[:, b, :, :length], cache.v[:, b, :, :length], atol=1e-4)


def cast(model: Decoder, dtype) -> Decoder:
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(lambda x: x.astype(dtype), state))


def test_in_bfloat16_what_differs_first_is_a_near_tie():
    model = cast(tiny_model(DRAFTED, **WIDE), jnp.bfloat16)
    # Tokens in pairs whose logits differ by less than bfloat16 can tell, so that some choices are near ties.
    weight = np.asarray(model.head_weight, np.float32)
    weight[1::2] = weight[::2]
    weight[1::2, 0] *= 1 + 2**-7
    assert model.lm_head is not None
    model.lm_head.weight[...] = jnp.asarray(weight, jnp.bfloat16)
    prompts = [[1, 2, 3, 4, 1, 2, 3], [5, 6, 5, 6, 5, 6, 5, 7], [8, 3, 8, 3, 8], [9, 9, 9]]

    def decode():
        talk = session(PromptLookup(), 4, model=model)
        talk.append(prompts)
        return talk.decode(**options(4, max_new=10)).tokens

    expected = decode()
    with use_backend("mosaic_tpu"), tpu_interpreter():
        tokens = jax.block_until_ready(decode())
    exact, differ = cast(model, jnp.float32), 0
    for prompt, ours, theirs in zip(prompts, expected, tokens, strict=True):
        first = next((i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
        if first is None:
            continue
        differ += 1
        text = jnp.asarray([prompt + ours[:first]])
        n = text.shape[1]
        causal = jnp.tril(jnp.ones((1, n, n), bool))
        logits = exact.logits(exact(text, jnp.arange(n)[None], causal, cache_of(exact, 1)).hidden)[0, -1]
        # Two steps of bfloat16 at the size of the largest logit.
        near = float(jnp.max(jnp.abs(logits))) * 2**-6
        assert float(jnp.max(logits) - jnp.min(logits[jnp.array([ours[first], theirs[first]])])) < near
        # The others are no near ties, so that this says something.
        assert float(jnp.sort(logits)[-1] - jnp.sort(logits)[-3]) > near
    assert differ, "no choice was near enough to differ"


@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=1.0, top_p=0.7), Sampling(repetition_penalty=1.2), Sampling(banned_ids=(3,))],
    ids=["top_p", "penalty", "ban"],
)
def test_what_a_kernel_cannot_do_exactly_is_done_without_it(sampling):
    args = round_of(tiny_model(**WIDE), PromptLookup(), 2, 48, sampling=sampling)
    with use_backend("mosaic_tpu"):
        assert custom_calls(lowers_for_tpu(one_round, *args)) == {"tree_attention": 2, "commit_cache": 1}


@pytest.mark.parametrize(
    ("drafter", "calls"),
    [
        (PromptLookup(), {"tree_attention": 2, "verify_head": 1, "commit_cache": 1}),
        (dlite(), {"low_rank_head": 1, "tree_attention": 2, "verify_head": 1, "commit_cache": 1}),
        (dlite("rejection"), {"low_rank_head": 1, "tree_attention": 2, "commit_cache": 1}),
        (dlite(head_output="lm_head"), {"tree_attention": 2, "verify_head": 1, "commit_cache": 1}),
    ],
    ids=["pld", "dlite", "rejection", "no low rank"],
)
def test_all_kernels_are_in_the_program_of_a_round(drafter, calls):
    model = tiny_model(DRAFTED, **WIDE)
    with use_backend("mosaic_tpu"):
        text = lowers_for_tpu(one_round, *round_of(model, drafter.fit(model), 2, 48))
    # One verify forward of two layers: all that is drafted is verified, so only one width is compiled.
    assert custom_calls(text) == calls


def test_the_heads_weights_are_packed_once_and_only_where_the_kernel_is_to_run():
    model, drafter = tiny_model(DRAFTED, **WIDE), dlite()
    assert drafter.fit(model).packed is None
    with use_backend("mosaic_tpu"):
        packed = drafter.fit(model).packed
        odd = DLiteDrafter(model=random_model(config(DRAFTED, rank=12)))
        assert odd.fit(model).packed is None, "a rank that the kernel refuses"
    head = drafter.model.head
    assert head.output is not None
    assert packed is not None
    np.testing.assert_array_equal(packed.output[:, :DRAFTED], head.output.weight[...].T)
    u = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, DRAFTED)), jnp.float32)
    np.testing.assert_allclose(output_logits(packed, u), head.logits(u), atol=1e-5)
    np.testing.assert_allclose(output_logits(head.weights(), u), head.logits(u), atol=1e-5)
    with use_backend("mosaic_gpu"):
        assert drafter.fit(model).packed is None
    with use_backend("mosaic_tpu"):
        fitted = drafter.fit(model)
        assert fitted.fit(model) is fitted, "packed once, however many sessions it serves"


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="the Hopper kernels need JAX 0.12")
def test_both_hopper_kernels_are_in_the_program_of_a_round():
    args = round_of(tiny_model(**WIDE), PromptLookup(), 2, 48)
    with use_backend("mosaic_gpu"):
        text = jax.jit(one_round).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    # Two of attention and one commit.
    assert text.count("custom_call @mosaic_gpu") == 3


def test_where_the_kernels_refuse_the_decoders_own_code_runs():
    # Heads of 8, a capacity of 43, a rank of 12 and a ban are refused.
    model, drafter = tiny_model(), DLiteDrafter(model=random_model(config(13, rank=12)))
    args = round_of(model, drafter, 2, 43, sampling=Sampling(banned_ids=(3,)))
    with use_backend("mosaic_tpu"):
        assert "tpu_custom_call" not in lowers_for_tpu(one_round, *args)
        # A kernel could not be lowered for this machine.
        jax.jit(one_round).lower(*args)


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
    assert_kernels_without_copies(compiled, 37, cache)
    tell("plain step", compiled, bytes_of((qwen3_4b, cache)))


@pytest.mark.slow
def test_a_round_of_qwen3_4b_with_dlite_compiles(qwen3_4b):
    config = DLiteConfig.qwen3_4b()
    network = nnx.eval_shape(lambda: DLite(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    with use_backend("mosaic_tpu"):
        drafter = jax.eval_shape(lambda network, target: DLiteDrafter(model=network).fit(target), network, qwen3_4b)
        args = round_of(qwen3_4b, drafter, 1, 4096)
        compiled = compile_for_tpu(one_round, CHIP, *args, donate_argnums=(2, 4))
    # One of each head besides attention and commit.
    assert_kernels_without_copies(compiled, 39, (args[2].cache, drafter.packed, table_of(qwen3_4b)))
    # The drafter's layers and small parts of its head once, W_o seven times.
    floor = bytes_of((qwen3_4b, args[2].cache, network.layers)) + 7 * bytes_of(drafter.packed.output)
    tell("DLite round", compiled, floor)


@pytest.mark.slow
def test_a_round_of_qwen3_4b_with_adapld_compiles(qwen3_4b):
    args = round_of(qwen3_4b, AdaPLD().fit(qwen3_4b), 1, 4096)
    with use_backend("mosaic_tpu"):
        compiled = compile_for_tpu(one_round, CHIP, *args, donate_argnums=(2, 4))
    assert_kernels_without_copies(compiled, 38, (args[2].cache, table_of(qwen3_4b)))
    tell("AdaPLD round", compiled, bytes_of((qwen3_4b, args[2].cache)))


@pytest.mark.slow
def test_a_plain_step_of_qwen3_4b_split_over_four_chips_compiles(qwen3_4b):
    mesh = make_mesh(model=4, devices=tpu_devices(CHIP))
    model = shard_model(qwen3_4b, mesh)
    cache = shard_cache(jax.eval_shape(lambda: cache_of(qwen3_4b, 1, 4096, jnp.bfloat16)), mesh)
    tokens = jax.ShapeDtypeStruct((1,), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec(None)))
    compiled = jax.jit(plain_step, donate_argnums=(2,)).lower(model, tokens, cache).compile()
    # A quarter of all weights and of the cache on each chip, besides norms.
    whole = bytes_of((model, cache))
    memory = compiled.memory_analysis()
    assert whole / 4 < memory.argument_size_in_bytes < 1.01 * whole / 4
    assert memory.temp_size_in_bytes < whole / 100
    tell("plain step, a chip of four", compiled, whole / 4)
    text = compiled.as_text()
    assert not re.findall(r"= .* (?:all-gather|all-to-all|collective-permute)\(", text), "no weight travels"
    # What the row-parallel products sum across chips: one vector after attention, one after the feed-forward.
    assert len(re.findall(r"= \S+ all-reduce(?:-start)?\(", text)) >= 2 * 36


def table_of(model):
    """Shape of the embedding table, which is the LM head too."""
    return model.embed.weight.get_value()


def bytes_of(arrays) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))


def tell(what, compiled, floor) -> None:
    """Print what the compiler says that a program needs (`pytest -s`); a loop's body counts once."""
    text = compiled.as_text()
    in_kernels = sum(int(size) for size in re.findall(r'"bytes_accessed":"?(\d+)', text))
    accessed, kept = compiled.cost_analysis()["bytes accessed"], compiled.memory_analysis().temp_size_in_bytes
    print(
        f"\n{what}: temporaries {kept / 1e6:.1f} MB; bytes accessed {accessed / 1e9:.2f} GB, of which the kernels say "
        f"{in_kernels / 1e9:.2f} GB; floor {floor / 1e9:.2f} GB"
    )


def assert_kernels_without_copies(compiled, kernels, arrays):
    text = compiled.as_text()
    assert text.count("tpu_custom_call") == kernels, "36 layers, one commit, and what else the caller names"
    assert not copies_of(text, arrays)
