"""Tree attention on Hopper: one warpgroup fetches tiles of the cache, others multiply; blocks share a long row."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.backends import MOSAIC_GPU, require_mosaic_gpu
from pallas_kernels.tuning import Question, choose, power_of_two

MAX_NODES = 64
# Query rows of a warpgroup's product, and slots of a tile: new nodes fill one tile at most.
ROWS = SLOTS = 64
# Streaming multiprocessors of an H100 or H200, and the fewest slots that are worth a block of their own.
BLOCKS = 132
MIN_SPLIT = 256
# Columns of a float32 tile that are divided at a time.
CHUNK = 64
# Registers per thread where two warpgroups compute and one fetches; 65,536 are shared by 384 threads.
COMPUTING, FETCHING = 232, 40


def _parts(x: jax.Array, count: int) -> list[jax.Array]:
    """`x` as a sum of `count` bfloat16 arrays, each the rounding of what those before leave; three hold a float32."""
    parts = []
    for _ in range(count):
        parts.append(x.astype(jnp.bfloat16))
        x = x - parts[-1].astype(x.dtype)
    return parts


def _stacked_parts(x: jax.Array, count: int) -> jax.Array:
    """`_parts` outside a kernel, where XLA may take a conversion there and back for none."""
    parts = []
    for _ in range(count):
        rounded = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        parts.append(rounded.astype(jnp.bfloat16))
        x = x - rounded
    return jnp.stack(parts)


def _pairs(left: int, right: int) -> list[tuple[int, int]]:
    """Which parts to multiply, smallest products first; those below float32's precision are left out."""
    pairs = [(i, j) for i in range(left) for j in range(right) if i + j < 3]
    return sorted(pairs, key=sum, reverse=True)


def _over(left: int, right: int, one: jax.Array):
    """Decorator that runs a function for each of `_pairs(left, right)`, in loops of the device where there are several.

    Unrolled, the addresses of all operands are kept from tile to tile, and there are not enough registers for them.
    `one` is 1 and not known to the compiler, which would unroll a loop of known length.
    """

    def run(function):
        if left == right == 1:
            function(0, 0)
            return

        @pl.loop(0, left * one)
        def _(step):
            total = left - 1 - step
            if right == 1:
                function(total, 0)
                return

            @pl.loop(0, total + 1)
            def _(i):
                function(i, total - i)

    return run


