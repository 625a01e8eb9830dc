"""`python -m jdlite.checkpoint`: look into drafters and training runs, convert and export them."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from jdlite import cli
from jdlite.errors import CheckpointError

if TYPE_CHECKING:
    from jdlite.models.dlite import DLite

_LAYOUTS = Literal["orbax", "official"]
_DTYPES = Literal["float32", "bfloat16", "float16"]
_PHASES = ("student", "single", "teacher")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspect:
    """Say what a folder holds: a drafter, a step of a training run, or a whole run.

    Attributes:
        folder: to look into.
        json: print JSON.
    """

    folder: Annotated[Path, tyro.conf.Positional]
    json: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convert:
    """Write a drafter in another layout or dtype.

    Attributes:
        source: folder of a drafter in the official layout, or of an Orbax checkpoint.
        destination: folder to create.
        to: `official` (config.json and safetensors, as released drafters) or `orbax`.
        dtype: of the written weights (default: as they are).
        overwrite: replace the destination.
    """

    source: Annotated[Path, tyro.conf.Positional]
    destination: Annotated[Path, tyro.conf.Positional]
    to: _LAYOUTS
    dtype: _DTYPES | None = None
    overwrite: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    """Take the drafter out of a training run, without what only training needs.

    Attributes:
        run: folder of the run.
        destination: folder to create.
        which: `best` by held-out tau, `last`, or the number of a step that is kept.
        phase: whose (default: the student, else the single-stage student, else the teacher).
        to: layout, as for convert.
        dtype: of the written weights.
        overwrite: replace the destination.
    """

    run: Annotated[Path, tyro.conf.Positional]
    destination: Annotated[Path, tyro.conf.Positional]
    which: str = "best"
    phase: Literal["student", "single", "teacher"] | None = None
    to: _LAYOUTS = "orbax"
    dtype: _DTYPES = "bfloat16"
    overwrite: bool = False


Commands = (
    Annotated[Inspect, tyro.conf.subcommand("inspect")]
    | Annotated[Convert, tyro.conf.subcommand("convert")]
    | Annotated[Export, tyro.conf.subcommand("export")]
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 0, or 2 for bad input."""
    return cli.run(
        _checkpoint,
        Commands,  # pyright: ignore[reportArgumentType]
        arguments,
        prog="python -m jdlite.checkpoint",
        description="Look into drafters and training runs, convert and export them.",
    )


def _checkpoint(command: Inspect | Convert | Export) -> None:
    from jdlite.training.run_checkpoint import quiet_orbax

    quiet_orbax()
    if isinstance(command, Inspect):
        facts = inspect(command.folder)
        print(json.dumps(facts, indent=2) if command.json else _text(facts))
    elif isinstance(command, Convert):
        network, info = _load(command.source)
        _write(network, info, command.destination, command.to, command.dtype, command.overwrite)
    else:
        folder = find_step(command.run, command.phase, command.which)
        network, info = _load(folder)
        _write(network, info, command.destination, command.to, command.dtype, command.overwrite)


def inspect(folder: str | Path) -> dict[str, Any]:
    """What a folder holds, as JSON values.

    Raises:
        CheckpointError: nothing of this library, or it is damaged.
    """
    folder = Path(folder).expanduser()
    phases = {phase: steps_of(folder / phase) for phase in _PHASES if (folder / phase / "checkpoints").is_dir()}
    if not phases:
        if (folder / "checkpoints").is_dir():  # a phase of a run
            phases, folder = {folder.name: steps_of(folder)}, folder.parent
        else:
            return {"kind": "drafter", "folder": str(folder), **_drafter_facts(folder)}
    facts: dict[str, Any] = {"kind": "training run", "folder": str(folder), "phases": {}}
    for phase, steps in phases.items():
        best = folder / phase / "best"
        facts["phases"][phase] = {
            "steps": steps,
            "damaged": sorted(p.name for p in (folder / phase / "checkpoints").glob("*.damaged")),
            "best": _drafter_facts(best) if best.is_dir() else None,
            "last": _drafter_facts(folder / phase / "checkpoints" / str(steps[-1])) if steps else None,
        }
    return facts


