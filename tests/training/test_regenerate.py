"""The regenerate stage on a tiny target."""

from __future__ import annotations

import dataclasses
import functools
import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import jdlite
from jdlite.checkpoints.target import Target
from jdlite.errors import CheckpointError, ConfigError, PromptError
from jdlite.training.prompts import make_prompt
from jdlite.training.records import Records
from jdlite.training.regenerate import RegenerateConfig, regenerate
from tests.tiny_target import END, REWRITING_CHAT, byte_tokenizer, tiny_model

CONFIG = RegenerateConfig(max_new_tokens=8, max_prompt_tokens=100, batch_size=3, prefill_chunk=16, shard_records=4)


@functools.cache
def tiny_target(chat: str | None = None) -> Target:
    """Ends often: a share of all tokens are stop tokens."""
    tokenizer = byte_tokenizer(chat) if chat else byte_tokenizer()
    return Target(model=tiny_model(), tokenizer=tokenizer, eos_ids=(END, *range(40, 60)))


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


PROMPTS = [make_prompt([user(f"question {i} " * (i % 4))]) for i in range(1, 10) if i % 4]


def run(folder, prompts=PROMPTS, config=CONFIG, target=None, **options):
    target = target or tiny_target()
    return regenerate(target, target.tokenizer, prompts, config, folder, **options)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("reference")
    return folder, run(folder)


def test_records_hold_what_decode_gives(reference):
    folder, summary = reference
    records = Records(folder)
    assert summary.records == summary.made == len(records) == len(PROMPTS)
    target = tiny_target()
    for prompt, example in zip(PROMPTS, records, strict=True):
        result = jdlite.decode(
            target,
            list(prompt.messages),
            drafter="plain",
            sampling=CONFIG.sampling,
            max_new_tokens=8,
            seed=[example.sampling["seed"]],
            prefill_chunk=16,
        )
        ids = target.encode_chat(prompt.messages)
        assert example.tokens.tolist() == ids + result.tokens[0]
        assert example.loss_mask.tolist() == [False] * len(ids) + [True] * len(result.tokens[0])
        assert example.prompt_length == len(ids)
        assert example.finish == result.finish_reasons[0]
        assert example.id == f"{prompt.id}-1"
        assert example.target == target.weights_hash
    assert set(summary.finish) == {"stop_id", "length"}
    assert summary.finish["stop_id"] == sum(example.finish == "stop_id" for example in records)
    assert len({example.sampling["seed"] for example in records}) == len(PROMPTS)
    assert [path.name for path in folder.iterdir()].count("answers.journal") == 0


class Stop(Exception):
    pass


@pytest.mark.parametrize("after", [0, 1, 4, len(PROMPTS)])
def test_an_interrupted_run_goes_on_and_stores_the_same(tmp_path, reference, after):
    seen = []

    def progress(done, total):
        seen.append(done)
        assert total == len(PROMPTS)
        if done == after:
            raise Stop

    with pytest.raises(Stop):
        run(tmp_path, progress=progress)
    assert seen == list(range(after + 1))
    # What a kill while records were written leaves.
    (tmp_path / ".records.x1y2").mkdir()
    (tmp_path / ".records.x1y2" / "records-00000.arecord").write_bytes(b"part")
    again = []
    summary = run(tmp_path, progress=lambda done, total: again.append(done))
    # Nothing that was finished is done again.
    assert again == list(range(after, len(PROMPTS) + 1))
    assert summary.made == len(PROMPTS) - after
    assert files(tmp_path) == files(reference[0])


