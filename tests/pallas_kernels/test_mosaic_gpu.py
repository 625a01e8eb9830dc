"""The Hopper kernels: each operation's cases in the Mosaic GPU interpreter, and compilation by ptxas."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.commit_cache.api import commit_cache
from pallas_kernels.commit_cache.mosaic_gpu import commit_cache as commit_on_gpu
from tests.pallas_kernels import test_commit_cache as commit
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
            args = commit.shapes(*shape)
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

        args = commit.shapes(36, 1, 8, 4096, 128, 8, 8)
        compiled, _ = compile_for_gpu(loop, "h100", *args, donate_argnums=(0, 1))
        assert not copies_of(compiled.as_text(), args[:2])
        assert compiled.memory_analysis().temp_size_in_bytes < 1 << 20

    def test_refusals(self):
        with pytest.raises(NotImplementedError, match="got the cache in float16"):
            commit_cache(*commit.make([0], [1], dtype=jnp.float16), backend="mosaic_gpu")
        with pytest.raises(NotImplementedError, match="units of 16 bytes and at most 256: got 6"):
            commit_cache(*commit.make([0], [1], h=6), backend="mosaic_gpu")


def test_old_jax_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    with pytest.raises(NotImplementedError, match=r"mosaic_gpu: The Hopper kernels need JAX 0.12"):
        commit_cache(*commit.make([0], [1]), backend="mosaic_gpu")
