"""The low-rank head on Hopper: one kernel per step sweeps W_o, every multiprocessor a share of the vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.backends import MOSAIC_GPU, require_mosaic_gpu
from pallas_kernels.low_rank_head.reference import dot
from pallas_kernels.low_rank_head.types import Drafts, HeadWeights
from pallas_kernels.noise import gumbel_without_log1p, key_words, threefry_bits
from pallas_kernels.tuning import Question, choose, power_of_two

# Higher ranks with a W_o of eight bits spill registers, and above 704 two tiles in bfloat16 no longer fit.
MAX_ROWS, MAX_RANK = 64, 512
# Rows of W_o in a tile: what one wgmma takes. The drafted rows are its columns, since a batch is small and 64 of them
# would be mostly noise for nobody.
TILE = 64
# Drafted rows of a block: what is kept of 32 for each of 64 lanes fits the registers.
ROWS = 32
# Streaming multiprocessors of an H100 or H200, and what a block may fill with tiles.
BLOCKS = 132
TILE_BYTES = 180 << 10
# Columns of W_o that go through the registers at once where eight bits are made sixteen.
PIECE = 64
# Below every logit, and finite, so that differences from it are numbers.
LOWEST = -3e38


def _sweep(u, output, scale, words, heat, *, sampled: bool, blocks: int, plain: bool):
    """What each lane of each block saw of its share: best score, its id, largest logit, sum of exponentials.

    Args:
        u: `[rows, R]` bfloat16, rows a multiple of `width`.
        output: W_o, `[V, R]`, bfloat16, int8 or float8_e4m3fn.
        scale: `[V]` float32, what a row of `output` is multiplied by; None for bfloat16.
        words: `[2, rows]` int32, the key of each row.
        heat: `[2, rows]` float32, inverse temperature, and 1 where the row is drawn.
        sampled: whether any row is drawn.
        blocks: how many share the vocabulary.
        plain: multiply what is loaded and not by wgmma, so that the interpreter sees races.

    Returns:
        Four arrays `[blocks * 64, rows]`.
    """
    rows, R = u.shape
    V = output.shape[0]
    width = min(rows, ROWS)
    tiles = -(-V // TILE)
    share = -(-tiles // blocks)
    stages = max(2, min(6, TILE_BYTES // (TILE * R * output.dtype.itemsize)))
    scaled = scale is not None

    def sweep_vocabulary(*refs):
        u, output, words, heat, *refs = refs
        scale, *refs = refs if scaled else (None, *refs)
        best_out, token_out, top_out, norm_out, u_tile, tile, u_in, arrived, used, *refs = refs
        scale_tile = refs[0] if scaled else None
        part, block, group = (jax.lax.axis_index(name) for name in ("part", "block", "group"))
        begin = part * share
        mine = jnp.clip(tiles - begin, 0, share)
        columns = pl.ds(block * width, width)

        def of_row(ref, index):
            layout = plgpu.Layout.WGMMA.reduce(0)
            return plgpu.load(ref.at[index, columns], layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]

        def in_lanes(values):
            return jax.lax.broadcast_in_dim(values, (TILE, width), (1,))

        @pl.when(group == 0)
        def _compute():
            plgpu.copy_gmem_to_smem(u.at[columns], u_tile, u_in)
            plgpu.barrier_wait(u_in)
            inverse, drawn = of_row(heat, 0), of_row(heat, 1)
            keys = of_row(words, 0), of_row(words, 1)
            lane = plgpu.broadcasted_iota(jnp.int32, (TILE, width), 0, layout=plgpu.Layout.WGMMA)

            def absorb(step, state):
                best, token, top, norm = state
                slot = jax.lax.rem(step, stages)
                plgpu.barrier_wait(arrived.at[slot])
                if plain:
                    product = jax.lax.dot_general(
                        tile[slot].astype(u_tile.dtype),
                        u_tile[...],
                        (((1,), (1,)), ((), ())),
                        preferred_element_type=jnp.float32,
                    )
                    plgpu.commit_smem()
                else:

                    def multiply(sums):
                        if not scaled:
                            plgpu.wgmma(sums, tile.at[slot], u_tile.transpose((1, 0)))
                            return sums[...]
                        # wgmma takes both operands in one type, so eight bits are widened in registers, exactly.
                        for start in range(0, R, PIECE):
                            across = pl.ds(start, PIECE)
                            wide = tile[slot, :, across]
                            if wide.dtype == jnp.float8_e4m3fn:  # there is no instruction for one step
                                wide = wide.astype(jnp.float32)
                            wide = wide.astype(u_tile.dtype)
                            plgpu.wgmma(sums, wide, u_tile.at[:, across].transpose((1, 0)))
                            plgpu.wgmma_wait(0)
                        return sums[...]

                    product = pl.run_scoped(multiply, plgpu.ACC((TILE, width), jnp.float32))
                if scale_tile is not None:
                    layout = plgpu.Layout.WGMMA.reduce(1)
                    of_ids = plgpu.load(scale_tile.at[slot], layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]
                    product = product * jax.lax.broadcast_in_dim(of_ids, (TILE, width), (0,))
                plgpu.barrier_arrive(used.at[slot])
                ids = lane + (begin + step) * TILE
                logits = jnp.where(ids < V, product * in_lanes(inverse), -jnp.inf)
                highest = jnp.maximum(top, logits)
                norm = norm * jnp.exp(top - highest) + jnp.exp(logits - highest)
                score = logits
                if sampled:
                    bits = threefry_bits(in_lanes(keys[0]), in_lanes(keys[1]), ids)
                    score = score + gumbel_without_log1p(bits) * in_lanes(drawn)
                score = jnp.where(logits != logits, jnp.inf, score)
                # Strictly, so that the lowest id wins a tie.
                better = score > best
                return jnp.where(better, score, best), jnp.where(better, ids, token), highest, norm

            def filled(value, dtype):
                return plgpu.layout_cast(jnp.full((TILE, width), value, dtype), plgpu.Layout.WGMMA)

            state = filled(-jnp.inf, jnp.float32), filled(0, jnp.int32), filled(LOWEST, jnp.float32)
            state = jax.lax.fori_loop(0, mine, absorb, (*state, filled(0, jnp.float32)))
            for out, value in zip((best_out, token_out, top_out, norm_out), state, strict=True):
                out[part, :, columns] = value

        @pl.when(group == 1)
        def _fetch():
            @pl.loop(0, mine)
            def _(step):
                slot = jax.lax.rem(step, stages)

                @pl.when(step >= stages)
                def _():
                    plgpu.barrier_wait(used.at[slot])

                down = pl.ds((begin + step) * TILE, TILE)
                plgpu.copy_gmem_to_smem(output.at[down], tile.at[slot], arrived.at[slot])
                if scale is not None and scale_tile is not None:
                    plgpu.copy_gmem_to_smem(scale.at[down], scale_tile.at[slot], arrived.at[slot])

    of = jax.ShapeDtypeStruct
    kept = [of((blocks, TILE, rows), dtype) for dtype in (jnp.float32, jnp.int32, jnp.float32, jnp.float32)]

    def layout(dtype):
        return plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(64 * jnp.dtype(dtype).itemsize)

    out = plgpu.kernel(
        sweep_vocabulary,
        out_type=tuple(kept),
        grid=(blocks, rows // width),
        grid_names=("part", "block"),
        num_threads=2,
        thread_name="group",
        scratch_types=[
            plgpu.SMEM((width, R), u.dtype, transforms=layout(u.dtype)),
            plgpu.SMEM((stages, TILE, R), output.dtype, transforms=layout(output.dtype)),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=stages, num_arrivals=1 + scaled),
            plgpu.Barrier(num_barriers=stages),
            *([plgpu.SMEM((stages, TILE), jnp.float32)] if scaled else []),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(u, output, words, heat, *([scale] if scaled else []))
    return [x.reshape(blocks * TILE, rows) for x in out]


def low_rank_head(
    weights: HeadWeights,
    hidden,
    anchor,
    state,
    keys=None,
    temperature=None,
    *,
    blocks: int | None = None,
    plain: bool = False,
) -> Drafts:
    """See `pallas_kernels.low_rank_head.api.low_rank_head`; `blocks` and `plain` are those of `_sweep`.

    Without `blocks` the tuning table says how many, and else there is one for each multiprocessor.
    """
    require_mosaic_gpu()
    if not isinstance(weights, HeadWeights):
        raise NotImplementedError("These weights are packed for a TPU; pass them as they are stored.")
    dtype, R = weights.embed.dtype, weights.embed.shape[1]
    V, B = weights.output.shape[0], hidden.shape[0]
    if dtype != jnp.bfloat16:
        raise NotImplementedError(f"The kernel has bfloat16: got weights in {dtype}.")
    if weights.output.dtype not in (jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn):
        raise NotImplementedError(f"W_o may be bfloat16, int8 or float8_e4m3fn: got {weights.output.dtype}.")
    if R % 64 or not 0 < R <= MAX_RANK:
        raise NotImplementedError(f"The rank must be a multiple of 64 and at most {MAX_RANK}: got {R}.")
    if B > MAX_ROWS:
        raise NotImplementedError(f"The kernel drafts for at most {MAX_ROWS} rows: got {B}.")
    words = None if keys is None else key_words(keys).swapaxes(0, 1)
    rows = -(-B // 8) * 8
    if rows > ROWS:
        rows = -(-rows // ROWS) * ROWS

    question = Question(
        "low_rank_head",
        MOSAIC_GPU,
        dtypes=(dtype, weights.output.dtype),
        shape={"rows": power_of_two(rows), "vocab": V, "rank": R, "sampled": int(words is not None)},
        limits={"blocks": range(1, 8 * BLOCKS + 1)},
        heuristic={"blocks": BLOCKS},
    )
    blocks = choose(question, blocks=blocks)["blocks"]

    def by_row(columns):
        return jnp.pad(columns.T, ((0, 0), (0, rows - B)))

    bias = weights.state_bias.astype(jnp.float32)
    hidden_part = dot(hidden.astype(dtype), weights.mix_weight[:, R:]) + weights.mix_bias.astype(jnp.float32)
    cold = jnp.ones_like(anchor, bool) if temperature is None else temperature <= 0
    inverse = jnp.ones(B, jnp.float32) if temperature is None else 1 / jnp.where(cold, 1.0, temperature)
    heat = by_row(jnp.stack([inverse, jnp.where(cold, 0.0, 1.0)], axis=1).astype(jnp.float32))

    def body(carry, x):
        state, previous = carry
        hidden_part, words = x
        embedded = jnp.take(weights.embed, previous, axis=0, mode="clip")
        both = dot(jnp.concatenate([state.astype(dtype), embedded], axis=-1), weights.state_weight) + bias
        gate = jax.nn.sigmoid(both[:, :R])
        state = gate * state + (1 - gate) * jnp.tanh(both[:, R:])
        u = (dot(state.astype(dtype), weights.mix_weight[:, :R]) + hidden_part).astype(dtype)
        sampled = words is not None
        spread = by_row(jnp.zeros((B, 2), jnp.int32) if words is None else words)
        best, token, top, norm = (
            x[:, :B]
            for x in _sweep(
                jnp.pad(u, ((0, rows - B), (0, 0))),
                weights.output,
                weights.output_scale,
                spread,
                heat,
                sampled=sampled,
                blocks=blocks,
                plain=plain,
            )
        )
        tokens = jnp.min(jnp.where(best == jnp.max(best, axis=0), token, V - 1), axis=0)
        highest = jnp.max(top, axis=0)
        total = highest + jnp.log(jnp.sum(norm * jnp.exp(top - highest), axis=0))
        # The chosen rows are read once more, so that the sweep need not carry their logits along.
        chosen = jnp.take(weights.output, tokens, axis=0).astype(jnp.float32)
        picked = jnp.einsum("br,br->b", chosen, u.astype(jnp.float32), precision="highest") * inverse
        if weights.output_scale is not None:
            picked = picked * weights.output_scale[tokens]
        return (state, tokens), (tokens, picked - total, u)

    carry = (state.astype(jnp.float32), anchor.astype(jnp.int32))
    _, out = jax.lax.scan(body, carry, (hidden_part.swapaxes(0, 1), words))
    return Drafts(*(x.swapaxes(0, 1) for x in out))
