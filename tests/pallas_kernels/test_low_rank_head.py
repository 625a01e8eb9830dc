"""The low-rank head: every backend against float64 loops in numpy."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from jdlite.decoding.sampling import DRAFT, gumbel, noise_key
from jdlite.errors import ConfigError
from jdlite.models.dlite_config import DLiteConfig
from jdlite.models.dlite_head import SequentialHead
from pallas_kernels.low_rank_head import mosaic_tpu
from pallas_kernels.low_rank_head.api import HeadWeights, PackedHead, low_rank_head, prepare, quantise
from tests.pallas_kernels.harness import (
    TOPOLOGIES,
    compile_for_tpu,
    copies_of,
    lowers_for_tpu,
    tpu_interpreter,
)


def make(V=300, R=24, D=16, B=3, K=4, dtype=jnp.float32, seed=0):
    """Random weights and inputs; `(weights, hidden, anchor, state)`."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape, scale=0.4: jnp.asarray(rng.normal(size=shape) * scale, dtype)  # noqa: E731
    weights = HeadWeights(
        normal(V, R, scale=1), normal(2 * R, 2 * R), normal(2 * R), normal(R, R + D), normal(R), normal(V, R, scale=1)
    )
    state = jnp.asarray(rng.normal(size=(B, R)), jnp.float32)
    return weights, normal(B, K, D, scale=1), jnp.asarray(rng.integers(0, V, B), jnp.int32), state


def draw_keys(B, K, seed=0):
    """Keys as DLite's drafter makes them, rows at different positions."""
    rows = jax.random.split(jax.random.key(seed, impl="threefry2x32"), B)
    positions = 5 + 3 * jnp.arange(B)[:, None] + jnp.arange(K)
    return jax.vmap(jax.vmap(lambda key, at: noise_key(key, at, DRAFT), (None, 0)))(rows, positions)


def oracle(weights, hidden, anchor, state, keys=None, temperature=None):
    """Tokens, log q and u by float64 loops, row by row and step by step; also the margin of each choice."""
    wide = lambda x: np.asarray(x, np.float64)  # noqa: E731
    E, W_s, b_s, W_u, b_u, W_o = (wide(getattr(weights, f.name)) for f in dataclasses.fields(weights)[:6])
    if weights.output_scale is not None:
        W_o = W_o * wide(weights.output_scale)[:, None]
    B, K, _ = hidden.shape
    R = E.shape[1]
    tokens, log_q, us, margins = np.zeros((B, K), int), np.zeros((B, K)), np.zeros((B, K, R)), np.zeros((B, K))
    for b in range(B):
        s, y = wide(state[b]), int(anchor[b])
        T = 0.0 if temperature is None else float(temperature[b])
        for k in range(K):
            z = W_s @ np.concatenate([s, E[y]]) + b_s
            gate = 1 / (1 + np.exp(-z[:R]))
            s = gate * s + (1 - gate) * np.tanh(z[R:])
            u = W_u @ np.concatenate([s, wide(hidden[b, k])]) + b_u
            scaled = W_o @ u / (T or 1.0)
            noise = wide(gumbel(keys[b, k], len(scaled))) if keys is not None and T else 0.0
            score = scaled + noise
            y = int(np.argmax(score))
            tokens[b, k], us[b, k], margins[b, k] = y, u, np.diff(np.sort(score)[-2:])[0]
            log_q[b, k] = scaled[y] - np.log(np.sum(np.exp(scaled - scaled.max()))) - scaled.max()
    return tokens, log_q, us, margins


