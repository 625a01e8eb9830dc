"""What the retrieval drafters share: masked matching over the committed tokens, picking, copying and scoring.

All functions work on the token buffer `[B, S]` of `Context`, whose slots at or past `lengths` hold rubbish that looks
like real ids. Hence two rules: a slot counts because of its index, never because of its value, and every index is
clipped into the buffer before a gather (XLA would wrap or clamp it silently) with a mask saying whether it meant
anything.

Words: the *anchor* is the token at `lengths - 1`. A match *ends* at slot j when the tokens up to j equal the newest
tokens of the row; its *continuation* starts at j + 1. The anchor's own slot is never an end, so a continuation has at
least one token (which may be the anchor itself).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jdlite.drafters.base import Context, Observation
from jdlite.errors import ConfigError
from jdlite.models.cache import write_rows

# Slots per block of the two-level search for the r-th candidate.
_BLOCK = 64
# Up to this match length the loop over suffix positions is unrolled, so that XLA fuses it into one pass.
_UNROLL = 8


def require_positive(drafter: str, **options: int) -> None:
    """Refuse options below 1.

    Raises:
        ConfigError: an option is not a positive integer.
    """
    for name, value in options.items():
        if value < 1:
            raise ConfigError(f"{drafter} needs {name} of at least 1, got {value}; give a positive number.")


def token_at(tokens: Int[Array, "B S"], slot: Int[Array, " B"]) -> Int[Array, " B"]:
    """`tokens[b, slot[b]]`, with the slot clipped into the buffer."""
    slot = jnp.clip(slot, 0, tokens.shape[1] - 1)
    return jnp.take_along_axis(tokens, slot[:, None], axis=1)[:, 0]


def rows_at(values: Shaped[Array, "B S D"], slots: Int[Array, "B Q"]) -> Shaped[Array, "B Q D"]:
    """`values[b, slots[b, q]]`, with the slots clipped into the buffer."""
    slots = jnp.clip(slots, 0, values.shape[1] - 1)
    return jnp.take_along_axis(values, slots[:, :, None], axis=1)


def anchor_positions(context: Context) -> Bool[Array, "B S"]:
    """Slots before the anchor that hold the anchor's token."""
    slot = jnp.arange(context.tokens.shape[1])
    return (context.tokens == context.anchor[:, None]) & (slot < context.lengths[:, None] - 1)


def suffix_lengths(tokens: Int[Array, "B S"], lengths: Int[Array, " B"], max_length: int) -> Int[Array, "B S"]:
    """Length of the common suffix of `tokens[b, :j + 1]` and the whole known row, at most `max_length`.

    Zero at the anchor's own slot and after it. Example: for the row `a b c a b` the values are `0 2 0 0 0`.

    One pass over the buffer per suffix position. A long `max_length` costs only as many passes as the longest match
    found, because the loop ends when no match is alive. It keeps nothing between rounds, so rollback and fork need no
    care.
    """
    B, S = tokens.shape
    slot = jnp.arange(S)
    last = lengths - 1
    padded = jnp.pad(tokens, ((0, 0), (max_length, 0)))

    def extend(d, alive):
        """Keep the ends j whose token j - d equals the d-th token before the anchor."""
        shifted = jax.lax.dynamic_slice_in_dim(padded, max_length - d, S, axis=1)
        return alive & (slot >= d) & (shifted == token_at(tokens, last - d)[:, None])

    alive = slot < last[:, None]
    found = jnp.zeros((B, S), jnp.int32)
    if max_length <= _UNROLL:
        for d in range(max_length):
            alive = extend(d, alive)
            found = found + alive
        return found

    def more(carry):
        d, alive, _ = carry
        return (d < max_length) & alive.any()

    def step(carry):
        d, alive, found = carry
        alive = extend(d, alive)
        return d + 1, alive, found + alive

    return jax.lax.while_loop(more, step, (jnp.zeros((), jnp.int32), alive, found))[2]


def suffix_length_at(
    tokens: Int[Array, "B S"], lengths: Int[Array, " B"], end: Int[Array, " B"], max_length: int = 16
) -> Int[Array, " B"]:
    """`suffix_lengths` at one slot per row, without a pass over the buffer."""
    back = jnp.arange(max_length)
    here = end[:, None] - back
    there = lengths[:, None] - 1 - back
    take = lambda slots: jnp.take_along_axis(tokens, jnp.clip(slots, 0, tokens.shape[1] - 1), axis=1)  # noqa: E731
    same = (take(here) == take(there)) & (here >= 0) & (here < there)
    return jnp.cumprod(same.astype(jnp.int32), axis=1).sum(axis=1)


def first_slot(mask: Bool[Array, "*rows S"]) -> Int[Array, "*rows"]:
    """Lowest marked slot, S where none is marked."""
    S = mask.shape[-1]
    return jnp.where(mask, jnp.arange(S, dtype=jnp.int32), S).min(axis=-1)


def last_slot(mask: Bool[Array, "*rows S"]) -> Int[Array, "*rows"]:
    """Highest marked slot, -1 where none is marked."""
    S = mask.shape[-1]
    return jnp.where(mask, jnp.arange(S, dtype=jnp.int32), -1).max(axis=-1)


