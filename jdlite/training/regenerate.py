"""Answers of the target to the training prompts."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from jdlite.decoding.sampling import Sampling
from jdlite.errors import ConfigError

Responses = Literal["target", "transcript"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegenerateConfig:
    """How the training answers are made.

    Attributes:
        responses: whose answers to train on: the `target`'s own, decoded anew, or the `transcript`'s as they stand.
        temperature, top_p, top_k, min_p: of the target's sampling; temperature 0 is greedy.
        max_new_tokens: longest answer; one that reaches it is marked `length`.
        max_prompt_tokens: longer prompts are skipped and counted.
        batch_size: rows that are decoded side by side; as soon as one has finished, the next prompt takes its place.
        prefill_chunk: prompt tokens per forward.
        thinking: what the chat template gets as `enable_thinking`; templates without it ignore it.
        template_options: more options for the chat template.
        seed: each prompt's own seed is derived from this one and its id.
        shard_records: records per ArrayRecord file.
    """

    responses: Responses = "target"
    temperature: float = 0.7
    top_p: float = 0.8
    top_k: int = 20
    min_p: float = 0.0
    max_new_tokens: int = 1024
    max_prompt_tokens: int = 2048
    batch_size: int = 16
    prefill_chunk: int = 64
    thinking: bool = False
    template_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 0
    shard_records: int = 4096

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "max_prompt_tokens", "batch_size", "prefill_chunk", "shard_records"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1: got {getattr(self, name)}; give a positive number.")
        _ = self.sampling  # refuses what is out of range

    @property
    def sampling(self) -> Sampling:
        """As the decode loop takes it."""
        return Sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p)
