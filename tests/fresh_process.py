"""A script in a Python of its own, for what must be said before JAX starts or seen in a process that is new."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_script(script: str) -> str:
    """What the script prints, stripped; it can import the package and the tests. Fails unless it ends well."""
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=root,
        timeout=500,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