def steps_of(phase: Path) -> list[int]:
    """Steps whose checkpoints are there, ascending."""
    return sorted(int(p.name) for p in (phase / "checkpoints").glob("*") if p.is_dir() and p.name.isdigit())


def find_step(run: str | Path, phase: str | None, which: str) -> Path:
    """The folder of a drafter in a run.

    Raises:
        CheckpointError: there is none.
    """
    run = Path(run).expanduser()
    there = [p for p in _PHASES if (run / p).is_dir()]
    if phase is None and not there:
        raise CheckpointError(f"{run} is no training run: it has none of {', '.join(_PHASES)}; give a run's folder.")
    folder = run / (phase or there[0])
    steps = steps_of(folder)
    path = (
        folder / "best"
        if which == "best"
        else folder / "checkpoints" / (str(steps[-1]) if which == "last" and steps else which)
    )
    if not path.is_dir():
        raise CheckpointError(
            f"{folder} has no drafter {which!r}: there are {'best, ' if (folder / 'best').is_dir() else ''}"
            f"steps {', '.join(map(str, steps)) or 'none'}; choose one with --which."
        )
    return path


def _load(folder: Path) -> tuple[DLite, dict[str, Any]]:
    from jdlite.checkpoints.drafter import check_drafter_folder, load_drafter

    path = check_drafter_folder(folder)
    if (path / "config.json").is_file():
        dtype = json.loads((path / "config.json").read_text(encoding="utf-8")).get("dtype", "float32")
        return load_drafter(path, dtype), {}
    from jdlite.checkpoints.dlite_orbax import load_dlite_orbax

    return load_dlite_orbax(path)


def _write(network: DLite, info: dict[str, Any], folder: Path, to: str, dtype: str | None, overwrite: bool) -> None:
    import jax

    from jdlite.checkpoints.dlite import save_dlite
    from jdlite.checkpoints.dlite_orbax import save_dlite_orbax

    if dtype is not None:
        network = jax.tree.map(lambda x: x.astype(dtype), network)
    if to == "orbax":
        path = save_dlite_orbax(network, folder, info=info, overwrite=overwrite)
    else:
        path = save_dlite(network, folder, overwrite=overwrite)
    size = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    print(f"{path}: {size / 1e6:.1f} MB")


def _drafter_facts(folder: Path) -> dict[str, Any]:
    from jdlite.checkpoints.dlite import tensor_names
    from jdlite.checkpoints.dlite_orbax import params_tree
    from jdlite.training.run_checkpoint import flat_arrays

    network, info = _load(folder)
    arrays = flat_arrays(params_tree(network))
    names = {".".join(map(str, path)): name for path, name in tensor_names(network).items()}
    return {
        "parameters": sum(math.prod(a.shape) for a in arrays.values()),
        "config": network.config.to_dict(),
        "info": {name: value for name, value in info.items() if name != "train"},
        "training": info.get("train"),
        "arrays": {name: f"{a.dtype.name}{list(a.shape)} {names[name]}" for name, a in arrays.items()},
    }


def _text(facts: dict[str, Any]) -> str:
    if facts["kind"] == "drafter":
        return "\n".join([f"drafter {facts['folder']}", *_drafter_lines(facts)])
    lines = [f"training run {facts['folder']}"]
    for phase, found in facts["phases"].items():
        lines.append(f"{phase}: steps {', '.join(map(str, found['steps'])) or 'none'}")
        if found["damaged"]:
            lines.append(f"  damaged: {', '.join(found['damaged'])}")
        for name in ("best", "last"):
            if found[name] is not None:
                lines += [f"  {name}:", *("  " + line for line in _drafter_lines(found[name], arrays=False))]
    return "\n".join(lines)


def _drafter_lines(facts: dict[str, Any], *, arrays: bool = True) -> list[str]:
    c, info = facts["config"], facts["info"]
    lines = [
        f"  {facts['parameters']:,} parameters, {c['num_layers']} layers, width {c['hidden_size']}, rank {c['rank']}, "
        f"block size {c['block_size']}, {c['num_taps']} taps, history {c['draft_history']}"
    ]
    lines += [f"  {name}: {json.dumps(value)}" for name, value in info.items()]
    if arrays:
        lines += [f"  {name} {text}" for name, text in facts["arrays"].items()]
    return lines


if __name__ == "__main__":
    sys.exit(main())
