"""A trained drafter from a folder, whichever layout it has."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jdlite.errors import CheckpointError, JdliteWarning
from jdlite.models.dlite import DLite

if TYPE_CHECKING:
    from jdlite.checkpoints.target import Target


def check_drafter_folder(folder: str | Path) -> Path:
    """The folder, once it is clear that it holds a drafter in one of the layouts. Reads nothing.

    Raises:
        CheckpointError: it does not.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise CheckpointError(f"there is no drafter folder {path}; give the folder of a saved DLite drafter.")
    if not (path / "config.json").is_file() and not all((path / item).is_dir() for item in ("params", "config")):
        raise CheckpointError(
            f"{path} holds no DLite drafter: neither config.json with safetensors nor the Orbax items params and "
            "config; give a released drafter's folder or one step of a training run."
        )
    return path


def load_drafter(folder: str | Path, dtype: str | None = None, target: Target | None = None) -> DLite:
    """Read a DLite network in the official layout (`checkpoints.dlite`) or as Orbax saved it
    (`checkpoints.dlite_orbax`).

    Args:
        folder: holds `config.json` and safetensors, or the items `params` and `config`.
        dtype: of the parameters; None keeps what an Orbax checkpoint holds, and is float32 for the official layout.
        target: what it is to draft for. If the checkpoint says that it was trained for other weights, that is a
            `JdliteWarning` and no error: the text stays the target's, and a drafter may well serve a model's relatives.

    Raises:
        CheckpointError: the folder holds no drafter, or a damaged one.
        ConfigError: its config cannot be used.
    """
    path = check_drafter_folder(folder)
    if (path / "config.json").is_file():
        from jdlite.checkpoints.dlite import load_dlite

        return load_dlite(path, dtype or "float32")
    # Importing Orbax takes seconds.
    from jdlite.checkpoints.dlite_orbax import load_dlite_orbax

    network, info = load_dlite_orbax(path, dtype)
    if target is not None:
        _compare_origin(info, target, path)
    return network


def _compare_origin(info: Mapping[str, Any], target: Target, path: Path) -> None:
    trained_for = info.get("target_fingerprint")
    if trained_for is not None and trained_for != target.fingerprint:
        warnings.warn(
            f"the drafter in {path} was trained for {info.get('target') or 'another target'}, and {target.source} has "
            "other weights; the text will be the same, but expect few accepted drafts.",
            JdliteWarning,
            stacklevel=2,
        )
