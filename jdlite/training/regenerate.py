"""The regenerate stage: answers to the training prompts, stored as records. It can be killed and run again."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jdlite.api import bucket
from jdlite.checkpoints.target import Target
from jdlite.decoding.sampling import Sampling
from jdlite.errors import CheckpointError, ConfigError, PromptError
from jdlite.training import masks, processes, records
from jdlite.training.journal import Journal
from jdlite.training.prompts import OnError, Prompt, Task, Turns, tasks
from jdlite.training.records import Example, Records, write_records
from jdlite.training.refill import Job, decode_jobs

Responses = Literal["target", "transcript"]
Progress = Callable[[int, int], None]
JOURNAL, RUN = "answers.journal", "answers.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegenerateConfig:
    """How the training answers are made.

    Attributes:
        responses: whose answers to train on: the `target`'s own, decoded anew, or the `transcript`'s as they stand.
        temperature, top_p, top_k, min_p: of the target's sampling; temperature 0 is greedy.
        max_new_tokens: longest answer; one that reaches it is marked `length`.
        max_prompt_tokens: longer prompts are skipped and counted.
        batch_size: rows that are decoded side by side; as soon as one has finished, the next prompt takes its place.
        prefill_chunk: prompt tokens per forward.
        thinking: what the chat template gets as `enable_thinking`; templates without it ignore it.
        template_options: more options for the chat template.
        history: with `responses: transcript`, which turns to learn from, as in `masks.render`; where each turn is a
            task of its own, it is that one alone.
        seed: each prompt's own seed is derived from this one and its id.
        shard_records: records per ArrayRecord file.
    """

    responses: Responses = "target"
    temperature: float = 0.7
    top_p: float = 0.8
    top_k: int = 20
    min_p: float = 0.0
    max_new_tokens: int = 1024
    max_prompt_tokens: int = 2048
    batch_size: int = 16
    prefill_chunk: int = 64
    thinking: bool = False
    template_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    history: masks.HistoryMode = "append_only"
    seed: int = 0
    shard_records: int = 4096

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "max_prompt_tokens", "batch_size", "prefill_chunk", "shard_records"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1: got {getattr(self, name)}; give a positive number.")
        _ = self.sampling  # refuses what is out of range

    @property
    def sampling(self) -> Sampling:
        """As the decode loop takes it."""
        return Sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p)

    @property
    def template(self) -> dict[str, Any]:
        """What the chat template gets."""
        return {"enable_thinking": self.thinking, **self.template_options}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """What a run of the stage came to.

    Attributes:
        records: stored examples.
        made: how many of them this call made; the others were there.
        finish: examples by finish reason.
        tokens: of all examples, prompts included.
        supervised: tokens to learn from, cut answers included.
        left_out: tasks without an example, by reason: `too_long`, `refused` by the chat template, `no_answer`.
    """

    records: int
    made: int
    finish: Mapping[str, int]
    tokens: int
    supervised: int
    left_out: Mapping[str, int]


def regenerate(
    target: Target,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    config: RegenerateConfig,
    folder: str | Path,
    *,
    turns: Turns = "last",
    on_error: OnError = "fail",
    progress: Progress | None = None,
) -> Summary:
    """Answer all prompts and store the answers as `folder/records`.

    Each answer is put into a journal as soon as it has ended. After a kill at any instant the same call goes on with
    the prompts that have no answer yet, and stores what an uninterrupted run would have stored: an answer depends on
    its prompt, the configuration and the target, not on the batch it was decoded in. (In floating point that holds for
    one batch size on one kind of machine.) More prompts may be added later; what is there is kept.

    Args:
        target: whose answers are wanted.
        tokenizer: with a chat template; usually `target.tokenizer`.
        prompts: from `read_prompts`.
        config: options.
        folder: of the run.
        turns: which turns to answer, as in `PromptsConfig`.
        on_error: what to do with a prompt that the chat template refuses: `fail` or `skip` (counted).
        progress: called with (tasks done, tasks in all).

    Raises:
        PromptError: the template refuses a prompt, or no prompt can be used.
        ConfigError: the folder holds answers of another target or of other options, another process works there, or
            answers are missing and JAX was started with several processes.
        CheckpointError: the folder cannot be written.
    """
    folder = Path(folder)
    run = _describe(target, tokenizer, config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot write {folder} ({error.strerror or error}); choose another folder.") from error
    _check_run(folder / RUN, run)
    left_out: Counter[str] = Counter()
    chosen = tasks(prompts, turns)
    prepared: Sequence[Job | Example]
    if config.responses == "target":
        prepared = _prompt_jobs(target, tokenizer, chosen, config, on_error, left_out)
    else:
        history = "last_turn" if turns == "each" else config.history
        prepared = _transcripts(target, tokenizer, chosen, config, history, on_error, left_out)
    if not prepared:
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items()) or "there are none"
        raise PromptError(f"no prompt can be used ({reasons}); check the prompts and max_prompt_tokens.")
    names = [item.id if isinstance(item, Example) else item.name for item in prepared]
    finished = _finished(folder, names)
    if finished is not None:
        (folder / JOURNAL).unlink(missing_ok=True)
        if progress:
            progress(len(names), len(names))
        return _summary(finished, 0, left_out)

    if processes.count() > 1:
        raise ConfigError(
            f"answers are still to be made for {folder}, which is work for one process; run --stage regenerate alone "
            "without --distributed and --coordinator first, then this command again."
        )
    journal = Journal(folder / JOURNAL)
    try:
        _take_over(folder, journal)
        # What a kill while records were written has left; all of it is in the journal.
        for rest in folder.glob(f".{records.FOLDER}.*"):
            shutil.rmtree(rest, ignore_errors=True)
        todo = [item for item, name in zip(prepared, names, strict=True) if name not in journal]
        done = len(names) - len(todo)
        if progress:
            progress(done, len(names))
        # The capacity is that of all prompts: it is part of the compiled program, so it must not depend on a kill.
        longest = max((len(item.tokens) for item in prepared), default=0)
        capacity = bucket(longest + config.max_new_tokens, target.config.max_position)
        for example in _examples(target, todo, config, run, capacity):
            journal.append(example)
            done += 1
            if progress:
                progress(done, len(names))
        write_records(
            folder,
            (journal[name] for name in names),
            run={**run, "left_out": dict(left_out)},
            shard_records=config.shard_records,
        )
    finally:
        journal.close()
    (folder / JOURNAL).unlink()
    return _summary(Records(folder), len(todo), left_out)


def _describe(target: Target, tokenizer: Any, config: RegenerateConfig) -> dict[str, Any]:
    """What all answers of a folder must have in common."""
    return {
        "target": target.weights_hash,
        "template": masks.template_hash(tokenizer),
        "template_options": config.template,
        "stop_ids": list(target.eos_ids),
        "responses": config.responses,
        **({"history": config.history} if config.responses == "transcript" else {}),
        "sampling": {name: getattr(config, name) for name in ("temperature", "top_p", "top_k", "min_p")},
        "max_new_tokens": config.max_new_tokens,
        "seed": config.seed,
    }


def _check_run(path: Path, run: Mapping[str, Any]) -> None:
    """Write down what the run is, or refuse a folder that holds another one."""
    try:
        before = json.loads(path.read_text())
    except FileNotFoundError:
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            temporary.write_text(json.dumps(run, indent=2, sort_keys=True) + "\n")
            temporary.replace(path)
        except OSError as error:
            raise CheckpointError(
                f"cannot write {path} ({error.strerror or error}); free some space or choose another folder."
            ) from error
        return
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); delete it and the answers beside it.") from error
    # Compared as JSON, since a tuple comes back as a list.
    now = json.loads(json.dumps(run))
    different = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    if different:
        changes = "; ".join(f"{name} was {_short(before.get(name))}, is {_short(now.get(name))}" for name in different)
        raise ConfigError(
            f"{path.parent} holds answers of another run ({changes}); choose another folder or delete {RUN}, {JOURNAL} "
            f"and {records.FOLDER} there."
        )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _prompt_jobs(
    target: Target,
    tokenizer: Any,
    todo: Sequence[Task],
    config: RegenerateConfig,
    on_error: OnError,
    left_out: Counter[str],
) -> list[Job]:
    """Prompts as tokens, those that are too long left out."""
    limit = min(config.max_prompt_tokens, target.config.max_position - 1)
    jobs = []
    for task in todo:
        try:
            tokens = masks.chat_tokens(tokenizer, task.messages, task.tools, options=config.template)
        except PromptError as error:
            if on_error == "fail":
                raise PromptError(f"prompt {task.id}: {error}") from error
            left_out["refused"] += 1
            continue
        if len(tokens) > limit:
            left_out["too_long"] += 1
            continue
        digest = hashlib.sha256(f"{config.seed}:{task.id}".encode()).digest()
        jobs.append(Job(tokens, int.from_bytes(digest[:4]) >> 1, task.id))
    return jobs


def _transcripts(
    target: Target,
    tokenizer: Any,
    todo: Sequence[Task],
    config: RegenerateConfig,
    history: masks.HistoryMode,
    on_error: OnError,
    left_out: Counter[str],
) -> list[Example]:
    """The transcripts' own answers."""
    limit = min(config.max_prompt_tokens + config.max_new_tokens, target.config.max_position)
    examples = []
    for task in todo:
        if task.answer is None:
            left_out["no_answer"] += 1
            continue
        try:
            rendered = masks.render(
                tokenizer,
                [*task.messages, task.answer],
                task.tools,
                stop_ids=target.eos_ids,
                history=history,
                options=config.template,
            )
        except PromptError as error:
            if on_error == "fail":
                raise PromptError(f"prompt {task.id}: {error}") from error
            left_out["refused"] += 1
            continue
        if rendered.tokens.size > limit:
            left_out["too_long"] += 1
            continue
        examples.append(
            Example(
                id=task.id,
                tokens=rendered.tokens,
                loss_mask=rendered.assistant_mask,
                prompt_length=_last_run(rendered.assistant_mask),
                finish="transcript",
            )
        )
    return examples


