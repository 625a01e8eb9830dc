"""What a benchmark found: figures per task and drafter from the records, a table, and charts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from jdlite.errors import ConfigError

PLAIN = "plain"


def summarise(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One dict per batch size, task and drafter, in the order in which they were run.

    Keys:
        rows, decodes: rows, and points of rows decoded.
        tokens, forwards, rounds: totals; a forward is a pass of the target over the whole batch, a round is counted per
            row. Prefill counts in neither.
        tau: tokens per round, pooled over rows.
        accepted_at: share of rounds in which at least 1, 2, ... drafted tokens were accepted.
        accepted_from: accepted tokens by source.
        drafted_per_round: nodes verified per round besides the anchor.
        uses: forwards by compiled number of nodes.
        tokens_per_s: tokens over the sum of each decode's median seconds.
        speed_ratio: tokens_per_s against plain's; speed_ratio_median: median over rows of the same ratio.
        exact_match: share of decodes whose tokens all equal plain's; differs: the first few that do not.
        propose_ms, observe_ms, forward_ms, round_ms, drafting_share: parts of a round; the first three were timed by
            themselves, forward_ms for each number of nodes and averaged by use; the share is of propose and observe in
            a round.
    """
    groups: dict[tuple, list[Mapping]] = {}
    for record in records:
        if record["points"]:
            groups.setdefault((record["batch"], record["task"]), []).append(record)
    out = []
    for (batch, task), group in groups.items():
        names = list(group[0]["points"][0]["drafters"])
        out += [_summarise_one(batch, task, name, group) for name in names]
    return out


