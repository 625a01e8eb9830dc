"""The command lines: training from prompts to a drafter, dry runs, and looking into what came out."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from flax import nnx

from jdlite import checkpoint, train
from jdlite.checkpoints.drafter import load_drafter
from jdlite.models.config import DecoderConfig
from jdlite.models.decoder import Decoder
from jdlite.training.config import TrainConfig
from jdlite.training.dry_run import KNOWN, target_shape
from jdlite.training.yaml_config import load
from tests.tiny_target import save_tiny_target

ROOT = Path(__file__).parents[2]
PRESETS = sorted((ROOT / "configs").glob("dlite-*.yaml"))
PARAMETERS = {"dlite-qwen3-4b": "603,322,560", "dlite-qwen3-8b": "1,123,879,680"}


@pytest.fixture
def run(tmp_path):
    """A configuration file for a tiny target with a tokenizer, and its prompts."""
    # Two rows more than the tokenizer has tokens: the mask is one of them.
    shape = DecoderConfig.tiny(vocab_size=260, num_layers=2, hidden_size=16, intermediate_size=16, head_dim=8)
    save_tiny_target(tmp_path / "target", model=Decoder(shape, rngs=nnx.Rngs(3)))
    prompts = "".join(
        json.dumps({"messages": [{"role": "user", "content": f"Say {i} {'and ' * (i % 3)}."}]}) + "\n" for i in range(8)
    )
    (tmp_path / "prompts.jsonl").write_text(prompts)
    (tmp_path / "run.yaml").write_text(
        f"""
