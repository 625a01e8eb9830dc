"""Several processes train as one does: the same rows, steps, metrics and checkpoints; what they agree on; refusals."""

import contextlib
import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from jdlite import train
from jdlite.checkpoints.dlite_orbax import load_dlite_orbax
from jdlite.errors import ConfigError
from jdlite.training import processes
from jdlite.training.data import DataConfig, make_dataset
from jdlite.training.metrics import TIME, read_lines
from jdlite.training.placement import Placement
from tests.training.tiny_run import config, store

DECODE = ("evaluation.prompts=2", "evaluation.max_new_tokens=6", "evaluation.max_prompt_tokens=8")
DATA = DataConfig(held_out_fraction=0.2, prefetch=0)


def dataset(folder, count=1, index=0, **options):
    return make_dataset(
        folder,
        DATA,
        **{"batch": 8, "length": 32, "seed": 3, "micro_rows": 4} | options,
        process_index=index,
        process_count=count,
    )


@pytest.mark.parametrize("split", ["train", "held_out"])
@pytest.mark.parametrize("micro", [4, 8])
def test_the_rows_of_all_processes_are_the_batch_of_one(tmp_path, split, micro):
    store(tmp_path, 40)
    options = {"split": split, "micro_rows": micro}
    whole = dataset(tmp_path, **options)
    wanted = [batch for _, batch in zip(range(4), whole, strict=False)]
    for count in (1, 2, 4):
        parts = [dataset(tmp_path, count, index, **options) for index in range(count)]
        assert {part.fingerprint for part in parts} == {whole.fingerprint}
        assert {part.steps(3) for part in parts} == {whole.steps(3)}
        iterators = [iter(part) for part in parts]
        for batch in wanted:
            shares = [next(iterator) for iterator in iterators]
            for name, value in batch.items():
                # Micro-batch by micro-batch, the processes side by side.
                cut = [share[name].reshape(8 // micro, micro // count, -1) for share in shares]
                np.testing.assert_array_equal(np.concatenate(cut, axis=1).reshape(value.shape), value)
        if split == "held_out":
            assert [next(iterator, None) for iterator in iterators] == [None] * count


def test_the_state_of_the_data_is_the_same_in_all_processes(tmp_path):
    store(tmp_path, 40)
    iterators = [iter(dataset(tmp_path, count, index)) for count, index in ((1, 0), (2, 0), (2, 1), (4, 3))]
    for _ in range(5):
        states = [next(iterator) and iterator.get_state() for iterator in iterators]
        assert all(state == states[0] for state in states)
    later = [next(iterator) for iterator in iterators]
    for iterator, wanted in zip(iterators, later, strict=True):
        iterator.set_state(states[0])
        np.testing.assert_array_equal(next(iterator)["tokens"], wanted["tokens"])


def test_one_process_agrees_with_itself():
    assert [processes.agree(flag) for flag in (True, False)] == [True, False]
    value = object()
    assert processes.broadcast(value) is value
    assert processes.on_first(lambda: value) is value
    assert processes.is_first()
    processes.check_same(value, "nothing", "never said")
    with pytest.raises(ConfigError, match="mine"), processes.together():
        raise ConfigError("mine")


def test_a_mesh_that_splits_rows_between_processes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"mesh.data must be a multiple of the number of processes.*got 1 for 2"):
        Placement(config(tmp_path))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--coordinator", "localhost:1"], "belong together: --processes and --process is missing"),
        (["--distributed", "--process", "0"], "belong together: --coordinator and --processes is missing"),
        (["--coordinator", "localhost", "--processes", "2", "--process", "0"], "must be HOST:PORT: got 'localhost'"),
        (["--coordinator", "localhost:1", "--processes", "2", "--process", "2"], "must be from 0 to 1: got 2 of 2"),
        (["--distributed", "--dry-run"], "are for one process"),
    ],
)
def test_half_given_options_are_one_sentence(tmp_path, capsys, options, words):
    (tmp_path / "run.yaml").write_text(f"folder: {tmp_path}/run\n")
    assert train.main(["--config", str(tmp_path / "run.yaml"), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert words in line


SCRIPT = """
import dataclasses, sys, jax
from pathlib import Path
folder, cache, count, index, port, steps = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:7])
for name, value in (("disable_most_optimizations", True), ("compilation_cache_dir", cache),
                    ("persistent_cache_min_compile_time_secs", 0), ("persistent_cache_min_entry_size_bytes", -1)):
    jax.config.update("jax_" + name, value)
from jdlite import train
from jdlite.training import processes
if count > 1:
    processes.start(f"localhost:{port}", count, index)
from jdlite.models.sharding import shard_model
from jdlite.training.placement import training_mesh
from jdlite.training.trainer import PhaseRun, Report
from tests.training.tiny_run import config, target
c = config(folder, "batch.rows=4", "batch.micro_rows=2", "mesh.data=2", "evaluation.log_every=1", *sys.argv[7:])
whole = dataclasses.replace(target(), model=shard_model(target().model, training_mesh(c.mesh)))
say = lambda *words: print(*words, flush=True)
with train._stop_on_signals() as asked:
    # Only the last process is asked to stop after some steps.
    ask = lambda: asked() or (index == count - 1 and run.state.step == steps)
    run = PhaseRun(c, whole, "single", Report(say=say, step=lambda done, total, words: say("step", done), stop=ask))
    say("ready")
    outcome = run.run()
    run.close()
say("stopped" if outcome.stopped else "end", outcome.step)
"""


def start(folder, cache, count, *overrides, stop_at=0, own=((), ())):
    """Two devices in `count` processes; a folder for all or one for each, and what each is given besides."""
    folders = folder if isinstance(folder, list) else [folder] * count
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={2 // count}"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    given = [(folders[i], cache, count, i, port, stop_at, *overrides, *own[i]) for i in range(count)]
    pipe = subprocess.PIPE
    return [
        subprocess.Popen([sys.executable, "-c", SCRIPT, *map(str, g)], env=env, stdout=pipe, stderr=pipe, text=True)
        for g in given
    ]


def finish(running):
    """Standard outputs, of processes that all ended well."""
    try:
        ended = [process.communicate(timeout=300) for process in running]
    finally:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    for process, (_, error) in zip(running, ended, strict=True):
        assert process.returncode == 0, error[-3000:]
    return [out for out, _ in ended]


def wait_for(words, process):
    while words not in (line := process.stdout.readline()):
        assert line, process.communicate()[1][-3000:]


def result(folder):
    """Parameters at the end, and metrics without times."""
    network, _ = load_dlite_orbax(folder / "single" / "checkpoints" / "8")
    found = read_lines(folder / "single" / "metrics.jsonl")
    lines = [{name: value for name, value in line.items() if name != TIME} for line in found]
    return jax.tree.leaves(network), lines


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The cache of compiled programs, and what one process with two devices comes to."""
    base = tmp_path_factory.mktemp("one")
    store(base)
    finish(start(base, base / "cache", 1, *DECODE))
    return base / "cache", result(base)


def check_same_result(folder, one):
    """Bit for bit: a sum of two numbers does not depend on the order."""
    (params, lines), (theirs, their_lines) = result(folder), one[1]
    for a, b in zip(params, theirs, strict=True):
        np.testing.assert_array_equal(a, b)
    assert lines == their_lines


@pytest.mark.slow
def test_two_processes_give_what_one_gives(one, tmp_path):
    store(tmp_path)
    first, second = finish(start(tmp_path, one[0], 2, *DECODE))
    assert "step 8" in first
    assert "step" not in second  # one speaks for all
    check_same_result(tmp_path, one)
    best, info = load_dlite_orbax(tmp_path / "single" / "best")
    assert best.config.rank == 6
    assert info["step"] in (4, 8)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["setting", "folder"])
def test_a_process_that_was_started_differently_ends_all(one, tmp_path, wrong):
    store(tmp_path / "first")
    folders = [tmp_path / "first", tmp_path / ("first" if wrong == "setting" else "second")]
    rates = [0.01, 0.02 if wrong == "setting" else 0.01]
    overrides = [[f"optimizer.learning_rate={rate}"] for rate in rates]
    ended = [process.communicate(timeout=300)[1] for process in start(folders, one[0], 2, own=overrides)]
    words = ("data or configuration differ between process 0 and 1",) * 2
    if wrong == "folder":
        words = ("another process has failed", "holds no training records")
    for error, sentence in zip(ended, words, strict=True):
        assert sentence in error
        assert "Check failure" not in error  # what JAX says when it loses a process


@pytest.mark.slow
def test_interrupted_processes_go_on_to_the_same_end(one, tmp_path):
    """Both killed; then one of them asked to stop; then the newest checkpoint damaged; then one process for two."""
    store(tmp_path)
    cache, folder = one[0], tmp_path / "single" / "checkpoints"
    running = start(tmp_path, cache, 2, *DECODE)
    # By now the checkpoint of step 2 is whole: the next one waits for it.
    wait_for("step 5", running[0])
    for process in running:
        process.kill()
    for process in running:
        process.communicate()
    assert not (folder / "8").exists()

    outs = finish(start(tmp_path, cache, 2, *DECODE, stop_at=5))
    assert "going on at step" in outs[0]
    assert all("stopped 5" in out for out in outs)

    for path in (folder / "5" / "params").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    outs = finish(start(tmp_path, cache, 2, *DECODE, stop_at=7))
    assert "5 is damaged" in outs[0]
    assert "going on at step 4" in outs[0]
    assert all("stopped 7" in out for out in outs)
    assert (folder / "5.damaged").is_dir()

    (out,) = finish(start(tmp_path, cache, 1, *DECODE))
    assert "going on at step 7" in out
    check_same_result(tmp_path, one)
