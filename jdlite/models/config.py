"""Configuration of a target model: one frozen dataclass for Qwen3, Qwen2.5, Llama 3 and SmolLM2."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, get_args

from jdlite.errors import ConfigError

RopeKind = Literal["default", "linear", "llama3", "yarn"]
FAMILIES = ("qwen3", "qwen2", "llama")
_POSITIVE = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
    "max_position",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        theta: base of the geometric frequency series.
        kind: how frequencies are rescaled for long inputs; `"default"` leaves them alone.
        factor: context extension factor (`linear`, `llama3`, `yarn`).
        original_max_position: context length before extension (`llama3`, `yarn`); 0 means the model's `max_position`.
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

    def __post_init__(self) -> None:
        if self.kind not in get_args(RopeKind):
            raise ConfigError(f"rope kind must be one of {', '.join(get_args(RopeKind))}: got {self.kind!r}.")
        if not 1 < self.theta < math.inf:
            raise ConfigError(f"rope theta must be above 1: got {self.theta}; check the config.")
        if not 1 <= self.factor < math.inf:
            raise ConfigError(f"rope factor must be at least 1: got {self.factor}; check the config.")
        if self.original_max_position < 0:
            raise ConfigError(f"original_max_position must not be negative: got {self.original_max_position}.")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                "rope low_freq_factor must be positive and below high_freq_factor: got "
                f"{self.low_freq_factor} and {self.high_freq_factor}; check the config."
            )
        if not 0 < self.beta_slow <= self.beta_fast:
            raise ConfigError(
                f"rope beta_slow must be positive and at most beta_fast: got {self.beta_slow} and {self.beta_fast}."
            )


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
        if self.family not in FAMILIES:
            raise ConfigError(f"family must be one of {', '.join(FAMILIES)}: got {self.family!r}; check the config.")
        for name in _POSITIVE:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} must be a positive integer: got {value!r}; check the config.")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_kv_heads must divide num_heads: got {self.num_kv_heads} and {self.num_heads}; check the config."
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary embeddings: got {self.head_dim}; check the config.")
        if not 0 < self.norm_eps < math.inf:
            raise ConfigError(f"norm_eps must be positive: got {self.norm_eps}; check the config.")

    # Published shapes. Each preset takes overrides, for example `DecoderConfig.qwen3_8b(num_layers=2)`.

    @classmethod
    def qwen3_0_6b(cls, **overrides) -> DecoderConfig:
        """Qwen3-0.6B."""
        return cls._qwen3(1024, 3072, layers=28, heads=16, tied=True, **overrides)

    @classmethod
    def qwen3_1_7b(cls, **overrides) -> DecoderConfig:
        """Qwen3-1.7B."""
        return cls._qwen3(2048, 6144, layers=28, heads=16, tied=True, **overrides)

    @classmethod
    def qwen3_4b(cls, **overrides) -> DecoderConfig:
        """Qwen3-4B."""
        return cls._qwen3(2560, 9728, layers=36, heads=32, tied=True, **overrides)

    @classmethod
    def qwen3_8b(cls, **overrides) -> DecoderConfig:
        """Qwen3-8B."""
        return cls._qwen3(4096, 12_288, layers=36, heads=32, tied=False, **overrides)

    @classmethod
    def qwen3_14b(cls, **overrides) -> DecoderConfig:
        """Qwen3-14B."""
        return cls._qwen3(5120, 17_408, layers=40, heads=40, tied=False, **overrides)

    @classmethod
    def qwen3_32b(cls, **overrides) -> DecoderConfig:
        """Qwen3-32B."""
        return cls._qwen3(5120, 25_600, layers=64, heads=64, tied=False, **overrides)

    @classmethod
    def _qwen3(
        cls, width: int, feed_forward: int, *, layers: int, heads: int, tied: bool, **overrides
    ) -> DecoderConfig:
        fields: dict = {
            "family": "qwen3",
            "vocab_size": 151_936,
            "hidden_size": width,
            "intermediate_size": feed_forward,
            "num_layers": layers,
            "num_heads": heads,
            "num_kv_heads": 8,
            "head_dim": 128,
            "rope": RopeConfig(theta=1_000_000.0),
            "tie_embeddings": tied,
            "max_position": 40_960,
        }
        return cls(**{**fields, **overrides})

    @classmethod
    def smollm2_135m(cls, **overrides) -> DecoderConfig:
        """SmolLM2-135M and its Instruct version."""
        fields: dict = {
            "family": "llama",
            "vocab_size": 49_152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_layers": 30,
            "num_heads": 9,
            "num_kv_heads": 3,
            "head_dim": 64,
            "norm_eps": 1e-5,
            "rope": RopeConfig(theta=100_000.0),
            "qk_norm": False,
            "tie_embeddings": True,
            "max_position": 8192,
        }
        return cls(**{**fields, **overrides})

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
