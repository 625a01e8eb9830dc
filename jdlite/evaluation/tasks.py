"""Rows of evaluation files: one reader per format, recognised by the fields that a row has.

A `Row` is a conversation (or a plain text, or ready token ids) at one or more points of which the target is to decode;
`jdlite.evaluation.segments` turns it into token ids for one target.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jdlite.errors import PromptError

Message = dict[str, str]

# Spec-Bench's own names of its tasks; its other categories are the eight of MT-Bench.
SPEC_BENCH_TASKS = ("translation", "summarization", "qa", "math_reasoning", "rag")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "function": "tool", "observation": "tool"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One conversation, text or token list to decode from. Exactly one of `messages`, `text` and `tokens` is set.

    Attributes:
        id: name of the row, unique within its task.
        task: what results are pooled by.
        messages: `{"role", "content"}` in order. With assistant messages it is a transcript: the target decodes where
            each of them stands, and the true message then takes its place. With user messages only, each one is a turn
            and the target's own answers stay in the history.
        text: a plain text to continue, without chat format.
        tokens: token ids appended before each point to decode at.
    """

    id: str
    task: str
    messages: tuple[Message, ...] = ()
    text: str = ""
    tokens: tuple[tuple[int, ...], ...] = ()

    @property
    def keeps_answers(self) -> bool:
        """Whether the target's own answers stay in the history."""
        return bool(self.messages) and all(m["role"] != "assistant" for m in self.messages)


class _Malformed(Exception):
    """What is wrong with a row, without the file and line."""


def read_tasks(paths: Iterable[str | Path]) -> list[Row]:
    """Rows of several files, in order.

    Raises:
        PromptError: a file is absent, holds a malformed row, or two rows share task and id.
    """
    rows = [row for path in paths for row in read_rows(path)]
    seen: set[tuple[str, str]] = set()
    for row in rows:
        if (row.task, row.id) in seen:
            raise PromptError(f"task {row.task!r} holds the id {row.id!r} twice; give each row its own id.")
        seen.add((row.task, row.id))
    return rows


def read_rows(path: str | Path) -> list[Row]:
    """Rows of a JSON Lines file, or of a JSON file that holds a list or one object.

    Raises:
        PromptError: the file cannot be read, or a row is malformed; names the file and the line.
    """
    path = Path(path).expanduser()
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"the task file {path} cannot be read ({error}); give a JSON or JSON Lines file.") from error
    # Only \n ends a line: texts may hold other line separators.
    numbered = [(i, line) for i, line in enumerate(content.split("\n"), 1) if line.strip()]
    # One object over many lines, or a list: a JSON document. One object on one line is JSON Lines all the same.
    document = _json_document(content) if len(numbered) > 1 or content.lstrip().startswith("[") else None
    if document is not None:
        items = [(f"{path}, item {i}", item) for i, item in enumerate(document, 1)]
    else:
        items = [(f"{path}, line {i}", _parse(line, f"{path}, line {i}")) for i, line in numbered]
    if not items:
        raise PromptError(f"the task file {path} holds no rows; give a JSON or JSON Lines file with at least one.")
    truths = _possible_answers(path)
    rows = []
    for number, (where, item) in enumerate(items):
        try:
            if not isinstance(item, Mapping):
                raise _Malformed(f"a row must be a JSON object, not {type(item).__name__}")
            rows.append(_read_one({**item, **truths.get(str(item.get("id")), {})}, path.stem, number))
        except _Malformed as error:
            raise PromptError(f"{where}: {error}.") from error
    return rows


def _json_document(content: str) -> list | None:
    try:
        document = json.loads(content)
    except json.JSONDecodeError:
        return None
    return document if isinstance(document, list) else [document]


