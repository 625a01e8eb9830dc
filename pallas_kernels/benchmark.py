"""What the operations' `bench.py` share: timing backends beside the reference and the byte floor, and tuning kernels.

python -m pallas_kernels.OPERATION.bench                       # on an accelerator
python -m pallas_kernels.OPERATION.bench --tune                # and record the best block sizes for its kind
python -m pallas_kernels.OPERATION.bench --smoke               # tiny shapes, anywhere; its times mean nothing

One program runs an operation several times, each run after the one before, and the time of a run is what more runs add,
so that neither starting a program nor what it does once counts. Each result is compared with the reference's.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from jdlite.errors import first_line
from jdlite.files import atomic_file
from jdlite.models.config import DecoderConfig
from jdlite.models.dlite_config import DLiteConfig
from jdlite.timing import median_seconds, medians_in_turn
from pallas_kernels import tuning
from pallas_kernels.backends import MOSAIC_GPU, MOSAIC_TPU, REFERENCE, candidates

Row = dict[str, Any]
Name = TypeVar("Name", bound=Hashable)

# A block size with so few values has all of them tried; others are tried up to so many times the heuristic's, or as
# small a part of it.
FEW, FARTHEST = 6, 8


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is run.

    Attributes:
        dtype: of weights and caches.
        models: target and drafter by name.
        rows, nodes, cached: rows, drafted nodes per row and cached tokens to combine.
        repeats: timings of each.
        loops: how many runs the longer of two timed programs adds; with 0 there is one, of a single run.
        copy: numbers of the array that is copied to see the memory's bandwidth.
    """

    dtype: str
    models: Mapping[str, tuple[DecoderConfig, DLiteConfig]]
    rows: tuple[int, ...]
    nodes: tuple[int, ...]
    cached: tuple[int, ...]
    repeats: int
    loops: int
    copy: int


def full() -> Setting:
    """Qwen3-4B, Qwen3-8B and SmolLM2-135M."""
    c, d = DecoderConfig, DLiteConfig
    models = {
        "Qwen3-4B": (c.qwen3_4b(), d.qwen3_4b()),
        "Qwen3-8B": (c.qwen3_8b(), d.qwen3_8b()),
        "SmolLM2-135M": (c.smollm2_135m(), d.smollm2_135m()),
    }
    return Setting("bfloat16", models, (1, 8, 64), (8, 64), (1024, 8192, 32_768), 15, 20, 1 << 29)


