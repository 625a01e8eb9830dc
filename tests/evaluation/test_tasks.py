"""Readers of every format, against rows written here by hand."""

import json

import pytest

from jdlite.errors import PromptError
from jdlite.evaluation.tasks import Row, read_rows, read_tasks


def write(folder, *items, name="some_task.jsonl"):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items), encoding="utf-8")
    return path


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def test_messages_schema_takes_the_task_from_the_file_name(tmp_path):
    item = {"id": "a1", "source": "s", "license": "MIT", "task": "code", "messages": [user("hi")], "n_tokens": 3}
    assert read_rows(write(tmp_path, item)) == [Row(id="a1", task="some_task", messages=(user("hi"),))]


def test_line_separators_inside_a_text_do_not_end_a_row(tmp_path):
    [row] = read_rows(write(tmp_path, {"id": 1, "messages": [user("one\u2028two\x85three")]}))
    assert row.messages[0]["content"] == "one\u2028two\x85three"


def test_keeps_answers_only_without_assistant_messages():
    assert Row(id="a", task="t", messages=(user("1"), user("2"))).keeps_answers
    assert not Row(id="a", task="t", messages=(user("1"), assistant("2"), user("3"))).keeps_answers
    assert not Row(id="a", task="t", tokens=((1,),)).keeps_answers


@pytest.mark.parametrize(
    ("category", "task"), [("translation", "translation"), ("rag", "rag"), ("writing", "mtbench"), ("stem", "mtbench")]
)
def test_spec_bench_and_mt_bench_questions(tmp_path, category, task):
    item = {"question_id": 81, "category": category, "turns": ["first?", "second?"], "reference": []}
    [row] = read_rows(write(tmp_path, item, name="question.jsonl"))
    assert row == Row(id="81", task=task, messages=(user("first?"), user("second?")))
    assert row.keeps_answers


def test_humaneval(tmp_path):
    item = {"task_id": "HumanEval/0", "prompt": "def f(x):\n    ", "entry_point": "f", "test": "t"}
    [row] = read_rows(write(tmp_path, item))
    assert (row.id, row.task) == ("HumanEval/0", "humaneval")
    assert row.messages[0]["content"].endswith("```python\ndef f(x):\n```")


@pytest.mark.parametrize("field", ["text", "prompt"])
def test_mbpp_and_its_sanitized_version(tmp_path, field):
    item = {"task_id": 11, field: "Write f.", "code": "c", "test_list": ["assert f(1) == 2", "assert f(2) == 3"]}
    path = tmp_path / "mbpp.json"
    path.write_text(json.dumps([item], indent=1))
    [row] = read_rows(path)
    assert (row.id, row.task) == ("11", "mbpp")
    assert "Write f." in row.messages[0]["content"]
    assert row.messages[0]["content"].endswith("assert f(1) == 2\nassert f(2) == 3")


def test_gsm8k_rows_are_numbered(tmp_path):
    rows = read_rows(write(tmp_path, {"question": "1+1?", "answer": "2"}, {"question": "2+2?", "answer": "4"}))
    assert [(r.id, r.task, r.messages) for r in rows] == [
        ("0", "gsm8k", (user("1+1?"),)),
        ("1", "gsm8k", (user("2+2?"),)),
    ]


def test_bfcl_with_reference_calls_in_a_file_beside(tmp_path):
    item = {"id": "multi_turn_base_0", "question": [[user("list")], [user("move")]], "function": [{"name": "ls"}]}
    path = write(tmp_path, item, name="bfcl.json")
    [row] = read_rows(path)
    assert [m["role"] for m in row.messages] == ["system", "user", "user"]
    assert '[{"name": "ls"}]' in row.messages[0]["content"]
    truth = {"id": "multi_turn_base_0", "ground_truth": [["ls()", "pwd()"], ["mv(a='b')"]]}
    write(tmp_path, truth, name="possible_answer/bfcl.json")
    [row] = read_rows(path)
    assert row.messages[1:] == (user("list"), assistant("[ls(), pwd()]"), user("move"), assistant("[mv(a='b')]"))


def test_tau_bench_tool_calls_become_text(tmp_path):
    call = {"id": "c", "type": "function", "function": {"name": "get_user", "arguments": '{"id": "é"}'}}
    turns = [
        user("hi"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "{}"},
    ]
    [row] = read_rows(write(tmp_path, {"task_id": 3, "trial": 1, "reward": 1.0, "traj": turns}))
    assert row.id == "3-1"
    assert row.messages[1] == assistant('<tool_call>\n{"name": "get_user", "arguments": {"id": "é"}}\n</tool_call>')
    assert row.messages[2]["role"] == "tool"


def test_swe_agent_trajectory_over_many_lines(tmp_path):
    path = tmp_path / "run.traj"
    path.write_text(json.dumps({"trajectory": [], "history": [user("fix"), assistant("ok")]}, indent=2))
    [row] = read_rows(path)
    assert (row.task, row.messages) == ("run", (user("fix"), assistant("ok")))


def test_sharegpt_roles_and_text_parts(tmp_path):
    talk = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    rows = read_rows(write(tmp_path, {"id": 1, "conversations": talk}, {"id": 2, "messages": [parts]}))
    assert rows[0].messages == (user("hi"), assistant("yo"))
    assert rows[1].messages == (user("ab"),)


def test_tokens_and_plain_prompts(tmp_path):
    rows = read_rows(
        write(tmp_path, {"tokens": [1, 2]}, {"tokens": [[1], [2, 3]], "task": "x"}, {"prompt": "Once", "id": "p"})
    )
    assert [r.tokens for r in rows] == [((1, 2),), ((1,), (2, 3)), ()]
    assert (rows[1].task, rows[2].text, rows[2].messages) == ("x", "Once", ())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "not valid JSON"),
        ("[1]", "must be a JSON object"),
        ('{"foo": 1}', "the fields foo are of no known format"),
        ('{"messages": []}', "must be a list that is not empty"),
        ('{"messages": [{"role": "user"}]}', "has no content"),
        ('{"messages": [{"content": "x"}]}', "must have a role"),
        ('{"messages": [{"role": "user", "content": 3}]}', "must be text"),
        ('{"messages": [{"role": "system", "content": "x"}]}', "no message is from a user"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "not text"),
        ('{"question_id": 1, "category": "qa", "turns": []}', "'turns' must be"),
        ('{"task_id": 1, "prompt": ""}', "'prompt' must be a text"),
        ('{"task_id": 1, "prompt": "p", "test_list": [1]}', "'test_list' must be"),
        ('{"question": 3, "answer": "4"}', "'question' must be a text"),
        ('{"id": 1, "question": "x"}', "'question' must be a list of turns"),
        ('{"tokens": [1, "2"]}', "'tokens' must be"),
    ],
)
def test_malformed_lines_name_file_and_line(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"id": "good", "prompt": "fine"}\n\n' + line + "\n")
    with pytest.raises(PromptError, match=message) as error:
        read_rows(path)
    assert f"{path}, line 3: " in str(error.value)


def test_files_without_rows_absent_files_and_equal_ids_are_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(PromptError, match="holds no rows"):
        read_rows(tmp_path / "empty.jsonl")
    with pytest.raises(PromptError, match="cannot be read"):
        read_rows(tmp_path / "absent.jsonl")
    path = write(tmp_path, {"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"})
    with pytest.raises(PromptError, match="holds the id 'a' twice"):
        read_tasks([path])
