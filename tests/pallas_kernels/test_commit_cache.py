"""Committing to the cache: every backend against numpy assignments, slot by slot."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from jdlite.errors import ConfigError
from pallas_kernels.commit_cache import mosaic_tpu
from pallas_kernels.commit_cache.api import commit_cache
from tests.pallas_kernels.harness import TOPOLOGIES, compile_for_tpu, copies_of, lowers_for_tpu, tpu_interpreter


def make(lengths, count, S=40, P=4, N=6, G=2, h=8, L=2, dtype=jnp.float32, seed=0):
    """Random arguments; new nodes that are not kept hold NaN."""
    rng, B = np.random.default_rng(seed), len(lengths)
    path = np.stack([np.sort(rng.permutation(N)[:P]) for _ in range(B)])
    caches = [rng.normal(size=(L, B, G, S, h)) for _ in range(2)]
    new = [np.full((L, B, G, N, h), np.nan) for _ in range(2)]
    for b in range(B):
        for x in new:
            x[:, b, :, path[b, : count[b]]] = rng.normal(size=(count[b], L, G, h))
    arrays = (jnp.asarray(x, dtype) for x in (*caches, *new))
    return (*arrays, *(jnp.asarray(x, jnp.int32) for x in (path, lengths, count)))


def oracle(k_cache, v_cache, k_new, v_new, path, lengths, count):
    caches = [np.array(k_cache), np.array(v_cache)]
    for cache, new in zip(caches, (np.asarray(k_new), np.asarray(v_new)), strict=True):
        for b in range(len(lengths)):
            for p in range(int(count[b])):
                cache[:, b, :, int(lengths[b]) + p] = new[:, b, :, int(path[b, p])].astype(cache.dtype)
    return caches


class CommitCases:
    """What every backend must do; a subclass says how to run it here."""

    def run(self, *args):
        raise NotImplementedError

    def check(self, *args):
        for cache, expected in zip(self.run(*args), oracle(*args), strict=True):
            assert cache.dtype == expected.dtype
            np.testing.assert_array_equal(np.asarray(cache), expected)

    def test_rows_at_tile_edges_empty_and_full(self):
        self.check(*make([0, 5, 7, 8, 36, 40], [4, 4, 1, 0, 4, 0]))

    def test_bfloat16(self):
        self.check(*make([0, 13, 28], [4, 4, 3], S=32, dtype=jnp.bfloat16))

    def test_path_longer_than_a_tile(self):
        self.check(*make([3, 0], [20, 17], S=64, P=20, N=24))

    def test_new_rows_are_rounded_to_the_cache(self):
        args = list(make([3], [2], S=48))
        args[0], args[1] = args[0].astype(jnp.bfloat16), args[1].astype(jnp.bfloat16)
        self.check(*args)


class TestReference(CommitCases):
    def run(self, *args):
        return jax.jit(lambda *args: commit_cache(*args, backend="reference"))(*args)


class TestMosaicTpu(CommitCases):
    def run(self, *args):
        with tpu_interpreter():
            call = jax.jit(lambda *args: commit_cache(*args, backend="mosaic_tpu"))
            return jax.block_until_ready(call(*args))

    @settings(max_examples=3, phases=[Phase.explicit, Phase.generate])
    @given(
        rows=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 7)), min_size=1, max_size=4), seed=st.integers(0, 9)
    )
    def test_random_rows(self, rows, seed):
        lengths, count = zip(*rows, strict=True)
        self.check(*make(lengths, count, S=40, P=7, N=9, seed=seed))

    def test_lowers_at_real_shapes(self):
        text = lowers_for_tpu(mosaic_tpu.commit_cache, *shapes(36, 1, 8, 4096, 128, 40, 9))
        assert "tpu_custom_call" in text

    @pytest.mark.slow
    @pytest.mark.parametrize("topology", TOPOLOGIES)
    def test_compiles_in_place(self, topology):
        for shape in ((36, 1, 8, 4096, 128, 40, 31), (36, 1, 8, 4096, 128, 8, 8), (28, 8, 8, 2048, 128, 8, 8)):
            args = shapes(*shape)
            compiled = compile_for_tpu(mosaic_tpu.commit_cache, topology, *args, donate_argnums=(0, 1))
            assert not copies_of(compiled.as_text(), args[:2]), shape
            assert compiled.memory_analysis().alias_size_in_bytes >= args[0].size * 4

    def test_refusals(self):
        with pytest.raises(NotImplementedError, match="got the cache in float16"):
            commit_cache(*make([0], [1], dtype=jnp.float16), backend="mosaic_tpu")
        with pytest.raises(NotImplementedError, match="positive multiple of 8: got 20"):
            commit_cache(*make([0], [1], S=20), backend="mosaic_tpu")


def shapes(L, B, G, S, h, N, P):
    """Arguments of the kernel as shapes, in bfloat16."""
    of = jax.ShapeDtypeStruct
    cache, new = of((L, B, G, S, h), jnp.bfloat16), of((L, B, G, N, h), jnp.bfloat16)
    return cache, cache, new, new, of((B, P), jnp.int32), of((B,), jnp.int32), of((B,), jnp.int32)


def test_bad_input_is_one_sentence():
    args = make([0], [1])
    with pytest.raises(ConfigError, match=r"count is \(2,\) and not \(1,\)"):
        commit_cache(*args[:6], jnp.zeros(2, jnp.int32))
