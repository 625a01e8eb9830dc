"""Prompts to train on: JSON Lines of conversations, named by the hash of their content."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jdlite.errors import ConfigError, PromptError

Message = Mapping[str, Any]
OnError = Literal["fail", "skip"]
Turns = Literal["last", "each"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptsConfig:
    """Which prompts to train on.

    Attributes:
        path: JSON Lines; each row has `messages` and may have `tools`.
        on_error: what to do with a malformed row: `fail` or `skip` (skipped rows are counted).
        turns: which assistant turns of a transcript the target answers anew: the `last` one, or `each` one in its
            place, with the transcript's own turns before it. A conversation that ends with another role is answered at
            its end.
        limit: read no more than this many rows.
    """

    path: str = ""
    on_error: OnError = "fail"
    turns: Turns = "last"
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"prompts.limit must be at least 1: got {self.limit}; leave it out to read all rows.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """A conversation.

    Attributes:
        id: hash of messages and tools, 24 hex digits; the same content has the same id wherever it stands.
        messages: in order; `role`, `content` and whatever else the chat template reads.
        tools: as the chat template takes them, or None.
        source: where it was read, for messages to people; no part of the id.
    """

    id: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] | None = None
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Task:
    """One answer that the target is to give.

    Attributes:
        id: `PROMPT-TURN`, where TURN is the index of the message that the answer will be.
        messages: the history that the answer follows.
        tools: as in `Prompt`.
        answer: the transcript's own assistant message at that place, or None.
    """

    id: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] | None
    answer: Message | None


class Prompts(list[Prompt]):
    """Prompts that were read, with what was left out.

    Attributes:
        skipped: messages about malformed rows.
        duplicates: how many rows repeated the content of an earlier one.
    """

    def __init__(self, prompts: Sequence[Prompt] = (), skipped: Sequence[str] = (), duplicates: int = 0):
        super().__init__(prompts)
        self.skipped = list(skipped)
        self.duplicates = duplicates


def content_hash(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
    """24 hex digits of the SHA-256 of messages and tools, whatever the order of their keys."""
    text = json.dumps([list(messages), list(tools) if tools else None], sort_keys=True, ensure_ascii=False)
    # Half a surrogate pair is legal JSON but no UTF-8.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def make_prompt(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, source: str = ""
) -> Prompt:
    """A prompt with its id.

    Raises:
        PromptError: messages or tools are not what a chat template takes.
    """
    problem = _problem(messages, tools)
    if problem:
        raise PromptError(f"{source + ': ' if source else ''}{problem}.")
    own_tools = tuple(tools) if tools else None
    return Prompt(id=content_hash(messages, own_tools), messages=tuple(messages), tools=own_tools, source=source)


def read_prompts(path: str | Path, on_error: OnError = "fail", *, limit: int | None = None) -> Prompts:
    """Read a JSON Lines file of `{"messages": [...], "tools": [...]}` rows; other fields are ignored.

    Rows whose content was read before are left out and counted.

    Args:
        path: of the file.
        on_error: `fail` raises at the first malformed row; `skip` leaves malformed rows out and counts them.
        limit: stop after this many prompts.

    Raises:
        PromptError: the file cannot be read or holds no prompt, or a row is malformed; the row is named by line.
    """
    path = Path(path).expanduser()
    found: dict[str, Prompt] = {}
    skipped: list[str] = []
    duplicates = 0
    for where, line in _lines(path):
        try:
            prompt = _parse(line, where)
        except PromptError as error:
            if on_error == "fail":
                raise
            skipped.append(str(error))
            continue
        duplicates += prompt.id in found
        found.setdefault(prompt.id, prompt)
        if len(found) == limit:
            break
    if not found:
        detail = f"all {len(skipped)} rows are malformed, the first: {skipped[0]}" if skipped else "it is empty"
        raise PromptError(f"{path} holds no prompts ({detail}); give JSON Lines with a list of messages in each row.")
    return Prompts(list(found.values()), skipped, duplicates)


def tasks(prompts: Sequence[Prompt], turns: Turns = "last") -> list[Task]:
    """The answers to ask of the target.

    Example: `user assistant user assistant` gives with `last` the task of answering the second question after the first
    answer as it stands in the transcript, and with `each` also the task of answering the first question.
    """
    return [task for prompt in prompts for task in _tasks_of(prompt, turns)]


def _tasks_of(prompt: Prompt, turns: Turns) -> Iterator[Task]:
    messages = prompt.messages
    # A turn can only be answered when somebody spoke before.
    asked = next((i for i, message in enumerate(messages) if _asks(message)), len(messages))
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i > asked]
    if messages[-1]["role"] != "assistant":
        places.append(len(messages))
    for place in places if turns == "each" else places[-1:]:
        answer = messages[place] if place < len(messages) else None
        yield Task(f"{prompt.id}-{place}", messages[:place], prompt.tools, answer)


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    try:
        # Only \n ends a line: texts may hold other line separators.
        with path.open(encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(file, 1):
                yield f"{path}, line {number}", line
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"the prompts {path} cannot be read ({error}); give a JSON Lines file in UTF-8.") from error


def _parse(line: str, where: str) -> Prompt:
    if not line.strip():
        raise PromptError(f"{where}: the row is empty; remove it or skip malformed rows with prompts.on_error=skip.")
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise PromptError(f"{where}: not valid JSON ({error}); each line must be one JSON object.") from error
    if not isinstance(row, dict):
        raise PromptError(f"{where}: a row must be a JSON object: got {type(row).__name__}.")
    if "messages" not in row:
        raise PromptError(f"{where}: the row has no 'messages': got {', '.join(row) or 'nothing'}.")
    return make_prompt(row["messages"], row.get("tools"), where)


def _asks(message: Message) -> bool:
    return message["role"] not in ("system", "assistant")


def _problem(messages: Any, tools: Any) -> str:
    """What is wrong with a conversation, or nothing."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        return f"the messages must be a list that is not empty: got {messages!r:.60}"
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or not message["role"]:
            return f"message {i} must have a role and a content: got {message!r:.60}"
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            return f"message {i} has no content: got {dict(message)!r:.60}"
        if content is not None and not isinstance(content, str | Sequence):
            return f"the content of message {i} must be text or a list of parts: got {content!r:.60}"
        if message["role"] == "user" and (not content or (isinstance(content, str) and not content.strip())):
            return f"the content of message {i} is empty"
    if not any(_asks(message) for message in messages):
        return "no message is from a user or a tool"
    if tools is not None and (not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools)):
        return f"the tools must be a list of objects: got {tools!r:.60}"
    return ""
