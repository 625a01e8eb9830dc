"""Writing a file so that it appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[TextIO]:
    """Give a temporary text file (UTF-8) beside `path` that becomes `path` when the block ends without an error.

    The folder is made where it is missing. Nothing is left behind when the block raises, and a file that was there
    before is kept as it was.

    Raises:
        OSError: the place cannot be written; callers say it in the words of what they write.
    """
    path = Path(path).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            yield file
        # mkstemp makes files that only the owner may read.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
