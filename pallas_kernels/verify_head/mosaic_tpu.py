"""The head of a verify forward on TPU: one kernel that sweeps tiles of the vocabulary for all nodes of all rows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jdlite.decoding.accept import sample_and_match
from jdlite.decoding.sampling import noise_key
from pallas_kernels.backends import MOSAIC_TPU
from pallas_kernels.noise import gumbel_from_bits, key_words, threefry_bits
from pallas_kernels.tuning import Question, choose, power_of_two
from pallas_kernels.verify_head.refusals import require_plain_sampling
from pallas_kernels.verify_head.types import Verified

LANES = 128
# The running list of the largest logits lies in the lanes of one register row.
MAX_TOP = LANES
# Nodes (of all rows) of a block and bytes of their states; bytes of a tile of W; logits of a step. Together, with
# second copies of what is fetched, they stay under the 16 MiB that a kernel may use by default.
MAX_NODES = 256
STATE_BYTES = 1 << 21
TILE_BYTES = 1 << 21
MAX_LOGITS = 1 << 17
# Bytes of the narrowest tile of W, 128 ids, at most.
MAX_TILE_BYTES = 1 << 22


def _kernel(*refs, vocab, transposed, sampled, top_k):
    """One tile of the vocabulary for one block of nodes."""
    names = ["hidden", "weight"] + ["words", "heat"] * sampled + ["token", "log_prob", "broken"]
    names += ["top_ids", "top_logits"] * (top_k > 0) + ["best", "picked", "top", "norm"] + ["left"] * (top_k > 0)
    r = dict(zip(names, refs, strict=True))
    tile = pl.program_id(1)
    rows = r["hidden"].shape[0]
    block = r["weight"].shape[1 if transposed else 0]

    @pl.when(tile == 0)
    def _start():
        for name in ("best", "picked", "top"):
            r[name][...] = jnp.full_like(r[name], -jnp.inf)
        for name in ("token", "broken", "norm"):
            r[name][...] = jnp.zeros_like(r[name])
        if top_k:
            r["top_ids"][...] = jnp.zeros_like(r["top_ids"])
            r["top_logits"][...] = jnp.full_like(r["top_logits"], -jnp.inf)

    def column(name):
        return r[name][:, :1]

    def keep(name, value):
        r[name][...] = jnp.broadcast_to(value, r[name].shape)

    precision = jax.lax.Precision.HIGHEST if r["weight"].dtype == jnp.float32 else None
    dimensions = (((1,), (0 if transposed else 1,)), ((), ()))
    logits = jax.lax.dot_general(
        r["hidden"][...], r["weight"][...], dimensions, precision=precision, preferred_element_type=jnp.float32
    )
    ids = jax.lax.broadcasted_iota(jnp.int32, (rows, block), 1) + tile * block
    # Past the vocabulary a tile of W holds anything, NaN included.
    logits = jnp.where(ids < vocab, logits, -jnp.inf)
    nan = logits != logits
    keep("broken", jnp.maximum(column("broken"), jnp.max(nan.astype(jnp.int32), axis=1, keepdims=True)))
    if top_k:
        r["left"][...] = jnp.where(nan, jnp.inf, logits)
        _merge(r, ids, top_k)

    # Divided and not multiplied by an inverse, as the definition does it, so that no bit differs.
    scaled = logits / r["heat"][:, :1] if sampled else logits
    # The running sum is kept relative to the running maximum; before the first finite logit that is zero.
    top = jnp.maximum(column("top"), jnp.max(scaled, axis=1, keepdims=True))
    finite = jnp.where(top == -jnp.inf, 0.0, top)
    total = jnp.sum(jnp.exp(scaled - finite), axis=1, keepdims=True)
    keep("norm", column("norm") * jnp.exp(column("top") - finite) + total)
    keep("top", top)

    score = scaled
    if sampled:
        noise = gumbel_from_bits(threefry_bits(r["words"][:, :1], r["words"][:, 1:2], ids))
        # The second lane says whether the row is drawn.
        score = score + noise * r["heat"][:, 1:2]
    score = jnp.where(nan, jnp.inf, score)
    best = jnp.max(score, axis=1, keepdims=True)
    token = jnp.min(jnp.where(score == best, ids, vocab - 1), axis=1, keepdims=True)
    picked = jnp.max(jnp.where(ids == token, scaled, -jnp.inf), axis=1, keepdims=True)
    # Strictly, so that the lowest id wins a tie.
    better = best > column("best")
    keep("picked", jnp.where(better, picked, column("picked")))
    keep("token", jnp.where(better, token, column("token")))
    keep("best", jnp.where(better, best, column("best")))

    @pl.when(tile == pl.num_programs(1) - 1)
    def _finish():
        r["log_prob"][...] = r["picked"][...] - (r["top"][...] + jnp.log(r["norm"][...]))


def _merge(r, ids, top_k):
    """Move logits of `left` that are among the k largest so far into the running list, one per row and turn.

    Later tiles have few of them, mostly none, and take as few turns.
    """
    lane = jax.lax.broadcasted_iota(jnp.int32, r["top_ids"].shape, 1)

    def more():
        best = jnp.max(r["left"][...], axis=1, keepdims=True)
        # Strictly: of equal logits the one in the list has the lower id.
        found = jnp.where(best > r["top_logits"][:, top_k - 1 : top_k], 1, 0)
        return jnp.max(jnp.broadcast_to(found, lane.shape))

    def turn(_):
        left, logits, known = r["left"][...], r["top_logits"][...], r["top_ids"][...]
        best = jnp.max(left, axis=1, keepdims=True)
        token = jnp.min(jnp.where(left == best, ids, jnp.iinfo(jnp.int32).max), axis=1, keepdims=True)
        r["left"][...] = jnp.where(ids == token, -jnp.inf, left)
        place = jnp.sum((logits >= best).astype(jnp.int32), axis=1, keepdims=True)
        place = jnp.where(best > logits[:, top_k - 1 : top_k], place, LANES)
        for name, old, new in (("top_logits", logits, best), ("top_ids", known, token)):
            moved = pltpu.roll(old, 1, axis=1)
            r[name][...] = jnp.where(lane < place, old, jnp.where(lane == place, new, moved))
        return more()

    jax.lax.while_loop(lambda found: found > 0, turn, more())


def block_sizes(nodes: int, width: int, vocab: int, itemsize: int) -> tuple[int, int]:
    """Nodes of a block and ids of a tile.

    Nodes are divided evenly into the fewest blocks that `MAX_NODES` and `STATE_BYTES` allow; a tile fills `TILE_BYTES`
    and `MAX_LOGITS`, in whole registers, and has at most 4,096 ids.
    """
    unit = 32 // itemsize
    most = max(min(MAX_NODES, STATE_BYTES // (width * itemsize)) // unit, 1) * unit
    blocks = -(-nodes // most)
    rows = -(-nodes // (blocks * unit)) * unit
    widest = min(TILE_BYTES // (width * itemsize), MAX_LOGITS // rows, 4096)
    return rows, min(max(widest // LANES, 1) * LANES, -(-vocab // LANES) * LANES)


def question(weight, nodes: int, rows: int, ids: int, row_major: bool, sampled: bool, top_k: int) -> Question:
    """What the tuning table is asked: the ids of a tile of W, where `block_sizes` says `rows` and `ids`."""
    V, D = weight.shape
    itemsize = weight.dtype.itemsize
    return Question(
        "verify_head",
        MOSAIC_TPU,
        dtypes=(weight.dtype,),
        shape={
            "nodes": power_of_two(nodes),
            "vocab": V,
            "width": D,
            "row_major": int(row_major),
            "sampled": int(sampled),
            "listed": int(top_k > 0),
        },
        limits={"block": range(LANES, -(-V // LANES) * LANES + 1, LANES)},
        heuristic={"block": ids},
        fits=lambda block: block * D * itemsize <= MAX_TILE_BYTES and block * rows <= 2 * MAX_LOGITS,
    )


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
    block: int | None = None,
) -> Verified:
    """See `pallas_kernels.verify_head.api.verify_head`; `block` sets the ids of a tile, a multiple of 128; None
    leaves it to the tuning table and `block_sizes`.
    """
    del history, generated  # only steps that are refused read them
    require_plain_sampling(sampling)
    if weight.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"The kernel has float32 and bfloat16: got a weight in {weight.dtype}.")
    if top_k > MAX_TOP:
        raise NotImplementedError(f"The kernel keeps at most {MAX_TOP} most likely ids: got {top_k}.")
    V, D = weight.shape
    B, N = drafts.shape
    itemsize = weight.dtype.itemsize
    widest = MAX_TILE_BYTES // (LANES * itemsize)
    if widest < D:
        raise NotImplementedError(f"The kernel takes a width of at most {widest} in {weight.dtype}: got {D}.")
    sampled = sampling.stochastic
    words = key_words(jax.vmap(jax.vmap(noise_key, (None, 0)))(keys, positions)) if sampled else None

    rows, ids = block_sizes(B * N, D, V, itemsize)
    ids = choose(question(weight, B * N, rows, ids, row_major, sampled, top_k), block=block)["block"]
    blocks = pl.cdiv(B * N, rows)
    # XLA stores a matrix transposed where its last axis is no multiple of 128 lanes; so read, it is not copied.
    transposed = D % LANES != 0 and not row_major

    def of_nodes(x, width):
        x = x.reshape(B * N, x.shape[-1])
        x = jnp.pad(x, ((0, blocks * rows - B * N), (0, width - x.shape[1])))
        return x, pl.BlockSpec((rows, width), lambda i, j: (i, 0))

    tile = pl.BlockSpec((D, ids), lambda i, j: (0, j)) if transposed else pl.BlockSpec((ids, D), lambda i, j: (j, 0))
    inputs = [of_nodes(hidden.astype(weight.dtype), D), (weight.T if transposed else weight, tile)]
    if words is not None:
        warm = sampling.temperature > 0
        heat = jnp.stack([jnp.where(warm, sampling.temperature, 1.0), warm.astype(jnp.float32)], axis=1)
        heat = jnp.broadcast_to(heat[:, None], (B, N, 2))
        inputs += [of_nodes(words, LANES), of_nodes(heat, LANES)]
    kinds = [jnp.int32, jnp.float32, jnp.int32] + [jnp.int32, jnp.float32] * (top_k > 0)
    out = pl.pallas_call(
        functools.partial(_kernel, vocab=V, transposed=transposed, sampled=sampled, top_k=top_k),
        out_shape=[jax.ShapeDtypeStruct((blocks * rows, LANES), kind) for kind in kinds],
        grid=(blocks, pl.cdiv(V, ids)),
        in_specs=[spec for _, spec in inputs],
        out_specs=[pl.BlockSpec((rows, LANES), lambda i, j: (i, 0)) for _ in kinds],
        scratch_shapes=[pltpu.VMEM((rows, LANES), jnp.float32)] * 4
        + [pltpu.VMEM((rows, ids), jnp.float32)] * (top_k > 0),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * blocks * rows * V * D,
            transcendentals=(3 if sampled else 1) * blocks * rows * V,
            bytes_accessed=blocks * weight.nbytes + B * N * D * itemsize,
        ),
        name="verify_head",
    )(*(x for x, _ in inputs))
    token, log_prob, broken, *best = (x[: B * N].reshape(B, N, LANES) for x in out)
    tokens = token[..., 0]
    top_ids, top_logits = (x[..., :top_k] for x in best or (token, log_prob))
    return Verified(
        tokens=tokens,
        log_prob=log_prob[..., 0],
        top_ids=top_ids,
        top_logits=top_logits,
        broken=broken[..., 0] > 0,
        acceptance=sample_and_match(tree, drafts, tokens, path_length),
        fused=jnp.array(True),
    )
