"""The low-rank head on TPU: one kernel whose grid is K serial steps by tiles of the vocabulary."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Shaped

from pallas_kernels.backends import MOSAIC_TPU
from pallas_kernels.low_rank_head.types import Drafts, HeadWeights
from pallas_kernels.noise import gumbel_from_bits, key_words, threefry_bits
from pallas_kernels.tuning import Question, choose, power_of_two

LANES = 128
MAX_ROWS = 64
# Bytes of a tile of W_o: large enough to hide the latency of a copy, small enough that two of them and the float32
# logits of 64 rows stay well under the 16 MiB that a kernel may use by default.
TILE_BYTES = 3 << 19
MAX_LOGITS = 1 << 17


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedHead:
    """`HeadWeights` in the layout that the kernel reads; Rp is R rounded up to 128 and Vp is V rounded up to 128.

    XLA gives an array whose last axis is no multiple of 128 a transposed layout and copies it back before a kernel
    reads it, so W_o is stored `[R, Vp]`. What is indexed by lane is padded to Rp with zeros, which stay zeros through
    the recurrence.

    Attributes:
        embed: `[V rounded up to whole tiles, Rp]`.
        gates_state: `[Rp, 2 Rp]`, W_s' columns for the state, transposed; the gate first.
        gates_embed: `[Rp, 2 Rp]`, those for the embedding.
        gates_bias: `[1, 2 Rp]` float32.
        mix_state: `[Rp, Rp]`, W_u's columns for the state, transposed.
        mix_hidden: `[D, Rp]`, those for the backbone state.
        mix_bias: `[Rp]` float32.
        output: `[R, Vp]`.
        output_scale: `[1, Vp]` float32, or None.
        vocab: V, static.
    """

    embed: Float[Array, "Vt Rp"]
    gates_state: Float[Array, "Rp 2Rp"]
    gates_embed: Float[Array, "Rp 2Rp"]
    gates_bias: Float[Array, "1 2Rp"]
    mix_state: Float[Array, "Rp Rp"]
    mix_hidden: Float[Array, "D Rp"]
    mix_bias: Float[Array, " Rp"]
    output: Shaped[Array, "R Vp"]
    output_scale: Float[Array, "1 Vp"] | None
    vocab: int = dataclasses.field(metadata={"static": True})


def _group(dtype) -> int:
    """Rows of a table that lie in one tile of memory (a power of two); only whole tiles can be copied by row number."""
    return 8 if jnp.dtype(dtype).itemsize == 4 else 16


def pack(weights: HeadWeights) -> PackedHead:
    """Lay the weights out for the kernel.

    Raises:
        NotImplementedError: a dtype or a rank that the kernel does not have.
    """
    dtype = weights.embed.dtype
    V, R = weights.output.shape
    if dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"The head's weights must be float32 or bfloat16: got {dtype}.")
    if weights.output.dtype not in (dtype, jnp.int8, jnp.float8_e4m3fn):
        raise NotImplementedError(
            f"W_o must be {dtype} like the other weights, int8 or float8_e4m3fn: got {weights.output.dtype}."
        )
    if R % 8:
        raise NotImplementedError(f"The rank must be a multiple of 8: got {R}.")
    Rp, Vp, Vt = (-(-size // unit) * unit for size, unit in ((R, LANES), (V, LANES), (V, _group(dtype))))

    def grown(x, rows, columns):
        return jnp.pad(x, ((0, rows - x.shape[0]), (0, columns - x.shape[1])))

    def gates(columns):
        return jnp.concatenate([grown(part.T, Rp, Rp) for part in jnp.split(columns, 2)], axis=1)

    bias = jnp.split(weights.state_bias.astype(jnp.float32)[None], 2, axis=1)
    scale = weights.output_scale
    return PackedHead(
        embed=grown(weights.embed, Vt, Rp),
        gates_state=gates(weights.state_weight[:, :R]),
        gates_embed=gates(weights.state_weight[:, R:]),
        gates_bias=jnp.concatenate([grown(part, 1, Rp) for part in bias], axis=1),
        mix_state=grown(weights.mix_weight[:, :R].T, Rp, Rp),
        mix_hidden=grown(weights.mix_weight[:, R:].T, weights.mix_weight.shape[1] - R, Rp),
        mix_bias=jnp.pad(weights.mix_bias.astype(jnp.float32), (0, Rp - R)),
        output=grown(weights.output.T, R, Vp),
        output_scale=None if scale is None else grown(scale.astype(jnp.float32)[None], 1, Vp),
        vocab=V,
    )


def _dot(x, weight):
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dimensions = (((x.ndim - 1,), (0,)), ((), ()))
    return jax.lax.dot_general(x, weight, dimensions, precision=precision, preferred_element_type=jnp.float32)


def logits(weights: PackedHead, u: Float[Array, "*B R"]) -> Float[Array, "*B V"]:
    """`W_o u` in float32."""
    out = _dot(u, weights.output.astype(u.dtype))
    if weights.output_scale is not None:
        out = out * weights.output_scale[0]
    return out[..., : weights.vocab]


def _kernel(first, *refs, vocab, group, sampled, scaled):
    """One tile of the vocabulary in one step; `first` are the anchors in scalar memory."""
    names = ["state_in", "hidden", "gates_state", "gates_embed", "gates_bias", "mix_state", "output", "embed"]
    names += ["scale"] * scaled + ["words", "heat"] * sampled + ["tokens", "log_q", "u_out"]
    names += ["state", "u", "best", "token", "picked", "top", "norm", "fetched", "embedded", "ids", "arrived"]
    r = dict(zip(names, refs, strict=True))
    step, tile = pl.program_id(0), pl.program_id(1)
    rows, width = r["state"].shape
    block = r["output"].shape[1]

    @pl.when(tile == 0)
    def _recur():
        @pl.when(step == 0)
        def _():
            r["state"][...] = r["state_in"][...]

        def previous(b):
            return jnp.clip(jnp.where(step == 0, first[b], r["ids"][b]), 0, vocab - 1)

        def fetch(b):
            start = pl.multiple_of(previous(b) & -group, group)
            return pltpu.make_async_copy(r["embed"].at[pl.ds(start, group)], r["fetched"].at[b], r["arrived"])

        @pl.loop(0, rows)
        def _(b):
            fetch(b).start()

        @pl.loop(0, rows)
        def _(b):
            fetch(b).wait()

        inside = jax.lax.broadcasted_iota(jnp.int32, (group, width), 0)

        @pl.loop(0, rows)
        def _(b):
            wanted = jnp.where(inside == previous(b) & (group - 1), r["fetched"][b].astype(jnp.float32), 0.0)
            r["embedded"][pl.ds(b, 1), :] = jnp.sum(wanted, axis=0, keepdims=True)

        dtype = r["u"].dtype
        both = _dot(r["state"][...].astype(dtype), r["gates_state"][...])
        both += _dot(r["embedded"][...].astype(dtype), r["gates_embed"][...]) + r["gates_bias"][...]
        gate = jax.nn.sigmoid(both[:, :width])
        state = gate * r["state"][...] + (1 - gate) * jnp.tanh(both[:, width:])
        r["state"][...] = state
        u = _dot(state.astype(dtype), r["mix_state"][...]) + r["hidden"][...]
        r["u"][...] = r["u_out"][...] = u[:, : r["u"].shape[1]].astype(dtype)
        for name in ("best", "picked", "top"):
            r[name][...] = jnp.full_like(r[name], -jnp.inf)
        r["norm"][...] = jnp.zeros_like(r["norm"])
        r["token"][...] = jnp.zeros_like(r["token"])

    def column(name):
        return r[name][:, :1]

    def keep(name, value):
        r[name][...] = jnp.broadcast_to(value, r[name].shape)

    logits = _dot(r["u"][...], r["output"][...].astype(r["u"].dtype))
    if scaled:
        logits = logits * r["scale"][...]
    if sampled:
        logits = logits * r["heat"][:, :1]
    ids = jax.lax.broadcasted_iota(jnp.int32, (rows, block), 1) + tile * block
    logits = jnp.where(ids < vocab, logits, -jnp.inf)

    # The running sum is kept relative to the running maximum; before the first finite logit that is zero.
    top = jnp.maximum(column("top"), jnp.max(logits, axis=1, keepdims=True))
    finite = jnp.where(top == -jnp.inf, 0.0, top)
    total = jnp.sum(jnp.exp(logits - finite), axis=1, keepdims=True)
    keep("norm", column("norm") * jnp.exp(column("top") - finite) + total)
    keep("top", top)

    score = logits
    if sampled:
        noise = gumbel_from_bits(threefry_bits(r["words"][:, :1], r["words"][:, 1:2], ids))
        # A negative inverse temperature cannot be; the second lane says whether the row is drawn.
        score = logits + noise * r["heat"][:, 1:2]
    score = jnp.where(logits != logits, jnp.inf, score)
    best = jnp.max(score, axis=1, keepdims=True)
    token = jnp.min(jnp.where(score == best, ids, vocab - 1), axis=1, keepdims=True)
    picked = jnp.sum(jnp.where(ids == token, logits, 0.0), axis=1, keepdims=True)
    # Strictly, so that the lowest id wins a tie.
    better = best > column("best")
    keep("picked", jnp.where(better, picked, column("picked")))
    keep("token", jnp.where(better, token, column("token")))
    keep("best", jnp.where(better, best, column("best")))

    @pl.when(tile == pl.num_programs(1) - 1)
    def _finish():
        r["tokens"][...] = r["token"][...]
        r["log_q"][...] = r["picked"][...] - (r["top"][...] + jnp.log(r["norm"][...]))
        row = jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 0)

        @pl.loop(0, rows)
        def _(b):
            r["ids"][b] = jnp.max(jnp.where(row == b, r["token"][...], 0))


def tile_size(rank: int, rows: int, vocab: int, itemsize: int) -> int:
    """Columns of W_o per tile: `TILE_BYTES` of it, at most 4,096 and at most 131,072 logits, in whole registers."""
    widest = min(TILE_BYTES // (rank * itemsize), 4096, MAX_LOGITS // rows)
    return min(max(widest // LANES, 1) * LANES, -(-vocab // LANES) * LANES)


def question(packed: PackedHead, rows: int, sampled: bool) -> Question:
    """What the tuning table is asked: the columns of a tile, at most twice the bytes and logits of `tile_size`."""
    output = packed.output
    R, Vp = output.shape
    itemsize = output.dtype.itemsize
    return Question(
        "low_rank_head",
        MOSAIC_TPU,
        dtypes=(packed.embed.dtype, output.dtype),
        shape={"rows": power_of_two(rows), "vocab": packed.vocab, "rank": R, "sampled": int(sampled)},
        limits={"block": range(LANES, Vp + 1, LANES)},
        heuristic={"block": tile_size(R, rows, packed.vocab, itemsize)},
        fits=lambda block: block * R * itemsize <= 2 * TILE_BYTES and block * rows <= 2 * MAX_LOGITS,
    )


def low_rank_head(
    weights: HeadWeights | PackedHead, hidden, anchor, state, keys=None, temperature=None, *, block: int | None = None
) -> Drafts:
    """See `pallas_kernels.low_rank_head.api.low_rank_head`; `block` sets the columns of a tile, a multiple of 128;
    None leaves it to the tuning table and `tile_size`.
    """
    B, K = hidden.shape[:2]
    if B > MAX_ROWS:
        raise NotImplementedError(f"The kernel drafts for at most {MAX_ROWS} rows: got {B}.")
    words = None if keys is None else key_words(keys)
    packed = pack(weights) if isinstance(weights, HeadWeights) else weights
    dtype = packed.embed.dtype
    R, Vp = packed.output.shape
    Rp = packed.mix_state.shape[0]
    rows = -(-B // 8) * 8
    scaled, sampled = packed.output_scale is not None, words is not None
    block = choose(question(packed, rows, sampled), block=block)["block"]

    # What the backbone states contribute is one product for all K.
    hidden_part = _dot(hidden.astype(dtype), packed.mix_hidden).swapaxes(0, 1)
    hidden_part = jnp.pad(hidden_part + packed.mix_bias, ((0, 0), (0, rows - B), (0, 0)))
    whole = lambda *shape: pl.BlockSpec(shape, lambda k, j, first: (0,) * len(shape))  # noqa: E731
    each = lambda *shape: pl.BlockSpec((None, *shape), lambda k, j, first: (k, 0, 0))  # noqa: E731
    inputs = [
        (jnp.pad(state.astype(jnp.float32), ((0, rows - B), (0, Rp - R))), whole(rows, Rp)),
        (hidden_part, each(rows, Rp)),
        (packed.gates_state, whole(Rp, 2 * Rp)),
        (packed.gates_embed, whole(Rp, 2 * Rp)),
        (packed.gates_bias, whole(1, 2 * Rp)),
        (packed.mix_state, whole(Rp, Rp)),
        (packed.output, pl.BlockSpec((R, block), lambda k, j, first: (0, j))),
        (packed.embed, pl.BlockSpec(memory_space=pl.ANY)),
    ]
    if packed.output_scale is not None:
        inputs.append((packed.output_scale, pl.BlockSpec((1, block), lambda k, j, first: (0, j))))
    if words is not None:
        assert temperature is not None
        words = jnp.pad(words.swapaxes(0, 1), ((0, 0), (0, rows - B), (0, LANES - 2)))
        cold = temperature <= 0
        heat = jnp.stack([1 / jnp.where(cold, 1.0, temperature), jnp.where(cold, 0.0, 1.0)], axis=1)
        heat = jnp.pad(heat.astype(jnp.float32), ((0, rows - B), (0, LANES - 2)))
        inputs += [(words, each(rows, LANES)), (heat, whole(rows, LANES))]
    group = _group(dtype)
    running = pltpu.VMEM((rows, LANES), jnp.float32)
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(K, pl.cdiv(Vp, block)),
        in_specs=[spec for _, spec in inputs],
        out_specs=(each(rows, LANES), each(rows, LANES), each(rows, R)),
        scratch_shapes=[
            pltpu.VMEM((rows, Rp), jnp.float32),
            pltpu.VMEM((rows, R), dtype),
            running,
            pltpu.VMEM((rows, LANES), jnp.int32),
            running,
            running,
            running,
            pltpu.VMEM((rows, group, Rp), dtype),
            pltpu.VMEM((rows, Rp), jnp.float32),
            pltpu.SMEM((rows,), jnp.int32),
            pltpu.SemaphoreType.DMA(()),
        ],
    )
    tokens, log_q, u = pl.pallas_call(
        functools.partial(_kernel, vocab=packed.vocab, group=group, sampled=sampled, scaled=scaled),
        out_shape=(
            jax.ShapeDtypeStruct((K, rows, LANES), jnp.int32),
            jax.ShapeDtypeStruct((K, rows, LANES), jnp.float32),
            jax.ShapeDtypeStruct((K, rows, R), dtype),
        ),
        grid_spec=spec,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        cost_estimate=_cost(packed, K, rows, group),
        name="low_rank_head",
    )(jnp.pad(anchor.astype(jnp.int32), (0, rows - B)), *(x for x, _ in inputs))
    return Drafts(tokens[:, :B, 0].T, log_q[:, :B, 0].T, u[:, :B].swapaxes(0, 1))


def _cost(packed: PackedHead, steps: int, rows: int, group: int) -> pl.CostEstimate:
    """What the kernel moves and computes: W_o once per step, a tile of the table per row and step, the rest once."""
    small = (packed.gates_state, packed.gates_embed, packed.mix_state)
    swept = packed.output.nbytes + (packed.output_scale.nbytes if packed.output_scale is not None else 0)
    fetched = rows * group * packed.embed.shape[1] * packed.embed.dtype.itemsize
    return pl.CostEstimate(
        flops=2 * steps * rows * (packed.output.size + sum(x.size for x in small)),
        transcendentals=steps * rows * packed.output.shape[1],
        bytes_accessed=steps * (swept + fetched) + sum(x.nbytes for x in small),
    )
