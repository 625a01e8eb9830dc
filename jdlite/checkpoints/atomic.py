"""Writing a folder or file so that it appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jdlite.errors import CheckpointError


@contextlib.contextmanager
def atomic_folder(path: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Give a temporary folder beside `path` that becomes `path` when the block ends without an error.

    Nothing is left behind when the block raises, and a folder that was there before is kept as it was.

    Args:
        path: the folder to create.
        overwrite: replace an existing folder; without it an existing one that is not empty is refused.

    Raises:
        CheckpointError: the folder exists, or its parent cannot be written.
    """
    path = Path(path).absolute()
    if path.exists() and not overwrite and not (path.is_dir() and not any(path.iterdir())):
        raise CheckpointError(f"{path} already exists; choose another folder or pass overwrite=True.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise CheckpointError(
            f"cannot write to {path.parent} ({error.strerror or error}); choose a folder that you may write to."
        ) from error
    try:
        # mkdtemp makes folders that only the owner may enter.
        temporary.chmod(0o755)
        yield temporary
        _swap(temporary, path)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path} ({error.strerror or error}); free some space or choose another folder."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _swap(temporary: Path, path: Path) -> None:
    """Rename `temporary` to `path`, moving an existing folder out of the way first."""
    if not path.exists():
        os.replace(temporary, path)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
    try:
        os.replace(path, old / "was")
        try:
            os.replace(temporary, path)
        except OSError:
            os.replace(old / "was", path)
            raise
    finally:
        shutil.rmtree(old, ignore_errors=True)
