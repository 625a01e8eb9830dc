"""`make demo`: a real chat model decodes real prompts plainly and with drafters, and all are compared.

The prompts are the project's own (`demo_prompts.jsonl`). Times leave out compilation, and all ways take turns, so that
a machine that slows down for a while favours none.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from jdlite import cli
from jdlite.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.table import Table

    from jdlite.decoding.session import Session


# Part of the repository, not of the installed package.
TRAINED = Path(__file__).parents[2] / "trained" / "dlite-smollm2-135m"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Decode the demo prompts plainly and with drafters: the same tokens, in fewer forwards and less time.

    Attributes:
        target: Hugging Face folder, hub id or .gguf file of a chat model; "demo" fetches SmolLM2-135M-Instruct.
        drafter: what to compare with plain decoding, as in "pld:num_drafts=5" or "dlite:FOLDER"; give it again for
            more. By default AdaPLD and, for the demo target in a copy of the repository, the trained DLite drafter and
            the hybrid of both.
        max_new_tokens: most new tokens of an answer.
        repeats: timings of each; their median is shown.
        capacity: tokens that a conversation can hold; one for all prompts, so that everything is compiled once.
        cache_dir: folder for compiled programs, cost tables and the demo target (default: the user's cache folder).
    """

    target: str = cli.DEMO
    drafter: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    max_new_tokens: int = 160
    repeats: int = 3
    capacity: int = 1024
    cache_dir: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None


@dataclasses.dataclass(frozen=True)
class Job:
    """A conversation to decode.

    Attributes:
        name: a word or two.
        turns: what the user says, turn by turn; each is answered before the next.
        system: system message, or None.
    """

    name: str
    turns: tuple[str, ...]
    system: str | None = None


@dataclasses.dataclass
class Run:
    """One drafter on one job.

    Attributes:
        tokens: new tokens of each turn.
        texts: the answers.
        prompt_tokens: tokens that were given.
        forwards: passes of the target in decoding.
        decode_seconds: of each repeat, decoding alone.
        total_seconds: of each repeat, prefill included.
    """

    tokens: list[list[int]]
    texts: list[str]
    prompt_tokens: int
    forwards: int
    decode_seconds: list[float]
    total_seconds: list[float]

    @property
    def new_tokens(self) -> int:
        """New tokens of all turns."""
        return sum(map(len, self.tokens))

    @property
    def tau(self) -> float:
        """Tokens per forward; with one row a forward is a round."""
        return self.new_tokens / max(self.forwards, 1)

    @property
    def seconds(self) -> float:
        """Of decoding alone, median."""
        return statistics.median(self.decode_seconds)


