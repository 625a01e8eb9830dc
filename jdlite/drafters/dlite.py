"""Drafting with DLite: one backbone pass and K steps of the head, from the target's states at one position."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jdlite.decoding.sampling import DRAFT, gumbel, noise_key
from jdlite.decoding.tree import order_by_gain
from jdlite.drafters.base import MODEL, Context, Drafter, Needs, Observation, Proposal
from jdlite.drafters.retrieval import require_positive
from jdlite.errors import ConfigError
from jdlite.models.cache import write_rows
from jdlite.models.config import DecoderConfig
from jdlite.models.dlite import DLite
from jdlite.models.dlite_teacher import history_windows
from pallas_kernels.backends import kernels_to_run, with_kernel

if TYPE_CHECKING:
    from jdlite.models.decoder import Decoder
    from pallas_kernels.low_rank_head.api import PackedHead


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DLiteMemory:
    """What DLite keeps of each row between rounds. It has no key/value cache.

    Attributes:
        features: the tapped states of the newest token that went through the target, `[B, M, D]`.
        position: `[B]` int32, its absolute position, -1 before the first. After a rollback it is not the anchor's
            predecessor; then nothing is drafted until the next forward of the target brings new features.
        history: fused states by absolute position, `[B, S, D]` (S = 0 without a draft history). Rows at or past a row's
            length are never read, so a rollback needs nothing.
    """

    features: Float[Array, "B M D"]
    position: Int[Array, " B"]
    history: Float[Array, "B S D"]


# Drafts `[B, K]`; a number for each that is finite if it is sound, its log-probability where the gain needs that; and
# the law `[B, K, V]` that it was drawn from, in rejection mode.
_Unrolled = tuple[jax.Array, jax.Array, jax.Array | None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DLiteDrafter(Drafter, static=False):
    """A chain of K = block_size - 1 tokens drafted by a DLite network, or a tree of that depth.

    Unlike drafters that hold options only, this one carries parameters: the network's arrays are leaves of the pytree,
    the options are static.

    Attributes:
        model: the network.
        lm_head: the target's LM head `[V, D]`, for a network with `head_output="lm_head"`.
        mode: what is proposed at temperature > 0. `"match"` drafts greedily and keeps a draft while the target draws
            the same token, so sampled output equals plain sampling token for token. `"rejection"` draws drafts from the
            network's own distribution q at the row's temperature and returns q, which accepts more often at high
            temperature; output is then equal in distribution.
        gain: how acceptance is estimated in match mode: `"probability"` by the product of the network's probabilities
            of the drafted tokens, `"constant"` by powers of `prior`, without a softmax. Rejection mode always uses the
            latter: whether a draft is verified must not depend on which token was drawn, or the output would be biased
            (a token that is dropped for being unlikely escapes its rejection).
        prior: acceptance probability of one draft, where it is assumed.
        beam: W, paths of each length 1..K that are offered. 1 is the chain of the paper. More give a tree of 1 + K W
            nodes from the same backbone pass (`SequentialHead.beam`), which is accepted further; they need match mode
            and the gain by probability, since the network's probabilities are what a path is chosen by.
        num_nodes: most nodes of that tree, anchor included; the least probable are left out. None offers all.
        packed: the head's weights in the layout of the kernel that is to run, from `fit`; None where none needs another
            than the network's. A second copy of the head: at Qwen3-4B 0.2 GB.
    """

    model: DLite
    lm_head: Float[Array, "V D"] | None = None
    packed: PackedHead | None = None
    mode: Literal["match", "rejection"] = dataclasses.field(default="match", metadata={"static": True})
    gain: Literal["probability", "constant"] = dataclasses.field(default="probability", metadata={"static": True})
    prior: float = dataclasses.field(default=0.8, metadata={"static": True})
    beam: int = dataclasses.field(default=1, metadata={"static": True})
    num_nodes: int | None = dataclasses.field(default=None, metadata={"static": True})

    name = "dlite"

    def __post_init__(self) -> None:
        if self.mode not in ("match", "rejection"):
            raise ConfigError(f"mode must be match or rejection: got {self.mode!r}.")
        if self.gain not in ("probability", "constant"):
            raise ConfigError(f"gain must be probability or constant: got {self.gain!r}.")
        if not 0 < self.prior <= 1:
            raise ConfigError(f"prior must be a probability above 0: got {self.prior}; 0.8 is a fair guess.")
        require_positive("DLite", beam=self.beam)
        if self.beam > 1 and not self._softmax_for_gain:
            raise ConfigError(
                f"a beam of {self.beam} needs mode=match and gain=probability: got {self.mode} and {self.gain}; leave "
                "out beam for a chain."
            )
        if self.num_nodes is not None and (self.beam == 1 or self.num_nodes < 2):
            raise ConfigError(
                f"num_nodes is the size of a tree, at least 2: got {self.num_nodes} with a beam of {self.beam}; leave "
                "it out or give a beam, for example beam=8,num_nodes=40."
            )

    @classmethod
    def create(
        cls, model: DLite, target: DecoderConfig, *, lm_head: jax.Array | None = None, **options
    ) -> DLiteDrafter:
        """A drafter for `target`, checked.

        Args:
            model: the network.
            target: the target's config.
            lm_head: the target's LM head (its embedding table when tied); kept only if the network needs it.
            options: `mode`, `gain`, `prior`, `beam`, `num_nodes`.

        Raises:
            ConfigError: the network was made for another target, or needs an LM head that is not given.
        """
        model.config.check_target(target)
        if model.config.head_output == "low_rank":
            lm_head = None
        elif lm_head is None:
            raise ConfigError(
                "This DLite ends in the target's LM head (head_output='lm_head') and was given none; pass lm_head."
            )
        return cls(model=model, lm_head=lm_head, **options)

    @property
    def max_nodes(self) -> int:
        nodes = 1 + self.model.config.num_drafts * self.beam
        return nodes if self.num_nodes is None else min(nodes, self.num_nodes)

    @property
    def max_depth(self) -> int:
        return min(self.model.config.num_drafts, self.max_nodes - 1)

    @property
    def samples(self) -> bool:
        return self.mode == "rejection"

    @property
    def network(self) -> DLiteDrafter:
        return self

    def fit(self, model: Decoder) -> DLiteDrafter:
        """Checks the target, takes its LM head where the network ends in it and none was given, and packs the head's
        weights where a kernel is to run that reads them otherwise."""
        self.model.config.check_target(model.config)
        if not self._low_rank:
            return self if self.lm_head is not None else dataclasses.replace(self, lm_head=model.head_weight)
        if self.beam > 1 or self.packed is not None:  # the kernel makes chains only
            return self
        return dataclasses.replace(self, packed=self._packed())

    def _packed(self) -> PackedHead | None:
        names = kernels_to_run()
        if not names:
            return None
        from pallas_kernels.low_rank_head.api import PackedHead, prepare

        try:
            packed = prepare(self.model.head.weights(), names)
        except NotImplementedError:
            return None
        return packed if isinstance(packed, PackedHead) else None

    def needs(self, num_layers: int) -> Needs:
        config = self.model.config
        if num_layers != config.num_target_layers:
            raise ConfigError(
                f"This DLite drafter was made for a target of {config.num_target_layers} layers: got one of "
                f"{num_layers}; use the drafter of this target."
            )
        return Needs(taps=config.captured_layers)

    def init(self, batch: int, capacity: int, *, hidden_size: int, vocab_size: int, dtype) -> DLiteMemory:
        config = self.model.config
        if (hidden_size, vocab_size) != (config.hidden_size, config.vocab_size):
            raise ConfigError(
                f"This DLite drafter was made for a target of width {config.hidden_size} and {config.vocab_size} "
                f"tokens: got {hidden_size} and {vocab_size}; use the drafter of this target."
            )
        if self.beam > vocab_size:
            raise ConfigError(f"DLite needs a beam of at most the vocabulary of {vocab_size}, got {self.beam}.")
        kept = capacity if config.draft_history else 0
        return DLiteMemory(
            features=jnp.zeros((batch, config.num_taps, hidden_size), dtype),
            position=jnp.full(batch, -1, jnp.int32),
            history=jnp.zeros((batch, kept, hidden_size), dtype),
        )

    def observe(self, memory: DLiteMemory, context: Context, observation: Observation) -> DLiteMemory:
        config, seen = self.model.config, observation
        taps = dict(zip(config.captured_layers, seen.taps, strict=True))
        moved = seen.count > 0
        # Only the last committed node is read, so gather it before anything else touches the taps.
        newest = jnp.take_along_axis(seen.path, jnp.maximum(seen.count - 1, 0)[:, None], axis=1)[:, :, None]
        features = jnp.concatenate([jnp.take_along_axis(taps[t], newest, axis=1) for t in config.taps], axis=1)
        history = memory.history
        if config.draft_history:
            states = jnp.stack([seen.committed(taps[t]) for t in config.history_taps], axis=2)
            fused = self.model.fuse_history(states)
            history = write_rows(history, fused, seen.start, seen.count, row=0, slot=1)
        return DLiteMemory(
            features=jnp.where(moved[:, None, None], features.astype(memory.features.dtype), memory.features),
            position=jnp.where(moved, seen.start + seen.count - 1, memory.position),
            history=history,
        )

    def propose(self, memory: DLiteMemory, context: Context) -> Proposal:
        return jax.lax.cond(
            context.run_network, lambda: self._draft(memory, context), lambda: self._nothing(context.anchor)
        )

    def _nothing(self, anchor: Int[Array, " B"]) -> Proposal:
        """A proposal without drafts."""
        shape = (anchor.shape[0], self.max_nodes - 1)
        zeros = jnp.zeros(shape, jnp.float32)
        proposal = Proposal.chain(anchor, jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool), zeros, MODEL)
        if self.mode == "match":
            return proposal
        log_q = jnp.zeros((shape[0], self.max_nodes, self.model.config.vocab_size), jnp.float32)
        return dataclasses.replace(proposal, log_q=log_q)

    def _draft(self, memory: DLiteMemory, context: Context) -> Proposal:
        hidden, tokens = self._backbone(memory, context)
        start = self.model.head.start(tokens)
        if self.beam > 1:
            return self._tree(
                memory, context, *self.model.head.beam(hidden, tokens[:, -1], start, self.beam, self.lm_head)
            )
        run = partial(with_kernel, self._steps, self._fused) if self._low_rank else self._steps
        drafts, log_prob, log_q = run(hidden, tokens[:, -1], start, context)
        # A network that has gone wrong (NaN) drafts nothing, rather than rubbish.
        valid = jnp.isfinite(log_prob) & self._fresh(memory, context)[:, None]
        if self._softmax_for_gain:
            gain = jnp.exp(jnp.cumsum(jnp.where(valid, log_prob, 0.0), axis=1))
        else:
            gain = jnp.broadcast_to(jnp.float32(self.prior) ** jnp.arange(1, drafts.shape[1] + 1), drafts.shape)
        proposal = Proposal.chain(context.anchor, drafts, valid, gain, MODEL)
        if log_q is None:
            return proposal
        # Node i was drawn from log_q[:, i]; the anchor was not drawn, and nodes that are not valid are never looked at.
        log_q = jnp.pad(jnp.where(valid[..., None], log_q, 0.0), ((0, 0), (1, 0), (0, 0)))
        return dataclasses.replace(proposal, log_q=log_q)

    def _tree(self, memory: DLiteMemory, context: Context, tokens, parents, log_path) -> Proposal:
        """The paths of `SequentialHead.beam` as one tree: the W nodes of depth 1, then those of depth 2, and so on."""
        B, K, W = tokens.shape
        # As in the chain, a network that has gone wrong drafts nothing.
        valid = jnp.isfinite(log_path) & self._fresh(memory, context)[:, None, None]
        gain = jnp.where(valid, jnp.exp(log_path), 0.0)
        first = 1 + W * (jnp.arange(K) - 1)[:, None]
        parents = jnp.where(jnp.arange(K)[:, None] == 0, 0, first + parents)
        join = lambda anchor, x: jnp.concatenate([anchor, x.reshape(B, K * W)], axis=1)  # noqa: E731
        one = jnp.ones((B, 1))
        proposal = Proposal(
            tokens=join(context.anchor[:, None], tokens).astype(jnp.int32),
            parents=join(jnp.zeros((B, 1), jnp.int32), parents).astype(jnp.int32),
            valid=join(one.astype(bool), valid),
            gain=join(one, gain).astype(jnp.float32),
            source=jnp.full((B, 1 + K * W), MODEL, jnp.int32),
        )
        if self.num_nodes is None:
            return proposal
        ordered, _ = order_by_gain(proposal, proposal.source)
        return jax.tree.map(lambda x: x[:, : self.max_nodes], ordered)

    @property
    def _low_rank(self) -> bool:
        return self.model.config.head_output == "low_rank"

    @property
    def _softmax_for_gain(self) -> bool:
        return self.gain == "probability" and self.mode == "match"

    def rollback(self, memory: DLiteMemory, lengths: Int[Array, " B"]) -> DLiteMemory:
        """Nothing to do: features that are no longer the anchor's predecessor's are recognised by their position."""
        return memory

    def _fresh(self, memory: DLiteMemory, context: Context):
        """Rows whose features belong to the position before the anchor."""
        return (memory.position >= 0) & (memory.position == context.lengths - 2)

    def _backbone(self, memory: DLiteMemory, context: Context):
        config = self.model.config
        A, W = config.anchor_group_size, config.draft_history
        index = context.lengths[:, None] - A + jnp.arange(A)
        tokens = jnp.take_along_axis(context.tokens, jnp.maximum(index, 0), axis=1)
        extra: dict[str, Any] = {}
        if A > 1:
            extra["token_valid"] = index >= 0
        if W:
            anchors = (context.lengths - 1)[:, None]
            states, there = history_windows(memory.history, anchors, W)
            extra["history"], extra["history_valid"] = states[:, 0], there[:, 0]
        return self.model.backbone(tokens, memory.features, context.embedding, **extra), tokens

    def _steps(self, hidden, anchor, start, context: Context) -> _Unrolled:
        """Run the head step by step, with the logits of each step in memory."""
        choose = self._sampler(context) if self.mode == "rejection" else self._greedy
        drafts, (log_prob, log_q) = self.model.head.unroll(hidden, anchor, start, choose, self.lm_head)
        return drafts, log_prob, log_q

    def _fused(self, hidden, anchor, start, context: Context, backend: tuple[str, ...]) -> _Unrolled:
        """Run the whole head as one kernel.

        Raises:
            NotImplementedError: no kernel can do it.
        """
        # Imported where it is used: Pallas takes long to import, and many never need it.
        from pallas_kernels.low_rank_head.api import low_rank_head, output_logits

        weights = self.model.head.weights() if self.packed is None else self.packed
        if self.mode == "match":
            out = low_rank_head(weights, hidden, anchor, start, backend=backend)
            return out.tokens, out.log_q, None
        positions = context.lengths[:, None] + jnp.arange(hidden.shape[1])
        each = jax.vmap(jax.vmap(partial(noise_key, stream=DRAFT), (None, 0)))
        keys, temperature = each(context.keys, positions), context.temperature
        out = low_rank_head(weights, hidden, anchor, start, keys=keys, temperature=temperature, backend=backend)
        # Acceptance needs the whole law that a token was drawn from, not rounded, or the output would not follow the
        # target's.
        log_q = jax.vmap(tempered, (1, None), 1)(output_logits(weights, out.u), temperature)
        return out.tokens, out.log_q, log_q

    def _greedy(self, logits, step):
        tokens = jnp.argmax(logits, axis=-1)
        best = jnp.max(logits, axis=-1)
        # Without a softmax only its being finite is of use.
        return tokens, (best - jax.nn.logsumexp(logits, axis=-1) if self._softmax_for_gain else best, None)

    def _sampler(self, context: Context):
        def row_noise(key, position):
            return gumbel(noise_key(key, position, DRAFT), self.model.config.vocab_size)

        def choose(logits, step):
            log_q = tempered(logits, context.temperature)
            # Step 0 draws the token after the anchor, whose position is the number of known tokens.
            noise = jax.vmap(row_noise)(context.keys, context.lengths + step)
            tokens = jnp.argmax(log_q + noise, axis=-1)
            picked = jnp.take_along_axis(log_q, tokens[:, None], axis=1)[:, 0]
            return tokens, (picked, log_q)

        return choose


def tempered(logits: Float[Array, "B V"], temperature: Float[Array, " B"]) -> Float[Array, "B V"]:
    """Log-probabilities of `softmax(logits / temperature)` per row; temperature 0 puts all mass on the best token."""
    cold = (temperature <= 0)[:, None]
    warm = jax.nn.log_softmax(logits / jnp.where(cold, 1.0, temperature[:, None]), axis=-1)
    best = jnp.arange(logits.shape[-1]) == jnp.argmax(logits, axis=-1)[:, None]
    return jnp.where(cold, jnp.where(best, 0.0, -jnp.inf), warm)
