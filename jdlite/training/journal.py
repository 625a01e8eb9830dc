"""A file to which finished examples are appended, and which survives being killed at any instant."""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from jdlite.errors import CheckpointError, ConfigError
from jdlite.training.records import Example

_FRAME = struct.Struct("<II")  # bytes of the example, their CRC-32


class Journal:
    """Examples in the order in which they were finished.

    Each is written with its size and checksum in one call. A last one that was not written whole is cut off when the
    journal is opened again. Only one process may hold a journal at a time.

    Attributes:
        places: where in the file each example id begins.

    Args:
        path: of the file; made if it is absent.

    Raises:
        ConfigError: another process holds it.
        CheckpointError: it cannot be read or written.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.places: dict[str, int] = {}
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise self._failed(error) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._file)
            raise ConfigError(
                f"another process is writing {self.path}; wait for it or choose another folder."
            ) from error
        self._end = 0
        for place, example in self._scan():
            self.places[example.id] = place
        try:
            if os.fstat(self._file).st_size > self._end:
                os.ftruncate(self._file, self._end)
        except OSError as error:
            raise self._failed(error) from error

    def __contains__(self, name: str) -> bool:
        return name in self.places

    def __getitem__(self, name: str) -> Example:
        """The example with this id."""
        place = self.places[name]
        size, _ = _FRAME.unpack(os.pread(self._file, _FRAME.size, place))
        return Example.from_bytes(os.pread(self._file, size, place + _FRAME.size))

    def append(self, example: Example) -> None:
        """Add an example; it is there after a kill once this returns (after a power cut once `close` returned).

        Raises:
            CheckpointError: the disk is full or fails. What was appended before is kept.
        """
        data = example.to_bytes()
        frame = _FRAME.pack(len(data), zlib.crc32(data)) + data
        try:
            written = os.pwrite(self._file, frame, self._end)
            if written != len(frame):
                os.ftruncate(self._file, self._end)
                raise OSError(f"only {written} of {len(frame)} bytes were written")
        except OSError as error:
            raise self._failed(error) from error
        self.places[example.id] = self._end
        self._end += len(frame)

    def close(self) -> None:
        """Flush to the disk and let go of the file."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise self._failed(error) from error
        finally:
            os.close(self._file)

    def _scan(self) -> Iterator[tuple[int, Example]]:
        """All whole examples from the beginning; afterwards `_end` is where the last one ends."""
        size = os.fstat(self._file).st_size
        while self._end + _FRAME.size <= size:
            length, checksum = _FRAME.unpack(os.pread(self._file, _FRAME.size, self._end))
            data = os.pread(self._file, length, self._end + _FRAME.size)
            if len(data) != length or zlib.crc32(data) != checksum or not length:
                return
            yield self._end, Example.from_bytes(data)
            self._end += _FRAME.size + length

    def _failed(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"cannot write {self.path} ({error.strerror or error}); free some space or choose another folder; "
            "answers that were finished are kept."
        )
