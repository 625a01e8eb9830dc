"""The demo on a tiny target: both ways agree, a difference is said and fails, and the table adds up."""

import dataclasses
import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from jdlite import cli
from jdlite.checkpoints.target import load_target
from jdlite.decoding.policy import NODE_COUNTS, Costs
from jdlite.evaluation import demo
from tests.tiny_target import save_tiny_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_target(tmp_path_factory.mktemp("target") / "hf")


@pytest.fixture
def call(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "use_compile_cache", lambda folder: None)
    monkeypatch.setattr("jdlite.api.measure_costs", lambda model, **options: Costs.typical(NODE_COUNTS))

    def call(*arguments):
        common = ["--target", str(folder), "--cache-dir", str(tmp_path), "--drafter", "pld", "--capacity", "4096"]
        return demo.main([*common, "--max-new-tokens", "12", *arguments]), *capsys.readouterr()

    return call


def test_the_jobs_are_the_four_that_were_promised():
    jobs = demo.read_jobs()
    assert [job.name for job in jobs] == ["code edit", "summary", "agent turn", "follow-up"]
    assert len(jobs[-1].turns) == 2
    assert jobs[2].system


def cells(out, *names):
    """Rows of the tables by their first cell; cells are parted by blanks."""
    rows = [re.split(r" {2,}", line.strip()) for line in out.splitlines() if re.search(r"\d  +(yes|NO) *$", line)]
    return {row[0]: row for row in rows if row[0] in names}


def test_all_ways_agree(call):
    status, out, _ = call("--repeats", "2", "--drafter", "token_recycling")
    assert status == 0
    assert max(map(len, out.splitlines())) <= 80
    jobs, drafters = [job.name for job in demo.read_jobs()], ["plain", "pld", "token_recycling"]
    body, sums = cells(out, *jobs), cells(out, *drafters)
    assert (list(body), list(sums)) == (jobs, drafters)
    new = sum(int(row[2]) for row in body.values())
    for row in sums.values():
        assert int(row[1]) == new
        assert float(row[3]) == round(new / int(row[2]), 2)
        assert int(row[2]) <= new
    assert int(sums["plain"][2]) == new
    assert sums["plain"][5] == "1.00"
    assert out.count("identical: yes") == 4


def test_another_token_fails_the_demo(call, monkeypatch):
    real, calls = demo.decode_job, []

    def faulty(job, *arguments):
        run = real(job, *arguments)
        calls.append(job.name)
        if calls[-1] == "agent turn" and calls.count("agent turn") == 2:
            run.tokens[0][-1] += 1
        return run

    monkeypatch.setattr(demo, "decode_job", faulty)
    status, out, _ = call("--repeats", "1")
    assert status == 1
    assert (out.count("identical: yes"), out.count("identical: NO")) == (3, 1)
    assert [name for name, row in cells(out, "plain", "pld").items() if row[-1] == "NO"] == ["pld"]
    assert [row[0] for row in cells(out, *(job.name for job in demo.read_jobs())).values() if row[-1] == "NO"] == [
        "agent turn"
    ]


def test_times_are_medians_and_ratios_of_them():
    plain = demo.Run([[1, 2], [3]], ["", ""], 5, 3, [9.0, 2.0, 3.0], [4.0, 4.0, 50.0])
    ours = demo.Run([[1, 2], [3]], ["", ""], 5, 2, [1.5, 1.0, 7.0], [2.0, 2.0, 2.0])
    assert ours.tau == 1.5
    console = Console(width=140, record=True, file=SimpleNamespace(write=lambda s: None, flush=lambda: None))
    results, names = [(demo.Job("j", ("q",)), [plain, ours], True)], ("plain", "dlite:some/folder")
    console.print(demo.job_table(results, names))
    console.print(demo.sum_table(results, names))
    text = console.export_text()
    found = cells(text, "j", "plain", "dlite")
    assert found["j"] == ["j", "5", "3", "1.50", "2.00", "yes"]
    assert found["plain"] == ["plain", "3", "3", "1.00", "3.0", "1.00", "1.00", "yes"]
    assert found["dlite"] == ["dlite", "3", "2", "1.50", "1.5", "2.00", "2.00", "yes"]
    assert "dlite tau, speed" in text


def test_trained_drafters_are_shown_for_their_target_alone(tmp_path, monkeypatch):
    assert demo.default_drafters(str(tmp_path)) == ("adapld",)
    monkeypatch.setattr(demo, "TRAINED", tmp_path / "absent")
    assert demo.default_drafters("demo") == ("adapld",)
    monkeypatch.setattr(demo, "TRAINED", tmp_path)
    assert demo.default_drafters("demo") == ("adapld", f"dlite:{tmp_path}", f"hybrid:{tmp_path}")


def test_turns_are_answered_in_one_session(folder):
    target = load_target(folder)
    options = dataclasses.replace(demo.Options(), max_new_tokens=4, capacity=256)
    from jdlite.decoding.session import Session
    from jdlite.drafters.plain import Plain

    session = Session(target.model, Plain(), capacity=256)
    run = demo.decode_job(demo.Job("two", ("ab", "cd"), system="s"), target, session, options)
    history = [{"role": "system", "content": "s"}, {"role": "user", "content": "ab"}]
    history += [{"role": "assistant", "content": run.texts[0]}, {"role": "user", "content": "cd"}]
    assert session.tokens[0] == target.encode_chat(history) + run.tokens[1]
    assert run.forwards == run.new_tokens == len(run.tokens[0]) + len(run.tokens[1])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--repeats", "0"), "--repeats and --max-new-tokens must be at least 1"),
        (("--drafter", "magic"), "there is no drafter 'magic'"),
        (("--capacity", "16"), "the capacity is 16"),
    ],
)
def test_bad_input_ends_with_a_sentence(call, words, sentence):
    status, out, err = call(*words)
    assert (status, out) == (2, "")
    assert sentence in next(line for line in err.splitlines() if line.startswith("error: "))
