"""Configuration of a DLite drafter: every open choice of the architecture is a field with the recommended default."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

from jdlite.errors import ConfigError
from jdlite.models.config import DecoderConfig, RopeConfig

ContextMode = Literal["kv", "stream"]
FeatureConcat = Literal["sequence", "feature"]
HeadOutput = Literal["low_rank", "lm_head"]


def target_layer_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """Target layers whose outputs a drafter reads: the first, the last, and evenly spaced ones between them.

    The interior ids are `1 + round(i (L - 3) / (M - 3))` for `i = 0 .. M - 3`, where halves go to the even neighbour
    (Python's `round`); a single interior id is the midpoint. Example: L = 36, M = 12 gives
    0 1 5 8 12 16 19 23 27 30 34 35.

    Args:
        num_target_layers: L, layers of the target.
        num_taps: M, how many to read.

    Raises:
        ConfigError: M is not between 2 and L.
    """
    L, M = num_target_layers, num_taps
    if not 2 <= M <= L:
        raise ConfigError(f"num_taps must be between 2 and the target's {L} layers: got {M}; choose one in that range.")
    gaps = max(M - 3, 2 if M == 3 else 1)
    # One interior id is half-way; otherwise both ends are taken. A quotient of whole numbers keeps exact halves exact.
    steps = (1,) if M == 3 else range(M - 2)
    interior = [1 + round(i * (L - 3) / gaps) for i in steps]
    return (0, *interior, L - 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DLiteConfig:
    """Shape and options of a DLite drafter and of its history teacher.

    Attributes:
        vocab_size: V of the target.
        hidden_size: D of the target; the drafter has the same width, since it reads the target's states as they are.
        intermediate_size: F, feed-forward width of the drafter's layers.
        num_heads: H, query heads.
        num_kv_heads: G, key/value heads; divides H.
        head_dim: h, width of a head.
        norm_eps: epsilon of every RMSNorm.
        rope_theta: base of the rotary frequencies. Positions stay small, so the target's long-context rescaling is not
            needed.
        num_target_layers: L, layers of the target.
        mask_token_id: row of the target's input embedding that stands for a token to be drafted. It must be a row that
            no text uses.
        num_layers: layers of the drafter.
        qk_norm: RMSNorm on each head of q and k. Off only to copy layers from a target that has none.
        num_taps: M, how many target layers are read.
        tap_layers: which ones; `None` follows `target_layer_ids`. An explicit list has `num_taps` entries.
        rank: R, width of the sequential head.
        block_size: tokens of a draft with the anchor counted, so `num_drafts = block_size - 1`.
        anchor_group_size: A, how many of the newest known tokens (anchor included) the drafter sees as tokens.
        context_mode: `"kv"` injects the target's states as extra keys and values of every layer; `"stream"` puts them
            into the residual stream beside the tokens.
        feature_concat: `"sequence"` makes one context slot of each tapped layer; `"feature"` fuses all of them into a
            single slot with a `D x M D` matrix.
        head_output: `"low_rank"` has its own `V x R` output matrix; `"lm_head"` maps to width D and uses the target's
            frozen LM head.
        draft_history: W, window of past positions that the drafter sees as fused states; 0 is the history-free DLite.
            The teacher has a window (128 in the released runs).
        history_layers: target layers that are fused for the window; `None` gives `(0, L // 2, L - 1)`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    num_target_layers: int
    mask_token_id: int
    num_layers: int = 5
    qk_norm: bool = True
    num_taps: int = 12
    tap_layers: tuple[int, ...] | None = None
    rank: int = 320
    block_size: int = 8
    anchor_group_size: int = 1
    context_mode: ContextMode = "kv"
    feature_concat: FeatureConcat = "sequence"
    head_output: HeadOutput = "low_rank"
    draft_history: int = 0
    history_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        self._check_types()
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1: got {getattr(self, name)}; give a positive number.")
        for name in ("norm_eps", "rope_theta"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive: got {getattr(self, name)}; use the target's value.")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}: got {getattr(self, name)!r}.")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_kv_heads must divide num_heads: got {self.num_kv_heads} and {self.num_heads}; use the target's."
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary embeddings: got {self.head_dim}; use the target's.")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ConfigError(
                f"mask_token_id must be a row of the target's embedding: got {self.mask_token_id} of "
                f"{self.vocab_size}; choose an id below the vocabulary size that no text uses."
            )
        if self.block_size < 2:
            raise ConfigError(
                f"block_size counts the anchor and at least one draft: got {self.block_size}; use 2 or more."
            )
        if self.draft_history < 0 or self.draft_history == 1:
            raise ConfigError(
                f"draft_history must be 0 (none) or a window of at least 2 positions: got {self.draft_history}; "
                "use 0, 128 or 512."
            )
        if self.history_layers is not None and not self.draft_history:
            raise ConfigError(
                f"history_layers are only read with a draft_history: got {self.history_layers} and no window; "
                "leave them out or set draft_history."
            )
        if self.tap_layers is not None and len(self.tap_layers) != self.num_taps:
            raise ConfigError(
                f"tap_layers must list num_taps layers: got {len(self.tap_layers)} and {self.num_taps}; change one."
            )
        for name, layers in (("tap_layers", self.taps), ("history_layers", self.history_taps)):
            outside = [layer for layer in layers if not 0 <= layer < self.num_target_layers]
            if outside or len(set(layers)) != len(layers):
                raise ConfigError(
                    f"{name} must be distinct layers 0..{self.num_target_layers - 1} of the target: got {layers}; "
                    "remove repeated ids and those out of range."
                )

    def _check_types(self) -> None:
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), str(field.type)
            if kind == "int" and (not isinstance(value, int) or isinstance(value, bool)):
                raise ConfigError(f"{field.name} must be a whole number: got {value!r}; remove quotes and fractions.")
            if kind == "float" and (not isinstance(value, (int, float)) or isinstance(value, bool)):
                raise ConfigError(f"{field.name} must be a number: got {value!r}; in YAML write 1.0e+6, not 1e6.")
            if kind == "bool" and not isinstance(value, bool):
                raise ConfigError(f"{field.name} must be true or false: got {value!r}; remove quotes.")
            if kind.startswith("tuple") and value is not None:
                whole = isinstance(value, tuple) and all(isinstance(v, int) and v is not True for v in value)
                if not whole:
                    raise ConfigError(f"{field.name} must be a tuple of layer numbers: got {value!r}; write (0, 1, 5).")

    @property
    def num_drafts(self) -> int:
        """K, tokens drafted per round."""
        return self.block_size - 1

    @property
    def taps(self) -> tuple[int, ...]:
        """The M target layers that are read at the anchor's predecessor, in slot order."""
        return self.tap_layers or target_layer_ids(self.num_target_layers, self.num_taps)

    @property
    def history_taps(self) -> tuple[int, ...]:
        """The target layers that are fused for the window; empty without one."""
        L = self.num_target_layers
        if not self.draft_history:
            return ()
        return self.history_layers or tuple(dict.fromkeys((0, L // 2, L - 1)))

    @property
    def captured_layers(self) -> tuple[int, ...]:
        """All target layers that a forward must deliver: `taps`, then the layers only the history needs."""
        return tuple(dict.fromkeys(self.taps + self.history_taps))

    @property
    def num_context_slots(self) -> int:
        """Context slots of the current position."""
        return self.num_taps if self.feature_concat == "sequence" else 1

    @property
    def layer_config(self) -> DecoderConfig:
        """The drafter's layers as a decoder's: what the shared building blocks are made from."""
        return DecoderConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            norm_eps=self.norm_eps,
            rope=RopeConfig(theta=float(self.rope_theta)),
            qk_norm=self.qk_norm,
        )

    def check_target(self, target: DecoderConfig) -> None:
        """Refuse a target that this drafter was not made for.

        Raises:
            ConfigError: a width, the vocabulary or the number of layers differs; all differences are named.
        """
        pairs = {
            "vocab_size": (self.vocab_size, target.vocab_size),
            "hidden_size": (self.hidden_size, target.hidden_size),
            "layers": (self.num_target_layers, target.num_layers),
        }
        wrong = [
            f"{name} {ours} against the target's {theirs}" for name, (ours, theirs) in pairs.items() if ours != theirs
        ]
        if wrong:
            raise ConfigError(
                f"This DLite drafter was made for another target: {'; '.join(wrong)}; use the drafter of this target."
            )

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON values."""
        fields = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DLiteConfig:
        """Build from field values as JSON or YAML give them; `preset: NAME` fills in what is not named.

        Raises:
            ConfigError: an unknown field or preset, a missing field, or a value that is refused.
        """
        values = dict(values)
        preset = values.pop("preset", None)
        if preset is not None:
            if preset not in PRESETS:
                raise ConfigError(f"preset must be one of {', '.join(PRESETS)}: got {preset!r}.")
            values = {**PRESETS[preset], **values}
        known = {field.name: field for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ConfigError(f"DLite config fields are unknown: {', '.join(unknown)}; known are {', '.join(known)}.")
        missing = [n for n, f in known.items() if f.default is dataclasses.MISSING and n not in values]
        if missing:
            raise ConfigError(f"DLite config fields are missing: {', '.join(missing)}; add them or name a preset.")
        for name, value in values.items():
            if isinstance(value, list):  # JSON and YAML have no tuples
                values[name] = tuple(value)
        return cls(**values)

    @classmethod
    def for_target(cls, target: DecoderConfig, *, mask_token_id: int, **overrides) -> DLiteConfig:
        """A drafter with the dimensions of `target`."""
        fields = {
            "vocab_size": target.vocab_size,
            "hidden_size": target.hidden_size,
            "intermediate_size": target.intermediate_size,
            "num_heads": target.num_heads,
            "num_kv_heads": target.num_kv_heads,
            "head_dim": target.head_dim,
            "norm_eps": target.norm_eps,
            "rope_theta": target.rope.theta,
            "num_target_layers": target.num_layers,
            "mask_token_id": mask_token_id,
        }
        return cls(**{**fields, **overrides})

    @classmethod
    def qwen3_4b(cls, **overrides) -> DLiteConfig:
        """The paper's drafter of Qwen3-4B: 603,322,560 parameters."""
        return cls.from_dict({"preset": "qwen3_4b", **overrides})

    @classmethod
    def qwen3_8b(cls, **overrides) -> DLiteConfig:
        """The paper's drafter of Qwen3-8B: 1,123,879,680 parameters."""
        return cls.from_dict({"preset": "qwen3_8b", **overrides})

    @classmethod
    def smollm2_135m(cls, **overrides) -> DLiteConfig:
        """A drafter of SmolLM2-135M-Instruct with two layers: 38 MB in bfloat16."""
        return cls.from_dict({"preset": "smollm2_135m", **overrides})

    @classmethod
    def tiny(cls, **overrides) -> DLiteConfig:
        """A drafter of `DecoderConfig.tiny()` for tests and docs."""
        return cls.from_dict({"preset": "tiny", **overrides})


_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "num_layers",
    "rank",
    "anchor_group_size",
)
_CHOICES = {
    "context_mode": get_args(ContextMode),
    "feature_concat": get_args(FeatureConcat),
    "head_output": get_args(HeadOutput),
}
_QWEN3 = {"vocab_size": 151_936, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "mask_token_id": 151_669}
PRESETS: dict[str, dict[str, Any]] = {
    "qwen3_4b": {
        **_QWEN3,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_target_layers": 36,
        "num_taps": 12,
        "rank": 320,
    },
    "qwen3_8b": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_target_layers": 36,
        "num_taps": 14,
        "rank": 512,
    },
    "smollm2_135m": {
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "norm_eps": 1e-5,
        "rope_theta": 100_000.0,
        "num_target_layers": 30,
        # An unused special token of its vocabulary.
        "mask_token_id": 16,
        "num_layers": 2,
        "num_taps": 8,
        # The best approximation of the LM head by rank 64 has its most likely token 36 times in 100, rank 120 51 times.
        "rank": 120,
    },
    "tiny": {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "rope_theta": 10_000.0,
        "num_target_layers": 4,
        "mask_token_id": 96,
        "num_layers": 2,
        "num_taps": 3,
        "rank": 8,
    },
}