def test_a_full_disk_keeps_finished_answers(tmp_path, reference):
    """A limit on the size of files stands for a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, before[0][1]))
    try:
        with pytest.raises(CheckpointError, match=r"cannot write .*; free some space .* answers that were finished"):
            run(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before[0])
        signal.signal(signal.SIGXFSZ, before[1])
    assert 0 < run(tmp_path).made < len(PROMPTS)
    assert files(tmp_path) == files(reference[0])


def test_two_runs_in_one_folder_are_refused(tmp_path):
    def progress(done, total):
        with pytest.raises(ConfigError, match="another process is writing"):
            run(tmp_path)
        raise Stop

    with pytest.raises(Stop):
        run(tmp_path, progress=progress)


def test_thinking_is_off_where_the_template_has_it(tmp_path):
    chat = "{% for m in messages %}{{ m.content }}{% endfor %}{% if not enable_thinking %}<off>{% endif %}{{ more }}"
    target = tiny_target(chat)
    run(tmp_path / "off", PROMPTS[:1], target=target)
    run(
        tmp_path / "on", PROMPTS[:1], dataclasses.replace(CONFIG, thinking=True, template_options={"more": "!"}), target
    )
    texts = []
    for name in ("off", "on"):
        (example,) = Records(tmp_path / name)
        texts.append(target.tokenizer.decode(example.tokens[: example.prompt_length]))
    assert texts == ["question 1 <off>", "question 1 !"]


def test_a_finished_run_does_nothing(reference):
    folder, first = reference
    before = files(folder)
    seen = []
    summary = run(folder, progress=lambda *call: seen.append(call))
    assert summary == dataclasses.replace(first, made=0)
    assert seen == [(len(PROMPTS), len(PROMPTS))]
    assert files(folder) == before


def test_prompts_may_be_added_and_removed(tmp_path, reference):
    assert run(tmp_path, PROMPTS[:3]).made == 3
    assert run(tmp_path).made == len(PROMPTS) - 3
    # Same answers as in one go, up to the capacity, which here is the same.
    assert files(tmp_path) == files(reference[0])
    assert run(tmp_path, PROMPTS[1:3]).made == 0
    assert [e.id for e in Records(tmp_path)] == [f"{p.id}-1" for p in PROMPTS[1:3]]


def test_a_folder_of_another_run_is_refused(reference):
    folder, _ = reference
    for change, expected in (
        ({"temperature": 0.0}, r"sampling was .*0.7.* is .*0.0"),
        ({"max_new_tokens": 9}, "max_new_tokens was 8, is 9"),
        ({"thinking": True}, "template_options"),
        ({"seed": 1}, "seed was 0, is 1"),
    ):
        with pytest.raises(ConfigError, match=rf"holds answers of another run \({expected}.*choose another folder"):
            run(folder, config=dataclasses.replace(CONFIG, **change))
    with pytest.raises(ConfigError, match=r"template was "):
        run(folder, target=tiny_target(REWRITING_CHAT))


def test_prompts_that_are_too_long_are_counted(tmp_path):
    long = make_prompt([user("x" * 100)])
    summary = run(tmp_path, [PROMPTS[0], long])
    assert summary.left_out == {"too_long": 1}
    assert summary.records == 1
    assert json.loads((tmp_path / "records" / "index.json").read_text())["run"]["left_out"] == {"too_long": 1}
    with pytest.raises(PromptError, match=r"no prompt can be used \(1 too_long\)"):
        run(tmp_path / "none", [long])


def test_prompts_that_the_template_refuses(tmp_path):
    chat = "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}<|start|>x"
    target = tiny_target(chat)
    prompts = [make_prompt([{"role": "tool", "content": "r"}]), make_prompt([user("a")])]
    with pytest.raises(PromptError, match=rf"prompt {prompts[0].id}-1: the chat template cannot .*no tools"):
        run(tmp_path / "fail", prompts, target=target)
    summary = run(tmp_path / "skip", prompts, target=target, on_error="skip")
    assert (summary.records, summary.left_out) == (1, {"refused": 1})


TALK = make_prompt([user("q"), assistant("a"), user("r"), assistant("b")])


def test_each_turn_is_answered_in_its_true_history(tmp_path):
    run(tmp_path, [TALK], turns="each")
    first, second = Records(tmp_path)
    decode = tiny_target().tokenizer.decode
    assert decode(first.tokens[: first.prompt_length]) == "<|start|>user\nq<|end|><|start|>assistant\n"
    assert decode(second.tokens[: second.prompt_length]) == (
        "<|start|>user\nq<|end|><|start|>assistant\na<|end|><|start|>user\nr<|end|><|start|>assistant\n"
    )
    assert (first.id, second.id) == (f"{TALK.id}-1", f"{TALK.id}-3")


def test_transcripts_can_be_kept_as_they_are(tmp_path):
    config = dataclasses.replace(CONFIG, responses="transcript")
    summary = run(tmp_path / "whole", [TALK, PROMPTS[0]], config)
    assert (summary.records, summary.left_out, summary.finish) == (1, {"no_answer": 1}, {"transcript": 1})
    decode = tiny_target().tokenizer.decode
    (example,) = Records(tmp_path / "whole")
    assert decode(example.tokens[example.loss_mask]) == "a<|end|>b<|end|>"
    assert decode(example.tokens[example.prompt_length :]) == "b<|end|>"
    run(tmp_path / "each", [TALK], config, turns="each")
    masked = [decode(example.tokens[example.loss_mask]) for example in Records(tmp_path / "each")]
    assert masked == ["a<|end|>", "b<|end|>"]


def test_options_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="batch_size must be at least 1: got 0"):
        RegenerateConfig(batch_size=0)
    with pytest.raises(ConfigError, match="top_p is 2"):
        RegenerateConfig(top_p=2)


_CHILD = """
import sys, time
import jax
jax.config.update("jax_disable_most_optimizations", True)
from tests.training.test_regenerate import run
run(sys.argv[1], progress=lambda done, total: (print(done, flush=True), time.sleep(0.1)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 2, 5])
def test_a_killed_process_leaves_nothing_to_repair(tmp_path, reference, after):
    child = subprocess.Popen([sys.executable, "-c", _CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout
    for line in child.stdout:
        if int(line) == after:
            break
    time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert run(tmp_path).made <= len(PROMPTS) - after
    assert files(tmp_path) == files(reference[0])
