"""DLite: a history-free drafter that reads the target's states at one position ("DLite: History-free Speculative
Decoding for Agentic AI"), and, with a window of fused states, its history teacher."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jdlite.errors import ConfigError
from jdlite.models.decoder import MLP
from jdlite.models.dlite_config import DLiteConfig
from jdlite.models.dlite_head import SequentialHead
from jdlite.models.layers import Linear, RMSNorm, apply_rope, rope_frequencies


@dataclasses.dataclass(frozen=True)
class Positions:
    """Rotary positions of one draft, counted from the first of the A known tokens.

    Example: A = 2, K = 7, no history gives context 0 (the same as token a-1), tokens 0 1, masks 2..8. For A = 1 the
    context shares position 0 with the anchor. With a history the positions are the true distances, so the context of
    A = 1 stands at -1; adding the absolute position of the first token would change nothing, since attention sees
    differences only, and small numbers keep float32 angles exact in long contexts.

    Attributes:
        history: `[W - 1]`, positions a-W .. a-2 of the window (empty without one).
        context: of all context slots, which hold states of position a-1.
        tokens: `[A]`, the known tokens; the anchor a is the last.
        masks: `[K]`, the tokens to be drafted.
    """

    history: np.ndarray
    context: int
    tokens: np.ndarray
    masks: np.ndarray

    @classmethod
    def of(cls, config: DLiteConfig) -> Positions:
        A, K, W = config.anchor_group_size, config.num_drafts, config.draft_history
        anchor = A - 1
        return cls(
            history=anchor - np.arange(W, 1, -1),
            context=anchor - 1 if W else max(anchor - 1, 0),
            tokens=np.arange(A),
            masks=anchor + 1 + np.arange(K),
        )


class DraftAttention(nnx.Module):
    """Grouped-query attention of the draft's rows over the context and over each other, in both directions."""

    def __init__(self, config: DLiteConfig, dtype, rngs: nnx.Rngs):
        D, H, G, h = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        shared = {"bias": False, "dtype": dtype, "rngs": rngs}
        self.q = Linear(D, H * h, axes=("heads", "embed"), **shared)
        self.k = Linear(D, G * h, axes=("kv_heads", "embed"), **shared)
        self.v = Linear(D, G * h, axes=("kv_heads", "embed"), **shared)
        self.o = Linear(H * h, D, axes=("embed", "heads"), **shared)
        self.q_norm = RMSNorm(h, config.norm_eps, dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(h, config.norm_eps, dtype) if config.qk_norm else None
        self.head_dim = h

    def __call__(self, rows, seen, rope, visible):
        """Attend.

        Args:
            rows: `[B, T, D]`, normed inputs that ask; they are the last T of `seen`.
            seen: `[B, C, D]`, inputs that give keys and values.
            rope: cos and sin of `seen`, each `[B, C, h/2]`.
            visible: `[B, C]` bool or None; keys that are not there are hidden from everyone.
        """
        (B, T, _), C, h = rows.shape, seen.shape[1], self.head_dim
        q = self.q(rows).reshape(B, T, -1, h)
        k, v = (p(seen).reshape(B, C, -1, h) for p in (self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = rope
        q, k = apply_rope(q, cos[:, C - T :], sin[:, C - T :]), apply_rope(k, cos, sin)
        G = k.shape[2]
        q = (q * (1.0 / math.sqrt(h))).reshape(B, T, G, -1, h)
        scores = jnp.einsum("btgrh,bcgh->bgrtc", q, k, preferred_element_type=jnp.float32)
        if visible is not None:
            scores = jnp.where(visible[:, None, None, None], scores, jnp.finfo(jnp.float32).min)
            # Slots that are not there may hold anything, NaN included.
            v = jnp.where(visible[:, :, None, None], v, 0)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        return self.o(jnp.einsum("bgrtc,bcgh->btgrh", weights, v).reshape(B, T, -1))


class DraftBlock(nnx.Module):
    """Pre-norm transformer block whose keys and values include context slots that it does not update."""

    def __init__(self, config: DLiteConfig, dtype, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps, dtype)
        self.attention = DraftAttention(config, dtype, rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps, dtype)
        self.mlp = MLP(config.layer_config, dtype, rngs)

    def __call__(self, x, context, rope, visible, keep: int):
        """Update the last `keep` rows of x `[B, T, D]`; `context` `[B, C, D]` is seen as it is, without a norm."""
        normed = self.attention_norm(x)
        seen = jnp.concatenate([context, normed], axis=1)
        first = x.shape[1] - keep
        x = x[:, first:] + self.attention(normed[:, first:], seen, rope, visible)
        return x + self.mlp(self.mlp_norm(x))


class DLite(nnx.Module):
    """The drafter network: a parallel backbone and a sequential head.

    Rows B are independent drafts; in training they are all anchors of all sequences. The target's input embedding is an
    argument and never a parameter.

    Args:
        config: shape and options. With `draft_history` this is the history teacher (or the windowed ablation).
        dtype: of parameters and activations (norms, softmax, rotary angles and the recurrence are float32).
        rngs: source of random weights: normal(0, 0.02), norms 1, biases 0.
    """

    def __init__(self, config: DLiteConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.config = config
        D, M, L = config.hidden_size, config.num_taps, config.num_target_layers
        shared = {"bias": False, "dtype": dtype, "rngs": rngs}
        if config.feature_concat == "sequence":
            # One row per target layer, not per slot, so that other taps can be read with the same table.
            init = nnx.initializers.normal(0.02)
            self.depth_embedding = nnx.Param(init(rngs.params(), (L, D), dtype), axes=(None, "embed"))
            self.feature_fuse = None
        else:
            self.depth_embedding = None
            self.feature_fuse = Linear(M * D, D, axes=("embed", None), **shared)
        self.context_norm = RMSNorm(D, config.norm_eps, dtype)
        J = len(config.history_taps)
        self.history_fuse = Linear(J * D, D, axes=("embed", None), **shared) if J else None
        self.history_norm = RMSNorm(D, config.norm_eps, dtype) if J else None
        self.layers = nnx.List([DraftBlock(config, dtype, rngs) for _ in range(config.num_layers)])
        self.norm = RMSNorm(D, config.norm_eps, dtype)
        self.head = SequentialHead(config, dtype, rngs)

    @property
    def dtype(self):
        """Dtype of parameters and activations."""
        return self.norm.scale[...].dtype

    def context(self, features: Float[Array, "B M D"]) -> Float[Array, "B C D"]:
        """Context slots of the target's states: `RMSNorm(h_l + e_depth[l])` per layer l, or all fused into one."""
        features = features.astype(self.dtype)
        if self.depth_embedding is not None:
            return self.context_norm(features + self.depth_embedding[...][np.asarray(self.config.taps)])
        assert self.feature_fuse is not None
        return self.context_norm(self.feature_fuse(features.reshape(features.shape[0], 1, -1)))

    def fuse_history(self, states: Float[Array, "B T J D"]) -> Float[Array, "B T D"]:
        """The state of each past position, `RMSNorm(W [h_0 ; h_{L//2} ; h_{L-1}])`, layers in `history_taps` order.

        Raises:
            ConfigError: the drafter has no history.
        """
        if self.history_fuse is None or self.history_norm is None:
            raise ConfigError("This DLite has no draft history: got states to fuse; set draft_history to a window.")
        joined = states.astype(self.dtype).reshape(*states.shape[:2], -1)
        return self.history_norm(self.history_fuse(joined))

    def backbone(
        self,
        tokens: Int[Array, "B A"],
        features: Float[Array, "B M D"],
        embedding: Float[Array, "V D"],
        *,
        token_valid: Bool[Array, "B A"] | None = None,
        history: Float[Array, "B past D"] | None = None,
        history_valid: Bool[Array, "B past"] | None = None,
        shift: Int[Array, " B"] | None = None,
        recompute: bool = False,
    ) -> Float[Array, "B K D"]:
        """Final-normed states of the K tokens to be drafted, in one parallel pass.

        Args:
            tokens: the A newest known tokens, the anchor last.
            features: states of the target at the position before the anchor, in the order of `config.taps`; the last
                target layer's is final-normed.
            embedding: the target's input embedding, frozen.
            token_valid: known tokens that exist (a row may be shorter than A); `None` for all.
            history: fused states of positions a-W .. a-2 (`past` = W - 1), for a config with `draft_history`.
            history_valid: those of them that exist.
            shift: added to all positions of a row. It changes nothing but rounding.
            recompute: for gradients: keep only what goes from layer to layer, and make the rest of a layer again when
                its gradient is taken.

        Raises:
            ConfigError: the history is missing or not wanted, or an axis does not fit the config.
        """
        c = self.config
        self._check(tokens, features, embedding, history)
        ids = jnp.concatenate(
            [tokens, jnp.full((tokens.shape[0], c.num_drafts), c.mask_token_id, tokens.dtype)], axis=1
        )
        x = jnp.take(jax.lax.stop_gradient(embedding), ids, axis=0, mode="clip").astype(self.dtype)
        slots = self.context(features)
        if history is not None:
            slots = jnp.concatenate([history.astype(self.dtype), slots], axis=1)
        rope = self._rope(slots.shape[1], x.shape[0], shift)
        visible = self._visible(x.shape[0], token_valid, history_valid)
        if c.context_mode == "stream":
            x, slots = jnp.concatenate([slots, x], axis=1), slots[:, :0]
        block = jax.checkpoint(DraftBlock.__call__, static_argnums=5) if recompute else DraftBlock.__call__
        for i, layer in enumerate(self.layers):
            # Nobody reads the other rows of the last layer.
            keep = c.num_drafts if i == c.num_layers - 1 else x.shape[1]
            x = block(layer, x, slots, rope, visible, keep)
        return self.norm(x)

    def _check(self, tokens, features, embedding, history) -> None:
        c = self.config
        past = max(c.draft_history - 1, 0)
        given = {
            "known tokens": (tokens.shape[1], c.anchor_group_size),
            "feature slots": (features.shape[1], c.num_taps),
            "feature width": (features.shape[2], c.hidden_size),
            "embedding width": (embedding.shape[1], c.hidden_size),
            "history positions": (0 if history is None else history.shape[1], past),
        }
        wrong = [f"{name} {got}, want {want}" for name, (got, want) in given.items() if got != want]
        if wrong:
            raise ConfigError(f"DLite inputs do not fit its config: {'; '.join(wrong)}; check target and drafter.")

    def _rope(self, slots: int, batch: int, shift):
        """cos and sin of all keys, `[B, C, h/2]`."""
        c, table = self.config, Positions.of(self.config)
        context = np.full(slots - len(table.history), table.context)
        positions = jnp.asarray(np.concatenate([table.history, context, table.tokens, table.masks]), jnp.int32)
        positions = jnp.broadcast_to(positions, (batch, positions.shape[0]))
        if shift is not None:
            positions = positions + shift[:, None]
        inverse, _ = rope_frequencies(c.layer_config.rope, c.head_dim, 0)
        angles = positions[..., None].astype(jnp.float32) * inverse
        return jnp.cos(angles), jnp.sin(angles)

    def _visible(self, batch: int, token_valid, history_valid):
        """Which keys exist, `[B, C]`; None when all do."""
        c = self.config
        if token_valid is None and history_valid is None:
            return None
        parts = [(max(c.draft_history - 1, 0), history_valid), (c.num_context_slots, None)]
        parts += [(c.anchor_group_size, token_valid), (c.num_drafts, None)]
        ones = [jnp.ones((batch, width), bool) if valid is None else valid for width, valid in parts]
        return jnp.concatenate(ones, axis=1)
