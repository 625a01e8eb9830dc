"""Block sizes that were measured to be the best on a kind of device: `OPERATION/tuning/KIND.json`, read and written.

A kernel states a `Question`, and `choose` answers it with what its caller named, else with what is recorded for the
default device, else with the kernel's own heuristic. Nothing is recorded for CPUs, so what is compiled on one for
another device has the heuristic's blocks. A table is read once per process, when the first kernel asks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jdlite.errors import ConfigError
from jdlite.files import atomic_file

# Of the files' format; a table of another version is refused.
VERSION = 1
# Where the operations' folders are.
FOLDER = Path(__file__).parent

_FIELDS = ("version", "operation", "device_kind", "entries")
_ENTRY_FIELDS = ("backend", "dtypes", "shape", "blocks", "microseconds", "jax")


@dataclasses.dataclass(frozen=True)
class Question:
    """Which block sizes a kernel wants to know.

    Attributes:
        operation, backend: whose they are.
        dtypes: of the arrays that decide, in the kernel's order.
        shape: the sizes that decide, by name, 0 and 1 for no and yes. Kernels round what differs from call to call up
            to a `power_of_two`, so that one entry serves many shapes.
        limits: the values that each block size may have.
        heuristic: the kernel's own choice.
        fits: called with the block sizes by name; whether they go together, in memory for instance.
    """

    operation: str
    backend: str
    dtypes: tuple[Any, ...]
    shape: Mapping[str, int]
    limits: Mapping[str, Sequence[int]]
    heuristic: Mapping[str, int]
    fits: Callable[..., bool] = lambda **blocks: True

    def allows(self, blocks: Mapping[str, int]) -> bool:
        """Whether the kernel can take these block sizes at this shape."""
        return all(value in self.limits[name] for name, value in blocks.items()) and self.fits(**blocks)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of a table.

    Attributes:
        backend: the kernel.
        dtypes: names, as in `Question`.
        shape: as in `Question`.
        blocks: the best block sizes.
        microseconds: median of one call with them.
        jax: version of JAX.
    """

    backend: str
    dtypes: tuple[str, ...]
    shape: Mapping[str, int]
    blocks: Mapping[str, int]
    microseconds: float
    jax: str

    @property
    def key(self) -> tuple:
        """What an entry is found by; one table has no two of the same."""
        return self.backend, self.dtypes, tuple(sorted(self.shape.items()))


def power_of_two(size: int) -> int:
    """`size` rounded up to a power of two."""
    return 1 << max(size - 1, 0).bit_length()


def device_kind() -> str | None:
    """Kind of the default device, such as "TPU v5 lite"; None for a CPU. Asking initialises JAX's backends."""
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if device is None or isinstance(device, str):
        device = jax.local_devices(backend=device)[0]
    return None if device.platform == "cpu" else device.device_kind


def table_path(operation: str, kind: str) -> Path:
    """Where the table of an operation and a kind of device is, whether or not there is one."""
    slug = re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")
    return FOLDER / operation / "tuning" / f"{slug}.json"


def choose(question: Question, **named: int | None) -> dict[str, int]:
    """Block sizes of a kernel.

    The table is asked only where the caller names none: its values were measured together. An entry that the kernel
    cannot take at this shape (its key is rounded) is not used at all.

    Args:
        question: of the kernel.
        named: what the caller of the kernel gave, by name; it is not checked.

    Returns:
        All of the question's block sizes.

    Raises:
        ConfigError: the table of the default device is malformed, or has block sizes that the kernel does not have.
    """
    for heard in _listeners:
        heard.append(question)
    given = {name: value for name, value in named.items() if value is not None}
    if given:
        return {**question.heuristic, **given}
    found = lookup(question.operation, question.backend, question.shape, question.dtypes)
    if found and found.keys() != question.heuristic.keys():
        raise ConfigError(
            f"{question.backend} of {question.operation} has the block sizes {', '.join(question.heuristic)}, and the "
            f"tuning table names {', '.join(found)}; tune again."
        )
    return found if found and question.allows(found) else dict(question.heuristic)


def lookup(operation: str, backend: str, shape: Mapping[str, int], dtypes: Iterable[Any]) -> dict[str, int]:
    """Block sizes recorded for the default device; empty where there are none, or it is a CPU.

    Raises:
        ConfigError: the table is malformed.
    """
    kind = device_kind()
    if kind is None:
        return {}
    wanted = (backend, _names(dtypes), tuple(sorted(shape.items())))
    entries = read(table_path(operation, kind), operation, kind)
    return next((dict(entry.blocks) for entry in entries if entry.key == wanted), {})


