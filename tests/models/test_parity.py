"""Logits and hidden states equal transformers', live where torch is installed and against golden files everywhere."""

import importlib.util
import json

import numpy as np
import pytest

from jdlite.checkpoints.huggingface import load_huggingface
from tests.models.parity import CASES, GOLDEN, ROW_LENGTHS, assert_parity, rows_of, torch_model, torch_outputs

# Whole prefill, chunks that end inside rows, single steps.
CHUNKS = (max(ROW_LENGTHS), 5, 1)
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """Name of a case to (folder that transformers wrote, rows, transformers' outputs), made once."""
    made = {}

    def get(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            model = torch_model(CASES[name])
            model.save_pretrained(folder)
            rows = rows_of(CASES[name]["vocab_size"])
            made[name] = folder, rows, torch_outputs(model, rows)
        return made[name]

    return get


@needs_torch
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(live, name, chunk):
    folder, rows, expected = live(name)
    assert_parity(load_huggingface(folder), rows, expected, chunk)


@needs_torch
def test_old_style_config_gives_the_same_model(live, tmp_path):
    """transformers 5 writes `rope_parameters`; published checkpoints still say `rope_theta` and `rope_scaling`."""
    folder, rows, expected = live("llama3")
    written = json.loads((folder / "config.json").read_text())
    assert "rope_parameters" in written
    (tmp_path / "config.json").write_text(json.dumps(CASES["llama3"]))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    assert_parity(load_huggingface(tmp_path), rows, expected, CHUNKS[0])


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", CASES)
def test_equals_golden_files(name, chunk):
    folder = GOLDEN / name
    with np.load(folder / "outputs.npz") as saved:
        expected = [(saved[f"logits_{b}"], saved[f"hidden_{b}"]) for b in range(len(ROW_LENGTHS))]
    rows = rows_of(CASES[name]["vocab_size"])
    assert_parity(load_huggingface(folder), rows, expected, chunk)


def test_golden_files_stay_small():
    files = [path for path in GOLDEN.rglob("*") if path.is_file()]
    assert len(files) == 3 * len(CASES)
    assert sum(path.stat().st_size for path in files) < 300_000
