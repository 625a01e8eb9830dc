"""Drafters by name, for command lines and for `decode(..., drafter="adapld")`."""

from __future__ import annotations

import dataclasses
import difflib

from jdlite.drafters.adapld import AdaPLD
from jdlite.drafters.base import Drafter
from jdlite.drafters.logit_spec import LogitSpec
from jdlite.drafters.lookup import PromptLookup
from jdlite.drafters.plain import Plain
from jdlite.drafters.pld_plus import PLDPlus
from jdlite.drafters.suffix import Suffix
from jdlite.drafters.token_recycling import TokenRecycling
from jdlite.errors import ConfigError

DRAFTERS: dict[str, type[Drafter]] = {
    drafter.name: drafter for drafter in (Plain, PromptLookup, PLDPlus, AdaPLD, TokenRecycling, Suffix, LogitSpec)
}


def make_drafter(name: str) -> Drafter:
    """A drafter from its name and options.

    Example: `make_drafter("adapld:copy_length=10,successors=never")`. Values are read as integers, floats, `none` or
    words, whatever the option's default suggests.

    Raises:
        ConfigError: the name or an option is not known, or a value is not usable.
    """
    kind, _, options = name.partition(":")
    if kind not in DRAFTERS:
        close = difflib.get_close_matches(kind, DRAFTERS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(DRAFTERS)}."
        raise ConfigError(f"there is no drafter {kind!r}; {hint}")
    known = [field.name for field in dataclasses.fields(DRAFTERS[kind])]  # pyright: ignore[reportArgumentType]
    values = {}
    for option in filter(None, options.split(",")):
        key, equals, value = option.partition("=")
        if key not in known or not equals:
            allowed = ", ".join(known) or "none"
            raise ConfigError(f"drafter {kind!r} does not understand {option!r}; its options are: {allowed}.")
        values[key] = _read(value)
    try:
        return DRAFTERS[kind](**values)
    except TypeError as error:
        raise ConfigError(f"drafter {kind!r} cannot be made from {options!r}: {error}.") from error


def _read(text: str):
    if text.lower() in ("none", "true", "false"):
        return {"none": None, "true": True, "false": False}[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
