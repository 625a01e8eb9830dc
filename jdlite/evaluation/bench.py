"""Plain decoding and drafters side by side: same rows, same history, same process, timed in turn."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jdlite.api import cache_folder, calibrate, resolve_costs
from jdlite.checkpoints.target import Target
from jdlite.decoding.costs import costs_file
from jdlite.decoding.policy import Costs, variants
from jdlite.decoding.request import make_request
from jdlite.decoding.sampling import Sampling
from jdlite.decoding.state import Request
from jdlite.drafters.base import SOURCES, Drafter
from jdlite.drafters.plain import Plain
from jdlite.drafters.registry import NAMES, check_drafter, make_drafter
from jdlite.errors import ConfigError
from jdlite.evaluation.broadcast import Run, SharedSession
from jdlite.evaluation.peer import PEERS, TransformersPeer
from jdlite.evaluation.profile import drafting_seconds, forward_seconds
from jdlite.evaluation.segments import Limits, Segment, history_after, segments
from jdlite.evaluation.tasks import Row

PLAIN = "plain"
BUDGETS = ("auto", "full")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How a benchmark is run. Everything here changes what is measured, and is kept with the results.

    Attributes:
        drafters: specifications: `name[:option=value,...][@auto|@full]`, with `FOLDER,` before the options of a
            trained drafter. Plain decoding always runs, first.
        batches: batch sizes.
        limits: which part of each row.
        max_new_tokens: per decode.
        repeats: timings of each decode; medians are reported.
        sampling: of all rows.
        seed: of all rows.
        budget: `auto` or `full` for drafters that do not say.
        capacity: of the cache; by default what the rows of a task need, in steps of a factor of 4, so that few shapes
            are compiled.
        prefill_chunk: tokens of a row per prefill forward.
        profile_rows: rows of each task and batch size on which the parts of a round are timed.
    """

    drafters: tuple[str, ...] = (PLAIN,)
    batches: tuple[int, ...] = (1,)
    limits: Limits = dataclasses.field(default_factory=Limits)
    max_new_tokens: int = 128
    repeats: int = 3
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    seed: int = 0
    budget: str = "auto"
    capacity: int | None = None
    prefill_chunk: int = 128
    profile_rows: int = 2

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "repeats", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1: got {getattr(self, name)}.")
        if not self.batches or min(self.batches) < 1:
            raise ConfigError(f"batch must be one or more sizes of at least 1: got {self.batches}.")
        if self.budget not in BUDGETS:
            raise ConfigError(f"budget must be one of {', '.join(BUDGETS)}: got {self.budget!r}.")
        if self.profile_rows < 0:
            raise ConfigError(f"profile_rows must be 0 or more: got {self.profile_rows}.")
        unique = [PLAIN, *(d for d in self.drafters if d != PLAIN)]
        if len(set(unique)) != len(unique):
            raise ConfigError(f"drafters must differ: got {', '.join(self.drafters)}.")
        object.__setattr__(self, "drafters", tuple(unique))


def split_drafters(text: str) -> tuple[str, ...]:
    """Specifications from a comma-separated list; commas also part a drafter's options.

    Example: `"plain,adapld:copy_length=10,successors=never@full,pld"` gives three.
    """
    specs: list[str] = []
    for piece in filter(None, (piece.strip() for piece in text.split(","))):
        continues = "=" in piece and piece.partition(":")[0].partition("@")[0] not in NAMES
        if continues and specs:
            specs[-1] += f",{piece}"
        else:
            specs.append(piece)
    return tuple(specs)


def split_budget(spec: str, budget: str) -> tuple[str, str]:
    """Name and budget of a specification, checked as far as can be told without reading a trained drafter.

    Raises:
        JdliteError: the drafter or the budget is not usable.
    """
    name, at, own = spec.rpartition("@")
    # An @ may also be in the path of a trained drafter; a budget is one word.
    name, own = (name, own) if at and own.isalpha() else (spec, budget)
    if own not in BUDGETS:
        raise ConfigError(f"the budget of drafter {spec!r} must be one of {', '.join(BUDGETS)}: got {own!r}.")
    check_drafter(name)
    return name, own


