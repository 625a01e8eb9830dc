"""Lossless speculative decoding of Qwen3-class language models in JAX.

    target = jdlite.load_target("Qwen/Qwen3-0.6B")
    result = jdlite.decode(target, "Repeat after me: ...", drafter="adapld", max_new_tokens=128)

Names are loaded when they are first used, so importing the package is quick and touches no device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_WHERE = {
    "jdlite.api": ("decode", "calibrate"),
    "jdlite.checkpoints.target": ("Target", "load_target"),
    "jdlite.checkpoints.huggingface": ("save_huggingface",),
    "jdlite.checkpoints.gguf": ("convert_gguf",),
    "jdlite.conversation": ("Conversation",),
    "jdlite.decoding.request": ("make_request",),
    "jdlite.decoding.sampling": ("Sampling",),
    "jdlite.decoding.session": ("Result", "Session"),
    "jdlite.decoding.state": ("DecodeState", "Request", "init_state"),
    "jdlite.decoding.loop": ("catch_up", "decode_rounds", "start"),
    "jdlite.decoding.policy": ("Costs",),
    "jdlite.drafters.base": ("Drafter", "Proposal"),
    "jdlite.drafters.registry": ("make_drafter",),
    "jdlite.models.config": ("DecoderConfig", "RopeConfig"),
    "jdlite.models.decoder": ("Decoder",),
    "jdlite.errors": ("JdliteError",),
}
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}

__all__ = sorted([*_MODULE_OF, "__version__"])  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from jdlite.api import calibrate, decode
    from jdlite.checkpoints.gguf import convert_gguf
    from jdlite.checkpoints.huggingface import save_huggingface
    from jdlite.checkpoints.target import Target, load_target
    from jdlite.conversation import Conversation
    from jdlite.decoding.loop import catch_up, decode_rounds, start
    from jdlite.decoding.policy import Costs
    from jdlite.decoding.request import make_request
    from jdlite.decoding.sampling import Sampling
    from jdlite.decoding.session import Result, Session
    from jdlite.decoding.state import DecodeState, Request, init_state
    from jdlite.drafters.base import Drafter, Proposal
    from jdlite.drafters.registry import make_drafter
    from jdlite.errors import JdliteError
    from jdlite.models.config import DecoderConfig, RopeConfig
    from jdlite.models.decoder import Decoder


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'jdlite' has no attribute {name!r}; it has: {', '.join(__all__)}.")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
