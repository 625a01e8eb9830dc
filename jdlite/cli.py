"""What the command lines share: errors of one sentence, progress on stderr, the compile cache, loading a target.

Imports nothing heavy, so that `--help` and wrong options answer at once.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from jdlite.errors import ConfigError, JdliteError, JdliteWarning

if TYPE_CHECKING:
    from jdlite.checkpoints.target import Target
    from jdlite.decoding.policy import Costs
    from jdlite.drafters.base import Drafter

T = TypeVar("T")
Update = Callable[[int, int], None]
# Stands for the demo target wherever a command line takes a target.
DEMO = "demo"
_hushed = False


def run(
    command: Callable[[T], int | None],
    options: type[T],
    arguments: Sequence[str] | None,
    *,
    prog: str,
    description: str | None = None,
) -> int:
    """Read the options, run the command, and turn what can go wrong into a sentence and an exit status.

    Args:
        command: takes the options; returns an exit status, None for 0.
        options: a dataclass whose docstring explains every option.
        arguments: words after the program's name; None takes `sys.argv`.
        prog: how the help calls the program.
        description: first lines of the help; by default those of the docstring of `options`.

    Returns:
        0, the command's own status, 2 for bad input, or 130 after Ctrl-C. As in argparse, options that cannot be read
        and `--help` raise `SystemExit`.
    """
    chosen = tyro.cli(
        options,
        args=arguments,
        prog=prog,
        description=description or inspect.cleandoc(options.__doc__ or "").partition("\n\nAttributes:")[0],
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.HelptextFromCommentsOff),
    )
    logging.getLogger("transformers").addFilter(_is_not_advice)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return command(chosen) or 0
    except JdliteError as error:
        fail(error)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (`head`, a pager) has left; point stdout elsewhere so that the interpreter's last flush is quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _is_not_advice(record: logging.LogRecord) -> bool:
    """Drops transformers' advice to install PyTorch: only its tokenizers are used."""
    return "PyTorch was not found" not in record.getMessage()


def _show_warning(message, category, *place, _other=warnings.showwarning) -> None:
    """Our own warnings without the line of code that gave them."""
    if issubclass(category, JdliteWarning):
        print(f"warning: {message}", file=sys.stderr)
    else:
        _other(message, category, *place)


def fail(error: Exception) -> None:
    """Print an error to stderr as `error: ...`, on one line."""
    print("error: " + " ".join(str(error).split()), file=sys.stderr)


def stderr_console() -> Console:
    """Where progress and notes go, so that stdout holds results alone; made anew, as stderr may be replaced."""
    return Console(stderr=True, highlight=False, quiet=_hushed)


def hush() -> None:
    """No progress and no notes from now on, errors alone: other processes speak."""
    global _hushed
    _hushed = True


@contextmanager
def stage(what: str) -> Iterator[Update]:
    """Show that something long is going on: a bar on a terminal, two plain lines elsewhere.

    Example:
        >>> with stage("Loading the weights") as update:
        ...     load_target(path, progress=update)

    Yields:
        A function of (done, total); without calls the bar only shows that it is alive.
    """
    console = stderr_console()
    if not console.is_terminal:
        begin = time.monotonic()
        console.print(f"{what} ...", markup=False, soft_wrap=True)
        yield lambda done, total: None
        console.print(f"{what}: {time.monotonic() - begin:.1f} s", markup=False, soft_wrap=True)
        return
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn()
    with Progress(*columns, TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
        end = bar.tasks[0].total or 1
        bar.update(task, completed=end, total=end)


def cache_folder(cache_dir: Path | None) -> Path:
    """The cache folder, made if it is absent and proved to be writable.

    Raises:
        ConfigError: it cannot be written.
    """
    from jdlite.checkpoints.demo import default_cache_dir

    folder = (cache_dir or default_cache_dir()).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"cannot write to the cache directory {folder} ({error.strerror or error}); pass --cache-dir with a folder "
            "that you may write to."
        ) from error
    return folder


def use_compile_cache(folder: Path) -> None:
    """Keep compiled programs in `folder`, apart by processor: a program for one may not run on another."""
    import jax

    host = [platform.machine(), platform.system()]
    try:
        host += [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")][:1]
    except OSError:
        host.append(platform.processor())
    key = hashlib.sha256(repr(host).encode()).hexdigest()[:8]
    jax.config.update("jax_compilation_cache_dir", str(folder / f"compiled-{key}"))


def load_target(path_or_repo: str, dtype: str, folder: Path) -> Target:
    """Load a target with a progress bar; `demo` stands for the demo target, fetched if it is not in `folder` yet."""
    from jdlite.checkpoints.demo import fetch_demo_target
    from jdlite.checkpoints.target import load_target

    if path_or_repo == DEMO:
        path_or_repo = str(fetch_demo(folder, fetch_demo_target))
    with stage("Loading the target") as update:
        return load_target(path_or_repo, dtype, progress=update)


def fetch_demo(folder: Path, fetch: Callable[..., Path]) -> Path:
    """The demo target's folder, with a bar for each step of making it."""
    current: list[Update] = []

    @contextmanager
    def step(what: str) -> Iterator[None]:
        with stage(what) as update:
            current.append(update)
            yield

    return fetch(folder, stage=step, progress=lambda done, total: current[-1](done, total))


def load_costs(target: Target, drafter: Drafter, budget: str, batch: int, folder: Path, **options: Any) -> Costs:
    """The cost table for `--budget`; "auto" measures it once per machine and model, with a progress line.

    Args:
        target: the target.
        drafter: whose number of nodes matters.
        budget: "auto" or "full".
        batch: B.
        folder: where measured tables are kept.
        options: for `jdlite.calibrate`.
    """
    from jdlite.api import calibrate, resolve_costs
    from jdlite.decoding.costs import costs_file, draft_file
    from jdlite.decoding.policy import NODE_COUNTS, variants

    counts = variants(drafter.max_nodes)
    if budget != "auto" or counts == (1,):
        return resolve_costs(target, drafter, batch, "full" if counts == (1,) else budget)
    network = drafter.fit(target.model).network
    files = [costs_file(folder, target.model, batch)]
    files += [] if network is None else [draft_file(folder, target.model, network, batch)]
    if all(file.exists() for file in files):
        return calibrate(target, drafter, batch=batch, folder=folder, **options)
    with stage("Measuring what forwards cost here (once per machine and model)") as update:
        total, done = 2 * len(NODE_COUNTS) * (options.get("repeats", 5) + 1), 0

        def count(message: str) -> None:
            nonlocal done
            done += 1
            update(done, total)

        return calibrate(target, drafter, batch=batch, folder=folder, progress=count, **options)
