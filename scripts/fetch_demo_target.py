"""Fetch the demo target (SmolLM2-135M-Instruct) into the user's cache directory and print its folder.

Run: `python scripts/fetch_demo_target.py [--cache-dir FOLDER]`. A folder that is already there and complete is reused.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from jdlite.checkpoints.demo import default_cache_dir, fetch_demo_target
from jdlite.errors import JdliteError


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache-dir", default=None, help=f"where to put the folder (default: {default_cache_dir()})")
    options = parser.parse_args(arguments)

    # The bar goes to stderr, so that stdout holds the folder alone.
    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    try:
        with Progress(*columns, console=console) as bar:
            tasks = []

            @contextmanager
            def stage(what: str) -> Iterator[None]:
                tasks.append(bar.add_task(what, total=None))
                yield
                bar.update(tasks[-1], total=1, completed=1)

            def progress(done: int, total: int) -> None:
                bar.update(tasks[-1], total=total, completed=done)

            folder = fetch_demo_target(options.cache_dir, stage=stage, progress=progress)
    except JdliteError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("error: interrupted; nothing was written, so run this again.", style="red")
        return 130
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
