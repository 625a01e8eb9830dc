"""Errors that jdlite raises for bad input: one sentence each, saying what was wrong, what was given and what to do."""

from __future__ import annotations


class JdliteError(ValueError):
    """Base of all errors that a user's input can cause."""


class ConfigError(JdliteError):
    """A configuration that cannot be used."""


class CheckpointError(JdliteError):
    """Weights or a checkpoint folder that cannot be read or written."""


class PromptError(JdliteError):
    """A prompt, conversation or token list that cannot be decoded."""


class CapacityError(JdliteError):
    """A request that does not fit the cache or the model's context."""


class JdliteWarning(UserWarning):
    """Something that works but is probably not what was meant; one sentence."""


def first_line(error: BaseException) -> str:
    """What another library's error says, on one line; its kind where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