def read_jobs() -> list[Job]:
    """The demo prompts that the package ships."""
    text = importlib.resources.files("jdlite.evaluation").joinpath("demo_prompts.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    return [Job(row["name"], tuple(row["turns"]), row.get("system")) for row in rows]


def decode_job(job: Job, target, session: Session, options: Options) -> Run:
    """Decode all turns of a job on an empty session, once."""
    import jax

    from jdlite.api import decode_texts
    from jdlite.conversation import Conversation

    chat = Conversation(target, session)
    chat.messages = [] if job.system is None else [{"role": "system", "content": job.system}]
    run = Run([], [], 0, 0, [0.0], [0.0])
    for turn in job.turns:
        begin = time.perf_counter()
        run.prompt_tokens += chat.add({"role": "user", "content": turn}).appended
        jax.block_until_ready(session.state.cache)
        middle = time.perf_counter()
        result = session.decode(stop_ids=[list(target.eos_ids)], max_new_tokens=options.max_new_tokens)
        end = time.perf_counter()
        run.decode_seconds[0] += end - middle
        run.total_seconds[0] += end - begin
        run.forwards += int(result.stats.forwards)
        run.tokens.append(result.tokens[0])
        run.texts += decode_texts(target, result.tokens) or [""]
        chat.messages = [*chat.messages, {"role": "assistant", "content": run.texts[-1]}]
    return run


def compare(
    job: Job,
    target,
    sessions: Sequence[Callable[[], Session]],
    options: Options,
    show: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[Run], bool]:
    """Run a job with each drafter in turn, `repeats` times.

    Args:
        job: what to decode.
        target: the target.
        sessions: makes an empty session of each drafter; the first is the reference.
        options: of the demo.
        show: told (done, total).

    Returns:
        The runs, one per drafter with the times of all repeats, and whether all of them gave the same tokens.
    """
    runs: list[Run] = []
    identical = True
    for repeat in range(options.repeats):
        for i, make in enumerate(sessions):
            run = decode_job(job, target, make(), options)
            if repeat == 0:
                runs.append(run)
            else:
                runs[i].decode_seconds += run.decode_seconds
                runs[i].total_seconds += run.total_seconds
            identical &= run.tokens == runs[0].tokens
            show(repeat * len(sessions) + i + 1, options.repeats * len(sessions))
    return runs, identical


Results = Sequence[tuple[Job, list[Run], bool]]


def job_table(results: Results, names: Sequence[str]) -> Table:
    """Tau and speed of each drafter on each job; narrow enough for a terminal of 80 columns.

    Args:
        results: jobs, runs of all drafters, and whether their tokens were the same.
        names: of the drafters; the first is plain decoding.
    """
    table = _table("tokens per forward and speed against plain decoding, by job")
    table.add_column("job", no_wrap=True)
    for name in ("prompt", "new", *(f"{name} tau, speed" for name in map(_short, names[1:])), "identical"):
        table.add_column(name, justify="right")
    for job, runs, same in results:
        plain = runs[0]
        pairs = [f"{run.tau:.2f}  {plain.seconds / run.seconds:.2f}" for run in runs[1:]]
        table.add_row(job.name, str(plain.prompt_tokens), str(plain.new_tokens), *pairs, _yes(same))
    return table


def sum_table(results: Results, names: Sequence[str]) -> Table:
    """All jobs together, one line per drafter; arguments as for `job_table`."""
    table = _table("all jobs: same model, same tokens")
    table.add_column("drafter", no_wrap=True)
    for name in ("new", "forwards", "tau", "seconds", "speed", "overall", "identical"):
        table.add_column(name, justify="right")
    columns = list(zip(*(runs for _, runs, _ in results), strict=True))
    seconds = [sum(run.seconds for run in runs) for runs in columns]
    whole = [sum(statistics.median(run.total_seconds) for run in runs) for runs in columns]
    for i, (name, runs) in enumerate(zip(names, columns, strict=True)):
        new, forwards = sum(run.new_tokens for run in runs), sum(run.forwards for run in runs)
        same = all(run.tokens == plain.tokens for run, plain in zip(runs, columns[0], strict=True))
        figures = (f"{new / forwards:.2f}", f"{seconds[i]:.1f}", f"{seconds[0] / seconds[i]:.2f}")
        table.add_row(_short(name), str(new), str(forwards), *figures, f"{whole[0] / whole[i]:.2f}", _yes(same))
    return table


def _table(title: str) -> Table:
    from rich import box
    from rich.table import Table

    return Table(title=title, box=box.SIMPLE, pad_edge=False, show_edge=False, padding=(0, 0, 0, 1))


def _short(name: str) -> str:
    """A drafter's name without its folder and options."""
    return name.partition(":")[0]


def _yes(same: bool) -> str:
    return "yes" if same else "[red]NO[/red]"


def default_drafters(target: str) -> tuple[str, ...]:
    """What to show for a target: trained drafters only where they were trained for it."""
    if target != cli.DEMO or not TRAINED.is_dir():
        return ("adapld",)
    return ("adapld", f"dlite:{TRAINED}", f"hybrid:{TRAINED}")


def _demo(options: Options) -> int:
    from rich.console import Console

    if options.repeats < 1 or options.max_new_tokens < 1:
        raise ConfigError("--repeats and --max-new-tokens must be at least 1.")
    from jdlite.decoding.session import Session
    from jdlite.drafters.registry import check_drafter, make_drafter

    names = ("plain", *(options.drafter or default_drafters(options.target)))
    for name in names:
        check_drafter(name)
    folder = cli.cache_folder(options.cache_dir)
    cli.use_compile_cache(folder)
    target = cli.load_target(options.target, "float32", folder)
    drafters = [make_drafter(name, "float32", target).fit(target.model) for name in names]
    capacity = min(options.capacity, target.config.max_position)
    costs = [cli.load_costs(target, drafter, "auto", 1, folder) for drafter in drafters]
    sessions: list[Callable[[], Session]] = [
        partial(Session, target.model, drafter, capacity=capacity, costs=cost)
        for drafter, cost in zip(drafters, costs, strict=True)
    ]

    jobs = read_jobs()
    short = dataclasses.replace(options, max_new_tokens=2)
    with cli.stage("Compiling (kept for the next time)") as update:
        for i, make in enumerate(sessions):
            update(i, len(sessions))
            decode_job(Job("warm-up", ("Hello!", "Hello again!")), target, make(), short)

    console = Console(highlight=False)
    results: list[tuple[Job, list[Run], bool]] = []
    for job in jobs:
        with cli.stage(f"Decoding: {job.name}") as update:
            runs, same = compare(job, target, sessions, options, update)
        results.append((job, runs, same))
        _show_job(console, job, runs, same, names)
    console.rule()
    console.print(job_table(results, names))
    console.print()
    console.print(sum_table(results, names))
    console.print(
        "prompt, new: tokens. forwards: passes of the target. tau: tokens per forward.\n"
        "seconds, speed: decoding; overall: "
        f"with reading the prompt. Medians of {options.repeats}, all ways in turn, without compilation.\n"
        "The demo model is a very small one: look at the speed, not at what it says.",
        style="dim",
    )
    return 0 if all(same for *_, same in results) else 1


def _show_job(console, job: Job, runs: list[Run], same: bool, names: Sequence[str]) -> None:
    """The conversation and one line per drafter."""
    console.rule(job.name)
    for turn, text, tokens in zip(job.turns, runs[0].texts, runs[0].tokens, strict=True):
        console.print("user: " + _shortened(turn), style="dim", markup=False)
        console.print("assistant: " + (text if tokens else "(nothing)"), markup=False)
        console.print()
    for name, run in zip(names, runs, strict=True):
        console.print(
            f"{_short(name)}: {run.new_tokens} tokens, {run.forwards} forwards, tau {run.tau:.2f}, "
            f"{run.seconds:.1f} s, speed {runs[0].seconds / run.seconds:.2f}",
            style="bold",
        )
    console.print(f"identical: {'yes' if same else 'NO'}", style="bold")


def _shortened(text: str, lines: int = 12) -> str:
    """The text, or its beginning and its last line where it is long."""
    all_lines = text.splitlines()
    if len(all_lines) <= lines:
        return text
    left_out = len(all_lines) - lines + 2
    return "\n".join([*all_lines[: lines - 2], f"[... {left_out} lines ...]", all_lines[-1]])


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 0 when all tokens are identical, 1 when not, 2 for bad input."""
    return cli.run(_demo, Options, arguments, prog="python -m jdlite.evaluation.demo")


if __name__ == "__main__":
    sys.exit(main())
