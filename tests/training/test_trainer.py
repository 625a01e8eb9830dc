"""Runs: resumed ones equal uninterrupted ones bit for bit; checkpoints, best, bad numbers, other configurations."""

import json
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from jdlite.checkpoints.dlite_orbax import load_dlite_orbax
from jdlite.errors import CheckpointError, ConfigError
from jdlite.training import trainer
from jdlite.training.initialise import random_params
from jdlite.training.metrics import TIME, read_lines
from jdlite.training.trainer import PhaseRun, Report, TrainingError
from tests.training.tiny_run import config, store, target


@pytest.fixture(autouse=True, scope="module")
def compile_once(tmp_path_factory):
    """Each run compiles its own steps; programs of the same kind are compiled once for all tests here."""
    names = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    old = {name: getattr(jax.config, name) for name in names}
    for name, value in names.items():
        jax.config.update(name, value)
    yield
    for name, value in old.items():
        jax.config.update(name, value)


def train(folder, phase, *overrides, stop_at=(), until=None):
    """Run a phase to its end, stopping and beginning anew after the given numbers of steps."""
    said = []
    for limit in [*stop_at, None]:
        box = []
        report = Report(say=said.append, stop=lambda: limit is not None and box[0].state.step >= limit)  # noqa: B023
        run = PhaseRun(config(folder, *overrides), target(), phase, report)
        box.append(run)
        outcome = run.run(until)
        run.close()
        assert outcome.stopped == (limit is not None)
    return run, said


def same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def lines(folder, phase):
    """Metrics without times."""
    found = read_lines(folder / phase / "metrics.jsonl")
    return [{name: value for name, value in line.items() if name != TIME} for line in found]


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder, stops in ((whole, ()), (parts, (1, 3))):
        store(folder)
        train(folder, "teacher", stop_at=stops[:1])
        # The border between warm-up and stable is at step 3.
        last, said = train(folder, "student", stop_at=stops)
        if stops:
            assert [text for text in said if "going on" in text] == [
                "student: going on at step 1 of 8.",
                "student: going on at step 3 of 8.",
            ]
        states = last.state
        if folder == whole:
            wanted = states
    same(wanted.params, states.params)
    same(wanted.opt_state, states.opt_state)
    assert wanted.train == states.train
    for phase in ("teacher", "student"):
        assert lines(whole, phase) == lines(parts, phase)
    assert [line["step"] for line in lines(whole, "student") if line["kind"] == "train"] == [2, 3, 4, 6, 8]
    assert sorted(int(p.name) for p in (whole / "student" / "checkpoints").iterdir()) == [6, 8]
    # What is best by held-out figures lies apart, and is a drafter like any other.
    network, info = load_dlite_orbax(whole / "student" / "best")
    assert network.config == last.dlite
    assert info["step"] == states.train["best"][1]
    assert info["target_hash"] == target().weights_hash


def test_stages_can_be_run_one_by_one(tmp_path):
    store(tmp_path)
    with pytest.raises(CheckpointError, match="run --stage teacher first"):
        PhaseRun(config(tmp_path), target(), "student")
    train(tmp_path, "teacher", stop_at=(1,))
    run, _ = train(tmp_path, "student", until="warmup")
    assert run.state.step == 3
    teacher, _ = load_dlite_orbax(tmp_path / "teacher" / "checkpoints" / "3")
    same(teacher.head.prev_embedding[...], run.state.params["head"]["prev_embedding"])


def test_a_damaged_newest_checkpoint_is_skipped(tmp_path):
    store(tmp_path)
    run, _ = train(tmp_path, "single")
    wanted = run.state
    folder = tmp_path / "single" / "checkpoints"
    for path in (folder / "8" / "params").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    again, said = train(tmp_path, "single")
    assert "8 is damaged" in said[0]
    assert "going on at step 6" in said[1]
    same(wanted.params, again.state.params)
    assert (folder / "8.damaged").is_dir()


def test_another_configuration_is_refused(tmp_path):
    store(tmp_path)
    train(tmp_path, "single", "student.steps=2")
    with pytest.raises(ConfigError, match=r"optimizer.learning_rate was 0.01, is 0.02"):
        PhaseRun(config(tmp_path, "student.steps=2", "optimizer.learning_rate=0.02"), target(), "single")
    with pytest.raises(ConfigError, match="rank: 6 is stored, 5 is configured"):
        PhaseRun(config(tmp_path, "student.steps=2", "drafter.rank=5"), target(), "single")
    PhaseRun(config(tmp_path, "student.steps=2", "checkpoint.every=7"), target(), "single").close()


def test_a_loss_that_is_not_a_number_stops_the_run(tmp_path):
    store(tmp_path)
    run = PhaseRun(config(tmp_path), target(), "single")
    run.state.params["norm"]["scale"] = run.state.params["norm"]["scale"].at[0].set(np.nan)
    with pytest.raises(TrainingError, match=r"step 1 are not finite.*step 0 is saved.*bad_batch_1.npz"):
        run.run()
    run.close()
    bad = np.load(tmp_path / "single" / "bad_batch_1.npz")
    assert bad["tokens"].shape == (2, 32)
    assert (tmp_path / "single" / "checkpoints" / "0").is_dir()