def resolve(spec: str, budget: str, target: Target) -> tuple[Drafter, str]:
    """Drafter, fitted to the target, and budget of a specification."""
    name, own = split_budget(spec, budget)
    return make_drafter(name, target.model.dtype.name, target).fit(target.model), own


def difference(tokens: Sequence[int], reference: Sequence[int]) -> int | None:
    """Index of the first token that differs, or None; where one is a prefix of the other, the shorter one's length."""
    for i, (a, b) in enumerate(zip(tokens, reference, strict=False)):
        if a != b:
            return i
    return None if len(tokens) == len(reference) else min(len(tokens), len(reference))


@dataclasses.dataclass(frozen=True)
class Job:
    """Rows that are decoded together: one row with all its points, or a batch of rows at one point each.

    Attributes:
        task: their task.
        ids: of the rows.
        segments: of each row.
        batch: B; where there are fewer rows, the rest of the batch is idle.
        capacity: S.
    """

    task: str
    ids: tuple[str, ...]
    segments: tuple[tuple[Segment, ...], ...]
    batch: int
    capacity: int

    @property
    def key(self) -> tuple:
        """What the job is recognised by in saved results."""
        return (self.batch, self.task, *self.ids)


class Bench:
    """Runs jobs on one target.

    Args:
        target: the target.
        options: how.
        peer: another library on the same weights, or None.
        costs_folder: where measured cost tables are kept; by default the user's cache folder.
        progress: told in words what is being done.
    """

    def __init__(
        self,
        target: Target,
        options: Options,
        *,
        peer: TransformersPeer | None = None,
        costs_folder: Path | None = None,
        progress: Callable[[str], None] = lambda message: None,
    ):
        self.target, self.options, self.peer, self.progress = target, options, peer, progress
        if peer is not None and options.sampling != Sampling():
            raise ConfigError("a peer is compared on greedy decoding only; leave the sampling options out.")
        resolved = {spec: resolve(spec, options.budget, target) for spec in options.drafters}
        self.drafters = {spec: drafter for spec, (drafter, _) in resolved.items()}
        self._budgets = {spec: budget for spec, (_, budget) in resolved.items()}
        self._costs_folder = costs_folder or cache_folder()
        self._costs: dict[int, dict[str, Costs]] = {}
        self._warm: set[tuple] = set()
        self._profiled: dict[tuple, int] = {}
        self.notes: list[str] = []

    def jobs(self, rows: Sequence[Row]) -> list[Job]:
        """The rows as jobs, for every batch size; what is too long is left out and noted."""
        limit = self.target.config.max_position
        new = self.options.max_new_tokens
        room = (self.options.capacity or limit) - new
        if room < 1:
            raise ConfigError(f"max_new_tokens of {new} leaves no room for a prompt; give less.")
        asked = self.options.limits
        limits = dataclasses.replace(asked, max_prompt=min(asked.max_prompt or room, room))
        cut: dict[str, list[tuple[str, tuple[Segment, ...]]]] = {}
        dropped: dict[str, int] = {}
        for row in rows:
            found = tuple(segments(row, self.target, limits))
            if found:
                cut.setdefault(row.task, []).append((row.id, found))
            else:
                dropped[row.task] = dropped.get(row.task, 0) + 1
        for task, count in dropped.items():
            self._note(f"{task}: {count} rows left out, whose first point lies after {limits.max_prompt} tokens")
        jobs = []
        for batch in self.options.batches:
            for task, items in cut.items():
                if batch > 1:
                    items = [(name, found[:1]) for name, found in items]
                capacity = self.options.capacity or _capacity(items, new, limit)
                capacity = max(capacity, max(drafter.max_depth for drafter in self.drafters.values()) + 1)
                for at in range(0, len(items), batch):
                    names, parts = zip(*items[at : at + batch], strict=True)
                    jobs.append(Job(task, names, parts, batch, capacity))
        return jobs

    def run(self, job: Job) -> dict[str, Any]:
        """Decode one job with every drafter, and give back its record (plain data, for JSON)."""
        session = SharedSession(
            self.target.model,
            self.drafters,
            self.costs(job.batch),
            batch=job.batch,
            capacity=job.capacity,
            prefill_chunk=self.options.prefill_chunk,
        )
        if self.peer is not None:
            self.peer.reset()
        record: dict[str, Any] = {
            "batch": job.batch,
            "task": job.task,
            "ids": list(job.ids),
            "capacity": job.capacity,
            "points": [],
        }
        request = self._request(job.batch)
        answers: list[list[int]] = [[] for _ in range(job.batch)]
        idle = job.batch - len(job.ids)
        for at in range(len(job.segments[0])):
            parts = [row[at] for row in job.segments]
            others = f" and {len(job.ids) - 1} more" if job.ids[1:] else ""
            where = f"{job.task} {job.ids[0]}{others}, point {at + 1}"
            new = [history_after(a, s, self.target.eos_ids) for a, s in zip(answers, parts, strict=False)]
            lengths = [have + len(ids) for have, ids in zip(session.lengths, new, strict=False)]
            if max(lengths) + self.options.max_new_tokens > job.capacity:
                self._note(f"{where} left out: with the answers before it, it is too long")
                break
            self.progress(f"{where}: prefill of {sum(map(len, new))} tokens")
            session.append([*new, *([[0] if at == 0 else []] * idle)])
            session.block()
            if self.peer is not None and job.batch == 1:
                self.peer.append(new[0])
            runs, seconds = self._point(session, request, job, where)
            record["points"].append(_record_point(self, lengths, runs, seconds, len(job.ids)))
            answers = runs[PLAIN].tokens
        done = self._profiled.get((job.batch, job.task), 0)
        if record["points"] and done < self.options.profile_rows:
            self._profiled[job.batch, job.task] = done + 1
            record["profile"] = self._profile(session, request, job, record["points"][-1])
        return record

    def costs(self, batch: int) -> dict[str, Costs]:
        """The cost table of every drafter, measured on this machine where the budget is `auto`."""
        if batch not in self._costs:
            tables = {}
            for spec, drafter in self.drafters.items():
                counts = variants(drafter.max_nodes)
                if self._budgets[spec] == "full" or counts == (1,):
                    tables[spec] = resolve_costs(self.target, drafter, batch, "full")
                    continue
                path = costs_file(self._costs_folder, self.target.model, batch)
                if not path.exists():
                    self.progress(f"measuring what forwards cost, once for this machine, model and batch {batch}")
                tables[spec] = calibrate(self.target, drafter, batch=batch, folder=self._costs_folder)
                self._note(f"budget auto of {spec}, batch {batch}: {_costs_in_words(tables[spec])}")
            self._costs[batch] = tables
        return self._costs[batch]

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
            self.progress(text)

    def _request(self, batch: int) -> Request:
        # The costs are replaced by each drafter's own.
        return make_request(
            self.target.model,
            Plain(),
            batch,
            sampling=self.options.sampling,
            stop_ids=[list(self.target.eos_ids)] * batch,
            seed=self.options.seed,
        )

    def _point(self, session: SharedSession, request: Request, job: Job, where: str):
        """Runs of the last repeat, and seconds of all repeats, by name."""
        budget = [self.options.max_new_tokens] * len(job.ids) + [0] * (job.batch - len(job.ids))
        for name in self.drafters:
            if (name, job.batch, job.capacity) not in self._warm:
                self.progress(f"compiling {name} for batch {job.batch} and {job.capacity} tokens")
                session.decode(name, request, budget, max_rounds=1)
                self._warm.add((name, job.batch, job.capacity))
        names = [*self.drafters]
        peers = PEERS if self.peer is not None and job.batch == 1 else ()
        runs: dict[str, Any] = {}
        seconds: dict[str, list[float]] = {name: [] for name in (*names, *peers)}
        for repeat in range(self.options.repeats):
            # Another one goes first each time, so that none always follows the same.
            turn = repeat % len(names)
            for name in names[turn:] + names[:turn]:
                self.progress(f"{where}: {name}, {repeat + 1} of {self.options.repeats}")
                run = session.decode(name, request, budget, keep=repeat == self.options.repeats - 1)
                if name in runs and runs[name].tokens != run.tokens:
                    self._note(f"{where}: two repeats of {name} gave different tokens")
                runs[name] = run
                seconds[name].append(run.seconds)
            for name in peers:
                assert self.peer is not None
                self.progress(f"{where}: {name}, {repeat + 1} of {self.options.repeats}")
                runs[name] = self.peer.decode(name, self.options.max_new_tokens)
                seconds[name].append(runs[name].seconds)
        return runs, seconds

    def _profile(self, session: SharedSession, request: Request, job: Job, point: Mapping) -> dict[str, Any]:
        self.progress(f"{job.task} {job.ids[0]}: timing the parts of a round")
        drafting = {}
        used: set[int] = set()
        for name in self.drafters:
            counted = point["drafters"][name]
            committed = round(sum(counted["emitted"]) / max(sum(counted["rounds"]), 1))
            drafting[name] = drafting_seconds(session, name, request, committed=committed)
            used |= {int(n) for n, count in counted["uses"].items() if count}
        forwards = forward_seconds(session, tuple(sorted(used)))
        return {
            "lengths": session.lengths[: len(job.ids)],
            "drafting": drafting,
            "forward": {str(n): s for n, s in forwards.items()},
        }


