"""The accelerator's benchmark runs from beginning to end on tiny shapes; its figures there mean nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

NAMES = ("tree_attention", "low_rank_head", "commit_cache", "verify_head")
SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu_bench.py"


@pytest.mark.slow
def test_smoke(tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, "--smoke", "--json", tmp_path / "out.json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert not [row for row in rows if "note" in row]
    errors = {row["what"]: row["error"] for row in rows if "error" in row}
    assert set(errors) == {f"{name}, reference: error" for name in NAMES}
    assert max(errors.values()) < 1e-5
    kinds = {row["what"] for row in rows if row.get("model") == "tiny"}
    wanted = {"plain step", "verify 8", "verify 40", "DLite draft", "(verify 8 + draft) / plain", "round, DLite"}
    assert wanted < kinds
    assert len({(row["batch"], row["cached"]) for row in rows if row["what"] == "plain step"}) == 4
    assert done.stdout.splitlines()[1].split()[:4] == ["model", "batch", "cached", "what"]


@pytest.mark.slow
def test_what_the_time_cuts_off_is_named(tmp_path):
    done = subprocess.run([sys.executable, SCRIPT, "--smoke", "--seconds", "0"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "not run: the time was up" in done.stdout
