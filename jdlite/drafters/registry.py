"""Drafters by name, for command lines and for `decode(..., drafter="adapld")`."""

from __future__ import annotations

import dataclasses
import difflib
from typing import TYPE_CHECKING, Any

from jdlite.drafters.adapld import AdaPLD
from jdlite.drafters.base import Drafter
from jdlite.drafters.logit_spec import LogitSpec
from jdlite.drafters.lookup import PromptLookup
from jdlite.drafters.plain import Plain
from jdlite.drafters.pld_plus import PLDPlus
from jdlite.drafters.suffix import Suffix
from jdlite.drafters.token_recycling import TokenRecycling
from jdlite.errors import ConfigError

if TYPE_CHECKING:
    from jdlite.checkpoints.target import Target

# Drafters that are options and nothing else.
DRAFTERS: dict[str, type[Drafter]] = {
    drafter.name: drafter for drafter in (Plain, PromptLookup, PLDPlus, AdaPLD, TokenRecycling, Suffix, LogitSpec)
}
_DLITE_OPTIONS = ("mode", "gain", "prior", "beam")
_ADAPLD_OPTIONS = tuple(field.name for field in dataclasses.fields(AdaPLD))
# Drafters with a trained network, read from a folder, and their options.
TRAINED: dict[str, tuple[str, ...]] = {
    "dlite": ("num_nodes", *_DLITE_OPTIONS),
    "hybrid": ("num_nodes", *_DLITE_OPTIONS, *_ADAPLD_OPTIONS),
}
NAMES = (*DRAFTERS, *TRAINED)


def make_drafter(name: str, dtype: str | None = None, target: Target | None = None) -> Drafter:
    """A drafter from its name and options.

    `NAME:OPTION=VALUE,...` for drafters without a network, for example `adapld:copy_length=10,successors=never`;
    `dlite:FOLDER,OPTION=VALUE,...` for a saved DLite drafter; `hybrid:FOLDER,...` for AdaPLD and that DLite in one
    tree, with the options of both and `num_nodes`. Values are read as integers, floats, `none`, `true`, `false` or
    words.

    Args:
        name: as above.
        dtype: of a network's parameters; see `checkpoints.drafter.load_drafter`.
        target: what a network is to draft for; see there. The drafter is not fitted to it yet.

    Raises:
        ConfigError: the name or an option is not known, or a value is not usable.
        CheckpointError: the folder holds no drafter, or a damaged one.
    """
    kind, folder, values = _parse(name)
    if folder is None:
        return _build(DRAFTERS[kind], name, values)
    retrieval = None
    if kind == "hybrid":  # before the weights are read
        retrieval = _build(AdaPLD, name, _only(values, _ADAPLD_OPTIONS))
    from jdlite.checkpoints.drafter import load_drafter
    from jdlite.drafters.dlite import DLiteDrafter
    from jdlite.drafters.hybrid import Hybrid

    network = load_drafter(folder, dtype, target)
    # The nodes of a hybrid are counted once, in the tree of both.
    own = _only(values, TRAINED["dlite"] if retrieval is None else _DLITE_OPTIONS)
    drafter = _build(DLiteDrafter, name, {"model": network, **own})
    if retrieval is None:
        return drafter
    return _build(Hybrid, name, {"first": retrieval, "second": drafter, **_only(values, ("num_nodes",))})


def check_drafter(name: str) -> None:
    """Refuse what `make_drafter` would refuse, as far as can be told without reading a network.

    Raises:
        ConfigError, CheckpointError: as `make_drafter`.
    """
    kind, folder, values = _parse(name)
    if folder is None:
        _build(DRAFTERS[kind], name, values)
    else:
        from jdlite.checkpoints.drafter import check_drafter_folder

        check_drafter_folder(folder)


def _parse(name: str) -> tuple[str, str | None, dict[str, Any]]:
    """Kind, folder and options of a drafter's name."""
    kind, _, rest = name.partition(":")
    if kind not in NAMES:
        close = difflib.get_close_matches(kind, NAMES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(NAMES)}."
        raise ConfigError(f"there is no drafter {kind!r}; {hint}")
    options, folder = list(filter(None, rest.split(","))), None
    if kind in TRAINED:
        known = TRAINED[kind]
        if not options or options[0].partition("=")[0] in known:
            raise ConfigError(
                f"drafter {kind!r} needs the folder of a saved DLite drafter; write {kind}:FOLDER, options after it."
            )
        folder = options.pop(0)
    else:
        known = tuple(field.name for field in dataclasses.fields(DRAFTERS[kind]))  # pyright: ignore[reportArgumentType]
    values = {}
    for option in options:
        key, equals, value = option.partition("=")
        if key not in known or not equals:
            allowed = ", ".join(known) or "none"
            raise ConfigError(f"drafter {kind!r} does not understand {option!r}; its options are: {allowed}.")
        values[key] = _read(value)
    return kind, folder, values


def _only(values: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in names}


def _build(make: type[Drafter], name: str, values: dict[str, Any]) -> Drafter:
    try:
        return make(**values)
    except TypeError as error:
        raise ConfigError(f"drafter {name!r} cannot be made: {error}.") from error


def _read(text: str):
    if text.lower() in ("none", "true", "false"):
        return {"none": None, "true": True, "false": False}[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
