"""The Hopper kernels: each operation's cases in the Mosaic GPU interpreter, and compilation by ptxas."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.commit_cache.api import commit_cache
from pallas_kernels.commit_cache.mosaic_gpu import commit_cache as commit_on_gpu
from pallas_kernels.low_rank_head import mosaic_gpu as head_on_gpu
from pallas_kernels.low_rank_head.api import HeadWeights, low_rank_head, prepare, quantise
from pallas_kernels.noise import gumbel_from_bits, gumbel_without_log1p
from pallas_kernels.tree_attention import mosaic_gpu as attention_on_gpu
from pallas_kernels.tree_attention.api import tree_attention
from pallas_kernels.verify_head import mosaic_gpu as verify_on_gpu
from pallas_kernels.verify_head.api import verify_head
from tests.pallas_kernels import test_commit_cache as commit
from tests.pallas_kernels import test_low_rank_head as head
from tests.pallas_kernels import test_tree_attention as attention
from tests.pallas_kernels import test_verify_head as verify
from tests.pallas_kernels.gpu_harness import compile_for_gpu, gpu_interpreter
from tests.pallas_kernels.harness import copies_of

needs_new_jax = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="the Hopper kernels need JAX 0.12 (make test-kernels)"
)


def compile_and_check(title, function, args, *, instructions=(), **options) -> list:
    """Compile for both devices, print what ptxas made of the kernel, and fail where registers were spilled."""
    compiled, kernel = compile_for_gpu(function, "h100", *args, **options)
    assert kernel is not None
    print(f"{title}: {kernel.registers} registers, {kernel.spills} bytes spilled, {kernel.shared} bytes shared")
    assert kernel.spills == 0
    for text in (".target sm_90a", "cp.async.bulk.tensor", *instructions):
        assert text in kernel.ptx
    # Both are sm_90a, so Mosaic GPU takes the machine code that it has and reports nothing a second time.
    return [compiled, compile_for_gpu(function, "h200", *args, **options)[0]]


@needs_new_jax
class TestCommitCache(commit.CommitCases):
    def run(self, *args):
        with gpu_interpreter():
            call = jax.jit(lambda *args: commit_cache(*args, backend="mosaic_gpu"))
            return jax.block_until_ready(call(*args))

    def test_slots_past_the_end_are_dropped(self):
        args = commit.make([38], [4])
        for cache, expected in zip(self.run(*args), commit_cache(*args, backend="reference"), strict=True):
            assert jnp.array_equal(cache, expected)

    @pytest.mark.slow
    def test_compiles_in_place(self):
        for shape in ((36, 1, 8, 4096, 128, 40, 31), (36, 1, 8, 4096, 128, 8, 8), (28, 8, 8, 2048, 128, 8, 8)):
            args: tuple = commit.shapes(*shape)
            for compiled in compile_and_check(f"commit_cache {shape}", commit_on_gpu, args, donate_argnums=(0, 1)):
                assert not copies_of(compiled.as_text(), args[:2]), shape
                assert compiled.memory_analysis().alias_size_in_bytes >= args[0].size * 4

    @pytest.mark.slow
    def test_a_loop_carries_the_cache_without_copying_it(self):
        def loop(k_cache, v_cache, k_new, v_new, path, lengths, count):
            def body(_, carry):
                k_cache, v_cache, lengths = carry
                caches = commit_on_gpu(k_cache, v_cache, k_new, v_new, path, lengths, count)
                return *caches, lengths + count

            return jax.lax.fori_loop(0, 5, body, (k_cache, v_cache, lengths))

        args: tuple = commit.shapes(36, 1, 8, 4096, 128, 8, 8)
        compiled: Any = compile_for_gpu(loop, "h100", *args, donate_argnums=(0, 1))[0]
        assert not copies_of(compiled.as_text(), args[:2])
        assert compiled.memory_analysis().temp_size_in_bytes < 1 << 20

    def test_refusals(self):
        with pytest.raises(NotImplementedError, match="got the cache in float16"):
            commit_cache(*commit.make([0], [1], dtype=jnp.float16), backend="mosaic_gpu")
        with pytest.raises(NotImplementedError, match="units of 16 bytes and at most 256: got 6"):
            commit_cache(*commit.make([0], [1], h=6), backend="mosaic_gpu")


@needs_new_jax
class TestTreeAttention(attention.AttentionCases):
    """With products from plain loads, so that the race detector sees all operands."""

    def run(self, *args, **options):
        with gpu_interpreter():
            options = {"plain": ("scores", "values"), **options}
            call = jax.jit(lambda *args: attention_on_gpu.tree_attention(*args, **options))
            return jax.block_until_ready(call(*args))

    def test_blocks_share_a_row(self):
        # Three blocks for five tiles, two and none; float32 products are made by wgmma as on the device.
        args: tuple = attention.make([300, 100, 0], N=3, G=1)
        np.testing.assert_allclose(self.run(*args, splits=3, plain=()), attention.oracle(*args), atol=3e-6)

    def test_two_warpgroups_and_two_blocks_of_queries(self):
        # 192 query rows; the keys' product by wgmma. The last tile is cleared by one group for both.
        args: tuple = attention.make([70], S=100, N=64, G=1, repeats=3, dtype=jnp.bfloat16)
        out = self.run(*args, splits=1, plain=("values",))
        np.testing.assert_allclose(np.asarray(out, np.float64), attention.oracle(*args), atol=0.02)

    def test_bfloat16_queries_and_float32_cache(self):
        args = list(attention.make([70], S=80, N=2, dtype=jnp.bfloat16))
        args[3:5] = [jnp.asarray(cache, jnp.float32) for cache in args[3:5]]
        np.testing.assert_allclose(np.asarray(self.run(*args), np.float64), attention.oracle(*args), atol=0.02)

    @pytest.mark.slow
    def test_compiles_without_spills_or_copies_of_the_cache(self):
        for shape in HOPPER:
            args = attention.shapes(*shape)
            title = f"tree_attention {shape[:-1]} {jnp.dtype(shape[-1]).name}"
            for compiled in compile_and_check(
                title, attention_on_gpu.tree_attention, args, instructions=("wgmma.mma_async",)
            ):
                assert not copies_of(compiled.as_text(), args[3:5]), shape

    def test_refusals(self):
        refused: tuple[tuple[dict[str, Any], str], ...] = (
            ({"N": 65}, "at most 64 nodes: got 65"),
            ({"h": 48}, "64 or 128: got 48"),
            ({"dtype": jnp.float16}, "got queries in float16"),
        )
        for options, message in refused:
            args: tuple = attention.make([4], S=8, **options)
            with pytest.raises(NotImplementedError, match=message):
                tree_attention(*args, backend="mosaic_gpu")


# L, B, H, G, S, h, N and dtype: Qwen3-0.6B (two warpgroups), 4B and 8B, a long row, a batch, float32, SmolLM2.
HOPPER = (
    (28, 1, 16, 8, 4096, 128, 64, jnp.bfloat16),
    (36, 1, 32, 8, 4096, 128, 8, jnp.bfloat16),
    (2, 1, 32, 8, 131_072, 128, 64, jnp.bfloat16),
    (2, 32, 32, 8, 4096, 128, 8, jnp.bfloat16),
    (2, 2, 16, 8, 1000, 128, 1, jnp.float32),
    (30, 1, 9, 3, 4096, 64, 8, jnp.bfloat16),
)


def test_noise_without_log1p():
    bits = jnp.asarray(np.random.default_rng(0).integers(-(2**31), 2**31, 10_000), jnp.int32)
    bits = jnp.concatenate([jnp.array([0, 1, -1, -2, 2**31 - 1, -(2**31)], jnp.int32), jnp.arange(300), bits])
    np.testing.assert_allclose(gumbel_without_log1p(bits), gumbel_from_bits(bits), rtol=1e-6, atol=5e-7)


@needs_new_jax
class TestLowRankHead:
    def check(self, args, options, **more):
        with gpu_interpreter():
            call = jax.jit(lambda *args: head_on_gpu.low_rank_head(*args, **options, **more))
            out = jax.block_until_ready(call(*args))
        expected = low_rank_head(*args, **options, backend="reference")
        np.testing.assert_array_equal(out.tokens, expected.tokens)
        np.testing.assert_array_equal(out.u.astype(jnp.float32), expected.u.astype(jnp.float32))
        np.testing.assert_allclose(out.log_q, expected.log_q, atol=2e-4)
        return out

    def test_argmax_of_shares_of_which_one_is_empty(self):
        # 5 tiles of 64 by four blocks: two, two, one, none; the last tile is cut.
        args = head.make(V=300, R=64, B=2, K=2, dtype=jnp.bfloat16)
        self.check(args, {}, blocks=4, plain=True)

    def test_draws_at_several_temperatures(self):
        args = head.make(V=4000, R=64, B=3, K=2, dtype=jnp.bfloat16)
        options = {"keys": head.draw_keys(3, 2), "temperature": jnp.array([0.0, 0.7, 1.5])}
        self.check(args, options, blocks=3)

    def test_more_rows_than_a_block_takes(self):
        args = head.make(V=200, R=128, B=40, K=1, dtype=jnp.bfloat16)
        options = {"keys": head.draw_keys(40, 1), "temperature": jnp.ones(40)}
        self.check(args, options, blocks=2, plain=True)

    @pytest.mark.parametrize("rounded", [jnp.int8, jnp.float8_e4m3fn])
    def test_eight_bits(self, rounded):
        # Products by plain loads only: the interpreter has no wgmma with an operand in registers.
        weights, *rest = head.make(V=300, R=192, B=2, K=2, dtype=jnp.bfloat16)
        output, scale = quantise(weights.output * jnp.linspace(0.5, 2, 300, dtype=jnp.bfloat16)[:, None], rounded)
        weights = dataclasses.replace(weights, output=output, output_scale=scale)
        self.check((weights, *rest), {}, blocks=4, plain=True)
        options = {"keys": head.draw_keys(2, 2), "temperature": jnp.array([0.7, 0.0])}
        self.check((weights, *rest), options, blocks=2, plain=True)

    def test_a_tie_goes_to_the_lowest_id_and_nan_is_told(self):
        weights, *rest = head.make(V=300, R=64, B=1, K=1, dtype=jnp.bfloat16)
        tied = dataclasses.replace(weights, output=jnp.zeros_like(weights.output))
        assert self.check((tied, *rest), {}, blocks=2).tokens[0, 0] == 0
        broken = dataclasses.replace(weights, output=weights.output.at[70].set(jnp.nan))
        assert np.isnan(self.check((broken, *rest), {}, blocks=2).log_q).all()

    @pytest.mark.slow
    def test_compiles_without_spills_or_copies_of_a_weight(self):
        for V, R, D, rows, sampled, dtype in HEADS:
            args: tuple = head_shapes(V, R, D, rows, sampled, dtype)
            drawn = "drawn" if sampled else "argmax"
            title = f"low_rank_head V={V} R={R} D={D} {rows} rows {drawn} {jnp.dtype(dtype).name}"
            for compiled in compile_and_check(
                title, head_on_gpu.low_rank_head, args, instructions=("wgmma.mma_async",)
            ):
                assert not copies_of(compiled.as_text(), args[0]), title

    def test_refusals(self):
        for options, message in (
            ({"dtype": jnp.float32}, "got weights in float32"),
            ({"R": 24, "dtype": jnp.bfloat16}, "multiple of 64 and at most 512: got 24"),
            ({"R": 576, "dtype": jnp.bfloat16, "K": 1}, "at most 512: got 576"),
            ({"R": 64, "B": 65, "K": 1, "dtype": jnp.bfloat16}, "at most 64 rows: got 65"),
        ):
            weights, *rest = head.make(**options)
            with pytest.raises(NotImplementedError, match=message):
                low_rank_head(weights, *rest, backend="mosaic_gpu")
        weights, *rest = head.make(R=64, dtype=jnp.bfloat16)
        assert prepare(weights, "mosaic_gpu") is weights
        odd = dataclasses.replace(weights, output=weights.output.astype(jnp.float16))
        with pytest.raises(NotImplementedError, match="W_o may be bfloat16, int8 or float8_e4m3fn: got float16"):
            low_rank_head(odd, *rest, backend="mosaic_gpu")
        with pytest.raises(NotImplementedError, match="packed for a TPU"):
            low_rank_head(prepare(weights, "mosaic_tpu"), *rest, backend="mosaic_gpu")


# V, R, D, rows, whether they are drawn, and the dtype of W_o: Qwen3-0.6B, 4B and 8B.
HEADS = (
    (151_936, 320, 1024, 1, False, jnp.bfloat16),
    (151_936, 320, 2560, 8, True, jnp.bfloat16),
    (151_936, 512, 4096, 64, True, jnp.bfloat16),
    (151_936, 320, 2560, 1, False, jnp.int8),
    (151_936, 512, 4096, 64, True, jnp.int8),
    (151_936, 320, 2560, 8, True, jnp.float8_e4m3fn),
    (151_936, 512, 4096, 64, True, jnp.float8_e4m3fn),
)


def head_shapes(V, R, D, B, sampled, dtype, K=7):
    """Arguments of the kernel as shapes, in bfloat16 but for W_o, which is in `dtype`."""
    of: Any = jax.ShapeDtypeStruct
    sizes = ((V, R), (2 * R, 2 * R), (2 * R,), (R, R + D), (R,))
    tables = [of(size, jnp.bfloat16) for size in sizes]
    scale = of((V,), jnp.float32) if jnp.dtype(dtype).itemsize == 1 else None
    args = (
        HeadWeights(*tables, of((V, R), dtype), scale),
        of((B, K, D), jnp.bfloat16),
        of((B,), jnp.int32),
        of((B, R), jnp.float32),
    )
    return (*args, jax.eval_shape(lambda: head.draw_keys(B, K)), of((B,), jnp.float32)) if sampled else args


def test_old_jax_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    with pytest.raises(NotImplementedError, match=r"mosaic_gpu: The Hopper kernels need JAX 0.12"):
        commit_cache(*commit.make([0], [1]), backend="mosaic_gpu")


def in_bfloat16(weight, hidden):
    """A bfloat16 weight and states, as wide as the kernel takes, with the same products.

    A float32 number is three bfloat16 parts, and pairs of parts stand side by side. What is not finite is in one pair
    only, so that it meets no zero.
    """
    pairs = [(0, 0)]
    if weight.dtype == jnp.float32:
        pairs += [(i, j) for i in range(3) for j in range(3) if 0 < i + j < 3]

    def parts(x):
        whole, rest, found = x.astype(jnp.bfloat16), jnp.where(jnp.isfinite(x), x, 0), []
        for _ in range(3):
            found.append(rest.astype(jnp.bfloat16))
            rest = rest - found[-1].astype(x.dtype)
        return whole, found

    def wide(x, side):
        whole, found = parts(x)
        x = jnp.concatenate([whole, *(found[pair[side]] for pair in pairs[1:])], axis=-1)
        return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, -x.shape[-1] % 64),))

    return wide(weight, 0), wide(hidden, 1)


@needs_new_jax
class TestVerifyHead(verify.HeadCases):
    """With products from plain loads, so that the race detector sees all operands, but where `plain` is False."""

    fused = True

    def run(self, weight, hidden, *args, path_length, top_k=0, parts=2, plain=True, **options):
        options = {"top_k": top_k, "path_length": path_length, "parts": parts, "plain": plain, **options}
        call = functools.partial(verify_on_gpu.verify_head, **options)
        with gpu_interpreter():
            return jax.block_until_ready(jax.jit(call)(*in_bfloat16(weight, hidden), *args))

    @pytest.mark.parametrize(
        ("temperature", "plain"), [(0.0, False), ((0.0, 0.7, 1.6), False), ((1.0, 0.0, 0.5), True)]
    )
    def test_a_wide_weight_comes_in_tiles(self, temperature, plain):
        # Five tiles across in a ring that has fewer places than the 15 of a share; 24 columns for 21 nodes; the last
        # ids are those of one group.
        case = verify.make(V=700, D=320, B=3, N=7, temperature=temperature, dtype=jnp.bfloat16, seed=1)
        tokens, log_prob, ids, largest, margin = verify.oracle(case, top_k=6)
        assert margin.min() > 1e-3
        out = self.run(*case.args, top_k=6, path_length=7, plain=plain)
        np.testing.assert_array_equal(out.tokens, tokens)
        np.testing.assert_array_equal(out.top_ids, ids)
        np.testing.assert_allclose(out.top_logits, largest, atol=1e-4)
        np.testing.assert_allclose(out.log_prob, log_prob, atol=2e-4)
        assert not out.broken.any()
        verify.check_walk(case, out)

    @pytest.mark.parametrize("top_k", [0, 3])
    def test_more_nodes_than_a_block_takes(self, top_k):
        case = verify.make(V=600, D=64, B=3, N=25, temperature=(0.0, 1.0, 0.5), dtype=jnp.bfloat16, seed=7)
        tokens, log_prob, ids, _, margin = verify.oracle(case, top_k=top_k)
        assert margin.min() > 1e-4
        out = self.run(*case.args, top_k=top_k, path_length=25)
        np.testing.assert_array_equal(out.tokens, tokens)
        np.testing.assert_array_equal(out.top_ids, ids)
        np.testing.assert_allclose(out.log_prob, log_prob, atol=2e-4)
        verify.check_walk(case, out)

    def test_shares_of_which_one_is_empty(self):
        case = verify.make(V=391, D=64, B=1, N=2, dtype=jnp.bfloat16)
        out = self.run(*case.args, path_length=2, parts=5, plain=False)
        np.testing.assert_array_equal(out.tokens, verify.oracle(case)[0])

    def test_a_large_vocabulary(self):
        case = verify.make(V=4096, D=128, B=2, N=5, temperature=(0.9, 0.0), dtype=jnp.bfloat16, seed=2)
        tokens, log_prob, ids, _, margin = verify.oracle(case, top_k=8)
        assert margin.min() > 1e-3
        out = self.run(*case.args, top_k=8, path_length=5, parts=3, plain=False)
        np.testing.assert_array_equal(out.tokens, tokens)
        np.testing.assert_array_equal(out.top_ids, ids)
        np.testing.assert_allclose(out.log_prob, log_prob, atol=2e-4)

    def test_a_tie_of_lanes_goes_to_the_lowest_id(self):
        # Three equal logits; the lane of the highest id has the lowest number.
        case = verify.make(V=391, D=64, B=1, N=1, dtype=jnp.bfloat16, whole=True)
        weight = jnp.zeros_like(case.weight).at[jnp.array([140, 300, 385])].set(case.hidden[0, 0])
        out = self.run(weight, *case.args[1:], top_k=2, path_length=1, parts=1)
        np.testing.assert_array_equal(out.top_ids, [[[140, 300]]])
        out = self.run(jnp.zeros_like(weight), *case.args[1:], top_k=16, path_length=1)
        np.testing.assert_array_equal(out.tokens, [[0]])
        np.testing.assert_array_equal(out.top_ids[0, 0], np.arange(16))
        np.testing.assert_allclose(out.log_prob, -np.log(391), rtol=1e-6)

    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    def test_infinity_is_not_broken(self, temperature):
        case = verify.make(V=300, D=64, B=1, N=3, temperature=temperature, dtype=jnp.bfloat16)
        hidden = case.hidden.at[0, 0, 0].set(jnp.inf).at[0, 1, 0].set(jnp.nan)
        out = self.run(case.weight, hidden, *case.args[2:], top_k=2, path_length=3)
        np.testing.assert_array_equal(out.broken, [[False, True, False]])
        # The lowest ids whose logits are +inf, or NaN.
        positive = np.flatnonzero(np.asarray(case.weight[:, 0], np.float32) > 0)
        np.testing.assert_array_equal(out.tokens[0, :2], [positive[0], 0])
        np.testing.assert_array_equal(out.top_ids[0, :2], [positive[:2], [0, 1]])
        assert not np.isfinite(out.log_prob[0, :2]).any()
        assert np.isfinite(out.log_prob[0, 2])
        np.testing.assert_array_equal(out.tokens[0, 2], verify.oracle(case)[0][0, 2])

    def test_through_the_api(self):
        case = verify.make(V=140, D=64, B=1, N=2, dtype=jnp.bfloat16)
        call = functools.partial(verify_head, path_length=2, backend=("mosaic_gpu", "reference"))
        with gpu_interpreter():
            out = jax.block_until_ready(jax.jit(call)(*case.args))
        assert out.fused
        np.testing.assert_array_equal(out.tokens, verify.oracle(case)[0])

    @pytest.mark.slow
    @pytest.mark.parametrize(("V", "D"), [(151_936, 2560), (151_936, 4096), (49_152, 576)])
    def test_compiles_without_spills_or_copies_of_the_weight(self, V, D):
        for rows, nodes, temperature, top_k in VERIFIES:
            args: tuple = verify.shapes(V, D, rows, nodes, jnp.bfloat16, temperature)
            call = functools.partial(verify.call_kernel, kernel=verify_on_gpu.verify_head, top_k=top_k)
            drawn = "drawn" if temperature else "argmax"
            title = f"verify_head V={V} D={D} {rows} rows of {nodes} nodes, {drawn}, top {top_k}"
            for compiled in compile_and_check(title, call, args, instructions=("wgmma.mma_async",)):
                assert not copies_of(compiled.as_text(), args[0]), title
                assert compiled.memory_analysis().temp_size_in_bytes < 256 << 20, title

    def test_refusals(self):
        def refused(match, case, **options):
            with pytest.raises(NotImplementedError, match=match):
                verify_head(*case.args, path_length=2, backend="mosaic_gpu", **options)

        narrow: Any = {"B": 1, "N": 2, "dtype": jnp.bfloat16}
        refused("bfloat16: got a weight in float32", verify.make(B=1, N=2, D=64))
        refused("multiple of 64 and at most 16384: got 72", verify.make(D=72, **narrow))
        refused("at most 16 most likely ids: got 17", verify.make(D=64, **narrow), top_k=17)
        many = verify.make(D=64, B=9, N=57, dtype=jnp.bfloat16)
        refused("at most 512 nodes of all rows: got 513", many, top_k=1)
        rows = [verify.Sampling(temperature=0.7, top_k=20, top_p=0.8)]
        refused("uses top-k, top-p", dataclasses.replace(verify.make(D=64, **narrow), rows=rows))


# Rows, nodes of each, temperature and top k; no two have the same kernel.
VERIFIES = (
    (1, 1, 0.0, 0),
    (8, 1, 0.7, 0),
    (1, 8, 0.7, 8),
    (1, 40, 0.0, 16),
    (1, 40, 0.7, 0),
    (8, 8, 0.0, 0),
    (8, 8, 0.7, 8),
    (8, 40, 0.0, 8),
    (8, 40, 0.7, 0),
)


def test_sizes_of_verified_blocks():
    # A node, a tree, eight rows of trees with and without top ids, 64 rows of 64 nodes; SmolLM2's width and others.
    assert verify_on_gpu.block_sizes(1, 2560, 0, False) == (8, 1, 132, 128)
    assert verify_on_gpu.block_sizes(40, 4096, 16, True) == (40, 1, 132, 128)
    assert verify_on_gpu.block_sizes(64, 4096, 16, False) == (64, 1, 132, 128)
    assert verify_on_gpu.block_sizes(64, 4096, 16, True) == (32, 2, 132, 128)
    assert verify_on_gpu.block_sizes(320, 2560, 0, False) == (64, 5, 26, 128)
    assert verify_on_gpu.block_sizes(320, 2560, 0, True) == (40, 8, 16, 128)
    assert verify_on_gpu.block_sizes(320, 2560, 8, False) == (64, 5, 132, 128)
    assert verify_on_gpu.block_sizes(4096, 2560, 0, False) == (64, 64, 2, 128)
    assert verify_on_gpu.block_sizes(4096, 2560, 0, True) == (40, 103, 1, 128)
    assert verify_on_gpu.block_sizes(65, 576, 0, False) == (40, 2, 66, 192)
    assert verify_on_gpu.block_sizes(9, 320, 0, True) == (16, 1, 132, 64)
