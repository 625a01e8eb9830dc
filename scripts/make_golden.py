"""Write the golden files of the parity tests (needs torch): tiny checkpoints and what transformers computes with them.

Run from the repository root: `python scripts/make_golden.py`. Only needed when a case is added or changed.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))


def main() -> None:
    import torch

    from tests.models.parity import CASES, GOLDEN, rows_of, torch_model, torch_outputs

    for name, config in CASES.items():
        folder = GOLDEN / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        model = torch_model(config)
        rows = rows_of(config["vocab_size"])
        outputs = torch_outputs(model, rows)
        arrays = {f"logits_{b}": logits for b, (logits, _) in enumerate(outputs)}
        arrays |= {f"hidden_{b}": hidden for b, (_, hidden) in enumerate(outputs)}
        np.savez_compressed(folder / "outputs.npz", **arrays)  # pyright: ignore[reportArgumentType]
        # Every value is exact in bfloat16, at half the size.
        model.to(torch.bfloat16).save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        # The config as published checkpoints write it, not as the installed transformers does.
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    size = sum(path.stat().st_size for path in GOLDEN.rglob("*") if path.is_file())
    print(f"{len(CASES)} cases, {size / 1000:.0f} kB in {GOLDEN}")


if __name__ == "__main__":
    main()