def _parse(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptError(f"{where}: not valid JSON ({error}); each line must be one JSON object.") from error


def _possible_answers(path: Path) -> dict[str, dict]:
    """BFCL keeps the reference calls in a file of the same name in `possible_answer/`."""
    twin = path.parent / "possible_answer" / path.name
    if not twin.is_file():
        return {}
    lines = [
        _parse(line, f"{twin}, line {i}") for i, line in enumerate(twin.read_text().split("\n"), 1) if line.strip()
    ]
    return {str(item["id"]): {"ground_truth": item.get("ground_truth")} for item in lines if "id" in item}


def _read_one(item: dict, stem: str, number: int) -> Row:
    for fields, reader in _READERS:
        if fields <= item.keys():
            return reader(item, stem, number)
    known = "; ".join(", ".join(sorted(fields)) for fields, _ in _READERS)
    raise _Malformed(f"the fields {', '.join(sorted(item)) or '(none)'} are of no known format, which have: {known}")


def _name(item: Mapping, number: int, *fields: str) -> str:
    """The row's id from the first of the fields that it has, else its number."""
    for field in fields:
        if item.get(field) is not None:
            return str(item[field])
    return str(number)


def _text(item: Mapping, field: str) -> str:
    value = item.get(field)
    if not isinstance(value, str) or not value.strip():
        raise _Malformed(f"{field!r} must be a text that is not empty, but is {value!r:.60}")
    return value


def _user(text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": text},)


def _content(message: Mapping) -> str:
    """Text of a message: a string, a list of text parts, or tool calls written the way Qwen and Hermes models do."""
    content = message.get("content", message.get("value"))
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise _Malformed("a message holds a part that is not text; remove it")
        content = "".join(parts)  # pyright: ignore[reportCallIssue, reportArgumentType]
    calls = message.get("tool_calls") or ()
    if content is None and not calls:
        raise _Malformed(f"a message has no content: {dict(message)!r:.80}")
    if content is not None and not isinstance(content, str):
        raise _Malformed(f"the content of a message must be text, but is {content!r:.60}")
    written = [content] if content else []
    for call in calls:
        function = call.get("function", call)
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            with contextlib.suppress(json.JSONDecodeError):  # models may write what is not JSON; it stays as it is
                arguments = json.loads(arguments)
        body = json.dumps({"name": function.get("name"), "arguments": arguments}, ensure_ascii=False)
        written.append(f"<tool_call>\n{body}\n</tool_call>")
    return "\n".join(written)


def _messages(value: Any) -> tuple[Message, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise _Malformed(f"the messages must be a list that is not empty, but are {value!r:.60}")
    messages = []
    for message in value:
        role = message.get("role", message.get("from")) if isinstance(message, Mapping) else None
        if not isinstance(role, str):
            raise _Malformed(f"a message must have a role and a content, but is {message!r:.60}")
        messages.append({"role": _SHAREGPT_ROLES.get(role, role), "content": _content(message)})
    if all(m["role"] in ("system", "assistant") for m in messages):
        raise _Malformed("no message is from a user or a tool")
    return tuple(messages)


def _token_row(item: dict, stem: str, number: int) -> Row:
    value = item["tokens"]
    lists = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
    good = all(
        isinstance(ids, list) and ids and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
        for ids in lists
    )
    if not good:
        raise _Malformed(f"'tokens' must be a list of token ids or a list of such lists, but is {value!r:.60}")
    return Row(id=_name(item, number, "id"), task=str(item.get("task", stem)), tokens=tuple(map(tuple, lists)))


def _conversation(field: str) -> Callable[[dict, str, int], Row]:
    """Transcripts and chats: jdlite's schema, SWE-agent trajectories (`history`), tau-bench (`traj`), ShareGPT."""

    def read(item: dict, stem: str, number: int) -> Row:
        name = _name(item, number, "id", "instance_id", "task_id")
        if field == "traj" and item.get("trial") is not None:
            name = f"{name}-{item['trial']}"
        return Row(id=name, task=stem, messages=_messages(item[field]))

    return read


def _questions(item: dict, stem: str, number: int) -> Row:
    """Spec-Bench and MT-Bench `question.jsonl`."""
    turns = item["turns"]
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise _Malformed(f"'turns' must be a list of texts, but is {turns!r:.60}")
    category = str(item["category"])
    task = category if category in SPEC_BENCH_TASKS else "mtbench"
    return Row(id=str(item["question_id"]), task=task, messages=sum(map(_user, turns), ()))


def _humaneval(item: dict, stem: str, number: int) -> Row:
    prompt = _text(item, "prompt")
    ask = "Complete the following Python function. Return the full function in a code block.\n\n"
    return Row(id=str(item["task_id"]), task="humaneval", messages=_user(f"{ask}```python\n{prompt.rstrip()}\n```"))


def _mbpp(item: dict, stem: str, number: int) -> Row:
    tests = item["test_list"]
    if not isinstance(tests, list) or not all(isinstance(test, str) for test in tests):
        raise _Malformed(f"'test_list' must be a list of texts, but is {tests!r:.60}")
    problem = _text(item, "text" if "text" in item else "prompt")
    ask = f"You are an expert Python programmer, and here is your task: {problem}"
    lines = "\n".join(tests)
    return Row(
        id=str(item["task_id"]), task="mbpp", messages=_user(f"{ask} Your code should pass these tests:\n\n{lines}")
    )


def _gsm8k(item: dict, stem: str, number: int) -> Row:
    return Row(id=_name(item, number, "id"), task="gsm8k", messages=_user(_text(item, "question")))


def _bfcl(item: dict, stem: str, number: int) -> Row:
    """BFCL: `question` is a list of turns, each a list of messages; `ground_truth` a list of calls per turn."""
    turns = item["question"]
    if not isinstance(turns, list) or not turns:
        raise _Malformed(f"'question' must be a list of turns, but is {turns!r:.60}")
    turns = turns if isinstance(turns[0], list) else [turns]
    truth = item.get("ground_truth") or []
    messages: list[Message] = []
    if item.get("function"):
        listed = json.dumps(item["function"], ensure_ascii=False)
        ask = "Answer each request only with calls of the functions below, as [name(argument=value), ...]."
        messages.append({"role": "system", "content": f"{ask}\n\n{listed}"})
    for i, turn in enumerate(turns):
        if turn:  # BFCL's turns of missing functions have no message
            messages += _messages(turn)
        if i < len(truth) and all(isinstance(call, str) for call in truth[i]):
            messages.append({"role": "assistant", "content": f"[{', '.join(truth[i])}]"})
    return Row(id=str(item["id"]), task=stem, messages=tuple(messages))


def _plain_text(item: dict, stem: str, number: int) -> Row:
    return Row(id=_name(item, number, "id"), task=str(item.get("task", stem)), text=_text(item, "prompt"))


# The first reader whose fields a row has reads it.
_READERS: tuple[tuple[frozenset[str], Callable[[dict, str, int], Row]], ...] = (
    (frozenset({"tokens"}), _token_row),
    (frozenset({"messages"}), _conversation("messages")),
    (frozenset({"question_id", "category", "turns"}), _questions),
    (frozenset({"traj"}), _conversation("traj")),
    (frozenset({"history"}), _conversation("history")),
    (frozenset({"conversations"}), _conversation("conversations")),
    (frozenset({"task_id", "test_list"}), _mbpp),
    (frozenset({"task_id", "prompt"}), _humaneval),
    (frozenset({"question", "answer"}), _gsm8k),
    (frozenset({"id", "question"}), _bfcl),
    (frozenset({"prompt"}), _plain_text),
)
