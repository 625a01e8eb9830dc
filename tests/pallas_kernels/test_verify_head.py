"""The head of a verify forward: every backend against float64 loops in numpy and plain Python."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from jdlite.decoding.penalties import History, node_history
from jdlite.decoding.sampling import GREEDY, Sampling, gumbel, noise_key, stack
from jdlite.decoding.tree import Tree
from jdlite.errors import ConfigError
from pallas_kernels.verify_head import mosaic_tpu, reference
from pallas_kernels.verify_head.api import Verified, verify_head
from tests.pallas_kernels.harness import (
    TOPOLOGIES,
    compile_for_tpu,
    copies_of,
    lowers_for_tpu,
    tpu_devices,
    tpu_interpreter,
)

PATH = 5


@dataclasses.dataclass(frozen=True)
class Case:
    """Inputs of one call; `parents` and `valid` are the tree's."""

    weight: jax.Array
    hidden: jax.Array
    parents: np.ndarray
    valid: np.ndarray
    drafts: np.ndarray
    positions: np.ndarray
    rows: list[Sampling]
    seed: int = 0

    @property
    def sampling(self):
        return stack(self.rows, len(self.rows), self.weight.shape[0], np.array([[1]] * len(self.rows)))

    @property
    def keys(self):
        return jax.random.split(jax.random.key(self.seed, impl="threefry2x32"), len(self.rows))

    @property
    def args(self):
        tree = Tree.from_parents(jnp.asarray(self.parents), jnp.asarray(self.valid))
        drafts, positions = jnp.asarray(self.drafts), jnp.asarray(self.positions)
        return self.weight, self.hidden, tree, drafts, positions, self.sampling, self.keys


def make(V=300, D=24, B=3, N=6, temperature: Any = 0.0, dtype: Any = jnp.float32, whole=False, seed=0) -> Case:
    """A random case whose drafts follow the greedy tokens in most nodes; with `whole` all numbers are small integers,
    so that products are exact, logits tie often, and no order of summing changes a bit."""
    rng = np.random.default_rng(seed)
    number = (lambda *shape: rng.integers(-2, 3, shape)) if whole else lambda *shape: rng.normal(size=shape)
    weight, hidden = jnp.asarray(number(V, D), dtype), jnp.asarray(number(B, N, D), dtype)
    parents = np.array([[0] + [rng.integers(max(0, i - 2), i) for i in range(1, N)]] * B, np.int32)
    greedy = np.argmax(np.asarray(hidden, np.float64) @ np.asarray(weight, np.float64).T, axis=-1)
    drafts = np.take_along_axis(greedy, parents, axis=1)
    drafts = np.where(rng.random((B, N)) < 0.2, rng.integers(0, V, (B, N)), drafts).astype(np.int32)
    valid = (rng.random((B, N)) < 0.9) | (np.arange(N) == 0)
    depth = np.zeros((B, N), np.int32)
    for i in range(1, N):
        depth[:, i] = depth[np.arange(B), parents[:, i]] + 1
    temperatures = np.broadcast_to(temperature, B)
    rows = [Sampling(temperature=float(t)) for t in temperatures]
    return Case(
        weight, hidden, parents, valid, drafts, 7 + 3 * np.arange(B, dtype=np.int32)[:, None] + depth, rows, seed
    )


def oracle(case: Case, top_k=0):
    """Tokens, log-probabilities, the largest logits and their ids by float64 loops, node by node; also the margin of
    each choice and of each place in the list."""
    W, hidden = np.asarray(case.weight, np.float64), np.asarray(case.hidden, np.float64)
    B, N, _ = hidden.shape
    tokens, log_prob, margin = np.zeros((B, N), int), np.zeros((B, N)), np.zeros((B, N))
    ids, largest = np.zeros((B, N, top_k), int), np.zeros((B, N, top_k))
    for b, row in enumerate(case.rows):
        for i in range(N):
            logits = W @ hidden[b, i]
            scaled = logits / (row.temperature or 1.0)
            score = scaled
            if row.temperature:
                key = noise_key(case.keys[b], case.positions[b, i])
                score = scaled + np.asarray(gumbel(key, len(logits)), np.float64)
            tokens[b, i] = np.argmax(score)
            log_prob[b, i] = scaled[tokens[b, i]] - np.log(np.sum(np.exp(scaled - scaled.max()))) - scaled.max()
            ids[b, i] = np.argsort(-logits, kind="stable")[:top_k]
            largest[b, i] = logits[ids[b, i]]
            margin[b, i] = min(np.diff(np.sort(score)[-2:])[0], *np.diff(np.sort(logits)[-top_k - 1 :]), np.inf)
    return tokens, log_prob, ids, largest, margin


