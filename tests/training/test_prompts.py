"""Reading prompts."""

from __future__ import annotations

import json

import pytest

from jdlite.errors import ConfigError, PromptError
from jdlite.training.prompts import PromptsConfig, content_hash, make_prompt, read_prompts, tasks


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def write(folder, *lines):
    path = folder / "prompts.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_rows_become_prompts_named_by_content(tmp_path):
    tool = {"type": "function", "function": {"name": "f"}}
    path = write(
        tmp_path,
        {"id": "x", "messages": [user("a\u2028b")]},
        {"messages": [user("b"), assistant("c"), user("d")], "tools": [tool]},
    )
    first, second = read_prompts(path)
    assert first.messages == (user("a\u2028b"),)
    assert first.tools is None
    assert (second.tools, len(second.messages)) == ((tool,), 3)
    assert second.source == f"{path}, line 2"
    assert first.id != second.id
    assert len(first.id) == 24


def test_the_id_depends_on_content_alone():
    assert content_hash([{"role": "user", "content": "é"}]) == content_hash([{"content": "é", "role": "user"}])
    assert content_hash([user("a")]) != content_hash([user("b")])
    assert content_hash([user("a")]) != content_hash([user("a")], [{"name": "f"}])
    assert content_hash([user("a")]) == content_hash([user("a")], [])
    # sha256sum of that JSON text: stored answers are found again by it.
    assert content_hash([user("hello")]) == "59221a6a36ccb38fa1659e84"


def test_repeated_content_is_read_once(tmp_path):
    prompts = read_prompts(write(tmp_path, {"messages": [user("a")]}, {"id": 2, "messages": [user("a")]}))
    assert len(prompts) == 1
    assert prompts.duplicates == 1


BAD = [
    ("", "the row is empty"),
    ("{", "not valid JSON"),
    ("[1]", "a row must be a JSON object: got list"),
    ({"prompt": "a"}, "the row has no 'messages': got prompt"),
    ({"messages": []}, "must be a list that is not empty"),
    ({"messages": "hi"}, "must be a list that is not empty"),
    ({"messages": ["hi"]}, "message 0 must have a role and a content"),
    ({"messages": [{"role": "user"}]}, "message 0 has no content"),
    ({"messages": [user(" ")]}, "the content of message 0 is empty"),
    ({"messages": [user(3)]}, "message 0 must be text or a list of parts: got 3"),
    ({"messages": [assistant("a")]}, "no message is from a user or a tool"),
    ({"messages": [user("a")], "tools": "f"}, "the tools must be a list of objects"),
]


@pytest.mark.parametrize(("row", "problem"), BAD)
def test_a_malformed_row_is_named_by_line(tmp_path, row, problem):
    path = write(tmp_path, {"messages": [user("a")]}, row)
    with pytest.raises(PromptError, match=rf"prompts.jsonl, line 2: .*{problem}"):
        read_prompts(path)


def test_malformed_rows_can_be_skipped_and_are_counted(tmp_path):
    path = write(tmp_path, *(row for row, _ in BAD), {"messages": [user("a")]})
    prompts = read_prompts(path, on_error="skip")
    assert [p.messages for p in prompts] == [(user("a"),)]
    assert len(prompts.skipped) == len(BAD)
    assert "line 3" in prompts.skipped[2]


def test_files_without_prompts_are_refused(tmp_path):
    with pytest.raises(PromptError, match=r"holds no prompts .it is empty"):
        read_prompts(write(tmp_path))
    with pytest.raises(PromptError, match=r"all 2 rows are malformed, the first: .*line 1"):
        read_prompts(write(tmp_path, "{", "["), on_error="skip")
    with pytest.raises(PromptError, match="cannot be read"):
        read_prompts(tmp_path / "none.jsonl")


def test_limit_ends_reading(tmp_path):
    path = write(tmp_path, {"messages": [user("a")]}, {"messages": [user("b")]}, "{")
    assert len(read_prompts(path, limit=2)) == 2
    with pytest.raises(ConfigError, match="limit must be at least 1"):
        PromptsConfig(path="x", limit=0)


def test_tasks_of_transcripts():
    system = {"role": "system", "content": "s"}
    talk = [system, assistant("hello"), user("q1"), assistant("a1"), user("q2"), assistant("a2")]
    prompt = make_prompt(talk)
    (last,) = tasks([prompt])
    assert (last.id, last.messages, last.answer) == (f"{prompt.id}-5", tuple(talk[:5]), assistant("a2"))
    # The greeting answers nobody.
    assert [(t.messages, t.answer) for t in tasks([prompt], "each")] == [
        (tuple(talk[:3]), assistant("a1")),
        (tuple(talk[:5]), assistant("a2")),
    ]


def test_a_conversation_that_waits_for_an_answer_gets_one():
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    talk = [user("q"), call, {"role": "tool", "content": "r"}]
    prompt = make_prompt(talk)
    assert [(t.id, t.messages, t.answer) for t in tasks([prompt])] == [(f"{prompt.id}-3", tuple(talk), None)]
    assert [t.messages for t in tasks([prompt], "each")] == [tuple(talk[:1]), tuple(talk)]
