"""From logits to tokens: one processed distribution for plain decoding, verification and bonus token.

`Sampling` is what a user writes for one row, `SamplingArrays` is the same for a batch inside jit, `processed_logits` is
the only place where logits are changed, and `draw` is the only place where a token of the target is chosen. The steps
have the order and the meaning of transformers' logits processors:

    repetition penalty -> presence and frequency penalty -> banned ids -> minimum of new tokens
    -> temperature -> top-k -> top-p -> min-p      (these four only for rows with a temperature above 0)

Presence and frequency penalty, which transformers lacks, are the OpenAI ones: they count generated tokens only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from jdlite.decoding.penalties import History, penalised
from jdlite.errors import ConfigError
from jdlite.models.layers import k_largest
from pallas_kernels.noise import gumbel_from_bits, key_words, threefry_bits

MIN_TEMPERATURE = 1e-6  # below it logits / temperature leaves float32
# Where no row keeps more tokens than this by top-k, only these are looked at for top-p and given noise. One number for
# all, so that another top-k compiles nothing.
FEW_TOKENS = 64

# Streams of noise other than the target's own draws, folded into the row key before the position. Positions are below
# 2**31, so a stream never shares a key with a draw of the target.
DRAFT, ACCEPT, RESIDUAL = 0xF0000001, 0xF0000002, 0xF0000003


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How one row is sampled. The default is greedy decoding.

    Attributes:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens (and all that tie with the k-th); 0 is off.
        top_p: keep the smallest set of most likely tokens whose probability reaches `top_p`; 1 is off.
        min_p: keep tokens whose probability is at least `min_p` times that of the most likely one; 0 is off.
        repetition_penalty: logits of tokens in the prompt or the generated text are divided by it where positive and
            multiplied by it where negative; 1 is off.
        presence_penalty: subtracted once from the logit of every token generated so far; 0 is off.
        frequency_penalty: subtracted as often as the token was generated so far; 0 is off.
        banned_ids: tokens that are never emitted.
        min_new_tokens: no stop id is emitted before this many new tokens. Stop sequences are not held back.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    banned_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            numeric = field.name != "banned_ids"
            if numeric and (isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value)):
                raise ConfigError(f"{field.name} is {value!r}; give a finite number.")
        if self.temperature < 0:
            raise ConfigError(f"temperature is {self.temperature}; give 0 for greedy decoding or a positive number.")
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ConfigError(
                f"temperature is {self.temperature}; give 0 for greedy decoding or at least {MIN_TEMPERATURE}."
            )
        if not isinstance(self.top_k, int) or self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}; give a whole number of tokens, or 0 to keep all.")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; give a number above 0 and at most 1, where 1 keeps all tokens.")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p is {self.min_p}; give a number from 0 to 1, where 0 keeps all tokens.")
        if self.repetition_penalty <= 0:
            raise ConfigError(
                f"repetition_penalty is {self.repetition_penalty}; give a positive number, where 1 is off."
            )
        if not isinstance(self.min_new_tokens, int) or self.min_new_tokens < 0:
            raise ConfigError(f"min_new_tokens is {self.min_new_tokens}; give a whole number of tokens, 0 or more.")
        object.__setattr__(self, "banned_ids", tuple(self.banned_ids))
        for token in self.banned_ids:
            if isinstance(token, bool) or not isinstance(token, int | np.integer) or token < 0:
                raise ConfigError(f"banned_ids holds {token!r}; give non-negative token ids.")

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> Sampling:
        """The sampling that a Hugging Face `generation_config.json` asks for.

        Without `do_sample` it is greedy and the temperature and truncation in the file do not count. A field that is
        absent takes transformers' default, so a sampling file without `top_k` means 50.

        Raises:
            ConfigError: the file turns on a step that jdlite does not have.
        """
        config = {name: value for name, value in config.items() if value is not None}
        refused = [name for name, off in _UNSUPPORTED.items() if config.get(name, off) != off]
        words = config.get("bad_words_ids", [])
        if any(len(word) != 1 for word in words):
            refused.append("bad_words_ids of several tokens")
        if refused:
            raise ConfigError(
                f"the generation config uses {', '.join(refused)}, which jdlite does not have; "
                "remove it from the file or pass sampling options yourself."
            )
        banned = {*config.get("suppress_tokens", ()), *(word[0] for word in words)}
        shared = {
            "repetition_penalty": float(config.get("repetition_penalty", 1.0)),
            "banned_ids": tuple(sorted(banned)),
            "min_new_tokens": config.get("min_new_tokens", 0),
        }
        if not config.get("do_sample", False):
            return cls(**shared)
        return cls(
            temperature=float(config.get("temperature", 1.0)),
            top_k=config.get("top_k", 50),
            top_p=float(config.get("top_p", 1.0)),
            min_p=float(config.get("min_p", 0.0)),
            **shared,
        )


GREEDY = Sampling()

# Fields of a generation config that change the distribution and that jdlite lacks, with the value that turns them off.
_UNSUPPORTED = {
    "num_beams": 1,
    "guidance_scale": 1,
    "sequence_bias": {},
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "begin_suppress_tokens": [],
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "watermarking_config": None,
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingArrays:
    """The sampling of a batch. A row that does not use a step passes through it unchanged, bit for bit.

    The flags are static: a step that no row uses is not compiled, and a batch of greedy rows costs one argmax.

    Attributes:
        temperature, repetition_penalty, presence_penalty, frequency_penalty, min_p: `[B]` float32, as in `Sampling`.
        top_k: `[B]` int32, 0 where off; off for greedy rows.
        tail: `[B]` float32, `1 - top_p`, rounded once so that it compares as in transformers; 0 for greedy rows.
        min_new_tokens: `[B]` int32.
        stop_ids: `[B, E]` int32, padded with -1.
        banned: `[B, V]` bool, or None when no row bans anything.
        stochastic: some row has a temperature above 0.
        uses_top_k, uses_top_p, uses_min_p: some row with a temperature above 0 uses that truncation.
        keeps_few: every row with a temperature above 0 has a top-k, and none above `FEW_TOKENS`.
        penalises: some row uses one of the three penalties, so a `History` is needed.
        min_new: some row has a minimum of new tokens and stop ids.
    """

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    tail: Float[Array, " B"]
    min_p: Float[Array, " B"]
    repetition_penalty: Float[Array, " B"]
    presence_penalty: Float[Array, " B"]
    frequency_penalty: Float[Array, " B"]
    min_new_tokens: Int[Array, " B"]
    stop_ids: Int[Array, "B E"]
    banned: Bool[Array, "B V"] | None
    stochastic: bool = dataclasses.field(metadata={"static": True})
    uses_top_k: bool = dataclasses.field(metadata={"static": True})
    uses_top_p: bool = dataclasses.field(metadata={"static": True})
    uses_min_p: bool = dataclasses.field(metadata={"static": True})
    keeps_few: bool = dataclasses.field(metadata={"static": True})
    penalises: bool = dataclasses.field(metadata={"static": True})
    min_new: bool = dataclasses.field(metadata={"static": True})

    @property
    def bans(self) -> bool:
        """Whether some row bans tokens."""
        return self.banned is not None

    @property
    def truncates(self) -> bool:
        """Whether some row uses top-k, top-p or min-p."""
        return self.uses_top_k or self.uses_top_p or self.uses_min_p


def stack(rows: Sampling | Sequence[Sampling], batch: int, vocab_size: int, stop_ids: Any = None) -> SamplingArrays:
    """Bring the sampling of each row into arrays.

    Args:
        rows: one for all rows, or one per row.
        batch: B.
        vocab_size: V.
        stop_ids: `[B, E]` integers padded with -1 (`Stops.ids`), or None for none.

    Raises:
        ConfigError: a wrong number of rows, a banned id outside the vocabulary, or a row that leaves no token allowed.
    """
    rows = [rows] * batch if isinstance(rows, Sampling) else list(rows)
    if len(rows) != batch:
        raise ConfigError(
            f"{len(rows)} samplings were given for a batch of {batch}; give one for all rows or one per row."
        )
    stops = np.full((batch, 0), -1, np.int32) if stop_ids is None else np.asarray(stop_ids, np.int32)
    banned = np.zeros((batch, vocab_size), bool)
    for b, row in enumerate(rows):
        if row.banned_ids and max(row.banned_ids) >= vocab_size:
            raise ConfigError(f"row {b} bans token {max(row.banned_ids)}, but the vocabulary has {vocab_size} tokens.")
        banned[b, list(row.banned_ids)] = True
        early = {int(t) for t in stops[b] if 0 <= t < vocab_size} if row.min_new_tokens else set()
        if banned[b].sum() + sum(not banned[b, t] for t in early) >= vocab_size:
            raise ConfigError(f"row {b} bans every token of the vocabulary; allow at least one that is no stop id.")

    warm = [row.temperature > 0 for row in rows]
    floats = lambda values: jnp.asarray(np.array(values, np.float32))  # noqa: E731
    ints = lambda values: jnp.asarray(np.array(values, np.int32))  # noqa: E731
    penalising = [(r.repetition_penalty, r.presence_penalty, r.frequency_penalty) != (1, 0, 0) for r in rows]
    waiting = [r.min_new_tokens > 0 and bool((s >= 0).any()) for r, s in zip(rows, stops, strict=True)]
    return SamplingArrays(
        temperature=floats([r.temperature for r in rows]),
        top_k=ints([min(r.top_k, vocab_size) * w for r, w in zip(rows, warm, strict=True)]),
        tail=floats([(1 - r.top_p) * w for r, w in zip(rows, warm, strict=True)]),
        min_p=floats([r.min_p * w for r, w in zip(rows, warm, strict=True)]),
        repetition_penalty=floats([r.repetition_penalty for r in rows]),
        presence_penalty=floats([r.presence_penalty for r in rows]),
        frequency_penalty=floats([r.frequency_penalty for r in rows]),
        min_new_tokens=ints([r.min_new_tokens for r in rows]),
        stop_ids=ints(stops),
        banned=jnp.asarray(banned) if banned.any() else None,
        stochastic=any(warm),
        uses_top_k=any(w and r.top_k > 0 for r, w in zip(rows, warm, strict=True)),
        uses_top_p=any(w and r.top_p < 1 for r, w in zip(rows, warm, strict=True)),
        uses_min_p=any(w and r.min_p > 0 for r, w in zip(rows, warm, strict=True)),
        keeps_few=any(warm)
        and all(0 < min(r.top_k, vocab_size) <= FEW_TOKENS for r, w in zip(rows, warm, strict=True) if w),
        penalises=any(penalising),
        min_new=any(waiting),
    )


def processed_logits(
    logits: Float[Array, "B N V"],
    sampling: SamplingArrays,
    *,
    history: History | None,
    generated: Int[Array, "B N"],
) -> Float[Array, "B N V"]:
    """Logits of the distribution that is sampled from, float32; a token that may not be drawn has -inf.

    Args:
        logits: of the target, for the N nodes of a tree, or N = 1 in plain decoding.
        sampling: of each row.
        history: needed when `sampling.penalises`; from `node_history` when the nodes are drafts.
        generated: new tokens of the row before the one that the node predicts: committed ones plus the node's depth.
    """
    x = logits.astype(jnp.float32)
    if sampling.penalises:
        if history is None:
            raise ValueError("this sampling uses penalties, so processed_logits needs a history.")
        x = penalised(
            x,
            history,
            repetition=sampling.repetition_penalty,
            presence=sampling.presence_penalty,
            frequency=sampling.frequency_penalty,
        )
    if sampling.banned is not None:
        x = jnp.where(sampling.banned[:, None, :], -jnp.inf, x)
    if sampling.min_new:
        B, N, V = x.shape
        early = generated < sampling.min_new_tokens[:, None]
        index = jnp.where(early[:, :, None] & (sampling.stop_ids >= 0)[:, None, :], sampling.stop_ids[:, None, :], V)
        x = x.at[jnp.arange(B)[:, None, None], jnp.arange(N)[:, None], index].set(-jnp.inf, mode="drop")
    if sampling.stochastic:
        x = x / _column(jnp.where(sampling.temperature > 0, sampling.temperature, 1.0))
    if sampling.truncates:
        x = _truncated(x, sampling)
    return x


def _column(values: Shaped[Array, " B"]) -> Shaped[Array, "B 1 1"]:
    """`[B]` to `[B, 1, 1]`."""
    return values[:, None, None]


def _truncated(x: Float[Array, "B N V"], sampling: SamplingArrays) -> Float[Array, "B N V"]:
    """Top-k, then top-p, then min-p.

    Borders are found by bisection instead of by a sort, which costs many times more on a CPU, or among the few tokens
    that top-k leaves. Where several tokens tie at the border of top-p, as many are kept as in transformers, lowest ids
    first (there the sort decides which).
    """
    kth = top = None
    if sampling.keeps_few:
        top = k_largest(x, min(FEW_TOKENS, x.shape[-1]))
        place = jnp.broadcast_to(_column(jnp.maximum(sampling.top_k - 1, 0)), (*x.shape[:-1], 1))
        kth = jnp.where(_column(sampling.top_k) > 0, jnp.take_along_axis(top, place, axis=-1), -jnp.inf)
    elif sampling.uses_top_k:
        k = _column(jnp.where(sampling.top_k > 0, sampling.top_k, x.shape[-1]))
        kth = _largest(lambda t: (x >= t).sum(axis=-1, keepdims=True, dtype=jnp.int32) >= k, x)
    if kth is not None:
        x = jnp.where(x < kth, -jnp.inf, x)
    if sampling.uses_top_p:
        tail = _column(sampling.tail)
        if top is None or kth is None:
            border, below, share = _top_p_border(x, tail)
        else:
            border, below, share = _top_p_border_of_few(x, top, kth, tail)
        equal = x == border
        ties = equal.sum(axis=-1, keepdims=True, dtype=jnp.int32)
        removed = jnp.floor((tail - below) / jnp.maximum(share, jnp.finfo(jnp.float32).tiny)).astype(jnp.int32)
        kept = jnp.maximum(ties - jnp.maximum(removed, 0), 1)
        on = tail > 0
        # Only where some of those at the border go must they be counted one by one, which is slow.
        late = jax.lax.cond(
            jnp.any(on & (kept < ties)),
            lambda: jnp.cumsum(equal, axis=-1, dtype=jnp.int32) > kept,
            lambda: jnp.zeros(x.shape, bool),
        )
        x = jnp.where(on & ((x < border) | (equal & late)), -jnp.inf, x)
    if sampling.uses_min_p:
        p = jax.nn.softmax(x, axis=-1)
        x = jnp.where(p < _column(sampling.min_p) * p.max(axis=-1, keepdims=True), -jnp.inf, x)
    return x


_Border = tuple[Float[Array, "B N 1"], Float[Array, "B N 1"], Float[Array, "B N 1"]]


def _top_p_border(x: Float[Array, "B N V"], tail: Float[Array, "B 1 1"]) -> _Border:
    """The least logit that top-p keeps, the probability of all below it, and that of one token at it."""
    p = jax.nn.softmax(x, axis=-1)
    below = lambda t: jnp.where(x < t, p, 0).sum(axis=-1, keepdims=True)  # noqa: E731
    border = jnp.minimum(_largest(lambda t: below(t) <= tail, x), x.max(axis=-1, keepdims=True))
    return border, below(border), jnp.where(x == border, p, 0).max(axis=-1, keepdims=True)


def _top_p_border_of_few(
    x: Float[Array, "B N V"], top: Float[Array, "B N K"], kth: Float[Array, "B N 1"], tail: Float[Array, "B 1 1"]
) -> _Border:
    """`_top_p_border` of what a top-k of at most K has left: the K largest, falling, and all that tie with the k-th.

    Where a row has no top-k (`kth` is -inf, greedy) the result means nothing.
    """
    ties = (x == kth).sum(axis=-1, keepdims=True)
    # All that tie with the k-th count as its one entry, the K-th place of another array.
    values = jnp.concatenate([jnp.where(top > kth, top, -jnp.inf), kth], axis=-1)
    each = jnp.exp(values - top[..., :1])
    mass = each.at[..., -1:].multiply(ties.astype(each.dtype))
    total = mass.sum(axis=-1, keepdims=True)
    lower = values[..., None, :] < values[..., None]
    below = jnp.where(lower, mass[..., None, :], 0).sum(axis=-1) / total
    fits = (below <= tail) & (values >= kth)
    border = jnp.where(fits, values, -jnp.inf).max(axis=-1, keepdims=True)
    at = jnp.argmax(values == border, axis=-1, keepdims=True)
    pick = lambda y: jnp.take_along_axis(y, at, axis=-1)  # noqa: E731
    return border, pick(below), pick(each) / total


def _largest(holds: Callable[[jax.Array], jax.Array], x: Float[Array, "B N V"]) -> Float[Array, "B N 1"]:
    """The largest number t for which `holds(t)`, for each row; `holds` must be true up to some t and false above.

    Bit by bit, over the floats in the order of their values: 32 steps find the border between two adjacent floats.
    """
    lowest, highest = (int(np.float32(v).view(np.int32)) for v in (-np.inf, np.inf))

    def value(rank):
        """The float of a rank in 0 ... 2**32 - 1; ranks of NaN patterns become the infinity next to them."""
        order = jax.lax.bitcast_convert_type(rank ^ jnp.uint32(1 << 31), jnp.int32)
        order = jnp.clip(order, lowest ^ 0x7FFFFFFF, highest)
        return jax.lax.bitcast_convert_type(jnp.where(order < 0, order ^ 0x7FFFFFFF, order), jnp.float32)

    def step(i, rank):
        candidate = rank | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where(holds(value(candidate)), candidate, rank)

    return value(jax.lax.fori_loop(0, 32, step, jnp.zeros((*x.shape[:-1], 1), jnp.uint32)))


def noise_key(key: Any, position: Any, stream: int | None = None) -> Any:
    """The key of the noise for the token at absolute `position` of a row.

    Args:
        key: the row's typed key, a scalar.
        position: absolute position of the token being drawn, a scalar.
        stream: None for the target's own draws, else `DRAFT`, `ACCEPT` or `RESIDUAL`.
    """
    if stream is not None:
        key = jax.random.fold_in(key, stream)
    return jax.random.fold_in(key, position)


def gumbel(key: Any, size: int) -> Float[Array, " V"]:
    """`size` finite standard Gumbel numbers.

    All 32 random bits are used, with the finest steps where a number is large. With the usual 23 bits the largest
    numbers of a big vocabulary would often be equal, which favours low ids.
    """
    uniform = (jax.random.bits(key, (size,), jnp.uint32).astype(jnp.float32) + 0.5) * jnp.float32(2**-32)
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, jnp.float32(1 - 2**-24))))


def draw(
    processed: Float[Array, "B N V"], keys: Any, positions: Int[Array, "B N"], sampling: SamplingArrays
) -> Int[Array, "B N"]:
    """Draw one token per node: the most likely one at temperature 0, otherwise by the Gumbel-max rule.

    The noise depends on the row's key and the token's position only, so a token comes out the same whether it is drawn
    in plain decoding or at any node of a tree, alone or in a batch. (Keys must be threefry: `rbg` keys draw other bits
    under vmap.) Nodes of one depth share their noise, which is harmless as only one of them is visited. A token with
    -inf is never drawn, because the noise is finite.

    Args:
        processed: from `processed_logits`.
        keys: `[B]` typed threefry keys, one per row.
        positions: absolute position of the token that is drawn.
        sampling: of each row.

    Raises:
        ConfigError: keys of another kind, if any row is sampled.
    """
    if sampling.stochastic:
        if str(jax.random.key_impl(keys)) != "threefry2x32":
            raise ConfigError(
                f"the keys are {jax.random.key_impl(keys)} keys, whose numbers depend on the batch; "
                "make them with jax.random.key(seed, impl='threefry2x32')."
            )
        warm = _column(sampling.temperature) > 0
        keys_of_nodes = jax.vmap(jax.vmap(noise_key, (None, 0)))(keys, positions)

        def draw_of_all() -> jax.Array:
            noise = jax.vmap(jax.vmap(lambda key: gumbel(key, processed.shape[-1])))(keys_of_nodes)
            return jnp.argmax(processed + jnp.where(warm, noise, 0.0), axis=-1)

        by_counter = jax.config.jax_threefry_partitionable  # pyright: ignore[reportAttributeAccessIssue]
        if not (sampling.keeps_few and by_counter):
            return draw_of_all().astype(jnp.int32)

        def draw_of_few() -> jax.Array:
            words = key_words(keys_of_nodes)[..., None]
            noise = gumbel_from_bits(threefry_bits(words[:, :, 0], words[:, :, 1], ids))
            noisy = values + jnp.where(warm, noise, 0.0)
            best = noisy == noisy.max(axis=-1, keepdims=True)
            # Of equal ones the lowest id, as argmax takes it; any id where there are no numbers.
            return jnp.where(best, ids, processed.shape[-1] - 1).min(axis=-1)

        # The same numbers at the same ids, but only for what top-k has left. More than that is left only by ties.
        values, ids = jax.lax.top_k(processed, min(FEW_TOKENS, processed.shape[-1]))
        left = (processed > -jnp.inf).sum(axis=-1, keepdims=True)
        return jax.lax.cond(jnp.any(warm & (left > FEW_TOKENS)), draw_of_all, draw_of_few).astype(jnp.int32)
    return jnp.argmax(processed, axis=-1).astype(jnp.int32)


def log_probs(processed: Float[Array, "B N V"], sampling: SamplingArrays) -> Float[Array, "B N V"]:
    """Log-probabilities of the distribution that `draw` draws from; rows with temperature 0 are one-hot."""
    V = processed.shape[-1]
    greedy = jnp.where(jnp.arange(V) == jnp.argmax(processed, axis=-1)[..., None], 0.0, -jnp.inf)
    if not sampling.stochastic:
        return greedy
    return jnp.where(_column(sampling.temperature) > 0, jax.nn.log_softmax(processed, axis=-1), greedy)


def any_nan(logits: Float[Array, "B N V"]) -> Bool[Array, "B N"]:
    """Nodes whose logits contain a value that is not a number."""
    return jnp.isnan(logits).any(axis=-1)
