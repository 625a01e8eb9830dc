"""Time forwards of a target by number of nodes and committed length: what a verify costs beside a plain step.

python scripts/forward_times.py --target PATH_OR_REPO --nodes 1 4 8 16 40 --lengths 300 8000
"""

from __future__ import annotations

import argparse
import dataclasses
from functools import partial

import jax.numpy as jnp

import jdlite
from jdlite.timing import medians_in_turn, verify_forward


def main() -> None:
    """Print a table in milliseconds: medians of `--repeats` timings, the numbers of nodes taken in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="Hugging Face folder, hub id or .gguf file")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 4, 8, 16, 40], help="nodes of a forward")
    parser.add_argument("--lengths", type=int, nargs="+", default=[300, 8000], help="tokens in the cache")
    parser.add_argument("--repeats", type=int, default=9, help="timings of each")
    options = parser.parse_args()
    model = jdlite.load_target(options.target).model
    empty = model.init_cache(1, min(max(options.lengths) + max(options.nodes), model.config.max_position))

    print("cached", *(f"{n:>8} nodes" for n in options.nodes))
    for length in options.lengths:
        cache = dataclasses.replace(empty, lengths=jnp.asarray([length], jnp.int32))
        calls = {n: partial(verify_forward, model, cache, n) for n in options.nodes}
        medians = [1e3 * seconds for seconds in medians_in_turn(calls, options.repeats).values()]
        print(f"{length:>6}", *(f"{ms:>7.1f} ({ms / medians[0]:.2f})" for ms in medians))


if __name__ == "__main__":
    main()
