"""`python -m jdlite.bench`: measure drafters against plain decoding on files of prompts."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from jdlite import cli
from jdlite.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Measure drafters against plain decoding: tokens per forward, speed, and whether the tokens are the same.

    Plain decoding always runs in the same process, in turn with the drafters, from the same cached history. Prefill and
    compilation are not timed.
    """

    target: str
    """Hugging Face folder, hub id or .gguf file of the target; `demo` fetches SmolLM2-135M-Instruct."""
    tasks: str
    """Files of prompts, separated by commas: jdlite's JSON Lines, Spec-Bench or MT-Bench question.jsonl, HumanEval,
    MBPP, GSM8K, BFCL multi-turn, agent transcripts, or rows with `prompt` or `tokens`."""
    drafters: str = "plain,pld,pld_plus,adapld"
    """Drafters, separated by commas: name[:option=value,...][@auto|@full], and dlite:FOLDER or hybrid:FOLDER for
    trained ones. @full verifies all that is drafted, @auto what pays on this machine."""
    batch: str = "1"
    """Batch sizes, separated by commas. Above 1, each row is decoded at its first point only."""
    rows: int = 0
    """Rows per task, at most; 0 for all."""
    turns: int = 4
    """Points to decode at per row, at most; 0 for all."""
    choose: Literal["even", "first", "last"] = "even"
    """Which points of a transcript with more."""
    max_prompt: int | None = None
    """Tokens of history, at most; later points are left out. By default what fits the model's context."""
    max_new_tokens: int = 128
    """New tokens per decode, at most."""
    repeats: int = 3
    """Timings of each decode; medians are reported."""
    budget: Literal["auto", "full"] = "auto"
    """Nodes to verify, for drafters that do not say: auto measures once what forwards cost on this machine, full
    verifies all."""
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 is off."""
    top_p: float = 1.0
    """Keep the most likely tokens up to this probability; 1 is off."""
    min_p: float = 0.0
    """Keep tokens of at least this share of the best one's probability; 0 is off."""
    repetition_penalty: float = 1.0
    """Penalty on tokens that were there before; 1 is off."""
    seed: int = 0
    """Seed of sampled decoding."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the target's parameters. Below float32, near-ties may be decided differently by forwards of different size."""
    capacity: int | None = None
    """Tokens that a row's cache can hold; by default what the rows of a task need."""
    prefill_chunk: int = 128
    """Tokens of a row per prefill forward."""
    profile_rows: int = 2
    """Rows of each task on which the parts of a round (propose, observe, forward) are timed by themselves."""
    peer: Literal["none", "transformers"] = "none"
    """Run transformers' plain and prompt-lookup generation on the same prompts (torch, float32, batch 1)."""
    peer_weights: str | None = None
    """Hugging Face folder for the peer, where the target is a .gguf file."""
    peer_threads: int = 2
    """Threads of torch."""
    json: Path | None = None
    """Results file, rewritten after every row."""
    resume: bool = False
    """Go on with the results file: rows that it holds are not run again."""
    png: Path | None = None
    """Charts."""
    cache_dir: Path | None = None
    """Where cost tables, the demo target and compiled programs are kept; by default the user's cache folder."""
    compile_cache: Path | None = None
    """Folder of compiled programs, which let later runs start sooner; by default inside the cache folder."""


def _bench(arguments: Arguments) -> None:
    """The command.

    Raises:
        JdliteError: an argument or a file is not usable.
    """
    from rich.console import Console

    from jdlite.decoding.sampling import Sampling
    from jdlite.evaluation import report, results
    from jdlite.evaluation.bench import Bench, Options, pending, split_budget, split_drafters
    from jdlite.evaluation.peer import TransformersPeer
    from jdlite.evaluation.segments import Limits
    from jdlite.evaluation.tasks import read_tasks

    a = arguments
    options = Options(
        drafters=split_drafters(a.drafters),
        batches=_sizes(a.batch),
        limits=Limits(turns=a.turns, choose=a.choose, max_prompt=a.max_prompt),
        max_new_tokens=a.max_new_tokens,
        repeats=a.repeats,
        sampling=Sampling(
            temperature=a.temperature,
            top_k=a.top_k,
            top_p=a.top_p,
            min_p=a.min_p,
            repetition_penalty=a.repetition_penalty,
        ),
        seed=a.seed,
        budget=a.budget,
        capacity=a.capacity,
        prefill_chunk=a.prefill_chunk,
        profile_rows=a.profile_rows,
    )
    for spec in options.drafters:
        split_budget(spec, options.budget)  # their errors come before anything slow
    if a.resume and a.json is None:
        raise ConfigError("--resume needs the results file; name it with --json.")
    if a.rows < 0:
        raise ConfigError(f"--rows must be 0 (all) or more: got {a.rows}.")
    rows = _first_rows(read_tasks(filter(None, a.tasks.split(","))), a.rows)
    settings = {
        **results.plain_data(options),
        "target": a.target,
        "dtype": a.dtype,
        "tasks": a.tasks,
        "rows": a.rows,
        "peer": a.peer,
    }
    records = results.load(a.json, settings) if a.json is not None and a.resume else []

    console = Console(stderr=True, highlight=False, log_path=False)
    say = lambda text: console.log(text, markup=False)  # noqa: E731
    folder = cli.cache_folder(a.cache_dir)
    cli.use_compile_cache(cli.cache_folder(a.compile_cache) if a.compile_cache else folder)
    target = cli.load_target(a.target, a.dtype, folder)
    peer = None
    if a.peer == "transformers":
        peer = TransformersPeer(a.peer_weights or target.source, target.eos_ids, threads=a.peer_threads)
    bench = Bench(target, options, peer=peer, costs_folder=folder, progress=say)
    jobs = bench.jobs(rows)
    if not jobs:
        raise ConfigError("no row fits; give shorter rows, a larger --max-prompt or a larger --capacity.")
    environment = results.environment()
    todo = list(pending(jobs, records))
    for number, job in enumerate(todo, 1):
        say(f"job {number} of {len(todo)}: {job.task}, {', '.join(job.ids)}")
        records.append(bench.run(job))
        if a.json is not None:
            summary = report.summarise(records)
            lengths = report.by_length(records)
            results.save(a.json, results.document(settings, environment, records, summary, lengths, bench.notes))
    summary = report.summarise(records)
    stdout = Console(width=None if sys.stdout.isatty() else 140)
    stdout.print(report.table(summary))
    lengths = report.by_length(records)
    if len({row["from"] for row in lengths}) > 1:
        stdout.print(report.length_table(lengths))
    for note in bench.notes:
        console.print(f"note: {note}", markup=False)
    if a.png is not None:
        report.draw_charts(summary, a.png)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in filter(None, text.split(",")))
    except ValueError as error:
        raise ConfigError(f"--batch must be whole numbers separated by commas: got {text!r}.") from error


def _first_rows(rows, count: int):
    """The first `count` rows of each task; all for 0."""
    taken: dict[str, int] = {}
    kept = []
    for row in rows:
        taken[row.task] = taken.get(row.task, 0) + 1
        if not count or taken[row.task] <= count:
            kept.append(row)
    return kept


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 0, or 2 for bad input."""
    return cli.run(_bench, Arguments, arguments, prog="python -m jdlite.bench")


if __name__ == "__main__":
    sys.exit(main())