def test_a_drafter_can_be_trained_further(tmp_path):
    store(tmp_path / "a")
    store(tmp_path / "b")
    first, _ = train(tmp_path / "a", "single", "student.steps=2")
    start = tmp_path / "a" / "single" / "checkpoints" / "2"
    run = PhaseRun(config(tmp_path / "b", f"start={start}"), target(), "single")
    same(first.state.params, run.state.params)
    run.close()
    with pytest.raises(ConfigError, match="another shape"):
        PhaseRun(config(tmp_path / "b", f"start={start}", "drafter.rank=5"), target(), "single")


def test_tau_by_decoding_is_logged(tmp_path):
    store(tmp_path)
    overrides = ("student.steps=2", "evaluation.every=2", "evaluation.prompts=2", "evaluation.max_new_tokens=6")
    train(tmp_path, "single", *overrides, "evaluation.max_prompt_tokens=8")
    (line,) = [line for line in lines(tmp_path, "single") if line["kind"] == "held_out"]
    assert 1 <= line["decoded"]["tau"] <= 4
    assert len(line["decoded"]["accepted_at"]) == 3
    assert len(line["accept"]) == 3


SCRIPT = """
import sys, jax
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_compilation_cache_dir", sys.argv[3])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
from pathlib import Path
from jdlite.training.trainer import PhaseRun, Report
from jdlite import train
from tests.training.tiny_run import config, target
for phase in sys.argv[2].split(","):
    with train._stop_on_signals() as asked:
        step = lambda done, total, words: print(phase, done, flush=True)
        report = Report(step=step, stop=asked)
        run = PhaseRun(config(Path(sys.argv[1]), "evaluation.log_every=1", *sys.argv[4:]), target(), phase, report)
        print(phase, "ready", flush=True)
        outcome = run.run()
        run.close()
    if outcome.stopped:
        print("stopped", outcome.step, flush=True)
        break
"""


def start(folder, cache, phases="teacher,student", **options):
    command = [sys.executable, "-c", SCRIPT, str(folder), phases, str(cache)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.slow
def test_killed_at_random_instants(tmp_path):
    """kill -9 while steps run, while checkpoints are written and across phases: the end is the same, bit for bit."""
    cache = tmp_path / "cache"
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        store(folder)
    out, error = start(whole, cache).communicate()
    assert "student 8" in out, error[-2000:]
    rng = random.Random(0)
    for _ in range(6):
        process = start(killed, cache)
        assert process.stdout is not None
        # The instant after a random line, plus a little; steps take milliseconds and saving as long.
        for _ in range(rng.randrange(1, 5)):
            if not process.stdout.readline():
                break
        time.sleep(rng.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    out, error = start(killed, cache).communicate()
    assert (killed / "student" / "checkpoints" / "8").is_dir(), error[-2000:]
    for phase, step in (("teacher", 3), ("student", 8)):
        ours, theirs = (load_dlite_orbax(f / phase / "checkpoints" / str(step))[0] for f in (whole, killed))
        same(ours, theirs)
        assert lines(whole, phase) == lines(killed, phase)


@pytest.mark.slow
def test_sigterm_saves_and_stops(tmp_path):
    store(tmp_path)
    process = start(tmp_path, tmp_path / "cache", "single")
    assert process.stdout is not None
    while "single 1" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGTERM)
    out, error = process.communicate()
    stopped = [int(line.split()[1]) for line in out.splitlines() if line.startswith("stopped")]
    assert process.returncode == 0, error[-2000:]
    if stopped:  # the run may have been quicker
        assert (tmp_path / "single" / "checkpoints" / str(stopped[0])).is_dir()
    train_data = json.loads(next((tmp_path / "single" / "checkpoints").glob("*/train/metadata")).read_text())
    assert train_data["step"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize("first", ["best", "checkpoint"])
def test_no_space_left(tmp_path, first):
    """A limit on the size of files stands for a full disk: the error is one sentence, whatever is written first."""
    store(tmp_path)
    script = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))\n" + SCRIPT
    command = [sys.executable, "-c", script, str(tmp_path), "single", str(tmp_path / "cache")]
    if first == "checkpoint":
        command += ["checkpoint.every=1", "evaluation.every=100"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert "CheckpointError: cannot write" in done.stderr
    assert "free some space and run the same command again" in done.stderr


@pytest.mark.parametrize("source", ["online", "disk"])
def test_the_start_from_the_target_is_fitted_to_its_states(tmp_path, source, monkeypatch):
    """The moment is that of supervised positions, whether states come from a forward or from disk."""
    store(tmp_path)
    given = []
    monkeypatch.setattr(
        trainer, "target_params", lambda d, model, seed, moment: given.append(moment) or random_params(d, 0)
    )
    options = ("initialise=target", "drafter.qk_norm=true", f"features.source={source}", "features.dtype=float32")
    run = PhaseRun(config(tmp_path, *options), target(), "single")
    model, total, count = target().model, 0.0, 0
    examples = list(run.dataset.records)
    for i in run.dataset._rows._chosen:
        example = examples[int(i)]
        T = example.tokens.size
        out = model(example.tokens[None], np.arange(T)[None], np.tril(np.ones((1, T, T), bool)), model.init_cache(1, 0))
        x = np.asarray(out.hidden[0], np.float64)[example.loss_mask]
        total, count = total + x.T @ x, count + len(x)
    run.run()
    run.close()
    # The epochs go round until there are enough states, so examples may count unequally often by one epoch of many.
    np.testing.assert_allclose(given[0], total / count, atol=0.02 * np.abs(total / count).max())
    again = PhaseRun(config(tmp_path, *options), target(), "single")
    again.close()
    assert given[1] is None
