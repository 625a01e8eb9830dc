"""Tree attention: every backend against float64 loops in numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from jdlite.errors import ConfigError
from jdlite.models.layers import cached_attention, swept_attention
from pallas_kernels.tree_attention import mosaic_tpu
from pallas_kernels.tree_attention.api import tree_attention
from tests.pallas_kernels.harness import TOPOLOGIES, compile_for_tpu, copies_of, lowers_for_tpu, tpu_interpreter


def tree_mask(rng, B, N):
    """Ancestors-or-self of random trees whose parents come first."""
    mask = np.zeros((B, N, N), bool)
    for b in range(B):
        for i in range(N):
            if i:
                mask[b, i] = mask[b, rng.integers(0, i)]
            mask[b, i, i] = True
    return mask


def make(lengths, S=300, N=5, G=2, repeats=2, h=64, L=2, dtype=jnp.float32, seed=0, poison=True):
    """Random arguments; slots past a row's length hold NaN."""
    rng, B = np.random.default_rng(seed), len(lengths)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    caches = [normal(L, B, G, S, h) for _ in range(2)]
    if poison:
        for b, length in enumerate(lengths):
            for cache in caches:
                cache[:, b, :, length:] = np.nan
    floats = (normal(B, N, G * repeats, h), normal(B, N, G, h), normal(B, N, G, h), *caches)
    mask = jnp.asarray(tree_mask(rng, B, N))
    return (*(jnp.asarray(x, dtype) for x in floats), 1, jnp.asarray(lengths, jnp.int32), mask)


def oracle(q, k_new, v_new, k_cache, v_cache, layer, lengths, mask):
    """Softmax over the visible keys alone, in float64, one node and head at a time."""
    q, k_new, v_new, k_cache, v_cache = (np.asarray(x, np.float64) for x in (q, k_new, v_new, k_cache, v_cache))
    B, N, H, h = q.shape
    G = k_new.shape[2]
    out = np.zeros(q.shape)
    for b in range(B):
        used = int(lengths[b])
        for i in range(N):
            there = np.flatnonzero(mask[b, i])
            for head in range(H):
                g = head // (H // G)
                keys = np.concatenate([k_cache[layer, b, g, :used], k_new[b, there, g]])
                values = np.concatenate([v_cache[layer, b, g, :used], v_new[b, there, g]])
                scores = keys @ q[b, i, head] / np.sqrt(h)
                weights = np.exp(scores - scores.max())
                out[b, i, head] = weights @ values / weights.sum()
    return out


class AttentionCases:
    """What every backend must do; a subclass says how to run it here."""

    def run(self, *args):
        raise NotImplementedError

    def test_rows_of_all_lengths(self):
        args = make([0, 1, 128, 129, 300])
        np.testing.assert_allclose(self.run(*args), oracle(*args), atol=3e-6)

    def test_one_node_and_one_head_per_key_head(self):
        args = make([17, 250], N=1, repeats=1, G=3)
        np.testing.assert_allclose(self.run(*args), oracle(*args), atol=3e-6)

    def test_large_scores_do_not_overflow(self):
        q, *rest = make([140], N=3)
        # Scores of some thousands: a softmax without its maximum would be infinite.
        args = (q * 1000, *rest)
        out = np.asarray(self.run(*args))
        assert np.isfinite(out).all()
        np.testing.assert_allclose(out, oracle(*args), atol=5e-3)

    def test_bfloat16(self):
        args = make([0, 200], dtype=jnp.bfloat16)
        out = self.run(*args)
        assert out.dtype == jnp.bfloat16
        # Weights and result are rounded to 8 bits of mantissa.
        np.testing.assert_allclose(np.asarray(out, np.float64), oracle(*args), atol=0.02)

    def test_cache_in_another_dtype(self):
        args = list(make([100], N=2))
        args[3], args[4] = args[3].astype(jnp.bfloat16), args[4].astype(jnp.bfloat16)
        np.testing.assert_allclose(self.run(*args), oracle(*args), atol=3e-6)


class TestReference(AttentionCases):
    def run(self, *args):
        return jax.jit(lambda *args: tree_attention(*args, backend="reference"))(*args)

    def test_is_what_the_decoder_computes(self):
        args = make([0, 40, 300])
        np.testing.assert_allclose(cached_attention(*args), self.run(*args), atol=3e-6)


class TestSwept(AttentionCases):
    """What the decoder runs where there is no kernel."""

    def run(self, *args):
        return jax.jit(swept_attention)(*args)

    @pytest.mark.parametrize("rows", [4, 9, 33])
    def test_many_rows_are_swept_in_smaller_blocks(self, rows):
        # Lengths within blocks, at their ends, and a capacity that is no multiple of one.
        args = make([(64 * b + b % 3) % 301 for b in range(rows)], N=2)
        np.testing.assert_allclose(self.run(*args), oracle(*args), atol=3e-6)


