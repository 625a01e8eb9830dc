"""What only an accelerator can show, in one run of minutes: are the kernels right on it, and what do rounds cost.

python scripts/gpu_bench.py --json results.json     # on an accelerator
python scripts/gpu_bench.py --smoke                 # tiny shapes, anywhere: shows that the script works; no figures

Weights are random (bfloat16, the shapes of Qwen3-4B and 8B), since only sizes matter for time. Bytes that must be read
stand beside each time: all weights once, and the keys and values of the cached tokens. One table is printed last. What
does not fit or cannot run is a line that says so, and what the time limit cuts off is named.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jdlite
from jdlite.decoding.policy import Costs
from jdlite.decoding.request import make_request
from jdlite.drafters.adapld import AdaPLD
from jdlite.drafters.base import Context
from jdlite.drafters.dlite import DLiteDrafter
from jdlite.drafters.plain import Plain
from jdlite.files import atomic_file
from jdlite.models.decoder import Decoder
from jdlite.models.dlite import DLite
from jdlite.models.dlite_config import DLiteConfig
from jdlite.timing import median_seconds, verify_forward
from pallas_kernels.backends import REFERENCE, candidates
from pallas_kernels.commit_cache.api import commit_cache
from pallas_kernels.low_rank_head.api import HeadWeights, low_rank_head
from pallas_kernels.tree_attention.api import tree_attention

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is run.

    Attributes:
        dtype: of weights and cache.
        copy, matmul: numbers of the copied array, and width of the multiplied matrices.
        models: target and drafter by name.
        batches, lengths: rows, and cached tokens.
        repeats: timings of each.
        rounds: rounds of one timed loop.
    """

    dtype: str
    copy: int
    matmul: int
    models: dict[str, tuple[jdlite.DecoderConfig, DLiteConfig]]
    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    repeats: int
    rounds: int


def full_sizes() -> Sizes:
    """Qwen3-4B and 8B."""
    c, d = jdlite.DecoderConfig, DLiteConfig
    models = {"Qwen3-4B": (c.qwen3_4b(), d.qwen3_4b()), "Qwen3-8B": (c.qwen3_8b(), d.qwen3_8b())}
    models = {name: (dataclasses.replace(t, max_position=1 << 18), q) for name, (t, q) in models.items()}
    return Sizes("bfloat16", 1 << 29, 8192, models, (1, 8, 64), (1024, 8192, 32_768, 131_072), 15, 16)


def smoke_sizes() -> Sizes:
    """A few layers of a few numbers."""
    target = jdlite.DecoderConfig.tiny()
    return Sizes("float32", 1 << 16, 64, {"tiny": (target, DLiteConfig.tiny())}, (1, 2), (128, 256), 2, 2)


# Correctness.


def check_attention(backend: str, dtype) -> float:
    """Largest difference from float64, of outputs of order one."""
    rng = np.random.default_rng(0)
    B, N, H, G, S, h = 3, 9, 8, 2, 256, 128
    q, k, v = (rng.normal(size=(B, N, heads, h)) for heads in (H, G, G))
    caches = rng.normal(size=(2, 1, B, G, S, h))
    lengths, mask = np.array([0, 130, 256]), np.tril(np.ones((B, N, N), bool))
    rounded = [np.asarray(jnp.asarray(x, dtype), np.float64) for x in (q, k, v, *caches)]
    q, k, v, k_cache, v_cache = rounded
    wanted = np.zeros(q.shape)
    for b, n in enumerate(lengths):
        for head in range(H):
            g = head // (H // G)
            scores = q[b, :, head] @ np.concatenate([k_cache[0, b, g, :n], k[b, :, g]]).T / math.sqrt(h)
            scores[:, n:][~mask[b]] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            wanted[b, :, head] = weights @ np.concatenate([v_cache[0, b, g, :n], v[b, :, g]])
    args = (*(jnp.asarray(x, dtype) for x in rounded), 0, jnp.asarray(lengths, jnp.int32), jnp.asarray(mask))
    got = jax.jit(partial(tree_attention, backend=backend))(*args)
    return float(np.abs(np.asarray(got, np.float64) - wanted).max())


def head_weights(rng, vocab: int, rank: int, width: int, dtype) -> HeadWeights:
    """Random weights of the low-rank head."""
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape) / math.sqrt(shape[-1]), dtype)  # noqa: E731
    return HeadWeights(
        normal(vocab, rank),
        normal(2 * rank, 2 * rank),
        jnp.zeros(2 * rank, dtype),
        normal(rank, rank + width),
        jnp.zeros(rank, dtype),
        normal(vocab, rank),
    )