def smoke() -> Setting:
    """A few numbers."""
    # Heads of 64 and a rank of 8 are the least that the kernels take.
    target, drafter = DecoderConfig.tiny(head_dim=64, num_layers=1), DLiteConfig.tiny(head_dim=64, rank=8, block_size=3)
    return Setting("float32", {"tiny": (target, drafter)}, (2,), (3,), (128,), 1, 0, 1 << 12)


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation at one shape.

    Attributes:
        label: what tells it from the model's other cases, such as "drawn"; may be empty.
        where: `model`, `batch` and `cached` of its rows, as far as they are there.
        floor: bytes that one run must move.
        make: its arguments, arrays with random values.
        at: the arguments of run number i (traced); those of run 0 are the arguments themselves.
        fed: how many of the first arguments are the outputs of the run before, as a cache that is written in place.
    """

    label: str
    where: Row
    floor: int
    make: Callable[[], tuple]
    at: Callable[[tuple, jax.Array], tuple] = lambda args, i: args
    fed: int = 0


@dataclasses.dataclass(frozen=True)
class Operation:
    """How to bench one operation.

    Attributes:
        name: its folder's.
        backends: by name; called with a case's arguments, and kernels with block sizes by name.
        cases: of a setting, what matters most first.
        off: how far a result is from the reference's, given both and the arguments; 1 is what rounding may do.
        error: largest difference of `call(*args)` from float64 in numpy at a small shape, given `call` and a dtype.
        prepare: the arguments as a backend wants them, made once.
    """

    name: str
    backends: Mapping[str, Callable[..., Any]]
    cases: Callable[[Setting], Iterator[Case]]
    off: Callable[[Any, Any, tuple], float]
    error: Callable[[Callable[..., Any], Any], float]
    prepare: Callable[[tuple, str], tuple] = lambda args, backend: args


# Timing.


def repeated(call: Callable[..., Any], case: Case, args: tuple) -> Callable[[int], Any]:
    """A program of `count` runs of `call`, each after the one before; it returns the last result."""

    @jax.jit
    def program(args, count):
        def run(i, out):
            if case.fed:
                return call(*case.at((*out, *args[case.fed :]), i))
            # All arguments depend on the run before, so nothing is computed once for all runs or not at all.
            fresh, _ = jax.lax.optimization_barrier((args, out))
            return call(*case.at(fresh, i))

        zeros = lambda x: jnp.zeros(x.shape, x.dtype)  # noqa: E731
        begin = args[: case.fed] if case.fed else jax.tree.map(zeros, jax.eval_shape(call, *args))
        return jax.lax.fori_loop(0, count, run, begin)

    return partial(program, args)


def seconds_per_run(programs: Mapping[Name, Callable[[int], Any]], repeats: int, loops: int) -> dict[Name, float]:
    """Median seconds of one run of each program of `repeated`; the programs take turns."""
    calls = {(name, n): partial(run, n) for name, run in programs.items() for n in (1, 1 + loops)}
    times = medians_in_turn(calls, repeats)
    added = {name: (times[name, 1 + loops] - times[name, 1]) / max(loops, 1) for name in programs}
    # Where noise hides the difference the whole is an upper bound.
    return {name: x if x > 0 else times[name, 1 + loops] / (1 + loops) for name, x in added.items()}


def copy_bandwidth(numbers: int, repeats: int) -> Row:
    """What the memory can do: a row of copying an array of bfloat16."""
    x = jnp.ones(numbers, jnp.bfloat16)
    seconds = median_seconds(partial(jax.jit(lambda x: x + 1), x), repeats)
    return {"what": "copy", "ms": 1e3 * seconds, "GB/s": 2 * x.nbytes / seconds / 1e9}


def device_backends() -> tuple[str, ...]:
    """The reference, and what the default device has."""
    own = candidates("", (REFERENCE, MOSAIC_GPU, MOSAIC_TPU), None)
    return tuple(dict.fromkeys((REFERENCE, *own)))


def measure(operation: Operation, setting: Setting, backends: Sequence[str]) -> Iterator[Row]:
    """A row for each case and backend, with its time only where its result is the reference's."""
    for case in operation.cases(setting):
        rows, programs = [], {}
        args = wanted = None
        for backend in dict.fromkeys((REFERENCE, *backends)):
            row = _row(operation, case, backend)
            if backend in backends:
                rows.append(row)
            if backend not in operation.backends:
                row["note"] = "there is none"
                continue
            try:
                args = case.make() if args is None else args
                program = repeated(operation.backends[backend], case, operation.prepare(args, backend))
                got = jax.block_until_ready(program(1))
                if backend == REFERENCE:
                    wanted = got
                elif wanted is None:
                    row["note"] = "not compared: the reference did not run"
                else:
                    row |= _judged(operation, got, wanted, args)
                if not _failed(row) and backend in backends:
                    programs[backend] = program
            except NotImplementedError as refusal:
                row["note"] = str(refusal)
            except Exception as error:  # out of memory, a kernel that does not compile: the others are still wanted
                row["note"] = failure(error)
        for backend, seconds in seconds_per_run(programs, setting.repeats, setting.loops).items():
            next(row for row in rows if row["backend"] == backend)["ms"] = 1e3 * seconds
        reference = next((row.get("ms") for row in rows if row["backend"] == REFERENCE), None)
        for row in rows:
            if reference and row["backend"] != REFERENCE and "ms" in row:
                row["against reference"] = row["ms"] / reference
            yield row


# Tuning.


