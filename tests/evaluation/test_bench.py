"""The bench command on a tiny random target: its figures are worked out again from what it keeps."""

import io
import json
import re

import numpy as np
import pytest
from rich.console import Console

from jdlite import bench as command
from jdlite.checkpoints.target import Target
from jdlite.decoding.session import Session
from jdlite.drafters.lookup import PromptLookup
from jdlite.drafters.plain import Plain
from jdlite.errors import ConfigError
from jdlite.evaluation.bench import Options, difference, resolve, split_drafters
from jdlite.evaluation.report import by_length, length_table, summarise
from tests.tiny_target import END, save_tiny_target, tiny_model

ROWS = [
    {"id": "a", "tokens": [[5, 6, 7, 5, 6, 7, 5, 6], [9, 9, 5, 6]]},
    {"id": "b", "tokens": [8, 9, 8, 9, 8]},
    {"id": "c", "tokens": [3, 4, 5]},
]
NEW = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    save_tiny_target(folder / "target")
    (folder / "toy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


def arguments(folder, out, *more):
    words = f"--target {folder / 'target'} --tasks {folder / 'toy.jsonl'} --drafters pld --max-new-tokens {NEW}"
    words += f" --repeats 2 --budget full --cache-dir {folder / 'cache'} --json {folder / out}"
    return [*words.split(), *more]


@pytest.fixture(scope="module")
def result(folder):
    assert command.main(arguments(folder, "out.json", "--batch", "1,2", "--png", str(folder / "out.png"))) == 0
    return json.loads((folder / "out.json").read_text())


def test_the_file_says_what_was_run(folder, result):
    assert result["settings"]["drafters"] == ["plain", "pld"]
    assert {"jax", "jdlite", "device", "command", "date"} <= result["environment"].keys()
    assert [(r["batch"], r["ids"]) for r in result["records"]] == [
        (1, ["a"]),
        (1, ["b"]),
        (1, ["c"]),
        (2, ["a", "b"]),
        (2, ["c"]),
    ]
    assert (folder / "out.png").read_bytes().startswith(b"\x89PNG")


def test_counts_equal_those_of_a_session(result):
    """Row a has two points; the true history is appended between them."""
    model = tiny_model()
    [record] = [r for r in result["records"] if r["batch"] == 1 and r["ids"] == ["a"]]
    for name, drafter in (("plain", Plain()), ("pld", PromptLookup())):
        session = Session(model, drafter, capacity=record["capacity"])
        assert len(record["points"]) == 2
        for point, tokens in zip(record["points"], ROWS[0]["tokens"], strict=True):
            session.append([tokens])
            assert point["prompt_tokens"] == session.lengths
            before = session.lengths
            want = session.decode(max_new_tokens=NEW, stop_ids=[[END]])
            session.rollback(before)
            kept = point["drafters"][name]
            assert point["tokens"] == want.tokens
            assert point["finish"] == want.finish_reasons
            assert kept["forwards"] == want.stats.forwards
            assert kept["rounds"] == want.stats.rounds.tolist()
            assert kept["emitted"] == [len(row) for row in want.tokens]
            assert kept["drafted"] == want.stats.drafted.tolist()
            assert sum(kept["uses"].values()) == kept["forwards"]
            assert sum(kept["accepted_from"].values()) == sum(kept["accepted_at"])
            assert len(kept["seconds"]) == 2


def test_summary_follows_from_the_records(result):
    for batch, points in ((1, 4), (2, 3)):
        for name in ("plain", "pld"):
            [row] = [r for r in result["summary"] if r["batch"] == batch and r["drafter"] == name]
            kept = [p["drafters"][name] for r in result["records"] if r["batch"] == batch for p in r["points"]]
            tokens, rounds = (sum(sum(d[key]) for d in kept) for key in ("emitted", "rounds"))
            seconds = sum(float(np.median(d["seconds"])) for d in kept)
            assert (row["rows"], row["decodes"], row["tokens"], row["rounds"]) == (3, points, tokens, rounds)
            assert row["forwards"] == sum(d["forwards"] for d in kept)
            assert row["tau"] == pytest.approx(tokens / rounds)
            assert row["tokens_per_s"] == pytest.approx(tokens / seconds)
            assert row["exact_match"] == 1.0
            assert row["drafting_share"] > 0
    plain = [r for r in result["summary"] if r["drafter"] == "plain"]
    assert all(r["tau"] == r["speed_ratio"] == r["speed_ratio_median"] == 1 for r in plain)


def test_a_batch_gives_each_row_the_tokens_that_it_has_alone(result):
    alone = {r["ids"][0]: r["points"][0]["tokens"][0] for r in result["records"] if r["batch"] == 1}
    for record in result["records"]:
        if record["batch"] == 2:
            assert record["points"][0]["tokens"] == [alone[name] for name in record["ids"]]


def test_resume_runs_only_what_is_missing(folder, result, monkeypatch):
    short = {**result, "records": [r for r in result["records"] if r["ids"] != ["b"]]}
    (folder / "part.json").write_text(json.dumps(short))
    done = []
    real = command_bench().run
    monkeypatch.setattr(command_bench(), "run", lambda self, job: done.append(job.ids) or real(self, job))
    assert command.main(arguments(folder, "part.json", "--batch", "1,2", "--resume")) == 0
    assert done == [("b",)]
    resumed = json.loads((folder / "part.json").read_text())
    [b] = [r for r in resumed["records"] if r["ids"] == ["b"]]
    [want] = [r for r in result["records"] if r["ids"] == ["b"]]
    assert b["points"][0]["tokens"] == want["points"][0]["tokens"]
    assert len(resumed["records"]) == len(result["records"])


def test_resume_with_more_rows_runs_those(folder, monkeypatch):
    done = []
    real = command_bench().run
    monkeypatch.setattr(command_bench(), "run", lambda self, job: done.append(job.ids) or real(self, job))
    words = ["--drafters", "plain", "--profile-rows", "0"]
    for rows in (1, 2):
        assert command.main([*arguments(folder, "more.json"), *words, "--rows", str(rows), "--resume"]) == 0
    assert done == [("a",), ("b",)]
    kept = json.loads((folder / "more.json").read_text())
    assert [record["ids"] for record in kept["records"]] == [["a"], ["b"]]
    assert kept["settings"]["rows"] == 2


def command_bench():
    from jdlite.evaluation.bench import Bench

    return Bench


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--drafters", "pdl"], "did you mean 'pld'"),
        (["--drafters", "pld@most"], "must be one of auto, full"),
        (["--drafters", "pld,pld"], "drafters must differ"),
        (["--batch", "two"], "--batch must be whole numbers"),
        (["--batch", "0"], "batch must be"),
        (["--repeats", "0"], "repeats must be at least 1"),
        (["--rows", "-1"], "--rows must be"),
        (["--temperature", "-1"], "temperature"),
        (["--tasks", "absent.jsonl"], "cannot be read"),
        (["--target", "absent/target"], "absent/target"),
        (["--max-prompt", "2"], "no row fits"),
        (["--max-new-tokens", "99999"], "leaves no room"),
        (["--resume"], "another setting of batches"),
    ],
)
def test_bad_input_is_one_sentence(folder, result, capsys, more, message):
    assert command.main([*arguments(folder, "out.json"), *more]) == 2
    line = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(line) == 1
    assert message in line[0]