def by_length(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tau by the length of the history, pooled over tasks and batch sizes: whether drafts get worse as texts grow.

    One dict per range and drafter, short histories first: `from` and `to` in tokens (0 to 1023, then octaves),
    `drafter`, `decodes`, `tokens`, `rounds`, `tau`.
    """
    groups: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for point in (point for record in records for point in record["points"]):
        for name, found in point["drafters"].items():
            # A peer has no rounds.
            for prompt, *counts in zip(point["prompt_tokens"], found["emitted"], found.get("rounds", ()), strict=False):
                begin = 0 if prompt < 1024 else 1 << (prompt.bit_length() - 1)
                groups.setdefault((begin, name), []).append((counts[0], counts[1]))
    out = []
    for (begin, name), decodes in sorted(groups.items(), key=lambda item: item[0][0]):
        tokens, rounds = (sum(column) for column in zip(*decodes, strict=True))
        row = {"from": begin, "to": max(1023, 2 * begin - 1), "drafter": name, "decodes": len(decodes)}
        out.append({**row, "tokens": tokens, "rounds": rounds, "tau": tokens / max(rounds, 1)})
    return out


def length_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """`by_length` as a table: a line per range, a column per drafter."""
    names = list(dict.fromkeys(row["drafter"] for row in rows))
    out = Table(title="tau by tokens of history")
    out.add_column("history")
    for name in ("decodes", *names):
        out.add_column(name, justify="right")
    for begin in dict.fromkeys(row["from"] for row in rows):
        inside = {row["drafter"]: row for row in rows if row["from"] == begin}
        first = next(iter(inside.values()))
        cells = [_figure(inside[name]["tau"] if name in inside else None) for name in names]
        out.add_row(f"{begin}-{first['to']}", str(first["decodes"]), *cells)
    return out


def _seconds(point: Mapping, name: str) -> float:
    return statistics.median(point["drafters"][name]["seconds"])


def _summarise_one(batch: int, task: str, name: str, group: Sequence[Mapping]) -> dict[str, Any]:
    points = [point for record in group for point in record["points"]]
    each = [point["drafters"][name] for point in points]
    tokens = sum(sum(d["emitted"]) for d in each)
    rounds = sum(sum(d["rounds"]) for d in each)
    seconds = sum(_seconds(point, name) for point in points)
    plain_tokens = sum(sum(point["drafters"][PLAIN]["emitted"]) for point in points)
    plain_seconds = sum(_seconds(point, PLAIN) for point in points)
    ratios = []
    for record in group:
        speeds = []
        for which in (name, PLAIN):
            emitted = sum(sum(point["drafters"][which]["emitted"]) for point in record["points"])
            speeds.append(emitted / sum(_seconds(point, which) for point in record["points"]))
        ratios.append(speeds[0] / speeds[1])
    row: dict[str, Any] = {
        "batch": batch,
        "task": task,
        "drafter": name,
        "rows": sum(len(record["ids"]) for record in group),
        "decodes": sum(len(d["emitted"]) for d in each),
        "tokens": tokens,
        "forwards": sum(d["forwards"] for d in each),
        "rounds": rounds,
        "tau": tokens / max(rounds, 1),
        "tokens_per_s": tokens / seconds,
        "speed_ratio": (tokens / seconds) / (plain_tokens / plain_seconds),
        "speed_ratio_median": statistics.median(ratios),
        "round_ms": 1000 * seconds / max(sum(d["forwards"] for d in each), 1),
    }
    verdicts = [at for d in each for at in d.get("differs_at", [None] * len(d["emitted"]))]
    row["exact_match"] = sum(at is None for at in verdicts) / len(verdicts)
    row["differs"] = [
        {"ids": record["ids"], "point": i, "differs_at": point["drafters"][name]["differs_at"]}
        for record in group
        for i, point in enumerate(record["points"])
        if any(at is not None for at in point["drafters"][name].get("differs_at", []))
    ][:5]
    if "accepted_at" in each[0]:
        depth = [sum(column) for column in zip(*(d["accepted_at"] for d in each), strict=True)]
        row["accepted_at"] = [count / max(rounds, 1) for count in depth]
        row["accepted_from"] = _sum_by_key(d["accepted_from"] for d in each)
        row["uses"] = _sum_by_key(d["uses"] for d in each)
        row["drafted_per_round"] = sum(sum(d["drafted"]) for d in each) / max(rounds, 1)
        row |= _parts(name, row, group)
    return row


def _sum_by_key(dicts) -> dict[str, int]:
    total: dict[str, int] = {}
    for counts in dicts:
        for key, count in counts.items():
            total[key] = total.get(key, 0) + count
    return total


def _parts(name: str, row: Mapping, group: Sequence[Mapping]) -> dict[str, Any]:
    """Parts of a round on the rows that were profiled, with the round time of the same rows."""
    profiled = [record for record in group if name in record.get("profile", {}).get("drafting", {})]
    if not profiled:
        return {}
    mean = lambda values: statistics.mean(values)  # noqa: E731
    propose = mean([record["profile"]["drafting"][name]["propose"] for record in profiled])
    observe = mean([record["profile"]["drafting"][name]["observe"] for record in profiled])
    points = [point for record in profiled for point in record["points"]]
    forwards = sum(point["drafters"][name]["forwards"] for point in points)
    a_round = sum(_seconds(point, name) for point in points) / max(forwards, 1)
    by_nodes = {
        n: mean([record["profile"]["forward"][n] for record in profiled if n in record["profile"]["forward"]])
        for n in row["uses"]
        if any(n in record["profile"]["forward"] for record in profiled)
    }
    uses = {n: row["uses"][n] for n in by_nodes if row["uses"][n]}
    weight = sum(uses.values())
    return {
        "propose_ms": 1000 * propose,
        "observe_ms": 1000 * observe,
        "forward_ms": 1000 * sum(by_nodes[n] * count for n, count in uses.items()) / weight if weight else None,
        "forward_ms_by_nodes": {n: 1000 * s for n, s in by_nodes.items()},
        "drafting_share": (propose + observe) / a_round if a_round else None,
    }


def _figure(value: float | None, pattern: str = "{:.2f}") -> str:
    return "-" if value is None or math.isnan(value) else pattern.format(value)


def table(summary: Sequence[Mapping[str, Any]]) -> Table:
    """The figures as a table for the terminal."""
    out = Table(title="decoding, prefill excluded; speed against plain decoding of the same run")
    columns = (
        *("task", "drafter", "rows", "tokens", "forwards", "tau", "drafted"),
        *("tok/s", "speed", "median", "drafting", "same"),
    )
    batches = {row["batch"] for row in summary}
    if len(batches) > 1:
        out.add_column("batch", justify="right")
    for name in columns:
        out.add_column(name, justify="left" if name in ("task", "drafter") else "right", no_wrap=name == "drafter")
    last = None
    for row in summary:
        if last not in (None, (row["batch"], row["task"])):
            out.add_section()
        first = last != (row["batch"], row["task"])
        last = (row["batch"], row["task"])
        cells = [
            row["task"] if first else "",
            row["drafter"],
            str(row["rows"]),
            str(row["tokens"]),
            str(row["forwards"]),
            _figure(row["tau"]),
            _figure(row.get("drafted_per_round"), "{:.1f}"),
            _figure(row["tokens_per_s"], "{:.1f}"),
            _figure(row["speed_ratio"]),
            _figure(row["speed_ratio_median"]),
            _figure(row.get("drafting_share"), "{:.1%}"),
            _figure(row["exact_match"], "{:.0%}"),
        ]
        out.add_row(*([str(row["batch"])] if len(batches) > 1 else []), *cells)
    return out


def draw_charts(summary: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Speed and tau per task and drafter, and how many drafted tokens were accepted, as a PNG.

    Raises:
        ConfigError: there is nothing to draw, or the place cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not summary:
        raise ConfigError("there are no results to draw; give rows that fit the model's context.")
    batches = sorted({row["batch"] for row in summary})
    names = list(dict.fromkeys(row["drafter"] for row in summary))
    figure = Figure(figsize=(15, 4.5 * len(batches)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(batches), 3, squeeze=False)
    for line, batch in zip(axes, batches, strict=True):
        rows = [row for row in summary if row["batch"] == batch]
        tasks = list(dict.fromkeys(row["task"] for row in rows))
        at = {(row["task"], row["drafter"]): row for row in rows}
        for axis, key, label in ((line[0], "speed_ratio", "speed / plain"), (line[1], "tau", "tau, tokens per round")):
            for i, name in enumerate(names):
                values = [at[task, name][key] if (task, name) in at else 0 for task in tasks]
                places = [t + (i - (len(names) - 1) / 2) * 0.8 / len(names) for t in range(len(tasks))]
                axis.bar(places, values, 0.8 / len(names), label=name, color=f"C{i}")
            axis.axhline(1, color="black", linewidth=0.8)
            axis.set_xticks(range(len(tasks)), tasks, rotation=20)
            axis.set_title(f"{label} (batch {batch})")
        line[0].legend(fontsize="small")
        for i, name in enumerate(names):
            own = [row for row in rows if row["drafter"] == name and row.get("accepted_at")]
            if not own:
                continue
            rounds = sum(row["rounds"] for row in own)
            shares = [
                sum(row["accepted_at"][d] * row["rounds"] for row in own) / rounds
                for d in range(len(own[0]["accepted_at"]))
            ]
            line[2].step(range(1, len(shares) + 1), shares, where="mid", label=name, color=f"C{i}")
        line[2].set_yscale("log")
        line[2].set_xlabel("drafted tokens")
        line[2].set_title(f"share of rounds that accept at least so many (batch {batch})")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise ConfigError(
            f"the charts cannot be written to {path} ({error.strerror or error}); choose another place."
        ) from error