def _costs_in_words(costs: Costs) -> str:
    at = {n: float(cost) for n, cost in zip(costs.counts, costs.fixed, strict=True)}
    listed = ", ".join(f"{n} nodes {cost:.2f}" for n, cost in at.items())
    return f"a forward costs, measured on this machine, in plain steps: {listed}"


def _capacity(items, max_new_tokens: int, limit: int) -> int:
    """Capacity for rows of one task: 256, 1024, 4096, ..., so that few shapes are compiled, never above the model's."""
    need = 0
    for _, found in items:
        total = sum(len(segment.tokens) for segment in found)
        answers = 1 + sum(segment.after_answer for segment in found)
        need = max(need, total + answers * max_new_tokens)
    size = 256
    while size < need:
        size *= 4
    return min(size, limit)


def _record_point(bench: Bench, lengths, runs: Mapping[str, Any], seconds, rows: int) -> dict[str, Any]:
    """What is kept of one point."""
    plain: Run = runs[PLAIN]
    record: dict[str, Any] = {
        "prompt_tokens": list(lengths),
        "tokens": plain.tokens[:rows],
        "finish": plain.finish[:rows],
        "drafters": {},
    }
    for name, run in runs.items():
        tokens = run.tokens[:rows] if isinstance(run, Run) else [run.tokens]
        kept: dict[str, Any] = {"seconds": [round(s, 6) for s in seconds[name]]}
        if isinstance(run, Run):
            stats, counts = run.stats, variants(bench.drafters[name].max_nodes)
            kept |= {
                "forwards": int(stats.forwards),
                "rounds": stats.rounds[:rows].tolist(),
                "emitted": stats.emitted[:rows].tolist(),
                "drafted": stats.drafted[:rows].tolist(),
                "accepted_at": stats.accepted_at[:rows].sum(axis=0).tolist(),
                "accepted_from": dict(zip(SOURCES, stats.accepted_from[:rows].sum(axis=0).tolist(), strict=True)),
                "uses": dict(zip(map(str, counts), stats.uses.tolist(), strict=True)),
            }
        else:
            kept |= {"forwards": run.forwards, "rounds": [run.forwards], "emitted": [len(run.tokens)]}
        if name != PLAIN:
            kept["differs_at"] = [difference(a, b) for a, b in zip(tokens, record["tokens"], strict=True)]
            if any(at is not None for at in kept["differs_at"]):
                kept["tokens"] = tokens
        record["drafters"][name] = kept
    return record


def median(values: Sequence[float]) -> float:
    """Median, or NaN of nothing."""
    return statistics.median(values) if values else float("nan")


def pending(jobs: Sequence[Job], records: Sequence[Mapping]) -> Iterator[Job]:
    """Jobs that have no record yet."""
    done = {(record["batch"], record["task"], *record["ids"]) for record in records}
    return (job for job in jobs if job.key not in done)