def check_head(backend: str, dtype) -> float:
    """How far the chosen tokens' logits are below the best ones, of float64 along the chosen tokens."""
    rng = np.random.default_rng(1)
    B, K, V, R, D = 2, 4, 1000, 64, 128
    weights = head_weights(rng, V, R, D, dtype)
    hidden = jnp.asarray(rng.normal(size=(B, K, D)), dtype)
    anchor = jnp.asarray([3, V - 1], jnp.int32)
    got = jax.jit(partial(low_rank_head, backend=backend))(weights, hidden, anchor, jnp.zeros((B, R)))
    w = {f.name: np.asarray(getattr(weights, f.name), np.float64) for f in dataclasses.fields(weights)[:-1]}
    x, tokens, worst = np.asarray(hidden, np.float64), np.asarray(got.tokens), 0.0
    for b in range(B):
        s, previous = np.zeros(R), int(anchor[b])
        for i in range(K):
            z = w["state_weight"] @ np.concatenate([s, w["embed"][previous]]) + w["state_bias"]
            gate = 1 / (1 + np.exp(-z[:R]))
            s = gate * s + (1 - gate) * np.tanh(z[R:])
            logits = w["output"] @ (w["mix_weight"] @ np.concatenate([s, x[b, i]]) + w["mix_bias"])
            previous = int(tokens[b, i])
            worst = max(worst, float(logits.max() - logits[previous]))
    return worst


def check_commit(backend: str, dtype) -> float:
    """Slots that differ from copying one by one."""
    rng = np.random.default_rng(2)
    L, B, G, S, N, P, h = 2, 3, 2, 64, 9, 4, 128
    k, v = (np.array(jnp.asarray(rng.normal(size=(L, B, G, S, h)), dtype)) for _ in range(2))
    new = [np.asarray(jnp.asarray(rng.normal(size=(L, B, G, N, h)), dtype)) for _ in range(2)]
    path, lengths, count = rng.integers(0, N, (B, P)), np.array([0, 7, 60]), np.array([4, 0, 3])
    call = jax.jit(partial(commit_cache, backend=backend), donate_argnums=(0, 1))
    arrays = [jnp.asarray(x) for x in (k, v, *new)]
    got = call(*arrays, *(jnp.asarray(x, jnp.int32) for x in (path, lengths, count)))
    for b in range(B):
        for i in range(count[b]):
            for cache, x in ((k, new[0]), (v, new[1])):
                cache[:, b, :, lengths[b] + i] = x[:, b, :, path[b, i]]
    return float(sum((np.asarray(a) != b).sum() for a, b in zip(got, (k, v), strict=True)))


# Times.


def bandwidth(sizes: Sizes) -> Iterator[Row]:
    """What the machine can do."""
    x = jnp.ones(sizes.copy, jnp.bfloat16)
    seconds = median_seconds(partial(jax.jit(lambda x: x + 1), x), sizes.repeats)
    yield {"what": "copy", "ms": 1e3 * seconds, "GB/s": 2 * x.nbytes / seconds / 1e9}
    a = jnp.ones((sizes.matmul, sizes.matmul), jnp.bfloat16)
    seconds = median_seconds(partial(jax.jit(jnp.matmul), a, a), sizes.repeats)
    yield {"what": "matmul", "ms": 1e3 * seconds, "TFLOP/s": 2 * sizes.matmul**3 / seconds / 1e12}


def random_model(make: Callable[[], Any], dtype: str) -> Any:
    """A network with random weights of a dtype, drawn by one program on the device."""

    @jax.jit
    def draw():
        return jax.tree.map(
            lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, nnx.state(make())
        )

    graph = nnx.graphdef(nnx.eval_shape(make))
    return nnx.merge(graph, draw())


def tree_bytes(tree: Any) -> int:
    """Bytes of all arrays."""
    return sum(x.nbytes for x in jax.tree.leaves(tree) if hasattr(x, "nbytes"))


