"""Prompts from a JSONL file, results to a JSONL file: checked before anything runs, written whole, resumable."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jdlite import cli
from jdlite.errors import ConfigError, PromptError
from jdlite.files import atomic_file

if TYPE_CHECKING:
    from jdlite.checkpoints.target import Target
    from jdlite.decoding.sampling import Sampling
    from jdlite.drafters.base import Drafter
    from jdlite.generate import Options

_KINDS = ("prompt", "messages", "tokens")


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the prompts file.

    Attributes:
        id: the line's "id", or its number.
        index: which row it is, from 0.
        line: its number in the file, from 1.
        kind: "prompt", "messages" or "tokens".
        value: what the line holds under that name.
    """

    id: str | int
    index: int
    line: int
    kind: str
    value: Any


def read_prompts(path: Path) -> list[Row]:
    """Read and check a prompts file; blank lines are skipped, fields other than those of `Row` are ignored.

    Raises:
        ConfigError: the file cannot be read.
        PromptError: a line is not usable; the sentence gives its number.
    """
    rows: list[Row] = []
    seen: dict[str | int, int] = {}
    for line, content in _lines(path, ConfigError):
        where = f"line {line} of {path}"
        kinds = [kind for kind in _KINDS if content.get(kind) is not None]
        if len(kinds) != 1:
            got = " and ".join(kinds) or f"only {', '.join(content) or 'nothing'}"
            raise PromptError(f"{where} must have exactly one of prompt, messages and tokens: got {got}.")
        kind, value = kinds[0], content[kinds[0]]
        _check(kind, value, where)
        name = content.get("id", line)
        if isinstance(name, bool) or not isinstance(name, str | int):
            raise PromptError(f'{where} has the id {name!r}; give a text or an integer, or leave "id" out.')
        if name in seen:
            raise PromptError(f"{where} has the id {name!r} of line {seen[name]}; give each line its own.")
        seen[name] = line
        rows.append(Row(name, len(rows), line, kind, value))
    if not rows:
        raise PromptError(f"{path} has no prompts; give at least one line.")
    return rows


def _check(kind: str, value: Any, where: str) -> None:
    """Refuse a prompt that no target could decode."""
    sized = isinstance(value, str if kind == "prompt" else list)
    if kind == "messages":
        right = sized and all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in value)
        wants = 'a list of objects with "role" and "content"'
    elif kind == "tokens":
        right = sized and all(isinstance(t, int) and not isinstance(t, bool) for t in value)
        wants = "a list of token ids"
    else:
        right, wants = sized, "a text"
    if not right:
        raise PromptError(f'{where}: "{kind}" must be {wants}: got {json.dumps(value):.60}.')
    if not value:
        raise PromptError(f'{where}: "{kind}" is empty; give at least one token.')


