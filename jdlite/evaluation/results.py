"""Results of a benchmark on disk: one JSON file, rewritten whole after every job, so a stopped run loses nothing."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import jdlite
from jdlite.errors import ConfigError
from jdlite.files import atomic_file

FORMAT = 1
_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "transformers", "tokenizers", "torch")


def environment() -> dict[str, Any]:
    """Versions, device, command and date."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    device = jax.devices()[0]
    return {
        "jdlite": jdlite.__version__,
        "python": platform.python_version(),
        **versions,
        "device": f"{device.platform} {device.device_kind}".strip(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "command": " ".join(["python -m jdlite.bench", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def plain_data(value: Any) -> Any:
    """Dataclasses and tuples as dicts and lists, the way that JSON gives them back."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    return json.loads(json.dumps(value))


def save(path: Path, content: Mapping[str, Any]) -> None:
    """Write the file whole or not at all.

    Raises:
        ConfigError: the place cannot be written.
    """
    try:
        with atomic_file(path) as file:
            json.dump(content, file, ensure_ascii=False)
    except OSError as error:
        raise ConfigError(
            f"the results cannot be written to {path} ({error.strerror or error}); choose another place."
        ) from error


def load(path: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Records of an earlier run with the same settings; none where there is no file. It may have taken other rows.

    Raises:
        ConfigError: the file is not one of ours, or its settings differ.
    """
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        records, before, version = content["records"], content["settings"], content["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is not a results file of jdlite.bench ({error}); give another name with --json."
        ) from error
    if version != FORMAT:
        raise ConfigError(f"{path} has results of format {version}, not {FORMAT}; give another name with --json.")
    now = plain_data(settings)
    # Which rows are taken does not change what a record says.
    compared = (before.keys() | now.keys()) - {"rows"}
    differing = sorted(key for key in compared if before.get(key) != now.get(key))
    if differing:
        raise ConfigError(
            f"{path} was made with another setting of {', '.join(differing)}, so it cannot be resumed; "
            "use the same settings, or another name with --json."
        )
    return records


def document(
    settings: Mapping[str, Any],
    environment: Mapping[str, Any],
    records: Sequence[Mapping],
    summary: Sequence[Mapping],
    by_length: Sequence[Mapping],
    notes: Sequence[str],
) -> dict[str, Any]:
    """The whole content of a results file."""
    return {
        "format": FORMAT,
        "environment": dict(environment),
        "settings": plain_data(settings),
        "summary": list(summary),
        "by_length": list(by_length),
        "notes": list(notes),
        "records": list(records),
    }
