"""Time AdaPLD's own work beside the forward that verifies, at a given number of committed tokens.

python scripts/drafting_times.py --target PATH_OR_REPO --length 32768

The committed text is made up (token frequencies of natural text, random states), since only its size matters here. The
target's context may be shorter than `--length`: times do not depend on what the positions mean.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import jdlite
from jdlite.drafters.adapld import AdaPLD, AdaPLDMemory
from jdlite.drafters.base import Context, Observation
from jdlite.timing import median_seconds, verify_forward

CHUNK = 128


def median_ms(call, repeats: int) -> float:
    """Median milliseconds of a call."""
    return 1e3 * median_seconds(call, repeats)


def filled_memory(drafter: AdaPLD, text: np.ndarray, hidden_size: int, vocab_size: int) -> AdaPLDMemory:
    """What AdaPLD keeps of a text `[S]` that was run up to its last token."""
    rng = np.random.default_rng(1)
    S = len(text)
    memory = drafter.init(1, S, hidden_size=hidden_size, vocab_size=vocab_size, dtype=jnp.float32)

    def add(i, distinct):
        tokens = jax.lax.dynamic_slice_in_dim(jnp.asarray(text)[None], i * CHUNK, CHUNK, axis=1)
        return distinct.add(tokens, jnp.full(1, i * CHUNK), jnp.full(1, CHUNK))

    distinct = jax.jit(lambda start: jax.lax.fori_loop(0, S // CHUNK, add, start))(memory.distinct)
    states = rng.normal(size=(1, S, hidden_size)).astype(np.float32)
    return dataclasses.replace(
        memory,
        states=jnp.asarray(states / np.linalg.norm(states, axis=-1, keepdims=True)),
        top_ids=jnp.asarray(rng.integers(0, vocab_size, memory.top_ids.shape, np.int32)),
        distinct=distinct,
    )


def adapld_milliseconds(
    model: jdlite.Decoder, length: int, nodes: Sequence[int], repeats: int
) -> tuple[dict[str, float], dict[int, float]]:
    """Milliseconds of AdaPLD's `propose` for anchors of different kinds and of its `observe`, and of verify forwards.

    Args:
        model: the target.
        length: committed tokens, a multiple of 128.
        nodes: of the forwards.
        repeats: timings of each.
    """
    S, D, V = length, model.config.hidden_size, model.config.vocab_size
    rng = np.random.default_rng(0)
    text = (rng.zipf(1.2, S) % (V - 2)).astype(np.int32)
    drafter = AdaPLD()
    memory = filled_memory(drafter, text, D, V)
    embedding = model.embed.weight[...]
    counts = np.bincount(text[:-1], minlength=V)
    anchors = {
        "most frequent token": int(counts.argmax()),
        "token met 20 times": int(np.abs(counts - 20).argmin()),
        "token never met": int(np.flatnonzero(counts == 0)[0]),
    }

    def context(anchor: int) -> Context:
        known = text.copy()
        known[-1] = anchor
        keys = jax.random.split(jax.random.key(0), 1)
        one = lambda n: jnp.full(1, n, jnp.int32)  # noqa: E731
        return Context(jnp.asarray(known)[None], one(S), one(S - 10), keys, jnp.zeros(1), embedding)

    propose = jax.jit(drafter.propose)
    shown = {what: context(anchor) for what, anchor in anchors.items()}
    times = {what: median_ms(lambda c=c: propose(memory, c), repeats) for what, c in shown.items()}

    N, P = drafter.max_nodes, drafter.max_depth + 1
    seen = Observation(
        tokens=jnp.zeros((1, N), jnp.int32),
        valid=jnp.ones((1, N), bool),
        path=jnp.minimum(jnp.arange(P, dtype=jnp.int32), N - 1)[None],
        start=jnp.full(1, S - 8),
        count=jnp.full(1, 3),
        taps=(jnp.ones((1, N, D)),),
        top_ids=jnp.zeros((1, N, drafter.num_branches), jnp.int32),
        next_tokens=jnp.zeros((1, P), jnp.int32),
    )
    here = context(anchors["token never met"])
    step = jax.jit(drafter.observe, donate_argnums=0)
    state = jax.tree.map(jnp.copy, memory)

    def observe():
        nonlocal state
        state = step(state, here, seen)
        return state

    times["observe"] = median_ms(observe, repeats)

    cache = dataclasses.replace(model.init_cache(1, S + N), lengths=jnp.full(1, S - 1, jnp.int32))

    verify = {n: median_ms(partial(verify_forward, model, cache, n), 3) for n in nodes}
    return times, verify


def main() -> None:
    """Print milliseconds, medians of `--repeats`, and the share of a verify forward."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="Hugging Face folder, hub id or .gguf file")
    parser.add_argument("--length", type=int, default=32768, help="committed tokens, a multiple of 128")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 8, 39], help="nodes of the verify forwards")
    parser.add_argument("--repeats", type=int, default=9, help="timings of each")
    options = parser.parse_args()
    model = jdlite.load_target(options.target).model
    times, verify = adapld_milliseconds(model, options.length, options.nodes, options.repeats)
    print(f"{options.length} committed tokens; verify forwards in ms:")
    print("  " + ", ".join(f"{n} nodes {ms:.0f}" for n, ms in verify.items()))
    print("AdaPLD in ms (share of each of these forwards):")
    for what, ms in times.items():
        total = ms if what == "observe" else ms + times["observe"]
        label = what if what == "observe" else f"propose + observe, {what}"
        print(f"  {label:40s} {total:7.2f}  " + ", ".join(f"{total / v:.2%}" for v in verify.values()))


if __name__ == "__main__":
    main()
