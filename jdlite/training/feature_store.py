"""The target's states of all examples on disk: made once, they spare every later epoch the target's forward."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdlite.checkpoints.target import Target
from jdlite.errors import CheckpointError
from jdlite.files import atomic_file
from jdlite.models.config import DecoderConfig
from jdlite.models.decoder import Decoder
from jdlite.models.sharding import here
from jdlite.training.config import TrainConfig
from jdlite.training.data import PackedRows, used_records
from jdlite.training.features import target_states
from jdlite.training.placement import Placement
from jdlite.training.processes import agree, on_first
from jdlite.training.records import Records

FOLDER, INDEX, STATES, PROGRESS = "features", "index.json", "states.bin", "progress.json"
_PART = f".{FOLDER}.part"
VERSION = 1
# Batches between two notes of how far the writing has come.
_EVERY = 16


class FeatureStore:
    """States by number of the record.

    Attributes:
        layers: whose outputs are stored, in this order; the final-normed states come after them.
        sizes: `[records]` positions that are stored of each record; 0 where it is not in use.

    Args:
        folder: of the run, which holds `features`.

    Raises:
        CheckpointError: they are not there, or are damaged.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder) / FOLDER
        try:
            index = json.loads((self.folder / INDEX).read_text())
            self.description: dict[str, Any] = index["description"]
            self.layers = tuple(self.description["layers"])
            self.sizes = np.array(index["sizes"], np.int64)
            self._begins = np.concatenate([[0], np.cumsum(self.sizes)])
            shape = (int(self._begins[-1]), len(self.layers) + 1, self.description["hidden_size"])
            self._states = np.memmap(
                self.folder / STATES, dtype=jnp.dtype(self.description["dtype"]), mode="r", shape=shape
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"the stored states in {self.folder} are missing or damaged ({error}); delete that folder, and they "
                "are made again."
            ) from error

    @property
    def row_shape(self) -> tuple[int, int]:
        """M + 1 and D."""
        return self._states.shape[1:]  # pyright: ignore[reportReturnType]

    def __getitem__(self, record: int) -> np.ndarray:
        """States of a record, `[size, M + 1, D]` in the stored type."""
        return self._states[self._begins[record] : self._begins[record + 1]]


def read_layers(config: TrainConfig, target: DecoderConfig) -> tuple[int, ...]:
    """Layers of the target that the drafter or its teacher reads."""
    student, teacher = config.dlite(target), config.teacher_dlite(target)
    return tuple(sorted({*student.captured_layers, *teacher.captured_layers}))


def ensure_features(
    config: TrainConfig, target: Target, progress: Callable[[int, int], None] = lambda done, total: None
) -> FeatureStore:
    """Open the stored states of a run, and make them first where they are missing or those of other data.

    A kill at any instant loses the last few batches only; the same call goes on after those that are written. Of
    several processes the first makes them, and the others wait.

    Args:
        config: of the run; its records must be there.
        target: frozen.
        progress: called with (tokens done, tokens in all).

    Raises:
        CheckpointError: there are no records, or the folder cannot be written.
    """
    folder = Path(config.folder).expanduser()
    records = Records(folder)
    chosen = used_records(records, config.data, config.batch.length)
    description = _describe(config, target, records, chosen)
    made = (folder / FOLDER / INDEX).is_file() and FeatureStore(folder).description == description
    if agree(not made):
        on_first(lambda: _write(config, target, records, chosen, description, progress))
    return FeatureStore(folder)


def store_bytes(tokens: int, layers: int, hidden_size: int, dtype: str) -> int:
    """Bytes on disk of the states of so many tokens."""
    return tokens * (layers + 1) * hidden_size * jnp.dtype(dtype).itemsize


def _describe(config: TrainConfig, target: Target, records: Records, chosen: np.ndarray) -> dict[str, Any]:
    digest = hashlib.sha256(records.table.tobytes())
    digest.update(chosen.astype("<i8").tobytes())
    return {
        "version": VERSION,
        "target": target.weights_hash,
        "target_dtype": config.target.dtype,
        "records": digest.hexdigest()[:16],
        "length": config.batch.length,
        "layers": list(read_layers(config, target.config)),
        "hidden_size": target.config.hidden_size,
        "dtype": config.features.dtype,
    }


