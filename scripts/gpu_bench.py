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
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jdlite
from jdlite.decoding.policy import Costs
from jdlite.decoding.request import make_request
from jdlite.drafters.adapld import AdaPLD
from jdlite.drafters.base import Context
from jdlite.drafters.dlite import DLiteDrafter
from jdlite.drafters.plain import Plain
from jdlite.models.decoder import Decoder
from jdlite.models.dlite import DLite
from jdlite.models.dlite_config import DLiteConfig
from jdlite.timing import median_seconds, verify_forward
from pallas_kernels.benchmark import (
    Operation,
    Row,
    Setting,
    copy_bandwidth,
    device_backends,
    environment,
    failure,
    finish,
    measure,
    save,
)
from pallas_kernels.commit_cache.bench import BENCH as COMMIT_CACHE
from pallas_kernels.low_rank_head.bench import BENCH as LOW_RANK_HEAD
from pallas_kernels.tree_attention.bench import BENCH as TREE_ATTENTION
from pallas_kernels.verify_head.bench import BENCH as VERIFY_HEAD

OPERATIONS = (TREE_ATTENTION, LOW_RANK_HEAD, COMMIT_CACHE, VERIFY_HEAD)


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


def check(operation: Operation, backend: str, dtype: str) -> Iterator[Row]:
    """How far a backend is from float64."""
    what = f"{operation.name}, {backend}: error"
    yield {"what": what, "error": operation.error(operation.backends[backend], dtype)}


def bandwidth(sizes: Sizes) -> Iterator[Row]:
    """What the machine can do."""
    yield copy_bandwidth(sizes.copy, sizes.repeats)
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


def kernels(sizes: Sizes, name: str) -> Iterator[Row]:
    """Each kernel and its reference at a model's shapes, beside the bytes that it must read."""
    models = {name: sizes.models[name]}
    setting = Setting(sizes.dtype, models, (1,), (8,), (sizes.lengths[1],), sizes.repeats, sizes.repeats, sizes.copy)
    for operation in OPERATIONS:
        yield from measure(operation, setting, device_backends())


def work(sizes: Sizes) -> Iterator[tuple[str, Callable[[], Iterator[Row]]]]:
    """Pieces of work by name, what matters most first."""
    yield "machine", lambda: bandwidth(sizes)
    for operation in OPERATIONS:
        for backend in device_backends():
            if backend in operation.backends:
                yield f"{operation.name}, {backend}", partial(check, operation, backend, sizes.dtype)
    for name, (target, dlite) in sizes.models.items():
        yield f"kernels of {name}", partial(kernels, sizes, name)
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
            rows.append({"what": name, "note": failure(error)})
        save(rows)
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Run, save and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes")
    parser.add_argument("--seconds", type=float, default=540, help="after these no new piece is begun")
    parser.add_argument("--json", type=Path, help="results file, rewritten after every row")
    options = parser.parse_args(arguments)
    header = environment() | {"smoke": options.smoke}
    sizes = smoke_sizes() if options.smoke else full_sizes()
    return finish(run(sizes, options.seconds, partial(save, options.json, header)), header)


if __name__ == "__main__":
    sys.exit(main())