def walk_down(parents, valid, drafts, drawn) -> list[int]:
    """The longest way down through nodes that carry what was drawn at their parent, the lowest nodes on a tie."""

    def deepest(node):
        ways = [
            deepest(i)
            for i in range(1, len(parents))
            if parents[i] == node and valid[i] and drafts[i] == drawn[node]
        ]  # fmt: skip
        return [node, *max(ways, key=len, default=[])]

    return deepest(0)


def check_walk(case: Case, out: Verified):
    """That the accepted path is the longest, and what it emits are the tokens drawn along it."""
    tokens = np.asarray(out.tokens)
    for b in range(len(tokens)):
        path = walk_down(case.parents[b], case.valid[b], case.drafts[b], tokens[b])
        accepted = int(out.acceptance.accepted[b])
        assert accepted == len(path) - 1
        assert np.asarray(out.acceptance.emitted[b])[: accepted + 1].tolist() == tokens[b, path].tolist()
        # Of equal siblings one or the other may be on the path.
        nodes = np.asarray(out.acceptance.path[b])[: accepted + 1]
        assert nodes[0] == 0
        for above, node in itertools.pairwise(nodes):
            assert case.parents[b, node] == above
            assert case.valid[b, node]


class HeadCases:
    """What every backend must do; a subclass names one, and says how to run it here."""

    fused = False

    def run(self, *args, **options) -> Verified:
        raise NotImplementedError

    @pytest.mark.parametrize("temperature", [0.0, (0.0, 0.8, 1.7)])
    def test_equals_float64_loops(self, temperature):
        case = make(temperature=temperature)
        tokens, log_prob, ids, largest, margin = oracle(case, top_k=5)
        assert margin.min() > 1e-4
        out = self.run(*case.args, top_k=5, path_length=6)
        np.testing.assert_array_equal(out.tokens, tokens)
        np.testing.assert_allclose(out.log_prob, log_prob, atol=2e-5)
        np.testing.assert_array_equal(out.top_ids, ids)
        np.testing.assert_allclose(out.top_logits, largest, atol=2e-5)
        assert not out.broken.any()
        assert out.acceptance.accepted.max() > 0
        assert out.fused == self.fused
        check_walk(case, out)
        dtypes = [x.dtype for x in (out.tokens, out.log_prob, out.top_ids, out.top_logits, out.broken)]
        assert dtypes == [jnp.int32, jnp.float32, jnp.int32, jnp.float32, bool]

    def test_ties_across_tiles_go_to_the_lowest_id(self):
        case = make(V=391, D=5, B=2, N=3, whole=True)
        tokens, log_prob, ids, largest, margin = oracle(case, top_k=16)
        assert margin.min() == 0
        assert (np.diff(largest) == 0).any()
        out = self.run(*case.args, top_k=16, path_length=3)
        np.testing.assert_array_equal(out.tokens, tokens)
        np.testing.assert_array_equal(out.top_ids, ids)
        np.testing.assert_array_equal(out.top_logits, largest)
        np.testing.assert_allclose(out.log_prob, log_prob, atol=1e-5)
        check_walk(case, out)

    def test_ids_of_the_tail_are_never_chosen(self):
        # All logits are very negative: a padded id, whose logit is 0, would win.
        case = make(V=131, B=1, N=2)
        case = dataclasses.replace(case, weight=-jnp.abs(case.weight) - 1, hidden=jnp.abs(case.hidden) + 1)
        tokens, log_prob, ids, _, _ = oracle(case, top_k=4)
        out = self.run(*case.args, top_k=4, path_length=2)
        np.testing.assert_array_equal(out.tokens, tokens)
        np.testing.assert_array_equal(out.top_ids, ids)
        np.testing.assert_allclose(out.log_prob, log_prob, rtol=1e-5, atol=2e-5)

    def test_nan_and_infinity_stay_in_their_node_and_show(self):
        case = make(V=140, B=2, N=4)
        hidden = case.hidden.at[0, 1].set(jnp.nan).at[1, 2, 0].set(jnp.inf)
        # Logits of node 3 of the first row are all -inf: nothing may follow.
        hidden = hidden.at[:, :, 1].set(0).at[0, 3, 1].set(-jnp.inf)
        weight = case.weight.at[:, 1].set(1)
        out = self.run(weight, hidden, *case.args[2:], top_k=3, path_length=4)
        case = dataclasses.replace(case, weight=weight, hidden=case.hidden.at[:, :, 1].set(0))
        whole = self.run(*case.args, top_k=3, path_length=4)
        same = np.array([[1, 0, 1, 0], [1, 1, 0, 1]], bool)
        for name in ("tokens", "log_prob", "top_ids", "top_logits"):
            np.testing.assert_array_equal(getattr(out, name)[same], getattr(whole, name)[same])
        np.testing.assert_array_equal(out.broken, [[0, 1, 0, 0], [0, 0, 0, 0]])
        assert np.isnan(out.log_prob[0, 1])
        np.testing.assert_array_equal(out.top_ids[0, 1], [0, 1, 2])
        np.testing.assert_array_equal(out.top_logits[0, 1], np.full(3, np.inf))
        assert out.tokens[0, 1] == 0
        assert not np.isfinite(out.log_prob[1, 2])
        # The lowest id whose logit is +inf.
        assert out.tokens[1, 2] == np.argmax(weight[:, 0] > 0)
        assert out.tokens[0, 3] == 0
        assert not np.isfinite(out.log_prob[0, 3])
        np.testing.assert_array_equal(out.top_ids[0, 3], np.zeros(3))
        np.testing.assert_array_equal(out.top_logits[0, 3], np.full(3, -np.inf))

    def test_a_nan_in_the_weight_counts_as_infinity(self):
        case = make(V=140, B=1, N=1)
        out = self.run(case.weight.at[131, 3].set(jnp.nan), *case.args[1:], top_k=2, path_length=1)
        _, _, ids, largest, _ = oracle(case, top_k=1)
        np.testing.assert_array_equal(out.tokens, [[131]])
        np.testing.assert_array_equal(out.top_ids[0, 0], [131, ids[0, 0, 0]])
        np.testing.assert_allclose(out.top_logits[0, 0], [np.inf, largest[0, 0, 0]], rtol=1e-5)
        assert out.broken.all()
        assert np.isnan(out.log_prob).all()

    def test_without_a_valid_draft_the_bonus_token_is_emitted(self):
        case = make(V=40, B=2, N=3)
        case = dataclasses.replace(case, valid=np.zeros_like(case.valid))
        out = self.run(*case.args, path_length=PATH)
        np.testing.assert_array_equal(out.acceptance.accepted, [0, 0])
        np.testing.assert_array_equal(out.acceptance.emitted[:, 0], out.tokens[:, 0])
        assert out.acceptance.path.shape == (2, PATH)
        assert out.top_ids.shape == out.top_logits.shape == (2, 3, 0)

    def test_a_node_is_drawn_as_it_is_alone(self):
        case = make(B=2, N=4, temperature=1.3, whole=True)
        out = self.run(*case.args, path_length=4)
        weight, hidden, tree, drafts, positions, sampling, keys = case.args
        alone = self.run(
            weight, hidden[:, 3:], tree.first(1), drafts[:, 3:], positions[:, 3:], sampling, keys, path_length=1
        )
        np.testing.assert_array_equal(alone.tokens[:, 0], out.tokens[:, 3])
        np.testing.assert_array_equal(alone.acceptance.emitted, alone.tokens)

    def test_bfloat16_is_not_rounded_after_the_sum(self):
        case = make(B=2, N=2, D=130, seed=3, dtype=jnp.bfloat16)
        tokens, log_prob, ids, largest, margin = oracle(case, top_k=4)
        assert margin.min() > 1e-3
        out = self.run(*case.args, top_k=4, path_length=2)
        np.testing.assert_array_equal(out.tokens, tokens)
        np.testing.assert_array_equal(out.top_ids, ids)
        # bfloat16 has steps of 0.125 at these sizes.
        np.testing.assert_allclose(out.top_logits, largest, atol=1e-4)
        np.testing.assert_allclose(out.log_prob, log_prob, atol=1e-4)