# Lists that the questions of this process are added to while `listen` runs.
_listeners: list[list[Question]] = []


@contextlib.contextmanager
def listen() -> Iterator[list[Question]]:
    """Gives a list of the questions that kernels ask while they are traced inside."""
    heard: list[Question] = []
    _listeners.append(heard)
    try:
        yield heard
    finally:
        # By identity: lists that are equal are not the same.
        _listeners[:] = [other for other in _listeners if other is not heard]


@functools.cache
def read(path: Path, operation: str, kind: str) -> tuple[Entry, ...]:
    """The entries of a table; none where there is no file.

    Raises:
        ConfigError: it cannot be read, or is no table of this operation and kind of device.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The tuning table {path} cannot be read: {error}.") from error
    try:
        return _parse(json.loads(text), operation, kind)
    except ValueError as error:
        raise ConfigError(
            f"The tuning table {path} is malformed: {error}; remove it, and make another by "
            f"python -m pallas_kernels.{operation}.bench --tune."
        ) from error


def record(operation: str, kind: str, entries: Iterable[Entry]) -> Path:
    """Add entries to a table, in the place of those with the same key; returns its path.

    Raises:
        ConfigError: what is there is malformed (it is left alone), an entry is, or the file cannot be written.
    """
    path = table_path(operation, kind)
    read.cache_clear()
    merged = {entry.key: entry for entry in (*read(path, operation, kind), *entries)}
    table = {
        "version": VERSION,
        "operation": operation,
        "device_kind": kind,
        "entries": [dataclasses.asdict(merged[key]) for key in sorted(merged)],
    }
    text = json.dumps(table, indent=1)
    try:
        _parse(json.loads(text), operation, kind)
    except ValueError as error:
        raise ConfigError(f"This cannot be recorded in {path}: {error}.") from error
    try:
        with atomic_file(path) as file:
            file.write(text + "\n")
    except OSError as error:
        raise ConfigError(f"The tuning table {path} cannot be written: {error}.") from error
    read.cache_clear()
    return path


def entry_for(question: Question, blocks: Mapping[str, int], seconds: float) -> Entry:
    """What to record when `blocks` were the best for a question."""
    return Entry(
        question.backend,
        _names(question.dtypes),
        dict(question.shape),
        dict(blocks),
        round(1e6 * seconds, 3),
        jax.__version__,
    )


def _names(dtypes: Iterable[Any]) -> tuple[str, ...]:
    return tuple(jnp.dtype(dtype).name for dtype in dtypes)


def _parse(table: Any, operation: str, kind: str) -> tuple[Entry, ...]:
    """Entries of a decoded file; ValueError with the reason where it is not exactly what `record` writes."""
    _fields(table, _FIELDS, "the file")
    for name, wanted in (("version", VERSION), ("operation", operation), ("device_kind", kind)):
        if table[name] != wanted or type(table[name]) is not type(wanted):
            raise ValueError(f"{name} is {table[name]!r} and not {wanted!r}")
    if not isinstance(table["entries"], list):
        raise ValueError("entries is no list")
    entries = tuple(_entry(entry, f"entry {i}") for i, entry in enumerate(table["entries"]))
    if len({entry.key for entry in entries}) < len(entries):
        raise ValueError("two entries are for the same backend, dtypes and shape")
    return entries


def _entry(entry: Any, where: str) -> Entry:
    _fields(entry, _ENTRY_FIELDS, where)
    for name in ("backend", "jax"):
        if not isinstance(entry[name], str) or not entry[name]:
            raise ValueError(f"{name} of {where} is no name: {entry[name]!r}")
    dtypes = entry["dtypes"]
    if not isinstance(dtypes, list) or not dtypes or not all(isinstance(dtype, str) for dtype in dtypes):
        raise ValueError(f"dtypes of {where} are no list of names: {dtypes!r}")
    for name, least in (("shape", 0), ("blocks", 1)):
        sizes = entry[name]
        # True is an int to Python.
        if not isinstance(sizes, dict) or not sizes or not all(type(x) is int and x >= least for x in sizes.values()):
            raise ValueError(f"{name} of {where} are no whole numbers from {least} by name: {sizes!r}")
    time = entry["microseconds"]
    if type(time) not in (int, float) or not 0 < time < math.inf:
        raise ValueError(f"microseconds of {where} are no positive number: {time!r}")
    return Entry(**{**entry, "dtypes": tuple(dtypes)})


def _fields(value: Any, wanted: Sequence[str], where: str) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is no object")
    if set(value) != set(wanted):
        raise ValueError(f"{where} has the fields {', '.join(sorted(value))} and not {', '.join(sorted(wanted))}")
