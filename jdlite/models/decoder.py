"""The target model: a decoder-only transformer that covers Qwen3, Qwen2.5, Llama 3 and SmolLM2 (Flax NNX)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jdlite.models.cache import KVCache
from jdlite.models.config import DecoderConfig
from jdlite.models.layers import Linear, RMSNorm, apply_rope, cached_attention, project, rope_frequencies


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ForwardOutput:
    """What one pass of the target computed for N nodes.

    Attributes:
        hidden: final-normed states, `[B, N, D]`; `Decoder.logits` turns (some of) them into logits.
        taps: the asked-for block outputs, each `[B, N, D]`, in the order asked.
        k: keys of the nodes, `[L, B, G, N, h]`, ready for `KVCache.append`.
        v: values of the nodes, `[L, B, G, N, h]`.
    """

    hidden: Float[Array, "B N D"]
    taps: tuple[Float[Array, "B N D"], ...]
    k: Float[Array, "L B G N h"]
    v: Float[Array, "L B G N h"]


class Attention(nnx.Module):
    """Grouped-query attention with optional q/k-norm and biases."""

    def __init__(self, config: DecoderConfig, dtype, rngs: nnx.Rngs):
        D, H, G, h = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        shared = {"dtype": dtype, "rngs": rngs}
        self.q = Linear(D, H * h, bias=config.qkv_bias, axes=("heads", "embed"), **shared)
        self.k = Linear(D, G * h, bias=config.qkv_bias, axes=("kv_heads", "embed"), **shared)
        self.v = Linear(D, G * h, bias=config.qkv_bias, axes=("kv_heads", "embed"), **shared)
        self.o = Linear(H * h, D, bias=config.output_bias, axes=("embed", "heads"), **shared)
        self.q_norm = RMSNorm(h, config.norm_eps, dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(h, config.norm_eps, dtype) if config.qk_norm else None
        self.head_dim = h

    def __call__(self, x, cos, sin, cache: KVCache, layer: int, mask):
        B, N, _ = x.shape
        q, k, v = (p(x).reshape(B, N, -1, self.head_dim) for p in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        k, v = k.astype(cache.k.dtype), v.astype(cache.v.dtype)
        seen_k, seen_v = k.astype(q.dtype), v.astype(q.dtype)
        out = cached_attention(q, seen_k, seen_v, cache.k, cache.v, layer, cache.lengths, mask)
        return self.o(out.reshape(B, N, -1)), k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)


class MLP(nnx.Module):
    """SwiGLU feed-forward (Shazeer, 2020)."""

    def __init__(self, config: DecoderConfig, dtype, rngs: nnx.Rngs):
        D, F = config.hidden_size, config.intermediate_size
        shared = {"bias": config.mlp_bias, "dtype": dtype, "rngs": rngs}
        self.gate = Linear(D, F, axes=("mlp", "embed"), **shared)
        self.up = Linear(D, F, axes=("mlp", "embed"), **shared)
        self.down = Linear(F, D, axes=("embed", "mlp"), **shared)

    def __call__(self, x):
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """Pre-norm transformer block."""

    def __init__(self, config: DecoderConfig, dtype, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps, dtype)
        self.attention = Attention(config, dtype, rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps, dtype)
        self.mlp = MLP(config, dtype, rngs)

    def __call__(self, x, cos, sin, cache: KVCache, layer: int, mask):
        mixed, k, v = self.attention(self.attention_norm(x), cos, sin, cache, layer, mask)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), k, v


class Embedding(nnx.Module):
    """Token embedding table `[V, D]`; also the LM head of models that tie the two."""

    def __init__(self, config: DecoderConfig, dtype, rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.02)
        shape = (config.vocab_size, config.hidden_size)
        self.weight = nnx.Param(init(rngs.params(), shape, dtype), axes=("vocab", "embed"))

    def __call__(self, tokens: Int[Array, "B N"]) -> Float[Array, "B N D"]:
        return jnp.take(self.weight[...], tokens, axis=0, mode="clip")


class Decoder(nnx.Module):
    """A target model.

    One method serves prefill, plain decoding and the verification of chains and trees: a pass over N new nodes of each
    row, on top of that row's cached tokens. The cache is read and never written; the caller commits what it accepts.

    Args:
        config: shape and options.
        dtype: of parameters and activations (norms, softmax and rotary angles are float32).
        rngs: source of random weights.
    """

    def __init__(self, config: DecoderConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.embed = Embedding(config, dtype, rngs)
        self.layers = nnx.List([Block(config, dtype, rngs) for _ in range(config.num_layers)])
        self.final_norm = RMSNorm(config.hidden_size, config.norm_eps, dtype)
        D, V = config.hidden_size, config.vocab_size
        # Assigned once: NNX fixes at the first assignment whether an attribute holds parameters.
        self.lm_head = (
            None if config.tie_embeddings else Linear(D, V, bias=False, axes=("vocab", "embed"), dtype=dtype, rngs=rngs)
        )

    @property
    def dtype(self):
        """Dtype of parameters and activations."""
        return self.embed.weight[...].dtype

    @property
    def head_weight(self) -> Float[Array, "V D"]:
        """Weight of the LM head; the embedding table where the two are tied."""
        return self.embed.weight[...] if self.lm_head is None else self.lm_head.weight[...]

    def init_cache(self, batch: int, capacity: int, dtype=None) -> KVCache:
        """An empty cache for `batch` rows of `capacity` slots, in `dtype` (default: the model's)."""
        c = self.config
        return KVCache.zeros(
            layers=c.num_layers,
            batch=batch,
            kv_heads=c.num_kv_heads,
            capacity=capacity,
            head_dim=c.head_dim,
            dtype=dtype or self.dtype,
        )

    def __call__(
        self,
        tokens: Int[Array, "B N"],
        positions: Int[Array, "B N"],
        mask: Bool[Array, "B N N"],
        cache: KVCache,
        taps: tuple[int, ...] = (),
    ) -> ForwardOutput:
        """Run N new nodes of each row.

        Example: a row with three cached tokens and the tree anchor -> {x, y} gives `positions = [3, 4, 4]` and
        `mask = [[1,0,0], [1,1,0], [1,0,1]]`: siblings share a position and do not see each other.

        Args:
            tokens: ids of the nodes.
            positions: absolute positions (row length + depth, never the slot).
            mask: `mask[b, i, j]`: node i sees node j (its ancestors and itself).
            cache: committed keys and values; all of a row's cached slots are visible to all of its nodes.
            taps: layers whose block output is wanted. `num_layers - 1` gives the final-normed state, as Hugging Face's
                `hidden_states[l + 1]` does.

        Raises:
            ValueError: a tap is not a layer of this model.
        """
        c = self.config
        for tap in taps:
            if not 0 <= tap < c.num_layers:
                raise ValueError(f"taps must be layers 0 to {c.num_layers - 1} of the target: got {tap}.")
        inverse, factor = rope_frequencies(c.rope, c.head_dim, c.max_position)
        angles = positions[..., None].astype(jnp.float32) * inverse
        cos, sin = jnp.cos(angles) * factor, jnp.sin(angles) * factor

        x = self.embed(tokens)
        tapped, keys, values = {}, [], []
        for layer, block in enumerate(self.layers):
            x, k, v = block(x, cos, sin, cache, layer, mask)
            tapped[layer] = x
            keys.append(k)
            values.append(v)
        hidden = tapped[c.num_layers - 1] = self.final_norm(x)
        return ForwardOutput(hidden, tuple(tapped[t] for t in taps), jnp.stack(keys), jnp.stack(values))

    def logits(self, hidden: Float[Array, "B N D"]) -> Float[Array, "B N V"]:
        """Next-token logits in float32 for final-normed states."""
        return project(hidden, self.head_weight).astype(jnp.float32)