folder: {tmp_path}/run
target: {{path: {tmp_path}/target}}
drafter: {{preset: target, mask_token_id: 259, num_layers: 1, num_taps: 2, rank: 4, block_size: 3}}
prompts: {{path: {tmp_path}/prompts.jsonl}}
regenerate: {{temperature: 0.0, max_new_tokens: 8, batch_size: 4}}
data: {{held_out_fraction: 0.2, truncated: keep, prefetch: 0}}
batch: {{rows: 1, length: 64, anchors: 4}}
student: {{steps: 2}}
checkpoint: {{every: 2}}
evaluation: {{log_every: 1, every: 2, batches: 1, prompts: 0, tensorboard: false}}
"""
    )
    return tmp_path


def call(run, *arguments):
    return train.main(["--config", str(run / "run.yaml"), "--cache-dir", str(run / "cache"), *arguments])


def test_from_prompts_to_a_drafter(run, capsys):
    assert call(run, "--stage", "regenerate") == 0
    assert "8 answers" in capsys.readouterr().err
    assert call(run, "--stage", "single-stage") == 0
    said = capsys.readouterr().err
    assert "2/2 single-stage: loss" in said
    assert (run / "run" / "report.html").is_file()
    assert call(run, "--show-sample") == 0
    assert "⟦" in capsys.readouterr().out

    assert checkpoint.main(["inspect", str(run / "run")]) == 0
    assert "single: steps 2" in capsys.readouterr().out
    exported = run / "exported"
    assert checkpoint.main(["export", str(run / "run"), str(exported), "--which", "last"]) == 0
    network = load_drafter(exported)
    assert network.dtype == "bfloat16"
    assert checkpoint.main(["convert", str(exported), str(run / "official"), "--to", "official"]) == 0
    capsys.readouterr()
    assert checkpoint.main(["inspect", str(run / "official"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["config"] == network.config.to_dict()
    assert checkpoint.main(["export", str(run / "run"), str(run / "no"), "--which", "77"]) == 2
    assert "has no drafter '77'" in capsys.readouterr().err


def test_stage_stable_needs_its_warm_up(run, capsys):
    assert call(run, "--stage", "regenerate") == 0
    assert call(run, "--stage", "stable") == 2
    assert "run --stage teacher first" in capsys.readouterr().err


def test_stopped_before_the_first_line_of_metrics(run, capsys, monkeypatch):
    assert call(run, "--stage", "regenerate") == 0
    monkeypatch.setattr(train, "_stop_on_signals", lambda: contextlib.nullcontext(lambda: True))
    quiet = ("--stage", "single-stage", "evaluation.log_every=2")
    assert call(run, *quiet) == train.STOPPED
    assert "stopped at step 1 of 2 of the single, which is saved; run the same command" in capsys.readouterr().err
    monkeypatch.undo()
    assert call(run, *quiet) == 0
    assert "2/2 single-stage: loss" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes(run):
    """Answers are made by one process; training is joined by both, and SIGTERM to one of them stops both."""

    def start(*arguments):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            where = f"localhost:{free.getsockname()[1]}"
        command = [sys.executable, "-m", "jdlite.train", "--config", run / "run.yaml", "--cache-dir", run / "cache"]
        command += [*arguments, "batch.rows=2", "mesh.data=2", "--coordinator", where, "--processes", "2", "--process"]
        env = {**os.environ, "JAX_PLATFORMS": "cpu"}
        return [
            subprocess.Popen([*map(str, command), str(i)], env=env, stderr=subprocess.PIPE, text=True) for i in range(2)
        ]

    def finish(running):
        said = [process.communicate(timeout=300)[1] for process in running]
        return [process.returncode for process in running], said

    codes, said = finish(start("--stage", "regenerate"))
    assert codes == [2, 2]
    assert all("answers are still to be made" in text and "Traceback" not in text for text in said)
    assert call(run, "--stage", "regenerate") == 0

    running = start("--stage", "all", "student.warmup_epochs=0", "student.steps=2000")
    first = running[0].stderr
    while "/2000 " not in (line := first.readline()):
        assert line
    running[1].send_signal(signal.SIGTERM)
    codes, said = finish(running)
    assert codes == [train.STOPPED] * 2
    assert "of 2000 of the student, which is saved; run the same command" in said[0]
    assert "student" not in said[1]

    codes, said = finish(start("--stage", "single-stage"))
    assert codes == [0, 0], said
    assert "2/2 single-stage: loss" in said[0]
    assert "report: " in said[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["optimizer.lerning_rate=1"], "'lerning_rate' is unknown in optimizer"),
        (["drafter.mask_token_id=70"], "which texts use"),
        (["drafter.mask_token_id=0"], "which texts use"),
        (["drafter.mask_token_id=1"], "which texts use"),
        (["drafter.num_taps=3"], "num_taps must be between 2 and the target's 2 layers"),
        (["target.path=/nowhere/at-all"], "no folder at"),
        (["batch.rows=3", "batch.micro_rows=2"], "must divide batch.rows"),
        (["--stage", "teacher"], "run the regenerate stage first"),
        (["--stage", "regenerate", "prompts.path=''"], "prompts.path is missing"),
    ],
)
def test_bad_input_is_one_sentence(run, capsys, arguments, words):
    assert call(run, *arguments) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1
    assert words in error[0]


def test_dry_run(run, capsys):
    assert call(run, "--dry-run", "--stage", "single-stage") == 0
    out = capsys.readouterr().out
    for words in ("drafter: ", "a checkpoint: ", "memory: ", "s a step", "single, single-stage: 2 steps"):
        assert words in out
    assert not (run / "run").exists()


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_presets(path):
    config = load(TrainConfig, path)
    shape = target_shape(config.target.path)
    assert shape is not None
    config.dlite(shape)
    assert config.teacher_dlite(shape).draft_history == config.teacher.window
    assert config.folder == f"runs/{path.stem}"


def test_known_targets_are_the_presets():
    assert {load(TrainConfig, path).target.path for path in PRESETS} <= set(KNOWN)
    assert {path.stem for path in PRESETS} == {"dlite-tiny", "dlite-smollm2-135m", "dlite-qwen3-4b", "dlite-qwen3-8b"}


@pytest.mark.slow
@pytest.mark.parametrize("name", PARAMETERS)
def test_dry_run_of_a_large_preset_needs_no_weights(name, capsys, tmp_path):
    path = ROOT / "configs" / f"{name}.yaml"
    small = ["batch.rows=1", "batch.length=64", "batch.anchors=4"]
    arguments = ["--config", str(path), "--dry-run", "--stage", "single-stage", "--cache-dir", str(tmp_path), *small]
    assert train.main(arguments) == 0
    out = capsys.readouterr().out
    assert f"drafter: {PARAMETERS[name]} parameters" in out
    assert "memory: " in out
