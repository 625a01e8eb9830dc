"""The head of a verify forward on Hopper: one kernel sweeps W, every multiprocessor a share of the vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jdlite.decoding.accept import sample_and_match
from jdlite.decoding.sampling import noise_key
from pallas_kernels.backends import MOSAIC_GPU, require_mosaic_gpu
from pallas_kernels.noise import gumbel_without_log1p, key_words, threefry_bits
from pallas_kernels.tuning import Question, choose, power_of_two
from pallas_kernels.verify_head.refusals import require_plain_sampling
from pallas_kernels.verify_head.types import Verified

MAX_WIDTH = 16_384
# Ids that are found most likely, and nodes for which they are: k rows of lanes are read again for each.
MAX_TOP, MAX_TOP_NODES = 16, 512
# Rows of W that one wgmma takes, and warpgroups that compute, each with its own rows and with all nodes of the block.
# Nodes are the columns, since a wgmma has 64 rows at least and mostly there are fewer nodes.
TILE, GROUPS = 64, 2
STEP = TILE * GROUPS
# Nodes of a block, for which W is read once, and those that are summed and absorbed together.
MAX_NODES, COLUMNS = 64, 16
# Nodes of a block where some are drawn: more is kept for each, and 64 spill registers.
MAX_DRAWN = 40
# Streaming multiprocessors of an H100 or H200, and what a block may fill with tiles.
BLOCKS = 132
TILE_BYTES = 220 << 10
# Registers per thread of the groups that compute and of the one that fetches; 65,536 are shared by 384 threads.
COMPUTING, FETCHING = 232, 40
# Finite, so that differences from it are numbers.
HIGHEST = 3e38


def block_sizes(nodes: int, width: int, top_k: int, sampled: bool) -> tuple[int, int, int, int]:
    """How the work is divided.

    Args:
        nodes: of all rows.
        width: D.
        top_k: as in the operation.
        sampled: whether any node is drawn.

    Returns:
        Nodes of a block; how many blocks of nodes; how many blocks share the vocabulary for each of them; columns of W
        in a tile.
    """
    blocks = pl.cdiv(nodes, MAX_DRAWN if sampled else MAX_NODES)
    columns = pl.cdiv(nodes, blocks * 8) * 8
    # All blocks of nodes run side by side, so that W comes to the chip once. With top ids there are more than run at a
    # time, so that a lane sees few ids.
    parts = BLOCKS if top_k else max(BLOCKS // blocks, 1)
    return columns, blocks, parts, next(depth for depth in (128, 192, 64) if width % depth == 0)


def _sweep(hidden, weight, words, heat, *, columns: int, parts: int, depth: int, lead: bool, plain: bool):
    """What each lane of each block saw of its share of the vocabulary.

    Lane l of group g in part p has the ids `((p * share + step) * GROUPS + g) * TILE + l`, one per step.

    Args:
        hidden: `[rows, D]` bfloat16, rows a multiple of `columns`.
        weight: W, `[V, D]` bfloat16.
        words: `[2, rows]` int32, the key of each node; None where none is drawn.
        heat: `[3, rows]` float32: temperature, its inverse, and 1 where the node is drawn; None where none is.
        columns: nodes of a block.
        parts: how many blocks share the vocabulary.
        depth: columns of W in a tile.
        lead: keep the id of the largest logit where nodes are drawn.
        plain: multiply what is loaded and not by wgmma, so that the interpreter sees races.

    Returns:
        Arrays `[parts * GROUPS * TILE, rows]`: best score, its id, and the sum of exponentials of the processed logits
        relative to the largest one, NaN where a logit is; where nodes are drawn also the largest logit, unprocessed
        (else it is the best score), and with `lead` its id. NaN is +inf in scores and largest logits.
    """
    rows, D = hidden.shape
    V = weight.shape[0]
    sampled = words is not None
    depths = D // depth
    tiles = pl.cdiv(V, STEP)
    share = pl.cdiv(tiles, parts)
    stages = min(TILE_BYTES // ((STEP + columns) * depth * 2), 8)
    chunks = [(start, min(COLUMNS, columns - start)) for start in range(0, columns, COLUMNS)]
    # What is kept for each lane and node, in the order of the results, and its start.
    kept = [(-jnp.inf, jnp.float32), (0, jnp.int32), (0, jnp.float32)]
    kept += [(-jnp.inf, jnp.float32)] * sampled + [(0, jnp.int32)] * lead

    def body(*refs):
        inputs = 4 if sampled else 2
        outs = refs[inputs : inputs + len(kept)]
        h_tile, w_tile, arrived, used = refs[inputs + len(kept) :]
        part, block, group = (jax.lax.axis_index(name) for name in ("part", "block", "group"))
        begin = part * share
        mine = jnp.clip(tiles - begin, 0, share)

        @pl.when(group < GROUPS)
        def _compute():
            plgpu.set_max_registers(COMPUTING, action="increase")

            def of_node(ref, index, start, size):
                where = ref.at[index, pl.ds(block * columns + start, size)]
                return plgpu.load(where, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)  # pyright: ignore[reportCallIssue]

            def products(tile):
                def ready(d):
                    slot = jax.lax.rem(tile * depths + d, stages)
                    plgpu.barrier_wait(arrived.at[slot])
                    return slot

                if plain:

                    def add(d, sums):
                        slot = ready(d)
                        w = w_tile[slot, group]
                        dimensions = (((1,), (1,)), ((), ()))
                        sums = [
                            total
                            + jax.lax.dot_general(
                                w, h_tile[slot, pl.ds(start, size)], dimensions, preferred_element_type=jnp.float32
                            )
                            for total, (start, size) in zip(sums, chunks, strict=True)
                        ]
                        plgpu.commit_smem()
                        plgpu.barrier_arrive(used.at[slot])
                        return sums

                    return jax.lax.fori_loop(0, depths, add, [_filled(0, jnp.float32, size) for _, size in chunks])

                def multiply(*sums):
                    @pl.loop(0, depths)
                    def _(d):
                        slot = ready(d)
                        for total, (start, size) in zip(sums, chunks, strict=True):
                            nodes = h_tile.at[slot, pl.ds(start, size)].transpose((1, 0))
                            plgpu.wgmma(total, w_tile.at[slot, group], nodes)
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(used.at[slot])

                    return [total[...] for total in sums]

                return pl.run_scoped(multiply, *(plgpu.ACC((TILE, size), jnp.float32) for _, size in chunks))

            def step(tile, states):
                first = ((begin + tile) * GROUPS + group) * TILE
                new = []
                for state, product, chunk in zip(states, products(tile), chunks, strict=True):
                    # Read again for each tile: kept in registers for 64 nodes, they leave too few.
                    rate = [of_node(ref, i, *chunk) for ref in refs[2:inputs] for i in range(ref.shape[0])]
                    new.append(_absorb(state, product, rate, first, V))
                return new

            states = [[_filled(value, kind, size) for value, kind in kept] for _, size in chunks]
            states = jax.lax.fori_loop(0, mine, step, states)
            for (start, size), state in zip(chunks, states, strict=True):
                for out, value in zip(outs, state, strict=True):
                    where = out.at[part, group, :, pl.ds(block * columns + start, size)]
                    plgpu.store(where, value, optimized=False)  # pyright: ignore[reportAttributeAccessIssue]

        @pl.when(group == GROUPS)
        def _fetch():
            plgpu.set_max_registers(FETCHING, action="decrease")
            hidden, weight = refs[:2]

            @pl.loop(0, mine * depths)
            def _(step):
                slot = jax.lax.rem(step, stages)

                @pl.when(step >= stages)
                def _():
                    plgpu.barrier_wait(used.at[slot])

                tile = jax.lax.div(step, depths)
                across = pl.ds(jax.lax.rem(step, depths) * depth, depth)
                for i in range(GROUPS):
                    down = pl.ds(((begin + tile) * GROUPS + i) * TILE, TILE)
                    plgpu.copy_gmem_to_smem(weight.at[down, across], w_tile.at[slot, i], arrived.at[slot])
                nodes = pl.ds(block * columns, columns)
                plgpu.copy_gmem_to_smem(hidden.at[nodes, across], h_tile.at[slot], arrived.at[slot])

    layout = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
    out = plgpu.kernel(
        body,
        out_type=tuple(jax.ShapeDtypeStruct((parts, GROUPS, TILE, rows), kind) for _, kind in kept),
        grid=(parts, rows // columns),
        grid_names=("part", "block"),
        num_threads=GROUPS + 1,
        thread_name="group",
        scratch_types=[
            plgpu.SMEM((stages, columns, depth), jnp.bfloat16, transforms=layout),
            plgpu.SMEM((stages, GROUPS, TILE, depth), jnp.bfloat16, transforms=layout),
            plgpu.Barrier(num_barriers=stages, num_arrivals=GROUPS + 1),
            plgpu.Barrier(num_barriers=stages, num_arrivals=GROUPS),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(hidden, weight, *((words, heat) if sampled else ()))
    return [x.reshape(parts * STEP, rows) for x in out]


def _filled(value, dtype, size: int) -> jax.Array:
    return plgpu.layout_cast(jnp.full((TILE, size), value, dtype), plgpu.Layout.WGMMA)


def _absorb(state, product, rate, first, vocab: int):
    """`state` of the lanes of some nodes after one more id each, `first` and those that follow."""
    best, token, norm, *peak = state
    shape = product.shape
    ids = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA) + first
    logits = jnp.where(ids < vocab, product, -jnp.inf)
    score = known = jnp.where(logits != logits, jnp.inf, logits)
    inverse = None
    if rate:
        key0, key1, temperature, inverse, drawn = (jax.lax.broadcast_in_dim(x, shape, (1,)) for x in rate)
        # Divided and not multiplied by an inverse, as the definition does it, so that no bit differs.
        score = known / temperature + gumbel_without_log1p(threefry_bits(key0, key1, ids)) * drawn

    def within(x):
        return jnp.minimum(jnp.maximum(x, -HIGHEST), HIGHEST)

    def spread(x):
        return jnp.exp(x if inverse is None else x * inverse)

    before = within(peak[0] if peak else best)
    # Strictly, so that the lowest id wins a tie.
    better = score > best
    best, token = jnp.where(better, score, best), jnp.where(better, ids, token)
    if peak:
        higher = known > peak[0]
        peak = [jnp.where(higher, new, old) for new, old in zip((known, ids)[: len(peak)], peak, strict=True)]
    highest = within(peak[0] if peak else best)
    norm = norm * spread(before - highest) + spread(logits - highest)
    return [best, token, norm, *peak]


def _top_ids(weight, hidden, largest, lead, top_k: int, parts: int):
    """The `top_k` largest logits of each node and their ids, from the largest logit of each lane.

    Each of them is in one of the k lanes with the largest ones (of lanes that tie, those with the lowest ids), whose
    logits are made again.

    Args:
        weight: W.
        hidden: `[n, D]`.
        largest: `[parts * STEP, n]`, the largest logit of each lane.
        lead: its id.
        top_k: k.
        parts: how many blocks share the vocabulary.

    Returns:
        ids and logits, `[n, k]`.
    """
    V = weight.shape[0]
    share = pl.cdiv(pl.cdiv(V, STEP), parts)
    n = len(hidden)
    # Sorted and not by lax.top_k, which puts 0 before -0, and which XLA cannot compile for many rows without a device.
    largest, lead = jnp.where(largest == 0, 0.0, largest).T, lead.T
    # The k lanes are in the k best parts. All ids of a part are below those of the next, so where parts tie, a sort
    # that is stable has the one with the lowest ids first.
    of_parts = jnp.max(largest.reshape(n, parts, STEP), axis=-1)
    _, chosen = jax.lax.sort((-of_parts, jax.lax.broadcasted_iota(jnp.int32, (n, parts), 1)), num_keys=1)
    lanes = (chosen[:, :top_k, None] * STEP + jnp.arange(STEP, dtype=jnp.int32)).reshape(n, -1)
    values, leads = (jnp.take_along_axis(x, lanes, axis=1) for x in (largest, lead))
    lanes = jax.lax.sort((-values, leads, lanes), num_keys=2)[2][:, :top_k]
    part, lane = lanes // STEP, lanes % STEP
    ids = (part[..., None] * share + jnp.arange(share)) * STEP + lane[..., None]
    ids = ids.reshape(n, -1).astype(jnp.int32)
    logits = _logits_at(weight, hidden, ids)
    logits = jnp.where(jnp.isnan(logits), jnp.inf, jnp.where(logits == 0, 0.0, logits))
    order, ids = jax.lax.sort((jnp.where(ids < V, -logits, jnp.inf), ids), num_keys=2)
    order, ids = order[:, :top_k], ids[:, :top_k]
    return jnp.where(order < jnp.inf, ids, 0), -order


def _logits_at(weight, hidden, ids):
    """Logits `[n, k]` of `ids`, float32."""
    chosen = jnp.take(weight, ids, axis=0, mode="clip").astype(jnp.float32)
    return jnp.einsum("nkd,nd->nk", chosen, hidden.astype(jnp.float32), precision="highest")


def verify_head(
    weight,
    hidden,
    tree,
    drafts,
    positions,
    sampling,
    keys,
    top_k,
    path_length,
    history=None,
    generated=None,
    row_major=False,
    *,
    parts: int | None = None,
    plain: bool = False,
) -> Verified:
    """See `pallas_kernels.verify_head.api.verify_head`; `parts` and `plain` are those of `_sweep`.

    Without `parts` the tuning table says how many, and else `block_sizes`.
    """
    del history, generated, row_major  # only steps that are refused read them, and a GPU stores W by rows
    require_mosaic_gpu()
    require_plain_sampling(sampling)
    V, D = weight.shape
    B, N = drafts.shape
    nodes = B * N
    if weight.dtype != jnp.bfloat16:
        raise NotImplementedError(f"The kernel has bfloat16: got a weight in {weight.dtype}.")
    if D % 64 or D > MAX_WIDTH:
        raise NotImplementedError(f"The width must be a multiple of 64 and at most {MAX_WIDTH}: got {D}.")
    if top_k > MAX_TOP:
        raise NotImplementedError(f"The kernel finds at most {MAX_TOP} most likely ids: got {top_k}.")
    if top_k and nodes > MAX_TOP_NODES:
        raise NotImplementedError(
            f"The kernel finds the most likely ids of at most {MAX_TOP_NODES} nodes of all rows: got {nodes}."
        )
    sampled = sampling.stochastic
    columns, blocks, shares, depth = block_sizes(nodes, D, top_k, sampled)
    most = pl.cdiv(V, STEP)
    question = Question(
        "verify_head",
        MOSAIC_GPU,
        dtypes=(weight.dtype,),
        shape={
            "nodes": power_of_two(nodes),
            "vocab": V,
            "width": D,
            "sampled": int(sampled),
            "listed": int(top_k > 0),
        },
        # A block without a tile of its own would do nothing.
        limits={"parts": range(1, most + 1)},
        heuristic={"parts": min(shares, most)},
    )
    parts = choose(question, parts=parts)["parts"]
    rows = columns * blocks

    def by_node(*values):
        stacked = jnp.stack([jnp.broadcast_to(x, (B, N)).reshape(nodes) for x in values])
        # Nodes that fill up the last block are divided by 1 too.
        return jnp.pad(stacked, ((0, 0), (0, rows - nodes)), constant_values=1)

    words = heat = None
    if sampled:
        words = key_words(jax.vmap(jax.vmap(noise_key, (None, 0)))(keys, positions))
        words = by_node(words[..., 0], words[..., 1])
        warm = sampling.temperature > 0
        heat = jnp.where(warm, sampling.temperature, 1.0)
        heat = by_node(*(x.astype(jnp.float32)[:, None] for x in (heat, 1 / heat, warm)))

    hidden = hidden.astype(weight.dtype).reshape(nodes, D)
    out = _sweep(
        jnp.pad(hidden, ((0, rows - nodes), (0, 0))),
        weight,
        words,
        heat,
        columns=columns,
        parts=parts,
        depth=depth,
        lead=sampled and top_k > 0,
        plain=plain,
    )
    best, token, norm, *peak = (x[:, :nodes] for x in out)
    tokens = jnp.min(jnp.where(best == jnp.max(best, axis=0), token, V - 1), axis=0)
    # The chosen rows are read once more, so that the sweep need not carry their logits along.
    picked = _logits_at(weight, hidden, tokens[:, None])[:, 0]
    largest = peak[0] if peak else best
    inverse = heat[1, :nodes] if heat is not None else jnp.ones(nodes)
    limited = jnp.clip(largest, -HIGHEST, HIGHEST)
    highest = jnp.max(limited, axis=0)
    total = jnp.sum(norm * jnp.exp((limited - highest) * inverse), axis=0)
    log_prob = (picked - highest) * inverse - jnp.log(total)
    top_ids, top_logits = jnp.zeros((nodes, 0), jnp.int32), jnp.zeros((nodes, 0), jnp.float32)
    if top_k:
        top_ids, top_logits = _top_ids(weight, hidden, largest, peak[1] if peak else token, top_k, parts)
    tokens = tokens.reshape(B, N)
    return Verified(
        tokens=tokens,
        log_prob=log_prob.reshape(B, N),
        top_ids=top_ids.reshape(B, N, top_k),
        top_logits=top_logits.reshape(B, N, top_k),
        broken=jnp.isnan(total).reshape(B, N),
        acceptance=sample_and_match(tree, drafts, tokens, path_length),
        fused=jnp.array(True),
    )