class TestReference(HeadCases):
    def run(self, *args, path_length, top_k=0, backend: Any = "reference", **options):
        call = functools.partial(verify_head, path_length=path_length, top_k=top_k, backend=backend)
        return jax.jit(call)(*args, **options)

    def test_steps_that_no_kernel_has_are_those_of_the_decoder(self):
        rows = [
            Sampling(temperature=0.7, top_k=20, top_p=0.8, presence_penalty=0.5, banned_ids=(2, 3)),
            Sampling(repetition_penalty=2.0, min_new_tokens=3),
            Sampling(temperature=1.2, min_p=0.05),
        ]
        case = dataclasses.replace(make(), rows=rows)
        _, _, tree, drafts, *_ = case.args
        history = node_history(
            History.from_prompt(jnp.tile(jnp.arange(9), (3, 1)), jnp.full(3, 9), 300), drafts, tree.ancestors
        )
        generated = tree.depth + jnp.array([0, 1, 2])[:, None]
        options = {"path_length": 6, "history": history, "generated": generated}
        out = self.run(*case.args, **options, backend=("mosaic_tpu", "reference"))
        assert not out.fused

        scores = np.asarray(case.hidden, np.float64) @ np.asarray(case.weight, np.float64).T
        for i in range(6):
            seen = [int(drafts[1, j]) for j in range(1, 6) if tree.ancestors[1, i, j]]
            index = np.unique([*range(9), *seen])
            scores[1, i, index] *= np.where(scores[1, i, index] < 0, 2, 0.5)
            if generated[1, i] < 3:
                scores[1, i, 1] = -np.inf
        np.testing.assert_array_equal(out.tokens[1], scores[1].argmax(-1))
        assert not np.isin(out.tokens[0], (2, 3)).any()
        rank = np.argsort(np.argsort(-scores, axis=-1), axis=-1)
        assert (np.take_along_axis(rank[0], np.asarray(out.tokens[0])[:, None], axis=1) < 26).all()
        with pytest.raises(NotImplementedError, match=r"uses top-k, top-p, min-p, penalties, banned ids, a minimum of"):
            verify_head(*case.args, **options, backend="mosaic_tpu")