class HeadCases:
    """What every backend must do; a subclass names one, and says how to run it here."""

    def run(self, *args, **options):
        raise NotImplementedError

    @pytest.mark.parametrize("sampled", [False, True])
    def test_equals_float64_loops(self, sampled):
        args = make()
        options = {"keys": draw_keys(3, 4), "temperature": jnp.array([0.0, 0.8, 1.7])} if sampled else {}
        tokens, log_q, u, margins = oracle(*args, **options)
        assert margins.min() > 1e-4
        out = self.run(*args, **options)
        np.testing.assert_array_equal(out.tokens, tokens)
        np.testing.assert_allclose(out.log_q, log_q, atol=2e-5)
        np.testing.assert_allclose(out.u, u, atol=2e-5)
        assert out.tokens.dtype == jnp.int32
        assert out.log_q.dtype == jnp.float32

    def test_keys_without_temperature_draw_at_one(self):
        args, keys = make(B=2, K=2), draw_keys(2, 2)
        tokens, log_q, _, _ = oracle(*args, keys=keys, temperature=np.ones(2))
        out = self.run(*args, keys=keys)
        np.testing.assert_array_equal(out.tokens, tokens)
        np.testing.assert_allclose(out.log_q, log_q, atol=2e-5)

    def test_lowest_id_wins_a_tie_across_tiles(self):
        weights, *rest = make(V=300, B=2, K=2)
        # Rows 7, 130 and 290 of W_o are equal and far along u, so that they tie for the maximum in three tiles.
        _, _, u, _ = oracle(weights, *rest)
        best = jnp.asarray(100 * np.sign(u[0, 0]), jnp.float32)
        weights = dataclasses.replace(weights, output=weights.output.at[jnp.array([7, 130, 290])].set(best))
        out = self.run(weights, *rest)
        assert out.tokens[0, 0] == 7
        np.testing.assert_allclose(out.log_q[0, 0], -np.log(3), atol=1e-4)

    def test_ids_of_the_tail_are_never_chosen(self):
        weights, *rest = make(V=131, B=1, K=2)
        # All logits are very negative: a padded column, whose logit is 0, would win.
        _, _, u, _ = oracle(weights, *rest)
        weights = dataclasses.replace(weights, output=-jnp.abs(weights.output) * jnp.sign(u[0, 0]).astype(jnp.float32))
        tokens, log_q, _, _ = oracle(weights, *rest)
        out = self.run(weights, *rest)
        np.testing.assert_array_equal(out.tokens, tokens)
        np.testing.assert_allclose(out.log_q, log_q, atol=2e-5)

    def test_nan_and_infinity_stay_in_their_row_and_show(self):
        weights, hidden, anchor, state = make(V=140, B=4, K=2)
        whole = self.run(weights, hidden, anchor, state)
        hidden = hidden.at[1, 0].set(jnp.nan).at[2, 1, 0].set(jnp.inf)
        out = self.run(weights, hidden, anchor, state)
        for row in (0, 3):
            np.testing.assert_array_equal(out.tokens[row], whole.tokens[row])
            np.testing.assert_array_equal(out.log_q[row], whole.log_q[row])
        assert np.isnan(out.log_q[1, 0])
        assert not np.isfinite(out.log_q[2, 1])
        assert ((out.tokens >= 0) & (out.tokens < 140)).all()

    def test_anchors_outside_count_as_the_nearest_inside(self):
        weights, hidden, _, state = make(V=130, B=2, K=1)
        out = self.run(weights, hidden, jnp.array([-5, 1000]), state)
        inside = self.run(weights, hidden, jnp.array([0, 129]), state)
        np.testing.assert_array_equal(out.u, inside.u)

    @pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
    def test_eight_bits_per_row(self, dtype):
        weights, *rest = make(B=2, K=2)
        output, scale = quantise(weights.output, dtype)
        weights = dataclasses.replace(weights, output=output, output_scale=scale)
        tokens, log_q, _, margins = oracle(weights, *rest)
        assert margins.min() > 1e-4
        out = self.run(weights, *rest)
        np.testing.assert_array_equal(out.tokens, tokens)
        np.testing.assert_allclose(out.log_q, log_q, atol=2e-5)

    def test_bfloat16_stays_close_to_float64(self):
        weights, hidden, anchor, state = make(B=2, K=1, dtype=jnp.bfloat16)
        tokens, log_q, u, margins = oracle(weights, hidden, anchor, state)
        assert margins.min() > 0.3
        out = self.run(weights, hidden, anchor, state)
        assert out.u.dtype == jnp.bfloat16
        np.testing.assert_array_equal(out.tokens, tokens)
        # State and u are each rounded to 8 bits of mantissa before a product of 24 terms.
        np.testing.assert_allclose(out.u.astype(jnp.float32), u, atol=0.03)
        np.testing.assert_allclose(out.log_q, log_q, atol=0.2)