def copy_span(
    tokens: Int[Array, "B S"], lengths: Int[Array, " B"], start: Int[Array, "B ..."], count: int
) -> tuple[Int[Array, "B ... K"], Bool[Array, "B ... K"]]:
    """The `count` tokens from `start` on, and which of them are known.

    Args:
        tokens: `[B, S]`.
        lengths: `[B]`; a span is cut at the row's length.
        start: `[B, ...]`; a negative start means "no span", and all its entries come back invalid.
        count: K.

    Returns:
        Tokens and validity, each `[B, ..., K]`.
    """
    B, S = tokens.shape
    slots = start[..., None] + jnp.arange(count)
    valid = (slots < lengths.reshape(B, *[1] * start.ndim)) & (start[..., None] >= 0)
    flat = jnp.clip(slots, 0, S - 1).reshape(B, -1)
    return jnp.take_along_axis(tokens, flat, axis=1).reshape(slots.shape), valid


def keep_distinct(tokens: Int[Array, "B C"], valid: Bool[Array, "B C"]) -> Bool[Array, "B C"]:
    """`valid` without the entries that repeat an earlier valid entry of their row: siblings must differ."""
    same = (tokens[:, :, None] == tokens[:, None, :]) & valid[:, None, :]
    earlier = jnp.tril(jnp.ones((tokens.shape[1], tokens.shape[1]), bool), -1)
    return valid & ~(same & earlier).any(axis=2)


# Candidates: finding the marked slots of a long mask and comparing the states before them.