def test_results_of_something_else_are_not_overwritten_by_resume(folder, capsys):
    (folder / "other.json").write_text("[]")
    assert command.main(arguments(folder, "other.json", "--resume")) == 2
    assert "is not a results file" in capsys.readouterr().err
    assert (folder / "other.json").read_text() == "[]"


def test_budget_auto_measures_once_and_says_so(folder, capsys):
    words = ["--budget", "auto", "--drafters", "pld@auto,pld:ngram_max=2@full", "--rows", "1", "--profile-rows", "0"]
    cache = folder / "costs"
    for time in ("first", "second"):
        assert command.main([*arguments(folder, f"{time}.json"), *words, "--cache-dir", str(cache)]) == 0
        assert ("measuring what forwards cost" in capsys.readouterr().err) == (time == "first")
        kept = json.loads((folder / f"{time}.json").read_text())
        assert any("budget auto of pld@auto, batch 1" in note for note in kept["notes"])
        assert all(row["exact_match"] == 1.0 for row in kept["summary"])
    assert len(list(cache.glob("costs-*.json"))) == 1


def test_difference():
    assert difference([1, 2, 3], [1, 2, 3]) is None
    assert difference([], []) is None
    assert difference([1, 2, 3], [1, 9, 3]) == 1
    assert difference([1, 2], [1, 2, 3]) == 2
    assert difference([1, 2, 3], []) == 0