def _write(config, target: Target, records: Records, chosen, description, progress) -> None:
    folder = Path(config.folder).expanduser()
    try:
        _write_all(folder, config, here(target.model), records, chosen, description, progress)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {folder / FOLDER} ({error.strerror or error}); free some space and run the same command "
            "again, or set features.source=online."
        ) from error


def _write_all(folder: Path, config, model: Decoder, records: Records, chosen, description, progress) -> None:
    part = folder / _PART
    done = _written(part, description)
    part.mkdir(parents=True, exist_ok=True)
    sizes = np.zeros(len(records), np.int64)
    sizes[chosen] = np.minimum(records.table["length"][chosen], config.batch.length)
    begins = np.concatenate([[0], np.cumsum(sizes)])
    rows = PackedRows(records, chosen, length=config.batch.length, seed=0, rows=None)
    forward = jax.jit(_states, static_argnames=("layers", "dtype"))
    place, micro = Placement(config, alone=True), config.batch.micro
    layers, dtype = tuple(description["layers"]), jnp.dtype(description["dtype"])
    total, passed = int(begins[-1]), 0
    # Not through a memory map: a full disk would kill the process instead of raising an error.
    with (part / STATES).open("r+b" if done else "wb") as file:
        for number, (batch, documents) in enumerate(_batches(rows, micro)):
            passed += int((batch["segment_ids"] > 0).sum())
            if number < done:
                continue
            placed = {name: x[0] for name, x in place.rows(batch).items()}
            states = np.asarray(forward(model, placed, layers=layers, dtype=dtype))
            for row, inside in zip(states, documents, strict=False):
                at = 0
                for document in inside:
                    record = int(chosen[document])
                    file.seek(int(begins[record]) * states[0, 0].nbytes)
                    file.write(np.ascontiguousarray(row[at : at + sizes[record]]).tobytes())
                    at += int(sizes[record])
            if (number + 1) % _EVERY == 0:
                file.flush()
                os.fsync(file.fileno())
                _note(part, description, number + 1)
            progress(passed, total)
        file.truncate(total * (len(layers) + 1) * description["hidden_size"] * dtype.itemsize)
        file.flush()
        os.fsync(file.fileno())
    with atomic_file(part / INDEX) as index:
        json.dump({"description": description, "sizes": sizes.tolist()}, index)
    (part / PROGRESS).unlink(missing_ok=True)
    shutil.rmtree(folder / FOLDER, ignore_errors=True)
    os.replace(part, folder / FOLDER)


def _states(target, batch: dict[str, jax.Array], *, layers: tuple[int, ...], dtype) -> jax.Array:
    """`[B, T, M + 1, D]`: outputs of the layers, then the final-normed states."""
    states = target_states(target, batch, layers)
    return jnp.stack([*(states.taps[layer] for layer in layers), states.hidden], axis=2).astype(dtype)


def _batches(rows: PackedRows, size: int) -> Iterator[tuple[dict[str, np.ndarray], list[list[int]]]]:
    """All rows, `size` at a time, the last filled up with empty ones, and the documents of each."""
    for begin in range(0, len(rows), size):
        numbers = range(begin, min(begin + size, len(rows)))
        parts = [rows[i] for i in numbers]
        parts += [{name: np.zeros_like(x) for name, x in parts[0].items()}] * (size - len(parts))
        yield {name: np.stack([p[name] for p in parts]) for name in parts[0]}, [rows.documents(i) for i in numbers]


def _written(part: Path, description: dict[str, Any]) -> int:
    """How many batches an interrupted writing of the same states has finished."""
    try:
        note = json.loads((part / PROGRESS).read_text())
        return int(note["done"]) if note["description"] == description else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _note(part: Path, description: dict[str, Any], done: int) -> None:
    with atomic_file(part / PROGRESS) as file:
        json.dump({"description": description, "done": done}, file)