def _last_run(mask: np.ndarray) -> int:
    """Where the last run of True begins; the length of the mask where there is none."""
    begins = np.flatnonzero(mask & ~np.concatenate([[False], mask[:-1]]))
    return int(begins[-1]) if begins.size else mask.size


def _examples(
    target: Target, todo: Sequence[Job | Example], config: RegenerateConfig, run: Mapping[str, Any], capacity: int
) -> Iterator[Example]:
    """Examples in the order in which they are finished."""
    jobs = [item for item in todo if isinstance(item, Job)]
    yield from (item for item in todo if isinstance(item, Example))
    # Rows of like length side by side: a round costs what its longest row does.
    jobs.sort(key=lambda job: (len(job.tokens), job.name))
    answers = decode_jobs(
        target.model,
        jobs,
        sampling=config.sampling,
        stop_ids=target.eos_ids,
        max_new_tokens=config.max_new_tokens,
        batch_size=config.batch_size,
        capacity=capacity,
        prefill_chunk=config.prefill_chunk,
    )
    for answer in answers:
        before = len(answer.job.tokens)
        mask = np.zeros(before + len(answer.tokens), bool)
        mask[before:] = True
        yield Example(
            id=answer.job.name,
            tokens=np.asarray([*answer.job.tokens, *answer.tokens], np.int32),
            loss_mask=mask,
            prompt_length=before,
            finish=answer.finish,
            sampling={**run["sampling"], "seed": answer.job.seed},
            target=run["target"],
        )


def _finished(folder: Path, names: Sequence[str]) -> Records | None:
    """The stored records if they are those of these tasks."""
    if not (folder / records.FOLDER).exists():
        return None
    stored = Records(folder)
    return stored if stored.table["id"].tolist() == [name.encode() for name in names] else None


def _take_over(folder: Path, journal: Journal) -> None:
    """Put stored records into the journal, from which a larger or smaller set is then written."""
    if (folder / records.FOLDER).exists():
        for example in Records(folder):
            if example.id not in journal:
                journal.append(example)


def _summary(stored: Records, made: int, left_out: Mapping[str, int]) -> Summary:
    index = stored.index
    return Summary(
        records=index["records"],
        made=made,
        finish=index["finish"],
        tokens=index["tokens"],
        supervised=index["supervised"],
        left_out=dict(left_out),
    )