class TestMosaicTpu(HeadCases):
    fused = True

    def run(self, *args, path_length, top_k=0, **options):
        options = {"top_k": top_k, "path_length": path_length, "block": 128, **options}
        with tpu_interpreter():
            call = functools.partial(mosaic_tpu.verify_head, **options)
            return jax.block_until_ready(jax.jit(call)(*args))

    @pytest.mark.parametrize(("D", "row_major"), [(128, False), (72, True)])
    def test_reads_rows_of_the_weight(self, D, row_major):
        case = make(V=200, D=D, B=1, N=3, temperature=0.5, whole=True)
        out = self.run(*case.args, top_k=4, path_length=3, row_major=row_major)
        np.testing.assert_array_equal(out.tokens, oracle(case)[0])
        np.testing.assert_array_equal(out.top_ids, oracle(case, top_k=4)[2])

    def test_nodes_in_several_blocks(self, monkeypatch):
        monkeypatch.setattr(mosaic_tpu, "MAX_NODES", 8)
        case = make(V=150, B=3, N=7, temperature=(0.0, 1.0, 0.5), whole=True)
        tokens, log_prob, ids, _, _ = oracle(case, top_k=2)
        out = self.run(*case.args, top_k=2, path_length=7)
        np.testing.assert_array_equal(out.tokens, tokens)
        np.testing.assert_array_equal(out.top_ids, ids)
        np.testing.assert_allclose(out.log_prob, log_prob, atol=2e-5)

    def test_through_the_api(self):
        case = make(V=140, B=1, N=2, whole=True)
        call = jax.jit(functools.partial(verify_head, path_length=2, backend="mosaic_tpu"))
        with tpu_interpreter():
            out = jax.block_until_ready(call(*case.args))
        assert out.fused
        np.testing.assert_array_equal(out.tokens, oracle(case)[0])

    @settings(max_examples=3, phases=[Phase.explicit, Phase.generate])
    @given(
        V=st.integers(2, 400),
        D=st.sampled_from([1, 40, 128, 136]),
        B=st.integers(1, 3),
        N=st.integers(1, 9),
        k=st.integers(0, 16),
        temperature=st.sampled_from([0.0, 0.5, 2.0]),
        seed=st.integers(0, 100),
    )
    def test_random_shapes_equal_the_reference_bit_for_bit(self, V, D, B, N, k, temperature, seed):
        k = min(k, V)
        # The first row is greedy, and powers of two keep all sums but the noise exact.
        case = make(V, D, B, N, [0.0, *[temperature] * (B - 1)], whole=True, seed=seed)
        out = self.run(*case.args, top_k=k, path_length=N)
        same = TestReference().run(*case.args, top_k=k, path_length=N)
        for name in ("tokens", "top_ids", "top_logits", "broken", "acceptance"):
            jax.tree.map(np.testing.assert_array_equal, getattr(out, name), getattr(same, name))
        np.testing.assert_allclose(out.log_prob, same.log_prob, atol=1e-4)
        check_walk(case, out)

    @pytest.mark.parametrize(("rows", "nodes", "temperature"), [(1, 1, 0.0), (1, 64, 0.7), (8, 40, 0.0)])
    def test_lowers_at_real_shapes(self, rows, nodes, temperature):
        args = shapes(151_936, 2560, rows, nodes, jnp.bfloat16, temperature)
        assert "tpu_custom_call" in lowers_for_tpu(functools.partial(call_kernel, top_k=8), *args)

    @pytest.mark.slow
    @pytest.mark.parametrize("topology", TOPOLOGIES)
    @pytest.mark.parametrize(
        ("V", "D", "rows", "nodes", "dtype", "temperature", "top_k"),
        [
            (151_936, 1024, 1, 8, jnp.bfloat16, 0.0, 0),
            (151_936, 2560, 1, 40, jnp.bfloat16, 0.0, 8),
            (151_936, 2560, 8, 64, jnp.bfloat16, 0.7, 8),
            (151_936, 4096, 1, 64, jnp.bfloat16, 0.7, 16),
            (151_936, 4096, 4, 64, jnp.float32, 0.7, 8),
            (49_152, 576, 1, 40, jnp.bfloat16, 0.7, 8),
            (49_152, 576, 3, 8, jnp.float32, 0.0, 8),
        ],
    )
    def test_compiles_without_copying_the_weight(self, topology, V, D, rows, nodes, dtype, temperature, top_k):
        args = shapes(V, D, rows, nodes, dtype, temperature)
        compiled = compile_for_tpu(functools.partial(call_kernel, top_k=top_k), topology, *args)
        text, memory = compiled.as_text(), compiled.memory_analysis()
        assert text is not None
        assert memory is not None
        assert not copies_of(text, args[0])
        assert memory.temp_size_in_bytes < 16 << 20

    @pytest.mark.slow
    @pytest.mark.parametrize("topology", TOPOLOGIES)
    def test_compiles_without_copying_a_tied_weight_in_row_major_order(self, topology):
        from jax.experimental.layout import Format, Layout

        where = jax.sharding.SingleDeviceSharding(tpu_devices(topology)[0])
        weight, *rest = shapes(49_152, 576, 1, 40, jnp.bfloat16, 0.0)
        rest = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), rest)

        def embed_and_verify(weight, hidden, parents, valid, drafts, *others):
            hidden = hidden + jnp.take(weight, drafts, axis=0)
            return call_kernel(weight, hidden, parents, valid, drafts, *others, row_major=True)

        pinned = (Format(Layout(major_to_minor=(0, 1)), where), *[None] * len(rest))
        text = jax.jit(embed_and_verify, in_shardings=pinned).lower(weight, *rest).compile().as_text()
        assert text is not None
        assert not copies_of(text, weight)

    def test_refusals(self):
        case = make(B=1, N=2, dtype=jnp.float16)
        with pytest.raises(NotImplementedError, match="float32 and bfloat16: got a weight in float16"):
            verify_head(*case.args, path_length=2, backend="mosaic_tpu")
        case = make(B=1, N=2)
        with pytest.raises(NotImplementedError, match="at most 128 most likely ids: got 129"):
            verify_head(*case.args, path_length=2, top_k=129, backend="mosaic_tpu")
        with pytest.raises(NotImplementedError, match="width of at most 8192 in float32: got 8193"):
            verify_head(*make(V=2, D=8193, B=1, N=2).args, path_length=2, backend="mosaic_tpu")
        keys = jax.random.split(jax.random.key(0, impl="rbg"), 1)
        args = dataclasses.replace(case, rows=[Sampling(temperature=1.0)]).args[:-1]
        with pytest.raises(NotImplementedError, match="rbg keys"):
            verify_head(*args, keys, path_length=2, backend="mosaic_tpu")
        # The reference refuses them too.
        with pytest.raises(ConfigError, match="rbg keys"):
            verify_head(*args, keys, path_length=2, backend=("mosaic_tpu", "reference"))