class TestReference(HeadCases):
    def run(self, weights, *args, **options):
        return jax.jit(lambda *args: low_rank_head(*args, **options, backend="reference"))(weights, *args)

    def test_is_what_dlite_drafts(self):
        graph, params = nnx.split(SequentialHead(DLiteConfig.tiny(), jnp.float32, nnx.Rngs(0)))
        # Initial weights are small and biases zero; what they become is far from ties.
        head = nnx.merge(
            graph, jax.tree.map(lambda x: 20 * x + 0.1 * jnp.sin(jnp.arange(x.size)).reshape(x.shape), params)
        )
        parts = (head.state_proj.weight, head.state_proj.bias, head.mix.weight, head.mix.bias, head.output.weight)
        weights = HeadWeights(head.prev_embedding[...], *(part[...] for part in parts))
        rng = np.random.default_rng(0)
        hidden = jnp.asarray(rng.normal(size=(3, 4, weights.mix_weight.shape[1] - head.rank)), jnp.float32)
        tokens = jnp.array([[1], [5], [7]])
        choose = lambda logits, step: (jnp.argmax(logits, -1), jax.nn.log_softmax(logits).max(-1))  # noqa: E731
        drafts, log_q = head.unroll(hidden, tokens[:, 0], head.start(tokens), choose)
        out = self.run(weights, hidden, tokens[:, 0], head.start(tokens))
        np.testing.assert_array_equal(out.tokens, drafts)
        np.testing.assert_allclose(out.log_q, log_q, atol=1e-5)


class TestMosaicTpu(HeadCases):
    block = 128

    def run(self, weights, *args, keys=None, temperature=None):
        if keys is not None and temperature is None:
            temperature = jnp.ones(keys.shape[0])
        with tpu_interpreter():
            call = jax.jit(lambda *args: mosaic_tpu.low_rank_head(*args, block=self.block))
            return jax.block_until_ready(call(weights, *args, keys, temperature))

    def test_prepared_weights_through_the_api(self):
        weights, *rest = make(B=2, K=2)
        packed = prepare(weights, "mosaic_tpu")
        assert isinstance(packed, PackedHead)
        with tpu_interpreter():
            out = jax.block_until_ready(low_rank_head(packed, *rest, backend="mosaic_tpu"))
        np.testing.assert_array_equal(out.tokens, oracle(weights, *rest)[0])
        with pytest.raises(NotImplementedError, match="packed for a TPU"):
            low_rank_head(packed, *rest, backend="reference")

    @settings(max_examples=3, phases=[Phase.explicit, Phase.generate])
    @given(
        V=st.integers(2, 400),
        R=st.sampled_from([8, 40, 136]),
        D=st.integers(1, 40),
        B=st.integers(1, 10),
        K=st.integers(1, 3),
        sampled=st.booleans(),
        seed=st.integers(0, 100),
    )
    def test_random_shapes(self, V, R, D, B, K, sampled, seed):
        args = make(V, R, D, B, K, seed=seed)
        options = {"keys": draw_keys(B, K, seed), "temperature": jnp.linspace(0, 2, B)} if sampled else {}
        tokens, log_q, _, margins = oracle(*args, **options)
        out = self.run(*args, **options)
        for b in range(B):
            # After a near-tie the two may go on from different tokens.
            close = np.flatnonzero(margins[b] < 1e-3)
            steps = close[0] if len(close) else K
            np.testing.assert_array_equal(out.tokens[b, :steps], tokens[b, :steps])
            np.testing.assert_allclose(out.log_q[b, :steps], log_q[b, :steps], atol=1e-3)

    @pytest.mark.parametrize("rows", [1, 64])
    @pytest.mark.parametrize("sampled", [False, True])
    def test_lowers_at_real_shapes(self, rows, sampled):
        text = lowers_for_tpu(mosaic_tpu.low_rank_head, *shapes(151_936, 320, 2560, rows, jnp.bfloat16, sampled))
        assert "tpu_custom_call" in text

    @pytest.mark.slow
    @pytest.mark.parametrize("topology", TOPOLOGIES)
    @pytest.mark.parametrize(
        ("V", "D", "rows", "dtype", "output", "sampled"),
        [
            (151_936, 1024, 1, jnp.bfloat16, None, False),
            (151_936, 2560, 8, jnp.bfloat16, None, True),
            (151_936, 4096, 64, jnp.bfloat16, None, True),
            (49_152, 576, 1, jnp.float32, None, False),
            (151_936, 2560, 8, jnp.bfloat16, jnp.int8, True),
            (151_936, 2560, 8, jnp.bfloat16, jnp.float8_e4m3fn, False),
        ],
    )
    def test_compiles_without_copying_a_weight(self, topology, V, D, rows, dtype, output, sampled):
        args = shapes(V, 320, D, rows, dtype, sampled, output)
        compiled = compile_for_tpu(mosaic_tpu.low_rank_head, topology, *args)
        assert not copies_of(compiled.as_text(), args[0])
        assert compiled.memory_analysis().temp_size_in_bytes < 4 << 20

    def test_refusals(self):
        weights, *rest = make(R=20)
        with pytest.raises(NotImplementedError, match="rank must be a multiple of 8: got 20"):
            prepare(weights, "mosaic_tpu")
        with pytest.raises(NotImplementedError, match="must be float32 or bfloat16: got float16"):
            prepare(make(dtype=jnp.float16)[0], "mosaic_tpu")
        weights, *rest = make(B=65, K=1)
        with pytest.raises(NotImplementedError, match=r"low_rank_head cannot run here.*at most 64 rows: got 65"):
            low_rank_head(weights, *rest, backend="mosaic_tpu")