def rounds(sizes: Sizes, name: str, batch: int, length: int, model: Decoder, drafter: DLiteDrafter) -> Iterator[Row]:
    """A plain step, verifies, the draft and whole rounds with the cache at one length."""
    room = 64 + 8 * sizes.rounds
    where = {"model": name, "batch": batch, "cached": length}
    weights = tree_bytes(model)
    c = model.config
    itemsize = jnp.dtype(sizes.dtype).itemsize
    cache_bytes = 2 * c.num_layers * c.num_kv_heads * c.head_dim * itemsize * batch * length
    floor = weights + cache_bytes

    def at_length(state):
        full = lambda n: jnp.full(batch, n, jnp.int32)  # noqa: E731
        cache = dataclasses.replace(state.cache, lengths=full(length - 1))
        return dataclasses.replace(state, cache=cache, lengths=full(length))

    state = at_length(jdlite.init_state(model, drafter, batch, length + room))
    memory = dataclasses.replace(state.memory, position=jnp.full(batch, length - 2, jnp.int32))
    state = dataclasses.replace(state, memory=memory)
    times = {}
    for n in (1, 8, 40):
        times[n] = median_seconds(partial(verify_forward, model, state.cache, n), sizes.repeats)
        row = {"what": "plain step" if n == 1 else f"verify {n}", "ms": 1e3 * times[n], "bytes": floor}
        yield where | row | {"against plain": times[n] / times[1]}
    request = make_request(model, drafter, batch, costs=Costs.free((drafter.max_nodes,)))

    @jax.jit
    def draft(drafter, memory, embedding, tokens, lengths):
        here = Context(tokens, lengths, lengths, request.keys, request.sampling.temperature, embedding)
        return drafter.propose(memory, here)

    embedding = model.embed.weight[...]
    seconds = median_seconds(
        partial(draft, drafter, state.memory, embedding, state.tokens, state.lengths), sizes.repeats
    )
    yield where | {
        "what": "DLite draft",
        "ms": 1e3 * seconds,
        "bytes": tree_bytes(drafter),
        "against plain": seconds / times[1],
    }
    yield where | {"what": "(verify 8 + draft) / plain", "against plain": (times[8] + seconds) / times[1]}
    for what, which, asked in (("plain", Plain(), None), ("DLite", drafter, request)):
        asked = asked or make_request(model, which, batch)
        begin = at_length(jdlite.init_state(model, which, batch, length + room))
        if which is drafter:
            begin = dataclasses.replace(begin, memory=state.memory)

        @jax.jit
        def loop(model, which, state, asked):
            progress = jdlite.start(model, which, state, asked, jnp.full(batch, room, jnp.int32))
            return jdlite.decode_rounds(model, which, state, asked, progress, sizes.rounds)[1].stats

        seconds = median_seconds(partial(loop, model, which, begin, asked), max(3, sizes.repeats // 3)) / sizes.rounds
        yield where | {
            "what": f"round, {what}",
            "ms": 1e3 * seconds,
            "bytes": floor,
            "against plain": seconds / times[1],
        }


def adapld(sizes: Sizes, name: str, length: int, model: Decoder) -> Iterator[Row]:
    """AdaPLD's own work beside the forward that verifies its tree."""
    from drafting_times import adapld_milliseconds  # its neighbour

    times, verify = adapld_milliseconds(model, length, (AdaPLD().max_nodes,), sizes.repeats)
    (forward,) = verify.values()
    for what, ms in times.items():
        total = ms if what == "observe" else ms + times["observe"]
        label = what if what == "observe" else f"propose + observe, {what}"
        yield {
            "what": f"AdaPLD {label}",
            "model": name,
            "batch": 1,
            "cached": length,
            "ms": total,
            "of a verify": total / forward,
        }


def kernels(sizes: Sizes, name: str, target: jdlite.DecoderConfig, drafter: DLiteConfig) -> Iterator[Row]:
    """Each kernel and its reference at a model's shapes, beside the bytes that it must read."""
    rng, dtype = np.random.default_rng(0), jnp.dtype(sizes.dtype)
    V, R, D, K = drafter.vocab_size, drafter.rank, drafter.hidden_size, drafter.num_drafts
    weights = head_weights(rng, V, R, D, dtype)
    B, N, length = 1, 8, sizes.lengths[1]
    H, G, h, L = target.num_heads, target.num_kv_heads, target.head_dim, 2
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    cache = [jnp.zeros((L, B, G, length, h), dtype) for _ in range(2)]
    attention = (normal(B, N, H, h), normal(B, N, G, h), normal(B, N, G, h), *cache, 1, jnp.full(B, length, jnp.int32))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((N, N), bool)), (B, N, N))
    head = (weights, normal(B, K, D), jnp.zeros(B, jnp.int32), jnp.zeros((B, R)))
    operations = {
        "low_rank_head": (low_rank_head, head, K * weights.output.nbytes),
        "tree_attention": (tree_attention, (*attention, mask), sum(x.nbytes for x in cache) // L),
    }
    for what, (call, args, floor) in operations.items():
        for backend in backends():
            row = {"what": f"{what}, {backend}", "model": name, "batch": B, "bytes": floor}
            try:
                seconds = median_seconds(partial(jax.jit(partial(call, backend=backend)), *args), sizes.repeats)
            except NotImplementedError as refusal:
                yield row | {"note": str(refusal)}
                continue
            yield row | {"ms": 1e3 * seconds}


def backends() -> tuple[str, ...]:
    """The reference, and what this device has."""
    own = candidates("", ("reference", "mosaic_gpu", "mosaic_tpu"), None)
    return tuple(dict.fromkeys((REFERENCE, *own)))


def work(sizes: Sizes) -> Iterator[tuple[str, Callable[[], Iterator[Row]]]]:
    """Pieces of work by name, what matters most first."""
    yield "machine", lambda: bandwidth(sizes)
    checks = {"tree_attention": check_attention, "low_rank_head": check_head, "commit_cache": check_commit}
    for what, check in checks.items():
        for backend in backends():
            yield (
                f"{what}, {backend}",
                lambda what=what, check=check, backend=backend: iter(
                    [{"what": f"{what}, {backend}: error", "error": check(backend, sizes.dtype)}]
                ),
            )
    for name, (target, dlite) in sizes.models.items():
        yield f"kernels of {name}", lambda name=name, t=target, d=dlite: kernels(sizes, name, t, d)
        made: list[Any] = []

        def make(made=made, target=target, dlite=dlite):
            if not made:
                model = random_model(lambda: Decoder(target, rngs=nnx.Rngs(0)), sizes.dtype)
                network = random_model(lambda: DLite(dlite, rngs=nnx.Rngs(1)), sizes.dtype)
                made.extend((model, DLiteDrafter(model=network).fit(model)))
            return made

        for batch in sizes.batches:
            for length in sizes.lengths:
                yield (
                    f"{name}, batch {batch}, {length} cached",
                    lambda n=name, b=batch, s=length, make=make: rounds(sizes, n, b, s, *make()),
                )
        yield f"AdaPLD on {name}", lambda n=name, make=make: adapld(sizes, n, sizes.lengths[-2], make()[0])


def run(sizes: Sizes, limit: float, save: Callable[[list[Row]], None]) -> list[Row]:
    """All that the time allows; a piece that fails is a row with the reason."""
    begin, rows = time.monotonic(), []
    for name, piece in work(sizes):
        if time.monotonic() - begin > limit:
            rows.append({"what": name, "note": "not run: the time was up"})
            continue
        print(f"{time.monotonic() - begin:6.0f} s  {name}", file=sys.stderr, flush=True)
        try:
            for row in piece():
                rows.append(row)
                save(rows)
        except Exception as error:  # out of memory, a kernel that does not compile: the others are still wanted
            rows.append({"what": name, "note": f"failed: {' '.join(str(error).split()):.200}"})
        save(rows)
    return rows


def table(rows: list[Row], peak: float | None) -> str:
    """Rows as aligned text; `of peak` is the share of the copy bandwidth that the bytes that must be read make up."""
    columns = ("model", "batch", "cached", "what", "ms", "GB", "of peak", "ratio", "note")
    lines: list[tuple[str, ...]] = [columns]
    for row in rows:
        share = ""
        if peak and row.get("bytes") and row.get("ms"):
            share = f"{row['bytes'] / (row['ms'] / 1e3) / 1e9 / peak:.0%}"
        others = [f"{name} {row[name]:.4g}" for name in ("GB/s", "TFLOP/s", "error") if name in row]
        ratio = row.get("against plain", row.get("of a verify"))
        cells = (
            *(str(row.get(name, "")) for name in ("model", "batch", "cached", "what")),
            f"{row['ms']:.3f}" if "ms" in row else "",
            f"{row['bytes'] / 1e9:.2f}" if "bytes" in row else "",
            share,
            "" if ratio is None else f"{ratio:.4f}",
            " ".join([*others, row.get("note", "")]).strip(),
        )
        lines.append(cells)
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def main(arguments: list[str] | None = None) -> int:
    """Run, save and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes")
    parser.add_argument("--seconds", type=float, default=540, help="after these no new piece is begun")
    parser.add_argument("--json", type=Path, help="results file, rewritten after every row")
    options = parser.parse_args(arguments)
    device = jax.devices()[0]
    environment = {"device": device.device_kind, "platform": device.platform, "jax": jax.__version__}

    def save(rows: list[Row]) -> None:
        if options.json is not None:
            with atomic_file(options.json) as file:
                json.dump({"environment": environment | {"smoke": options.smoke}, "rows": rows}, file, indent=1)

    rows = run(smoke_sizes() if options.smoke else full_sizes(), options.seconds, save)
    peak = next((row["GB/s"] for row in rows if "GB/s" in row), None)
    print(", ".join(f"{name} {value}" for name, value in environment.items()))
    print(table(rows, peak))
    return 1 if any("failed" in row.get("note", "") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