def call_kernel(
    weight,
    hidden,
    parents,
    valid,
    drafts,
    positions,
    sampling,
    keys,
    top_k=0,
    row_major=False,
    kernel=mosaic_tpu.verify_head,
):
    """A kernel from a tree's parents on, as the decoder would have it."""
    tree = Tree.from_parents(parents, valid)
    return kernel(weight, hidden, tree, drafts, positions, sampling, keys, top_k, PATH, row_major=row_major)


def shapes(V, D, B, N, dtype, temperature):
    """Arguments of `call_kernel` as shapes."""
    of = jax.ShapeDtypeStruct
    integers = of((B, N), jnp.int32)
    sampling = stack(Sampling(temperature=temperature), B, V)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0, impl="threefry2x32"), B))
    sampling = jax.tree.map(lambda x: of(x.shape, x.dtype), sampling)
    tree = (integers, of((B, N), bool))
    return of((V, D), dtype), of((B, N, D), dtype), *tree, integers, integers, sampling, keys


def test_sizes_of_blocks():
    # Qwen3-4B in bfloat16: a node, a tree, eight rows of trees; SmolLM2 in float32.
    assert mosaic_tpu.block_sizes(1, 2560, 151_936, 2) == (16, 384)
    assert mosaic_tpu.block_sizes(64, 2560, 151_936, 2) == (64, 384)
    assert mosaic_tpu.block_sizes(8 * 40, 2560, 151_936, 2) == (160, 384)
    assert mosaic_tpu.block_sizes(24, 576, 49_152, 4) == (24, 896)
    assert mosaic_tpu.block_sizes(3, 16, 40, 4) == (8, 128)


