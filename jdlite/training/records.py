"""Stored training examples: their bytes, ArrayRecord shards with a table of contents, and the reader."""

from __future__ import annotations

import dataclasses
import json
import struct
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]

from jdlite.checkpoints.atomic import atomic_folder
from jdlite.errors import CheckpointError

FOLDER, INDEX, TABLE = "records", "index.json", "table.npy"
VERSION = 1
_MAGIC = b"JDL1"
_HEAD = struct.Struct("<4sII")  # magic, bytes of the JSON header, number of tokens
# One row per record: what choosing and packing examples needs, so that no record is read for it.
# `first` is the first supervised token, or the length where there is none.
ROW = np.dtype([("id", "S40"), ("length", "<i4"), ("first", "<i4"), ("supervised", "<i4"), ("finish", "S16")])
# Answers that did not come to their own end.
CUT = frozenset({"length", "capacity", "error"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """One conversation to learn from.

    Attributes:
        id: of the task (`prompts.Task`), at most 40 characters.
        tokens: `[T]` int32, history and answer.
        loss_mask: `[T]` bool, True on tokens to learn from, the end-of-turn token included.
        prompt_length: tokens before the answer.
        finish: why the answer ended: a decode finish reason (`stop_id`, `length`, ...), or `transcript`.
        sampling: how it was sampled.
        target: hash of the weights that wrote it; empty for a transcript's own answer.
    """

    id: str
    tokens: np.ndarray
    loss_mask: np.ndarray
    prompt_length: int
    finish: str
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    target: str = ""

    def __post_init__(self) -> None:
        if self.tokens.shape != self.loss_mask.shape or self.tokens.ndim != 1:
            raise ValueError(
                f"tokens and mask must be two equal lists: got {self.tokens.shape}, {self.loss_mask.shape}"
            )

    def to_bytes(self) -> bytes:
        """The example as bytes: a JSON header, the tokens as little-endian int32, the mask as bits."""
        header = {
            "id": self.id,
            "prompt_length": self.prompt_length,
            "finish": self.finish,
            "sampling": dict(self.sampling),
            "target": self.target,
        }
        text = json.dumps(header, sort_keys=True).encode()
        bits = np.packbits(self.loss_mask.astype(bool), bitorder="little")
        head = _HEAD.pack(_MAGIC, len(text), self.tokens.size)
        return head + text + self.tokens.astype("<i4").tobytes() + bits.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Example:
        """The inverse of `to_bytes`.

        Raises:
            CheckpointError: the bytes are no example.
        """
        try:
            magic, header_size, count = _HEAD.unpack_from(data)
            body = _HEAD.size + header_size
            if magic != _MAGIC or len(data) != body + 4 * count + (count + 7) // 8:
                raise ValueError("wrong size or kind")
            header = json.loads(data[_HEAD.size : body])
            tokens = np.frombuffer(data, "<i4", count, body).astype(np.int32)
            bits = np.frombuffer(data, np.uint8, offset=body + 4 * count)
            mask = np.unpackbits(bits, count=count, bitorder="little").astype(bool)
            return cls(tokens=tokens, loss_mask=mask, **header)
        except (struct.error, ValueError, TypeError) as error:
            raise CheckpointError(
                f"a stored example is damaged ({error}); delete the records folder and regenerate."
            ) from error

    def row(self) -> tuple[bytes, int, int, int, bytes]:
        """Its row of the table (`ROW`)."""
        first = int(np.argmax(self.loss_mask)) if self.loss_mask.any() else self.tokens.size
        return self.id.encode(), self.tokens.size, first, int(self.loss_mask.sum()), self.finish.encode()


def write_records(
    folder: str | Path, examples: Iterable[Example], *, run: Mapping[str, Any], shard_records: int = 4096
) -> None:
    """Write examples as `folder/records`, whole or not at all, replacing what was there.

    The same examples in the same order give the same bytes.

    Args:
        folder: of the run.
        examples: in the order in which they are to be stored.
        run: what the index says about the run, JSON values.
        shard_records: records per file.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    with atomic_folder(Path(folder) / FOLDER, overwrite=True) as temporary:
        shards: list[dict[str, Any]] = []
        rows = []
        writer = None
        try:
            for example in examples:
                if writer is None or shards[-1]["records"] == shard_records:
                    if writer is not None:
                        writer.close()
                    shards.append({"file": f"records-{len(shards):05d}.arecord", "records": 0})
                    writer = array_record_module.ArrayRecordWriter(str(temporary / shards[-1]["file"]), "group_size:1")
                writer.write(example.to_bytes())
                shards[-1]["records"] += 1
                rows.append(example.row())
            if writer is not None:
                writer.close()
        except (RuntimeError, ValueError) as error:  # what the writer raises for a full disk
            raise CheckpointError(
                f"cannot write {Path(folder) / FOLDER} ({error}); free some space or choose another folder."
            ) from error
        table = np.array(rows, ROW)
        np.save(temporary / TABLE, table)
        (temporary / INDEX).write_text(json.dumps(_index(table, shards, run), indent=2, sort_keys=True) + "\n")


def _index(table: np.ndarray, shards: list[dict[str, Any]], run: Mapping[str, Any]) -> dict[str, Any]:
    finish = Counter(name.decode() for name in table["finish"].tolist())
    return {
        "version": VERSION,
        "records": len(table),
        "tokens": int(table["length"].sum()),
        "supervised": int(table["supervised"].sum()),
        "finish": dict(finish),
        "shards": shards,
        "run": dict(run),
    }


class Records:
    """Stored examples by number. Safe to read from several threads, and cheap to pickle.

    Attributes:
        index: the contents of the index file.
        table: one `ROW` per record, in order.

    Args:
        folder: of the run, which holds `records`.

    Raises:
        CheckpointError: there are no records, or their files do not fit together.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder) / FOLDER
        try:
            self.index: dict[str, Any] = json.loads((self.folder / INDEX).read_text())
            if self.index["version"] != VERSION:
                raise ValueError(f"version {self.index['version']} instead of {VERSION}")
            self.table: np.ndarray = np.load(self.folder / TABLE)
            self._begins = np.cumsum([0, *(shard["records"] for shard in self.index["shards"])])
            if self.table.dtype != ROW or not len(self.table) == self._begins[-1] == self.index["records"]:
                raise ValueError("index, table and shards count differently")
        except OSError as error:
            raise CheckpointError(
                f"{folder} holds no training records ({error.strerror or error}); run the regenerate stage first."
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"the training records in {folder} are damaged ({error}); delete them and regenerate."
            ) from error
        self._readers: dict[int, Any] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.table)

    @property
    def run(self) -> Mapping[str, Any]:
        """What was said about the run when it was written."""
        return self.index["run"]

    def __getitem__(self, i: int) -> Example:
        """Record i.

        Raises:
            IndexError: there is no such record.
            CheckpointError: its shard is missing or damaged.
        """
        if not 0 <= i < len(self):
            raise IndexError(i)
        shard = int(np.searchsorted(self._begins, i, side="right")) - 1
        at = i - int(self._begins[shard])
        path = self.folder / self.index["shards"][shard]["file"]
        try:
            with self._lock:
                reader = self._readers.get(shard)
                if reader is None:
                    reader = self._readers[shard] = array_record_module.ArrayRecordReader(
                        str(path), "readahead_buffer_size:0"
                    )
                (data,) = reader.read([at])
        except (RuntimeError, ValueError, IndexError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); delete the records and regenerate.") from error
        return Example.from_bytes(data)

    def __iter__(self) -> Iterator[Example]:
        return (self[i] for i in range(len(self)))

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder.parent}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(state["folder"])  # pyright: ignore[reportGeneralTypeIssues]