def shapes(V, R, D, B, dtype, sampled, output=None, K=7):
    """Arguments of the kernel as shapes, with packed weights."""
    of = jax.ShapeDtypeStruct
    weights = HeadWeights(
        of((V, R), dtype),
        of((2 * R, 2 * R), dtype),
        of((2 * R,), dtype),
        of((R, R + D), dtype),
        of((R,), dtype),
        of((V, R), output or dtype),
        None if output is None else of((V,), jnp.float32),
    )
    args = (
        jax.eval_shape(mosaic_tpu.pack, weights),
        of((B, K, D), dtype),
        of((B,), jnp.int32),
        of((B, R), jnp.float32),
    )
    return (*args, jax.eval_shape(lambda: draw_keys(B, K)), of((B,), jnp.float32)) if sampled else args


def test_rounding_to_eight_bits_is_within_half_a_step():
    table = np.random.default_rng(0).normal(size=(20, 16)).astype(np.float32)
    table[3] = 0
    for dtype, relative in ((jnp.int8, None), (jnp.float8_e4m3fn, 2**-4)):
        values, scale = quantise(jnp.asarray(table), dtype)
        error = np.abs(np.asarray(values, np.float64) * np.asarray(scale, np.float64)[:, None] - table)
        # int8 has equal steps; float8 has three bits of mantissa, and equal steps of 2**-9 below 2**-6.
        step = np.asarray(scale)[:, None]
        bound = step / 2 if relative is None else np.maximum(np.abs(table) * relative, step * 2**-10)
        assert (error <= bound * (1 + 1e-5)).all()
        assert scale[3] == 1
    with pytest.raises(ConfigError, match="int8 or float8_e4m3fn: got int16"):
        quantise(jnp.asarray(table), jnp.int16)


def test_bad_input_is_one_sentence():
    weights, hidden, anchor, state = make()
    with pytest.raises(ConfigError, match=r"anchor is \(2,\) and not \(3,\)"):
        low_rank_head(weights, hidden, anchor[:2], state)
    with pytest.raises(ConfigError, match=r"mix_bias is \(23,\) and not \(24,\)"):
        low_rank_head(dataclasses.replace(weights, mix_bias=weights.mix_bias[1:]), hidden, anchor, state)
    with pytest.raises(ConfigError, match="no keys to draw with"):
        low_rank_head(weights, hidden, anchor, state, temperature=jnp.ones(3))
    with pytest.raises(ConfigError, match="eight bits goes with scales"):
        prepare(dataclasses.replace(weights, output=weights.output.astype(jnp.int8)))
    keys = jax.random.split(jax.random.key(0, impl="rbg"), (3, 4))
    with pytest.raises(NotImplementedError, match="rbg keys"):
        low_rank_head(weights, hidden, anchor, state, keys=keys, backend=("mosaic_tpu", "reference"))
