"""Time forwards of a target by number of nodes and committed length: what a verify costs beside a plain step.

python scripts/forward_times.py --target PATH_OR_REPO --nodes 1 4 8 16 40 --lengths 300 8000
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp

import jdlite


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

    def forward(model, tokens, cache):
        steps = jnp.arange(tokens.shape[1])
        mask = (steps[:, None] >= steps)[None]
        out = model(tokens, cache.lengths[:, None] + steps, mask, cache)
        return jnp.argmax(model.logits(out.hidden), axis=-1), out.k, out.v

    compiled = {}
    for n in options.nodes:
        tokens = jnp.ones((1, n), jnp.int32)
        compiled[n] = (jax.jit(forward).lower(model, tokens, empty).compile(), tokens)
    print("cached", *(f"{n:>8} nodes" for n in options.nodes))
    for length in options.lengths:
        cache = dataclasses.replace(empty, lengths=jnp.asarray([length], jnp.int32))
        times: dict[int, list[float]] = {n: [] for n in options.nodes}
        for _ in range(options.repeats + 1):
            for n, (program, tokens) in compiled.items():
                begin = time.perf_counter()
                jax.block_until_ready(program(model, tokens, cache))
                times[n].append((time.perf_counter() - begin) * 1e3)
        medians = [statistics.median(times[n][1:]) for n in options.nodes]
        print(f"{length:>6}", *(f"{ms:>7.1f} ({ms / medians[0]:.2f})" for ms in medians))


if __name__ == "__main__":
    main()
