"""Safetensors files, read by range through a memory map and written tensor by tensor."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path

import ml_dtypes
import numpy as np

from jdlite.checkpoints.assemble import StoredTensor
from jdlite.errors import CheckpointError

# The format: 8 bytes of header length (little endian), a JSON header (name to dtype, shape, data_offsets), the data.
_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
_CODES = {dtype.name: code for code, dtype in _DTYPES.items()}
_LONGEST_HEADER = 100_000_000


def read_safetensors(path: str | Path) -> dict[str, StoredTensor]:
    """The tensors of one file; only the header is read now.

    Raises:
        CheckpointError: the file is truncated or damaged, or holds a dtype other than F32, F16 and BF16.
    """
    path = Path(path)
    header, start = _header(path)
    size = path.stat().st_size - start
    tensors, odd = {}, []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            code, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
            begin, end = (int(n) for n in entry["data_offsets"])
        except (TypeError, KeyError, ValueError) as error:
            raise CheckpointError(f"{path} has a damaged entry for tensor {name}; get a fresh copy.") from error
        if not 0 <= begin <= end <= size:
            raise CheckpointError(
                f"{path} is truncated: tensor {name} ends at byte {start + end} of a file of {start + size}; "
                "get a fresh copy."
            )
        if code not in _DTYPES:
            odd.append(f"{name} ({code})")
            continue
        if end - begin != _DTYPES[code].itemsize * int(np.prod(shape, dtype=np.int64)):
            raise CheckpointError(
                f"{path} is damaged: the bytes of tensor {name} do not fit its shape; get a fresh copy."
            )
        tensors[name] = StoredTensor(shape, _reader(path, _DTYPES[code], start + begin, shape))
    if odd:
        raise CheckpointError(
            f"{path} holds tensors whose dtype is not F32, F16 or BF16: {', '.join(sorted(odd))}; "
            "use an unquantised checkpoint."
        )
    return tensors


def _header(path: Path) -> tuple[dict, int]:
    """The parsed header and the offset of the data."""
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            text = file.read(length) if 2 <= length <= _LONGEST_HEADER else b""
            if not text or len(text) < length:
                raise ValueError("its header is cut short")
            header = json.loads(text)
            if not isinstance(header, dict):
                raise ValueError("its header is no table")
            return header, 8 + length
    except OSError as error:
        raise CheckpointError(f"cannot read {path} ({error.strerror or error}); check the file.") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not a complete safetensors file ({error}); get a fresh copy.") from error


def _reader(path: Path, dtype: np.dtype, offset: int, shape: tuple[int, ...]):
    def read(index: tuple) -> np.ndarray:
        if 0 in shape:
            return np.zeros(shape, dtype)[index]
        mapped = np.memmap(path, dtype=np.uint8, mode="r", offset=offset, shape=(int(np.prod(shape)) * dtype.itemsize,))
        # Copied out of the map: a parameter must not change with the file.
        return np.array(mapped.view(dtype).reshape(shape)[index])

    return read


def write_safetensors(path: str | Path, arrays: Iterable[tuple[str, np.dtype, tuple[int, ...], object]]) -> None:
    """Write one file.

    Args:
        path: the file to create.
        arrays: `(name, dtype, shape, get)` in the order of the file; `get()` returns the values and is called once,
            so only one tensor need be in memory.
    """
    arrays = list(arrays)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape, _ in arrays:
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        header[name] = {"dtype": _CODES[dtype.name], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts on a multiple of 8 bytes
    with Path(path).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, _, _, get in arrays:
            file.write(np.ascontiguousarray(get()).tobytes())  # pyright: ignore[reportCallIssue]