def _tiled(dtype, width: int):
    """How the tensor cores and the copy engine agree to lay out rows of `width` in shared memory."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(width * itemsize * 8)
    return plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)


def split_count(batch: int, kv_heads: int, blocks: int, capacity: int) -> int:
    """How many blocks share one row's slots, for one key/value head: enough to give every multiprocessor one."""
    return max(1, min(BLOCKS // (batch * kv_heads * blocks), capacity // MIN_SPLIT))


def tree_attention(
    q,
    k_new,
    v_new,
    k_cache,
    v_cache,
    layer,
    lengths,
    mask,
    *,
    splits: int | None = None,
    plain: tuple[str, ...] = (),
) -> jax.Array:
    """See `pallas_kernels.tree_attention.api.tree_attention`.

    `splits` sets how many blocks share a row; without it the tuning table is asked, and else `split_count`. `plain`
    names products ("scores", "values") to be made from plain loads and not by wgmma: the interpreter sees races of
    loads only, and lacks wgmma with an operand in registers.
    """
    require_mosaic_gpu()
    B, N, H, h = q.shape
    L, _, G, S, _ = k_cache.shape
    for name, x in (("queries", q), ("the cache", k_cache)):
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            raise NotImplementedError(f"The kernel has float32 and bfloat16: got {name} in {x.dtype}.")
    if v_cache.dtype != k_cache.dtype:
        raise NotImplementedError(f"Keys and values must have one dtype: got {k_cache.dtype} and {v_cache.dtype}.")
    if N > MAX_NODES:
        raise NotImplementedError(f"The kernel takes at most {MAX_NODES} nodes: got {N}.")
    if h not in (64, 128):
        raise NotImplementedError(f"The head width must be 64 or 128: got {h}.")
    if 0 in (L, B, N, S):
        raise NotImplementedError(f"The kernel needs rows, nodes and slots: got {q.shape} and {k_cache.shape}.")

    cached = k_cache.dtype
    # float32 operands are three bfloat16 parts, since wgmma would round them to 11 bits. A float32 cache is divided in
    # the kernel, one tile at a time; new nodes are given in the cache's dtype, in parts where one would not hold them.
    q_parts = 3 if q.dtype == jnp.float32 else 1
    convert = cached == jnp.float32
    key_parts = q_parts if convert else 1
    new_parts = q_parts if not convert else 1
    repeats = H // G
    used = repeats * N
    compute = 2 if used > ROWS and q_parts == 1 and not convert else 1
    block = compute * ROWS
    M = -(-used // block) * block
    blocks = M // block
    kept = -(-used // 8) * 8 if blocks == compute == 1 else block  # rows of a block that are written
    question = Question(
        "tree_attention",
        MOSAIC_GPU,
        dtypes=(q.dtype, cached),
        shape={
            "rows": power_of_two(B),
            "kv_heads": G,
            "queries": power_of_two(used),
            "capacity": power_of_two(S),
            "head_dim": h,
        },
        # A block without a tile of its own would do nothing.
        limits={"splits": range(1, -(-S // SLOTS) + 1)},
        heuristic={"splits": split_count(B, G, blocks, S)},
    )
    splits = choose(question, splits=splits)["splits"]
    # As many tiles as fit shared memory. (Four, with one computing warpgroup, make ptxas 13.0 crash.)
    stages = 1 if convert else (3 if q_parts > 1 else 6 - compute)
    width = h if q_parts == 1 else CHUNK  # columns of the result that are summed at a time
    scale = math.log2(math.e) / math.sqrt(h)
    result = q.dtype if splits == 1 else jnp.float32

    def body(
        q, words, k_new, v_new, layer, lengths, k_cache, v_cache, out, top_out, norm_out,
        q_tile, k_tile, v_tile, staged, q_in, k_in, v_in, k_used, v_used, clean, *spare,
    ):  # fmt: skip
        split, part, head, row = (jax.lax.axis_index(name) for name in ("split", "block", "head", "row"))
        group = jax.lax.axis_index("group")
        length = lengths[row]
        tiles = jax.lax.div(length + (SLOTS - 1), SLOTS)
        share = jax.lax.div(tiles + (splits - 1), splits)
        begin = split * share
        # Tiles of this block's share, of which all but the last of the row are full; the first block has the new nodes.
        mine = jnp.clip(tiles - begin, 0, share)
        full = jnp.clip(jax.lax.div(length, SLOTS) - begin, 0, mine)
        one = jnp.where(length >= 0, 1, 0)
        fresh = jnp.where(split == 0, new_parts, 0)

        def slot(step):
            return jax.lax.rem(step, stages)

        def plainly(left, right, contract):
            return jax.lax.dot_general(left, right, (contract, ((), ())), preferred_element_type=jnp.float32)

        def absorb(state, steps, left, seen):
            """Add the tile that came with `steps` to the running softmax (Milakov and Gimelshein, 2018).

            Slots from `left` on hold no values, which None says of none; `seen` masks scores likewise.
            """
            totals, top, norm = state
            places = [slot(step) for step in steps]

            def fetched(tile, arrived):
                for place in places:
                    plgpu.barrier_wait(arrived.at[place])
                if not convert:
                    return lambda j: tile.at[places[0] + j]

                # Some columns at a time: a whole tile in registers would spill others.
                @pl.loop(0, h // CHUNK * one)
                def _(chunk):
                    columns = pl.ds(chunk * CHUNK, CHUNK)
                    wide = plgpu.layout_cast(tile[places[0], :, columns], plgpu.Layout.WGMMA)
                    if tile is v_tile and left is not None:
                        wide = jnp.where(at(0, CHUNK) < left, wide, 0.0)
                    for i, piece in enumerate(_parts(wide, key_parts)):
                        spare[1][i, :, columns] = piece

                plgpu.commit_smem()
                return lambda j: spare[1].at[j]

            def release(barrier, loaded):
                # A fence orders plain loads before the next copy; wgmma and the copy engine are ordered as they are.
                if loaded:
                    plgpu.commit_smem()
                for place in places:
                    plgpu.barrier_arrive(barrier.at[place])

            keys = fetched(k_tile, k_in)
            held = key_parts if convert else len(places)
            pairs = _pairs(q_parts, held)
            if "scores" in plain:
                scores = sum(plainly(q_tile[group, i], keys(j)[...], ((1,), (1,))) for i, j in pairs)
            else:

                def multiply(sums):
                    @_over(q_parts, held, one)
                    def _(i, j):
                        plgpu.wgmma(sums, q_tile.at[group, i], keys(j).transpose((1, 0)))

                    return sums[...]

                scores = pl.run_scoped(multiply, plgpu.ACC((ROWS, SLOTS), jnp.float32))
            release(k_used, "scores" in plain)
            values = fetched(v_tile, v_in) if convert else None

            if seen is not None:
                scores = jnp.where(seen, scores, -jnp.inf)
            # Exponents are to base two, which is what the device has.
            highest = jnp.maximum(top, jnp.max(scores, axis=1) * scale)
            weights = jnp.exp2(scores * scale - spread(highest, SLOTS))
            fade = jnp.exp2(top - highest)
            norm = norm * fade + jnp.sum(weights, axis=1)

            values = values or fetched(v_tile, v_in)
            if left is not None and not convert:
                # What lies in unused slots may be NaN, which a weight of zero does not remove.
                @pl.when(group == 0)
                def _():
                    tile = values(0)
                    kept = plgpu.layout_cast(tile[...], plgpu.Layout.WGMMA)
                    tile[...] = jnp.where(at(0, h) < left, kept, jnp.zeros_like(kept))
                    plgpu.commit_smem()
                    if compute > 1:
                        plgpu.barrier_arrive(clean)

                if compute > 1:
                    plgpu.barrier_wait(clean)
            rounded = _parts(weights, q_parts)
            if q_parts > 1:
                for i, piece in enumerate(rounded):
                    spare[0][i] = piece
                plgpu.commit_smem()

            def pieces(i):
                return spare[0].at[i] if q_parts > 1 else rounded[0]

            def weigh(columns):
                if "values" in plain:
                    return sum(plainly(pieces(i)[...], values(j)[:, columns], ((1,), (0,))) for i, j in pairs)

                def multiply(sums):
                    @_over(q_parts, held, one)
                    def _(i, j):
                        plgpu.wgmma(sums, pieces(i), values(j).at[:, columns])

                    return sums[...]

                return pl.run_scoped(multiply, plgpu.ACC((ROWS, width), jnp.float32))

            totals = [
                total * spread(fade, width) + weigh(pl.ds(start, width))
                for total, start in zip(totals, range(0, h, width), strict=True)
            ]
            release(v_used, "values" in plain)
            return totals, highest, norm

        def at(axis, columns):
            return plgpu.broadcasted_iota(jnp.int32, (ROWS, columns), axis, layout=plgpu.Layout.WGMMA)

        def spread(column, columns):
            return jax.lax.broadcast_in_dim(column, (ROWS, columns), (0,))

        @pl.when(group < compute)
        def _compute():
            if compute > 1:
                plgpu.set_max_registers(COMPUTING, action="increase")
            first = part * block + group * ROWS
            for i in range(q_parts):
                plgpu.copy_gmem_to_smem(
                    q.at[i, row, head, pl.ds(first, ROWS)], q_tile.at[group, i], q_in.at[group * q_parts + i]
                )
            for i in range(q_parts):
                plgpu.barrier_wait(q_in.at[group * q_parts + i])
            of_row = plgpu.Layout.WGMMA.reduce(1)
            state = (
                [plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), plgpu.Layout.WGMMA)] * (h // width),
                plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), of_row),
                plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), of_row),
            )

            def nodes(_, state):
                load = functools.partial(plgpu.load, layout=of_row, optimized=False)
                low, high = (load(words.at[row, i, pl.ds(first, ROWS)]) for i in range(2))  # pyright: ignore[reportCallIssue]
                column = at(1, SLOTS)
                word = jnp.where(column < 32, spread(low, SLOTS), spread(high, SLOTS))
                seen = (jax.lax.shift_right_logical(word, column & 31) & 1) != 0
                return absorb(state, range(new_parts), None, seen)

            def whole(tile, state):
                return absorb(state, [fresh + tile], None, None)

            def last(tile, state):
                left = length - (begin + tile) * SLOTS
                return absorb(state, [fresh + tile], left, at(1, SLOTS) < left)

            state = jax.lax.fori_loop(0, jnp.where(split == 0, one, 0), nodes, state)
            state = jax.lax.fori_loop(0, full, whole, state)
            totals, top, norm = jax.lax.fori_loop(full, mine, last, state)
            if splits > 1:
                top_out[row, head, split, pl.ds(first, ROWS)] = top
                norm_out[row, head, split, pl.ds(first, ROWS)] = norm
            for total, start in zip(totals, range(0, h, width), strict=True):
                total = total * spread(1 / norm, width) if splits == 1 else total
                staged[group, :, pl.ds(start, width)] = total.astype(result)
            plgpu.commit_smem()
            written = min(kept, ROWS)
            plgpu.copy_smem_to_gmem(
                staged.at[group, pl.ds(0, written)], out.at[row, head, split, pl.ds(first, written)]
            )
            plgpu.wait_smem_to_gmem(0)

        @pl.when(group == compute)
        def _fetch():
            if compute > 1:
                plgpu.set_max_registers(FETCHING, action="decrease")

            def fetch(step, k, v):
                place = slot(step)

                @pl.when(step >= stages)
                def _():
                    plgpu.barrier_wait(k_used.at[place])

                plgpu.copy_gmem_to_smem(k, k_tile.at[place], k_in.at[place])

                @pl.when(step >= stages)
                def _():
                    plgpu.barrier_wait(v_used.at[place])

                plgpu.copy_gmem_to_smem(v, v_tile.at[place], v_in.at[place])

            @pl.when(split == 0)
            def _():
                for i in range(new_parts):
                    fetch(i, k_new.at[i, row, head], v_new.at[i, row, head])

            @pl.loop(0, mine)
            def _(tile):
                where = (layer[0], row, head, pl.ds((begin + tile) * SLOTS, SLOTS))
                fetch(fresh + tile, k_cache.at[where], v_cache.at[where])

    # Query rows are the nodes of one head after those of another. Rows that pad them see one node, so that their
    # softmax is one of something.
    stacked = q.reshape(B, N, G, repeats, h).transpose(0, 2, 3, 1, 4).reshape(B, G, used, h)
    stacked = jnp.pad(stacked, ((0, 0), (0, 0), (0, M - used), (0, 0)))
    stacked = _stacked_parts(stacked, q_parts)
    words = _words(mask)
    words = jnp.pad(jnp.tile(words, (1, 1, repeats)), ((0, 0), (0, 0), (0, M - used)), constant_values=1)
    new = []
    for x in (k_new, v_new):
        x = jnp.pad(x.astype(q.dtype).swapaxes(1, 2), ((0, 0), (0, 0), (0, SLOTS - N), (0, 0)))
        new.append(_stacked_parts(x, new_parts) if new_parts > 1 else x.astype(cached)[None])

    def narrow(count, rows, columns):
        return plgpu.SMEM((count, rows, columns), jnp.bfloat16, transforms=_tiled(jnp.bfloat16, columns))

    # Room for the parts of weights, and for those of a tile.
    spare = [narrow(q_parts, ROWS if q_parts > 1 else 8, SLOTS)] if q_parts > 1 or convert else []
    spare += [narrow(key_parts, SLOTS, h)] if convert else []
    of = jax.ShapeDtypeStruct
    tile = plgpu.SMEM((stages, SLOTS, h), cached, transforms=_tiled(cached, h))
    barriers = lambda count, **kwargs: plgpu.Barrier(num_barriers=count, **kwargs)  # noqa: E731
    out, top, norm = plgpu.kernel(
        body,
        out_type=(
            of((B, G, splits, blocks * kept, h), result),
            of((B, G, splits, M), jnp.float32),
            of((B, G, splits, M), jnp.float32),
        ),
        grid=(splits, blocks, G, B),
        grid_names=("split", "block", "head", "row"),
        num_threads=compute + 1,
        thread_name="group",
        scratch_types=[
            plgpu.SMEM((compute, q_parts, ROWS, h), jnp.bfloat16, transforms=_tiled(jnp.bfloat16, h)),
            tile,
            tile,
            plgpu.SMEM((compute, ROWS, h), result, transforms=_tiled(result, h)),
            barriers(compute * q_parts),
            barriers(stages),
            barriers(stages),
            barriers(stages, num_arrivals=compute),
            barriers(stages, num_arrivals=compute),
            plgpu.Barrier(),
            *spare,
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(
        stacked,
        words,
        *new,
        jnp.asarray(layer, jnp.int32).reshape(1),
        jnp.minimum(lengths, S).astype(jnp.int32),
        k_cache,
        v_cache,
    )
    if splits > 1:
        weight = jnp.exp2(top - jnp.max(top, axis=2, keepdims=True))[..., : out.shape[3]]
        norm = jnp.sum(norm[..., : out.shape[3]] * weight, axis=2)
        out = jnp.sum(out * weight[..., None], axis=2) / norm[..., None]
    else:
        out = out[:, :, 0]
    out = out[:, :, :used].astype(q.dtype).reshape(B, G, repeats, N, h)
    return out.transpose(0, 3, 1, 2, 4).reshape(B, N, H, h)


def _words(mask: jax.Array) -> jax.Array:
    """`[B, N, N]` bool as `[B, 2, N]` int32: bit j of a node's 64 says that it sees node j."""
    B, N, _ = mask.shape
    bits = jnp.pad(mask, ((0, 0), (0, 0), (0, MAX_NODES - N))).reshape(B, N, 2, 32).astype(jnp.uint32)
    words = jnp.sum(bits << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)
    return jax.lax.bitcast_convert_type(words, jnp.int32).swapaxes(1, 2)