def test_a_difference_shows_in_the_summary(result):
    record = json.loads(json.dumps(result["records"][0]))
    record["points"][1]["drafters"]["pld"]["differs_at"] = [4]
    plain, pld = summarise([record])
    assert plain["exact_match"] == 1.0
    assert pld["exact_match"] == 0.5
    assert pld["differs"] == [{"ids": ["a"], "point": 1, "differs_at": [4]}]


def test_drafters_with_options_in_a_list():
    text = "plain,adapld:copy_length=10,successors=never@full, pld ,pld:num_drafts=3"
    assert split_drafters(text) == ("plain", "adapld:copy_length=10,successors=never@full", "pld", "pld:num_drafts=3")
    target = Target(model=tiny_model())
    drafter, budget = resolve("pld:num_drafts=3@full", "auto", target)
    assert (drafter, budget) == (PromptLookup(num_drafts=3), "full")
    assert resolve("pld", "auto", target)[1] == "auto"
    assert split_drafters("dlite:run/step=3,mode=match,hybrid:a@b/c,num_nodes=9@full") == (
        "dlite:run/step=3,mode=match",
        "hybrid:a@b/c,num_nodes=9@full",
    )


def test_plain_always_runs_first():
    assert Options(drafters=("pld", "plain")).drafters == ("plain", "pld")
    with pytest.raises(ConfigError, match="budget"):
        Options(budget="half")


def test_tau_by_length_of_the_history():
    decode = lambda emitted, rounds: {"emitted": emitted, "rounds": rounds}  # noqa: E731
    point = lambda prompts, plain, ours: {"prompt_tokens": prompts, "drafters": {"plain": plain, "pld": ours}}  # noqa: E731
    records = [
        {
            "points": [
                point([1023], decode([6], [6]), decode([6], [2])),
                point([2048], decode([8], [8]), decode([8], [4])),
            ]
        },
        {"points": [point([1024, 4095], decode([3, 4], [3, 4]), decode([3, 4], [3, 1]))]},
    ]
    found = {(row["from"], row["to"], row["drafter"]): row for row in by_length(records)}
    assert list(found) == [(b, e, n) for b, e in ((0, 1023), (1024, 2047), (2048, 4095)) for n in ("plain", "pld")]
    assert [row["tau"] for key, row in found.items() if key[2] == "pld"] == [3.0, 1.0, 12 / 5]
    assert [row["decodes"] for key, row in found.items() if key[2] == "pld"] == [1, 1, 2]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(length_table(by_length(records)))
    assert re.search(r"2048-4095 +\S +2 +\S +1.00 +\S +2.40", console.export_text())


def test_a_peer_has_no_rounds():
    records = [{"points": [{"prompt_tokens": [5], "drafters": {"transformers": {"emitted": [3]}}}]}]
    assert by_length(records) == []
