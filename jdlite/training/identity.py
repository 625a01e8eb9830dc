"""What makes two invocations the same run: target, data, and the settings that decide what is trained."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from jdlite.training.config import FREE_GROUPS

# Settings within compared groups that do not change what is trained.
_FREE = ("target.path", "data.prefetch", "batch.recompute")
# Groups that decide what the records are; the fingerprint of the data stands for them. The drafter is compared with
# the shapes of the arrays.
_ELSEWHERE = ("prompts", "regenerate", "drafter")


def differences(stored: Mapping[str, Any], ours: Mapping[str, Any], phase: str) -> list[str]:
    """How this invocation differs from the run that a checkpoint belongs to, in words; empty if it is the same.

    Args:
        stored: `info` of the checkpoint.
        ours: the same of this invocation.
        phase: decides whose options count.
    """
    ignored = {*FREE_GROUPS, *_ELSEWHERE, "student" if phase == "teacher" else "teacher"}
    old, new = flatten_config(stored["train"]), flatten_config(ours["train"])
    names = sorted(
        name
        for name in old.keys() | new.keys()
        if name.partition(".")[0] not in ignored and name not in _FREE and old.get(name) != new.get(name)
    )
    wrong = [f"{name} was {old.get(name)!r}, is {new.get(name)!r}" for name in names]
    if stored["target_hash"] != ours["target_hash"]:
        wrong.append(f"the target was {stored['target']} with other weights, is {ours['target']}")
    if stored["steps"] != ours["steps"]:
        wrong.append(f"the phase had {stored['steps']} steps, has {ours['steps']} (other data?)")
    return wrong


def tokenizer_hash(tokenizer: Any) -> str:
    """Of vocabulary and chat template; empty without a tokenizer."""
    if tokenizer is None:
        return ""
    parts = sorted(tokenizer.get_vocab().items()), getattr(tokenizer, "chat_template", None)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def flatten_config(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted name."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten_config(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = list(value) if isinstance(value, tuple) else value
    return flat