class TestMosaicTpu(AttentionCases):
    def run(self, *args):
        with tpu_interpreter():
            call = jax.jit(lambda *args: mosaic_tpu.tree_attention(*args, block=128))
            return jax.block_until_ready(call(*args))

    def test_through_the_api_inside_jit_with_a_traced_layer(self):
        args = make([5, 9], S=16, N=2)
        with tpu_interpreter():
            call = jax.jit(lambda *args: tree_attention(*args, backend=("mosaic_tpu", "reference")))
            out = jax.block_until_ready(call(*args))
        np.testing.assert_allclose(out, oracle(*args), atol=3e-6)

    @settings(max_examples=3, phases=[Phase.explicit, Phase.generate])
    @given(
        lengths=st.lists(st.integers(0, 280), min_size=1, max_size=4),
        N=st.integers(1, 20),
        G=st.integers(1, 4),
        repeats=st.integers(1, 3),
        seed=st.integers(0, 100),
    )
    def test_random_shapes(self, lengths, N, G, repeats, seed):
        args = make(lengths, 280, N, G, repeats, seed=seed)
        np.testing.assert_allclose(self.run(*args), oracle(*args), atol=5e-6)

    def test_lowers_at_real_shapes(self):
        for shape in REAL[:2]:
            assert "tpu_custom_call" in lowers_for_tpu(mosaic_tpu.tree_attention, *shapes(*shape))

    @pytest.mark.slow
    @pytest.mark.parametrize("topology", TOPOLOGIES)
    def test_compiles_without_copying_the_cache(self, topology):
        for shape in REAL:
            args = shapes(*shape)
            compiled = compile_for_tpu(mosaic_tpu.tree_attention, topology, *args)
            assert not copies_of(compiled.as_text(), args[3:5]), shape

    def test_refusals(self):
        with pytest.raises(NotImplementedError, match="at most 64 nodes: got 65"):
            tree_attention(*make([4], S=8, N=65), backend="mosaic_tpu")
        with pytest.raises(NotImplementedError, match="multiple of 64: got 48"):
            tree_attention(*make([4], S=8, h=48), backend="mosaic_tpu")
        with pytest.raises(NotImplementedError, match="got queries in float16"):
            tree_attention(*make([4], S=8, dtype=jnp.float16), backend="mosaic_tpu")


# L, B, H, G, S, h, N and dtype: Qwen3-4B/8B, then at 128k, Qwen3-32B in a batch, Qwen3-0.6B.
REAL = (
    (36, 1, 32, 8, 4096, 128, 8, jnp.bfloat16),
    (2, 1, 32, 8, 131_072, 128, 64, jnp.bfloat16),
    (2, 8, 64, 8, 4096, 128, 64, jnp.bfloat16),
    (2, 2, 16, 8, 1000, 128, 1, jnp.float32),
)


def shapes(L, B, H, G, S, h, N, dtype):
    """Arguments of the kernel as shapes."""
    of = jax.ShapeDtypeStruct
    cache, new = of((L, B, G, S, h), dtype), of((B, N, G, h), dtype)
    layer, lengths = of((), jnp.int32), of((B,), jnp.int32)
    return (of((B, N, H, h), dtype), new, new, cache, cache, layer, lengths, of((B, N, N), bool))


def test_tiles_fit_the_memory_of_a_core():
    for _, B, H, G, S, h, N, dtype in REAL:
        queries = H // G * (-(-N // 16) * 16)
        heads, slots = mosaic_tpu.tile_sizes(B, G, queries, S, h, jnp.dtype(dtype).itemsize)
        assert G % heads == 0
        assert slots % 128 == 0
        tiles = 4 * heads * slots * h * jnp.dtype(dtype).itemsize
        sums = heads * queries * (h + 256) * 4
        ends = 4 * heads * queries * h * jnp.dtype(dtype).itemsize
        assert tiles + sums + ends + 2 * queries * slots * 4 < 14 << 20


def test_bad_input_is_one_sentence():
    args = make([4], S=8)
    with pytest.raises(ConfigError, match=r"mask is \(1, 5, 4\) and not \(1, 5, 5\)"):
        tree_attention(*args[:7], args[7][:, :, :4])
    with pytest.raises(ConfigError, match="multiple of key/value heads: got 3 and 2"):
        tree_attention(args[0][:, :, :3], *args[1:])