def _block_counts(mask: Bool[Array, "B Q S"]) -> tuple[Bool[Array, "B Q X W"], Int[Array, "B Q X"]]:
    """The mask in blocks of W slots, and the marked slots up to and including each block."""
    B, Q, S = mask.shape
    blocks = -(-S // _BLOCK)
    mask = jnp.pad(mask, ((0, 0), (0, 0), (0, blocks * _BLOCK - S))).reshape(B, Q, blocks, _BLOCK)
    return mask, jnp.cumsum(mask.sum(axis=3, dtype=jnp.int32), axis=2)


def _ranked_slots(mask: Bool[Array, "B Q X W"], ends: Int[Array, "B Q X"], rank: Int[Array, "B Q C"]):
    """Slot of the marked entry with each rank (0 = lowest slot); meaningless at ranks that do not exist.

    A cumulative sum over all S slots is the dear part of the usual compaction; this one needs it over the blocks, and
    inside the blocks that are asked for.
    """
    blocks, width = mask.shape[2:]
    block = (ends[:, :, None, :] <= rank[..., None]).sum(axis=3, dtype=jnp.int32)
    block = jnp.minimum(block, blocks - 1)
    before = jnp.where(block > 0, jnp.take_along_axis(ends, jnp.maximum(block - 1, 0), axis=2), 0)
    inside = jnp.take_along_axis(mask, block[..., None], axis=2)
    order = jnp.cumsum(inside.astype(jnp.int32), axis=3)
    offset = (order <= (rank - before)[..., None]).sum(axis=3, dtype=jnp.int32)
    return block * width + jnp.minimum(offset, width - 1)


def newest_slots(mask: Bool[Array, "B S"], count: int) -> tuple[Int[Array, "B C"], Bool[Array, "B C"]]:
    """The `count` highest marked slots, highest first, and which of them exist."""
    blocks, ends = _block_counts(mask[:, None])
    rank = ends[:, :, -1:] - 1 - jnp.arange(count)
    slots = _ranked_slots(blocks, ends, jnp.maximum(rank, 0))[:, 0]
    return jnp.clip(slots, 0, mask.shape[1] - 1), rank[:, 0] >= 0


def normalise(states: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
    """States at unit length in float32; a zero state stays zero, so its cosine with anything is 0."""
    states = states.astype(jnp.float32)
    return states * jax.lax.rsqrt(jnp.maximum(jnp.square(states).sum(axis=-1, keepdims=True), 1e-24))


def rerank(
    states: Float[Array, "B S D"],
    candidates: Bool[Array, "B Q S"],
    query: Float[Array, "B Q D"],
    *,
    chunk: int = 64,
) -> tuple[Int[Array, "B Q"], Bool[Array, "B Q"], Float[Array, "B Q"]]:
    """The candidate whose *preceding* state is closest to the query: argmax over j of `states[b, j - 1] . query[b, q]`.

    This is the selection step of PLD+ and of AdaPLD (arXiv 2606.05742, step 4). Only the candidates' states are read,
    `chunk` at a time, so the cost grows with their number and not with S; from S / 8 candidates (and 512) on, reading
    all states in one product is quicker. Slot 0 has no preceding state and is never chosen. Equal similarities go to
    the lowest slot. A NaN similarity is never chosen.

    Args:
        states: unit states of the committed tokens (see `normalise`).
        candidates: marked slots; Q independent searches per row.
        query: unit states to compare with.
        chunk: candidates compared per iteration.

    Returns:
        `[B, Q]` each: the chosen slot (0 where none), whether there is one, and its cosine (-inf where none).
    """
    B, Q, S = candidates.shape
    blocks, ends = _block_counts(candidates & (jnp.arange(S) > 0))
    total = ends[:, :, -1]
    query = query.astype(states.dtype)

    def more(carry):
        return carry[0] < total.max()

    def compare(carry):
        done, slot, best = carry
        rank = jnp.broadcast_to(done + jnp.arange(chunk), (B, Q, chunk))
        slots = _ranked_slots(blocks, ends, rank)
        before = rows_at(states, slots.reshape(B, Q * chunk) - 1).reshape(B, Q, chunk, -1)
        similarity = jnp.einsum("bqcd,bqd->bqc", before, query, preferred_element_type=jnp.float32, precision="highest")
        usable = (rank < total[:, :, None]) & ~jnp.isnan(similarity)
        similarity = jnp.where(usable, similarity, -jnp.inf)
        pick = similarity.argmax(axis=2)[..., None]
        value = jnp.take_along_axis(similarity, pick, axis=2)[..., 0]
        better = value > best
        slot = jnp.where(better, jnp.take_along_axis(slots, pick, axis=2)[..., 0], slot)
        return done + chunk, slot, jnp.where(better, value, best)

    def sparse():
        start = (jnp.zeros((), jnp.int32), jnp.zeros((B, Q), jnp.int32), jnp.full((B, Q), -jnp.inf, jnp.float32))
        return jax.lax.while_loop(more, compare, start)[1:]

    def dense():
        similarity = jnp.einsum("bsd,bqd->bqs", states, query, preferred_element_type=jnp.float32, precision="highest")
        before = jnp.pad(similarity, ((0, 0), (0, 0), (1, 0)))[:, :, :S]
        before = jnp.where(candidates & (jnp.arange(S) > 0) & ~jnp.isnan(before), before, -jnp.inf)
        best = before.max(axis=2)
        slot = first_slot(before == best[:, :, None])
        return jnp.where(best > -jnp.inf, slot, 0), best

    limit = max(S // 8, 512)
    slot, best = sparse() if limit >= S else jax.lax.cond(total.max() > limit, dense, sparse)
    return slot, best > -jnp.inf, best


def default_rerank_layer(num_layers: int, fraction: float = 29 / 36) -> int:
    """Tap of the layer whose states pick among candidates, for a target of `num_layers` layers.

    Published choices, as indices into transformers' `hidden_states` (0 = embedding output): Qwen3-8B 29 of 36 layers,
    Vicuna-7B 9 of 32, -13B 13 of 40, -33B 11 of 60. The default fraction is Qwen3's; 9 / 32 suits older Llama-family
    chat models. The layer is `round(fraction * num_layers)`, and tap l is `hidden_states[l + 1]`, hence the minus one.

    Example: 36 layers give tap 28, and 32 layers with `fraction=9 / 32` give tap 8.
    """
    return min(max(round(fraction * num_layers) - 1, 0), num_layers - 1)


def rerank_tap(drafter: str, layer: int | None, num_layers: int) -> int:
    """The tap to ask for: the option where it is given, and the default for the depth otherwise.

    Raises:
        ConfigError: the option is not a layer of the target.
    """
    if layer is None:
        return default_rerank_layer(num_layers)
    if not 0 <= layer < num_layers:
        raise ConfigError(
            f"{drafter} got rerank_layer {layer} for a target of {num_layers} layers; "
            f"give 0 to {num_layers - 1}, or None for the default."
        )
    return layer


def record(buffer: Shaped[Array, "B S *D"], node_values: Shaped[Array, "B N *D"], observation: Observation):
    """Write the committed nodes' values into a per-position buffer at the positions they were committed to.

    Args:
        buffer: `[B, S, ...]`.
        node_values: `[B, N, ...]`, one value per node of the observation.
        observation: says which nodes were committed, and where.
    """
    S = buffer.shape[1]
    values = observation.committed(node_values)[:, :S]
    count = jnp.clip(observation.count, 0, S - observation.start)
    return write_rows(buffer, values, observation.start, count, row=0, slot=1)


# Expected gain.


def step_acceptance(match_length: Int[Array, "*any"]) -> Float[Array, "*any"]:
    """Prior probability that the token after a match of this many tokens is what the target says next: m / (m + 1.5).

    0.4 after a single token, 0.67 after three, 0.91 after sixteen, 0 without a match. The shape is that of reuse
    statistics published for lookup drafters: a single-token match is right about two times in five, and a copy that
    has survived some tokens mostly goes on.
    """
    length = match_length.astype(jnp.float32)
    return length / (length + 1.5)


def chain_gain(match_length: Int[Array, "*any"], depth: int) -> Float[Array, "*any K"]:
    """Estimated probability that copied token 1, 2, ..., `depth` after a match is accepted, along a new last axis.

    Each accepted copy makes the match one token longer, so the step probabilities rise along the chain; their running
    product falls.
    """
    return jnp.cumprod(step_acceptance(match_length[..., None] + jnp.arange(depth)), axis=-1)