def _lines(path: Path, error: type[Exception]) -> list[tuple[int, dict[str, Any]]]:
    """Numbered objects of a JSONL file."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as problem:
        raise ConfigError(f"cannot read {path} ({problem.strerror or problem}); check the path.") from problem
    except UnicodeDecodeError as problem:
        raise ConfigError(f"{path} is not UTF-8 text (byte {problem.start}); save it as UTF-8.") from problem
    out = []
    for line, raw in enumerate(text.split("\n"), start=1):
        if not raw.strip():
            continue
        try:
            content = json.loads(raw)
        except ValueError as problem:
            raise PromptError(f"line {line} of {path} is not JSON ({problem}); write one object per line.") from problem
        if not isinstance(content, dict):
            raise PromptError(f"line {line} of {path} is not a JSON object: got {raw.strip():.60}; write {{...}}.")
        out.append((line, content))
    return out


def check_output(path: Path) -> None:
    """Refuse a place that cannot be written, before any work is done.

    Raises:
        ConfigError: says why.
    """
    if path.is_dir():
        raise ConfigError(f"--out {path} is a folder; give the name of a file.")
    folder = path.absolute().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"cannot write to {folder} ({error.strerror or error}); choose another --out.") from error


def run(
    options: Options, target: Target, drafter: Drafter, sampling: Sampling, folder: Path, rows: Sequence[Row]
) -> None:
    """Decode the rows in batches and write each batch when it is done.

    Raises:
        PromptError: a row cannot be encoded.
        ConfigError: the output file holds results of other prompts or options.
    """
    from jdlite.api import decode_texts, encode_stops
    from jdlite.generate import check_numbers, fit_capacity, make_session

    ids = [_encode(options, target, row) for row in rows]
    marks = [_fingerprint(options, target, sampling, row, tokens) for row, tokens in zip(rows, ids, strict=True)]
    done = _done(options.out, {row.id: mark for row, mark in zip(rows, marks, strict=True)})
    todo = [i for i, row in enumerate(rows) if row.id not in done]
    if len(todo) < len(rows):
        print(f"{len(rows) - len(todo)} of {len(rows)} rows are there already", file=sys.stderr)
    if not todo:
        return
    # One capacity and one batch size, so that everything is compiled once.
    capacity = fit_capacity(options, target, drafter, max(map(len, ids)))
    size = min(options.batch, len(rows))
    stop_ids, sequences = encode_stops(target, options.stop)
    stop_ids += [] if options.ignore_eos else list(target.eos_ids)
    results = list(done.values())
    failed: list[str] = []
    first = make_session(options, target, drafter, folder, capacity, size)
    with cli.stage(f"Decoding {len(todo)} prompts") as update:
        for begin in range(0, len(todo), size):
            chosen = todo[begin : begin + size]
            padded = chosen + [chosen[-1]] * (size - len(chosen))
            session = first if begin == 0 else make_session(options, target, drafter, folder, capacity, size)
            session.append([ids[i] for i in padded])
            result = session.decode(
                sampling=sampling,
                # A row that only fills up the batch costs nothing.
                max_new_tokens=[options.max_new_tokens if b < len(chosen) else 0 for b in range(size)],
                stop_ids=[stop_ids] * size,
                stop_sequences=[sequences] * size,
                seed=[options.seed + rows[i].index for i in padded],
            )
            texts = decode_texts(target, result.tokens)
            new = []
            for b, i in enumerate(chosen):
                text, reason = None if texts is None else texts[b], result.finish_reasons[b]
                if text is not None:
                    text, reason = _cut(text, options.stop, reason)
                new.append(
                    {
                        "id": rows[i].id,
                        "text": text,
                        "tokens": result.tokens[b],
                        "finish_reason": reason,
                        "rounds": int(result.stats.rounds[b]),
                        "tau": round(int(result.stats.emitted[b]) / max(int(result.stats.rounds[b]), 1), 3),
                        "fingerprint": marks[i],
                    }
                )
            failed += result.finish_reasons
            results += new
            _write(options.out, results, new)
            update(begin + len(chosen), len(todo))
    if options.stats:
        _summary(results)
    check_numbers(failed)


def _encode(options: Options, target: Target, row: Row) -> list[int]:
    from jdlite.generate import encode_text

    if row.kind == "tokens":
        wrong = [t for t in row.value if not 0 <= t < target.config.vocab_size]
        if wrong:
            raise PromptError(
                f"line {row.line} of {options.prompts} holds token {wrong[0]}, but ids go from 0 to "
                f"{target.config.vocab_size - 1}; check the tokenizer."
            )
        return list(row.value)
    try:
        return encode_text(options, target, row.value) if row.kind == "prompt" else target.encode_chat(row.value)
    except PromptError as error:
        raise PromptError(f"line {row.line} of {options.prompts}: {error}") from error


def _fingerprint(options: Options, target: Target, sampling: Sampling, row: Row, tokens: Sequence[int]) -> str:
    """What a row's tokens depend on. The drafter, the batch and the budget are not among them: decoding is lossless."""
    seed = options.seed + row.index if sampling.temperature else 0
    what = (
        *(options.target, options.dtype, options.cache_dtype, list(tokens), dataclasses.astuple(sampling), seed),
        *(options.max_new_tokens, options.stop, options.ignore_eos, options.capacity),
    )
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


def _done(out: Path | None, marks: Mapping[str | int, str]) -> dict[str | int, dict[str, Any]]:
    """Results that the output file has already, by id."""
    if out is None or not out.exists():
        return {}
    done = {}
    for line, content in _lines(out, ConfigError):
        name = content.get("id", "")
        if not isinstance(name, str | int) or name not in marks or content.get("fingerprint") != marks[name]:
            raise ConfigError(
                f"line {line} of {out} (id {name!r}) was made from another prompt or with other options; choose "
                "another --out or remove the file."
            )
        done[name] = content
    return done


def _cut(text: str, stops: Sequence[str], reason: str) -> tuple[str, str]:
    """The text up to the first stop text."""
    from jdlite.api import first_stop

    end = first_stop(text, stops)
    return (text, reason) if end is None else (text[:end], "stop_sequence")


def _write(out: Path | None, results: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> None:
    """All results to a temporary name, then renamed; or the new ones to stdout."""
    if out is None:
        for result in new:
            print(json.dumps(result, ensure_ascii=False), flush=True)
        return
    try:
        with atomic_file(out) as file:
            file.writelines(json.dumps(result, ensure_ascii=False) + "\n" for result in results)
    except OSError as error:
        raise ConfigError(
            f"cannot write {out} ({error.strerror or error}); free some space and run this again."
        ) from error


def _summary(results: Sequence[Mapping[str, Any]]) -> None:
    tokens, rounds = sum(len(r["tokens"]) for r in results), sum(r["rounds"] for r in results)
    print(
        f"{len(results)} rows: {tokens} tokens in {rounds} rounds, tau {tokens / max(rounds, 1):.2f}", file=sys.stderr
    )