def block_sizes_to_try(question: tuning.Question) -> list[dict[str, int]]:
    """The heuristic's block sizes first, then all others that are worth a try and that the kernel takes.

    Of each block size: all values where they are `FEW`, else the smallest one and the heuristic's, doubled and halved,
    no farther from the heuristic's than `FARTHEST` times.
    """
    options = []
    for name, limit in question.limits.items():
        own = question.heuristic[name]
        if len(limit) <= FEW:
            options.append(list(limit))
            continue
        doublings = [start * 2**k for start in (limit[0], own) for k in range(24)] + [own // 2, own // 4]
        near = {x for x in doublings if x in limit and own <= x * FARTHEST and x <= own * FARTHEST}
        options.append(sorted(near))
    tried = [dict(zip(question.limits, values, strict=True)) for values in itertools.product(*options)]
    own = dict(question.heuristic)
    return [own, *(blocks for blocks in tried if blocks != own and question.allows(blocks))]


def question_of(call: Callable[..., Any], args: tuple) -> tuning.Question | None:
    """Which block sizes a kernel asks for with these arguments; None for one that has none."""
    with tuning.listen() as heard:
        jax.eval_shape(lambda *args: call(*args), *args)
    return heard[0] if heard else None


def tune(
    operation: Operation,
    setting: Setting,
    backends: Sequence[str],
    kind: str | None,
    timer: Callable[[Mapping[int, Callable[[int], Any]], int, int], Mapping[int, float]] = seconds_per_run,
) -> Iterator[Row]:
    """Try block sizes for every case and record the best; a row for each.

    Args:
        operation: whose kernels.
        setting: its shapes.
        backends: names of kernels.
        kind: kind of the device, whose table is written after every case; None writes nothing.
        timer: as `seconds_per_run`.
    """
    for case in operation.cases(setting):
        for backend in backends:
            if backend != REFERENCE and backend in operation.backends:
                yield from _tune_one(operation, setting, case, backend, kind, timer)


def _tune_one(operation, setting, case, backend, kind, timer) -> Iterator[Row]:
    row = _row(operation, case, backend)
    call = operation.backends[backend]
    try:
        args = case.make()
        prepared = operation.prepare(args, backend)
        question = question_of(call, prepared)
        if question is None:
            yield row | {"note": "it has no block sizes to tune"}
            return
        wanted = jax.block_until_ready(repeated(operation.backends[REFERENCE], case, args)(1))
    except NotImplementedError as refusal:
        yield row | {"note": str(refusal)}
        return
    except Exception as error:
        yield row | {"note": failure(error)}
        return
    tried = block_sizes_to_try(question)
    rows = [row | {"blocks": blocks} for blocks in tried]
    programs = {}
    for i, blocks in enumerate(tried):
        try:
            program = repeated(partial(call, **blocks), case, prepared)
            rows[i] |= _judged(operation, jax.block_until_ready(program(1)), wanted, args)
            if not _failed(rows[i]):
                programs[i] = program
        except Exception as error:  # a candidate that does not fit the device's memory is no candidate
            rows[i]["note"] = f"cannot be taken: {_short(error)}"
    times = timer(programs, setting.repeats, setting.loops) if programs else {}
    for i, seconds in times.items():
        rows[i]["ms"] = 1e3 * seconds
    if times:
        best = min(times, key=lambda i: times[i])
        if kind is not None:
            tuning.record(operation.name, kind, [tuning.entry_for(question, tried[best], times[best])])
        rows[best]["note"] = "best" if kind is None else "best, recorded"
    yield from rows


def _row(operation: Operation, case: Case, backend: str) -> Row:
    label = f"{operation.name} {case.label}".strip()
    return {"what": f"{label}, {backend}", "backend": backend, **case.where, "bytes": case.floor}


def _judged(operation: Operation, got: Any, wanted: Any, args: tuple) -> Row:
    off = operation.off(got, wanted, args)
    # JSON has neither NaN nor infinity.
    row = {"off": off} if math.isfinite(off) else {}
    return row if off <= 1 else row | {"note": f"failed: its result is wrong, {off:.3g} times what rounding may do"}


def _failed(row: Row) -> bool:
    return row.get("note", "").startswith("failed")


def _short(error: BaseException) -> str:
    return f"{' '.join(str(error).split()) or first_line(error):.200}"


def failure(error: BaseException) -> str:
    """The note of a piece that failed."""
    return f"failed: {_short(error)}"


# What is printed and saved.


def environment() -> Row:
    """What times depend on."""
    device = jax.devices()[0]
    return {"device": device.device_kind, "platform": device.platform, "jax": jax.__version__}


def save(path: Path | None, header: Row, rows: list[Row]) -> None:
    """Write `{"environment": header, "rows": rows}`, whole or not at all; nothing without a path."""
    if path is not None:
        with atomic_file(path) as file:
            json.dump({"environment": header, "rows": rows}, file, indent=1)


def table(rows: list[Row], peak: float | None) -> str:
    """Rows as aligned text; `of peak` is the share of the copy bandwidth that the bytes that must be read make up."""
    columns = ("model", "batch", "cached", "what", "ms", "GB", "of peak", "ratio", "note")
    lines: list[tuple[str, ...]] = [columns]
    for row in rows:
        share = ""
        if peak and row.get("bytes") and row.get("ms"):
            share = f"{row['bytes'] / (row['ms'] / 1e3) / 1e9 / peak:.0%}"
        others = [f"{name} {row[name]:.4g}" for name in ("GB/s", "TFLOP/s", "error", "off") if name in row]
        others += [f"{name} {value}" for name, value in row.get("blocks", {}).items()]
        ratio = next((row[x] for x in ("against plain", "of a verify", "against reference") if x in row), None)
        cells = (
            *(str(row.get(name, "")) for name in ("model", "batch", "cached", "what")),
            f"{row['ms']:.3f}" if "ms" in row else "",
            f"{row['bytes'] / 1e9:.2f}" if "bytes" in row else "",
            share,
            "" if ratio is None else f"{ratio:.4f}",
            " ".join([*others, row.get("note", "")]).strip(),
        )
        lines.append(cells)
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def finish(rows: list[Row], header: Row) -> int:
    """Print all rows; returns the exit status."""
    print(", ".join(f"{name} {value}" for name, value in header.items()))
    print(table(rows, next((row["GB/s"] for row in rows if "GB/s" in row), None)))
    return 1 if any(_failed(row) for row in rows) else 0


def main(operation: Operation, arguments: list[str] | None = None) -> int:
    """The command line of an operation's bench."""
    parser = argparse.ArgumentParser(
        prog=f"python -m pallas_kernels.{operation.name}.bench",
        description=f"Time the backends of {operation.name} beside its reference and the bytes that must be moved.",
    )
    parser.add_argument(
        "--backend",
        action="append",
        choices=sorted(operation.backends),
        help="one to run, may be given again; default: the reference and what the device has",
    )
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, TPU kernels interpreted; no figures")
    parser.add_argument("--tune", action="store_true", help="try block sizes and record the best (not with --smoke)")
    parser.add_argument("--json", type=Path, help="results file, rewritten after every row")
    options = parser.parse_args(arguments)
    setting = smoke() if options.smoke else full()
    kind = None if options.smoke else tuning.device_kind()
    if options.tune and not options.smoke and kind is None:
        parser.error(
            "there is nothing to tune on a CPU; run it on an accelerator, or add --smoke to try the candidates."
        )
    on_cpu = jax.default_backend() == "cpu"
    backends = options.backend or [*device_backends(), *[MOSAIC_TPU] * (options.smoke and on_cpu)]
    header = environment() | {"smoke": options.smoke}
    rows: list[Row] = []
    interpreted = options.smoke and on_cpu and MOSAIC_TPU in backends
    with pltpu.force_tpu_interpret_mode() if interpreted else contextlib.nullcontext():
        for row in _all_rows(operation, setting, backends, options.tune, kind):
            rows.append(row)
            try:
                save(options.json, header, rows)
            except OSError as error:
                parser.error(f"{options.json} cannot be written: {error}.")
    return finish(rows, header)


def _all_rows(operation, setting, backends, tuned: bool, kind: str | None) -> Iterable[Row]:
    yield copy_bandwidth(setting.copy, setting.repeats)
    if tuned:
        yield from tune(operation, setting, backends, kind)
    yield from measure(operation, setting, backends)


def normal(key: jax.Array, shape: Sequence[int], dtype: Any, scale: float = 1.0) -> jax.Array:
    """Random normal numbers, drawn on the device, since some arrays are gigabytes."""
    draw = jax.jit(lambda key: (jax.random.normal(key, shape, jnp.float32) * scale).astype(dtype))
    return draw(key)
