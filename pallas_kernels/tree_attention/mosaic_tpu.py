"""Tree attention on TPU: one kernel that sweeps each row's cache once for all its nodes and query heads."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.backends import MOSAIC_TPU
from pallas_kernels.tuning import Question, choose, power_of_two

LANES = 128
MAX_NODES = 64
# Bytes of a tile of keys (of all heads of a block), and query rows of a block: together with the tile of values, second
# copies of both and the float32 sums they stay under the 16 MiB that a kernel may use by default.
TILE_BYTES = 1 << 20
MAX_QUERIES = 2048


def _kernel(
    layer, lengths, q, k_new, v_new, mask, k_cache, v_cache, out, total, norm, top, *, scale, repeats
):  # fmt: skip
    """One tile of one row's cache for a block of key/value heads; the new nodes come first."""
    del layer  # only the block index needs it
    row, tile = pl.program_id(0), pl.program_id(2)
    heads, queries, _ = q.shape
    block = k_cache.shape[1]
    length = lengths[row]

    def absorb(head, keys, values, seen):
        """Add keys and values to the running softmax (Milakov and Gimelshein, 2018) of one head."""
        precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
        product = functools.partial(jax.lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
        scores = product(q[head], keys.astype(q.dtype), (((1,), (1,)), ((), ()))) * scale
        scores = jnp.where(seen, scores, -jnp.inf)
        old = top[head][:, :1]
        new = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp(scores - new)
        fade = jnp.exp(old - new)
        added = jnp.sum(weights, axis=1, keepdims=True)
        norm[head] = jnp.broadcast_to(norm[head][:, :1] * fade + added, (queries, LANES))
        top[head] = jnp.broadcast_to(new, (queries, LANES))
        weighted = product(weights.astype(q.dtype), values.astype(q.dtype), (((1,), (0,)), ((), ())))
        total[head] = total[head] * fade + weighted

    @pl.when(tile == 0)
    def _nodes():
        total[...] = jnp.zeros_like(total)
        norm[...] = jnp.zeros_like(norm)
        top[...] = jnp.full_like(top, -jnp.inf)
        # Query rows are the nodes of one head after those of another.
        seen = jnp.concatenate([mask[...]] * repeats, axis=0) != 0

        @pl.loop(0, heads)
        def _(head):
            absorb(head, k_new[head], v_new[head], seen)

    @pl.when(tile * block < length)
    def _cached():
        left = length - tile * block
        seen = jax.lax.broadcasted_iota(jnp.int32, (queries, block), 1) < left
        # The values of unused slots may be anything, NaN included.
        used = jax.lax.broadcasted_iota(jnp.int32, (block, v_cache.shape[2]), 0) < left

        @pl.loop(0, heads)
        def _(head):
            values = jnp.where(used, v_cache[head].astype(jnp.float32), 0.0)
            absorb(head, k_cache[head], values, seen)

    @pl.when(tile == pl.num_programs(2) - 1)
    def _finish():
        @pl.loop(0, heads)
        def _(head):
            out[head] = (total[head] / norm[head][:, :1]).astype(out.dtype)


def tile_sizes(batch: int, kv_heads: int, queries: int, capacity: int, head_dim: int, itemsize: int) -> tuple[int, int]:
    """Key/value heads of a block and cache slots of a tile.

    Heads are divided as far as `MAX_QUERIES` asks, and by two at least for a single row, so that both cores of a chip
    that has two share the work. Slots fill `TILE_BYTES`, in whole registers, and are at most 1,024.
    """
    heads = kv_heads
    while heads % 2 == 0 and (heads * queries > MAX_QUERIES or (batch == 1 and heads == kv_heads)):
        heads //= 2
    slots = min(TILE_BYTES // (heads * max(head_dim, LANES) * itemsize), 1024)
    return heads, min(max(slots // LANES, 1) * LANES, -(-capacity // LANES) * LANES)


def question(batch: int, queries: int, q_dtype, cache) -> Question:
    """What the tuning table is asked: key/value heads of a block and slots of a tile of `cache`, `[L, B, G, S, h]`."""
    _, _, G, S, h = cache.shape
    itemsize = cache.dtype.itemsize
    heads, block = tile_sizes(batch, G, queries, S, h, itemsize)

    def fits(heads, block):
        # The memory that `tile_sizes` may fill, and as much again.
        slots = 2 * TILE_BYTES // (heads * max(h, LANES) * itemsize)
        return (heads * queries <= MAX_QUERIES or heads == 1) and block <= max(slots, LANES)

    return Question(
        "tree_attention",
        MOSAIC_TPU,
        dtypes=(q_dtype, cache.dtype),
        shape={
            "rows": power_of_two(batch),
            "kv_heads": G,
            "queries": power_of_two(queries),
            "capacity": power_of_two(S),
            "head_dim": h,
        },
        limits={
            "heads": [heads for heads in range(1, G + 1) if G % heads == 0],
            "block": range(LANES, -(-S // LANES) * LANES + 1, LANES),
        },
        heuristic={"heads": heads, "block": block},
        fits=fits,
    )


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
    heads: int | None = None,
    block: int | None = None,
) -> jax.Array:
    """See `pallas_kernels.tree_attention.api.tree_attention`.

    `heads` sets the key/value heads of a block, a divisor of all, and `block` the slots of a tile, a multiple of 128.
    Without both the tuning table is asked, and else `tile_sizes`.
    """
    B, N, H, h = q.shape
    G, S = k_cache.shape[2], k_cache.shape[3]
    for name, x in (("queries", q), ("the cache", k_cache)):
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            raise NotImplementedError(f"The kernel has float32 and bfloat16: got {name} in {x.dtype}.")
    if N > MAX_NODES:
        raise NotImplementedError(f"The kernel takes at most {MAX_NODES} nodes: got {N}.")
    if h % 64:
        raise NotImplementedError(f"The head width must be a multiple of 64: got {h}.")
    if not S:
        raise NotImplementedError("The kernel needs a cache with slots.")
    repeats = H // G
    nodes = -(-N // 16) * 16  # whole tiles of bfloat16, so that stacked heads start at one
    queries = repeats * nodes
    sizes = choose(question(B, queries, q.dtype, k_cache), heads=heads, block=block)
    heads, slots = sizes["heads"], sizes["block"]

    pad = nodes - N
    stacked = jnp.pad(q.reshape(B, N, G, repeats, h), ((0, 0), (0, pad), (0, 0), (0, 0), (0, 0)))
    stacked = stacked.transpose(0, 2, 3, 1, 4).reshape(B, G, queries, h)
    new = [jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, pad), (0, 0))) for x in (k_new, v_new)]
    # Padded nodes see themselves, so that their softmax is one of something.
    seen = jnp.pad(mask, ((0, 0), (0, pad), (0, pad))) | jnp.eye(nodes, dtype=bool)
    lengths = jnp.minimum(lengths, S).astype(jnp.int32)

    def of_head(rows):
        return pl.BlockSpec((None, heads, rows, h), lambda b, g, j, layer, lengths: (b, g, 0, 0))

    def place(b, g, j, layer, lengths):
        # Past a row's last slot the block stays the same, so nothing is copied.
        last = jnp.maximum(jax.lax.div(lengths[b] + (slots - 1), slots) - 1, 0)
        return layer[0], b, g, jnp.minimum(j, last), 0

    cached = pl.BlockSpec((None, None, heads, slots, h), place)
    # The number of tiles is computed on the device: the cost follows the longest row and not the capacity.
    tiles = jnp.maximum(jax.lax.div(jnp.max(lengths) + (slots - 1), slots), 1)
    running = pltpu.VMEM((heads, queries, LANES), jnp.float32)
    out = pl.pallas_call(
        functools.partial(_kernel, scale=1 / math.sqrt(h), repeats=repeats),
        out_shape=jax.ShapeDtypeStruct((B, G, queries, h), q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, G // heads, tiles),
            in_specs=[
                of_head(queries),
                of_head(nodes),
                of_head(nodes),
                pl.BlockSpec((None, nodes, nodes), lambda b, g, j, layer, lengths: (b, 0, 0)),
                cached,
                cached,
            ],
            out_specs=of_head(queries),
            scratch_shapes=[pltpu.VMEM((heads, queries, h), jnp.float32), running, running],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        # The committed lengths are not known here: this is the cost of full rows.
        cost_estimate=pl.CostEstimate(
            flops=4 * B * H * nodes * (S + nodes) * h,
            transcendentals=B * H * nodes * (S + nodes),
            bytes_accessed=2 * B * G * S * h * k_cache.dtype.itemsize + 2 * stacked.nbytes,
        ),
        name="tree_attention",
    )(jnp.asarray(layer, jnp.int32).reshape(1), lengths, stacked, *new, seen.astype(jnp.int32), k_cache, v_cache)
    out = out.reshape(B, G, repeats, nodes, h)[:, :, :, :N]
    return out.transpose(0, 3, 1, 2, 4).reshape(B, N, H, h)
