"""Batches of packed examples."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jdlite.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """How stored examples become batches.

    Attributes:
        held_out_fraction: share of the conversations that is never trained on, chosen by a hash of their id.
        truncated: what to do with answers that were cut at the limit of new tokens: `drop` or `keep`.
        long: what to do with examples that are longer than a row: `truncate` keeps their beginning, `drop` leaves them
            out. An example without a supervised token left is always dropped.
        min_supervised: least number of supervised tokens of an example.
        open_rows: rows that are filled side by side when examples are packed; more waste less.
        prefetch: batches that are made ahead.
    """

    held_out_fraction: float = 0.02
    truncated: Literal["drop", "keep"] = "drop"
    long: Literal["truncate", "drop"] = "truncate"
    min_supervised: int = 2
    open_rows: int = 64
    prefetch: int = 2

    def __post_init__(self) -> None:
        if not 0 <= self.held_out_fraction < 1:
            raise ConfigError(
                f"held_out_fraction must be at least 0 and below 1: got {self.held_out_fraction}; 0.02 is usual."
            )
        for name in ("min_supervised", "open_rows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1: got {getattr(self, name)}; give a positive number.")
        if self.prefetch < 0:
            raise ConfigError(f"prefetch must not be negative: got {self.prefetch}; 2 is usual.")
