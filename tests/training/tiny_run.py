"""A run small enough for tests: a random target of two layers, and stored answers that repeat themselves."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
from flax import nnx

from jdlite.checkpoints.target import Target
from jdlite.models.config import DecoderConfig
from jdlite.models.decoder import Decoder
from jdlite.training.config import TrainConfig
from jdlite.training.records import Example, write_records
from jdlite.training.yaml_config import from_dict

VOCAB, MASK = 31, 30


@functools.cache
def target() -> Target:
    """Random weights, no tokenizer."""
    config = DecoderConfig.tiny(vocab_size=VOCAB, num_layers=3, hidden_size=16, intermediate_size=24, head_dim=8)
    return Target(model=Decoder(config, rngs=nnx.Rngs(1)), source="tiny")


def store(folder: Path, count: int = 12) -> None:
    """Answers of 8 tokens to questions of 4."""
    rng = np.random.default_rng(0)
    examples = []
    for i in range(count):
        tokens = rng.integers(0, MASK, 12).astype(np.int32)
        mask = np.arange(12) >= 4
        examples.append(
            Example(id=f"{i:024x}-1", tokens=tokens, loss_mask=mask, prompt_length=4, finish="stop_id", target="x")
        )
    write_records(folder, examples, run={})


def config(folder: Path, *overrides: str) -> TrainConfig:
    """Teacher of 3 steps, warm-up of 3 and stable of 5; a checkpoint every 2 steps."""
    values = {
        "folder": str(folder),
        "drafter": {
            "preset": "target",
            "mask_token_id": MASK,
            "num_layers": 1,
            "num_taps": 2,
            "rank": 6,
            "block_size": 4,
            "qk_norm": True,
        },
        "data": {"held_out_fraction": 0.2, "prefetch": 0},
        "batch": {"rows": 2, "micro_rows": 1, "length": 32, "anchors": 6},
        "optimizer": {"learning_rate": 0.01},
        "teacher": {"window": 5, "steps": 3},
        "student": {"warmup_epochs": 3, "stable_epochs": 5, "steps": 8},
        "checkpoint": {"every": 2, "keep": 2},
        "evaluation": {"log_every": 2, "every": 4, "batches": 1, "prompts": 0, "tensorboard": False},
    }
    return from_dict(TrainConfig, values, overrides)
