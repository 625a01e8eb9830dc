"""Configuration of a target model: one frozen dataclass for Qwen3, Qwen2.5, Llama 3 and SmolLM2."""

from __future__ import annotations

import dataclasses
from typing import Literal

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        theta: base of the geometric frequency series.
        kind: how frequencies are rescaled for long inputs; `"default"` leaves them alone.
        factor: context extension factor (`linear`, `llama3`, `yarn`).
        original_max_position: context length before extension (`llama3`, `yarn`).
        low_freq_factor: wavelengths above `original_max_position / low_freq_factor` are divided by `factor` (`llama3`).
        high_freq_factor: wavelengths below `original_max_position / high_freq_factor` are kept (`llama3`).
        beta_fast: rotations above which a frequency is kept (`yarn`).
        beta_slow: rotations below which a frequency is divided by `factor` (`yarn`).
        attention_factor: multiplies cos and sin (`yarn`); `None` gives `0.1 ln(factor) + 1`.
        truncate: round the `yarn` correction range outwards to whole dimensions.
    """

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape and options of a decoder-only target.

    Attributes:
        family: Hugging Face `model_type` (`qwen3`, `qwen2`, `llama`); names the export format and nothing else.
        vocab_size: V, rows of the embedding.
        hidden_size: D, model width.
        intermediate_size: F, feed-forward width.
        num_layers: L.
        num_heads: H, query heads.
        num_kv_heads: G, key/value heads; divides H.
        head_dim: h, width of a head (`H * h` need not equal D).
        norm_eps: epsilon of every RMSNorm.
        rope: rotary embedding.
        qk_norm: RMSNorm on each head of q and k (Qwen3).
        qkv_bias: biases on the q, k and v projections (Qwen2.5).
        output_bias: bias on the attention output projection.
        mlp_bias: biases in the feed-forward.
        tie_embeddings: the LM head is the embedding table.
        max_position: longest sequence the model was made for; a longer capacity is refused.
    """

    family: str = "qwen3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    qk_norm: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    tie_embeddings: bool = False
    max_position: int = 32_768

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads must divide num_heads: got {self.num_kv_heads} and {self.num_heads}; check the config."
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings: got {self.head_dim}; check the config.")

    @classmethod
    def tiny(cls, **overrides) -> DecoderConfig:
        """A random-weight Qwen3 for tests and docs: 4 layers of width 32 over 97 tokens."""
        fields: dict = {
            "vocab_size": 97,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_layers": 4,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 16,
            "rope": RopeConfig(theta=10_000.0),
            "tie_embeddings": True,
            "max_position": 4096,
        }
        return cls(**{**fields, **overrides})