def test_unrounded_logits_differ_from_the_models_in_bfloat16_only():
    """What docs say of `Decoder.logits`."""
    for dtype, equal in ((jnp.float32, True), (jnp.bfloat16, False)):
        case = make(dtype=dtype)
        rounded = (case.hidden @ case.weight.T).astype(jnp.float32)
        assert np.allclose(reference.lm_head(case.weight, case.hidden), rounded, atol=1e-5) == equal


def test_bad_input_is_one_sentence():
    case = make()
    weight, hidden, tree, drafts, positions, sampling, keys = case.args
    call = functools.partial(verify_head, path_length=PATH)

    def refused(match, *args, **options):
        with pytest.raises(ConfigError, match=match):
            call(*args, **options)

    refused(r"hidden is \(3, 6, 23\) and not \(3, 6, 24\)", weight, hidden[..., 1:], *case.args[2:])
    refused(r"positions is \(2, 6\)", weight, hidden, tree, drafts, positions[1:], sampling, keys)
    refused(r"tree is \(3, 5\) and not \(3, 6\)", weight, hidden, tree.first(5), drafts, positions, sampling, keys)
    refused(r"temperature is \(2,\)", weight, hidden, tree, drafts, positions, stack(GREEDY, 2, 300), keys)
    refused(r"keys is \(2,\) and not \(3,\)", *case.args[:-1], keys[1:])
    refused(r"generated is \(3,\) and not \(3, 6\)", *case.args, generated=jnp.zeros(3, jnp.int32))
    refused("The weight .* float dtype: got int8", weight.astype(jnp.int8), *case.args[1:])
    refused("The hidden .* float dtype: got int32", weight, hidden.astype(jnp.int32), *case.args[2:])
    refused("No axis .* V = 0, D = 24, B = 3 and N = 6", weight[:0], *case.args[1:])
    refused("top_k must be from 0 to 300, .* got 301", *case.args, top_k=301)
    refused("top_k must be from 0 to 300, .* got -1", *case.args, top_k=-1)
    refused("path_length .* at least 1: got 0", *case.args, path_length=0)
    refused("verify_head has no backend 'gpu'; choose from reference, mosaic_tpu", *case.args, backend="gpu")
    for row, match in (
        (Sampling(temperature=1.0), "no keys were given"),
        (Sampling(presence_penalty=1.0), "no history was given"),
        (Sampling(min_new_tokens=2), "pass generated"),
    ):
        refused(match, *dataclasses.replace(case, rows=[row] * 3).args[:-1])
