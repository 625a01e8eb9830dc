"""A trained drafter from a folder, whichever layout it has."""

from __future__ import annotations

from pathlib import Path

from jdlite.errors import CheckpointError
from jdlite.models.dlite import DLite


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


def load_drafter(folder: str | Path, dtype: str | None = None) -> DLite:
    """Read a DLite network in the official layout (`checkpoints.dlite`) or as Orbax saved it
    (`checkpoints.dlite_orbax`).

    Args:
        folder: holds `config.json` and safetensors, or the items `params` and `config`.
        dtype: of the parameters; None keeps what an Orbax checkpoint holds, and is float32 for the official layout.

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

    return load_dlite_orbax(path, dtype)[0]
