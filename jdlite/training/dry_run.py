"""What a run would cost, before it begins: shapes, parameters, memory, bytes on disk, steps, and hours."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdlite.checkpoints.assemble import abstract_decoder
from jdlite.checkpoints.hf_config import config_from_hf
from jdlite.checkpoints.huggingface import read_json
from jdlite.checkpoints.target import Target
from jdlite.cli import DEMO
from jdlite.errors import JdliteError
from jdlite.models.config import DecoderConfig
from jdlite.models.decoder import Decoder
from jdlite.training.config import TrainConfig
from jdlite.training.data import make_dataset
from jdlite.training.feature_store import read_layers, store_bytes
from jdlite.training.initialise import Template, random_params
from jdlite.training.stages import Phase, Plan, Stage, make_plan
from jdlite.training.step import Scalars, Step, jit_train, make_optimizer

# Shapes of targets that need not be there for a dry run.
KNOWN: dict[str, Callable[[], DecoderConfig]] = {
    DEMO: DecoderConfig.smollm2_135m,
    "HuggingFaceTB/SmolLM2-135M-Instruct": DecoderConfig.smollm2_135m,
    "Qwen/Qwen3-0.6B": DecoderConfig.qwen3_0_6b,
    "Qwen/Qwen3-1.7B": DecoderConfig.qwen3_1_7b,
    "Qwen/Qwen3-4B": DecoderConfig.qwen3_4b,
    "Qwen/Qwen3-8B": DecoderConfig.qwen3_8b,
    "Qwen/Qwen3-14B": DecoderConfig.qwen3_14b,
    "Qwen/Qwen3-32B": DecoderConfig.qwen3_32b,
}
_TIMED = 3
# A target above this size is not loaded to be timed.
_LARGE = 4e9


def dry_run(config: TrainConfig, stage: str, load: Callable[[], Target], say: Callable[[str], None] = print) -> None:
    """Print the estimate. Nothing is written.

    Args:
        config: of the run.
        stage: as on the command line.
        load: gives the target, for the timed steps; called only if it is small enough and there.
        say: prints a line.

    Raises:
        ConfigError: the configuration cannot be used.
    """
    shape = target_shape(config.target.path)
    target: Target | None = None
    if shape is None:
        target = load()
        shape = target.config
    dtype = jnp.dtype(config.target.dtype)
    size = parameter_count(abstract_decoder(shape, config.target.dtype))
    say(f"target {config.target.path}: {size:,} parameters, {_bytes(size * dtype.itemsize)} in {dtype.name}")
    dlite = config.dlite(shape)
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(_shapes(dlite)))
    state = 3 * 4 * count  # weights and two moments in float32
    say(f"drafter: {count:,} parameters, taps {', '.join(map(str, dlite.taps))}, K = {dlite.num_drafts}")
    say(f"  saved: {_bytes(2 * count)} in bfloat16; a checkpoint: {_bytes(state)}, {config.checkpoint.keep} are kept")
    b = config.batch
    anchors = b.rows * b.anchors
    say(
        f"step: {b.rows} rows of {b.length} tokens in {b.rows // b.micro} parts, up to {anchors} anchors "
        f"({anchors * dlite.num_drafts} drafts)"
    )
    per_epoch, source = _steps_per_epoch(config)
    say(f"data: {per_epoch} steps per epoch ({source})")
    if config.features.source == "disk":
        layers = len(read_layers(config, shape))
        bound = store_bytes(per_epoch * b.rows * b.length, layers, shape.hidden_size, config.features.dtype)
        say(f"states of the target on disk: at most {_bytes(bound)}, made before the first step (not timed below)")
    seconds = 0.0
    for phase in _wanted(stage, config):
        plan = make_plan(phase, config.teacher, config.student, config.optimizer, per_epoch)
        for part in plan.stages:
            say(f"{phase}, {part.name}: {part.end - part.begin} steps")
            seconds += _one_stage(config, plan, part, shape, size * dtype.itemsize, load, target, say)
    if seconds:
        say(f"in all: {_hours(seconds)} for training, without regenerating and evaluations")


def target_shape(path: str) -> DecoderConfig | None:
    """The target's config without its weights, where it is known or lies in a local folder."""
    if path in KNOWN:
        return KNOWN[path]()
    folder = Path(path).expanduser()
    if (folder / "config.json").is_file():
        return config_from_hf(read_json(folder / "config.json"))
    return None


def parameter_count(model: Decoder) -> int:
    """Numbers in all parameters."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(model))


def _shapes(dlite) -> Any:
    return jax.eval_shape(lambda: random_params(dlite, 0))


def _wanted(stage: str, config: TrainConfig) -> list[Phase]:
    if stage == "regenerate":
        return []
    if stage == "single-stage":
        return ["single"]
    if stage == "teacher":
        return ["teacher"]
    taught = config.student.warmup_epochs + config.student.transition_epochs > 0
    return ["teacher", "student"] if stage == "all" and taught else ["student"]


def _steps_per_epoch(config: TrainConfig) -> tuple[int, str]:
    b = config.batch
    try:
        dataset = make_dataset(config.folder, config.data, batch=b.rows, length=b.length, seed=config.seed)
        return dataset.steps(), f"{dataset.counts['used']} stored answers"
    except JdliteError:
        pass
    try:
        with Path(config.prompts.path).expanduser().open(encoding="utf-8") as file:
            rows = sum(1 for line in file if line.strip())
    except OSError:
        return 1, "nothing is stored, and there are no prompts to count"
    rows = min(rows, config.prompts.limit or rows)
    # A guess until answers are there: half of the longest answer, and as much prompt.
    tokens = rows * min(b.length, config.regenerate.max_new_tokens)
    return max(1, round(tokens / (b.rows * b.length))), f"guessed from {rows} prompts"


def _one_stage(
    config: TrainConfig, plan: Plan, part: Stage, shape: DecoderConfig, size: float, load, target, say
) -> float:
    """Print memory and time of a stage; returns its seconds, 0 where they are not known."""
    phase = plan.phase
    dlite = config.teacher_dlite(shape) if phase == "teacher" else config.dlite(shape)
    taught = Template(config.teacher_dlite(shape)) if part.uses_teacher else None
    optimizer = make_optimizer(plan, config)
    label = config.teacher.label if phase == "teacher" else config.loss.label
    stored = None
    batch = _example(config, shape.vocab_size)
    if config.features.source == "disk":
        stored = read_layers(config, shape)
        batch["states"] = jnp.zeros((*batch["tokens"].shape, len(stored) + 1, shape.hidden_size), jnp.float32)
    step = Step(config, part, Template(dlite), taught, optimizer, label, stored)
    params = _shapes(dlite)
    teacher = None if taught is None else _shapes(taught.config)
    scalars = Scalars(*(jnp.float32(v) for v in (0.1, 1.0, float(part.uses_teacher), 0.0, 1.0)))
    model = abstract_decoder(shape, config.target.dtype)
    state = jax.eval_shape(optimizer.init, params)
    key = jax.random.key(0)
    compiled = jit_train(step).lower(model, teacher, params, state, batch, key, scalars).compile()
    memory = compiled.memory_analysis()
    if memory is not None:
        say(
            f"  memory: {_bytes(memory.argument_size_in_bytes)} for weights, optimiser and target, "
            f"{_bytes(memory.temp_size_in_bytes)} while a step runs"
        )
    small = size <= _LARGE and (config.target.path == DEMO or Path(config.target.path).expanduser().exists())
    if not small:
        say("  time: not measured; the target is not here or too large to be loaded for it")
        return 0.0
    target = target or load()
    live = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (params, teacher, state))
    times = []
    for i in range(_TIMED + 1):
        begin = time.monotonic()
        out = compiled(target.model, live[1], live[0], live[2], batch, jax.random.fold_in(key, i), scalars)
        jax.block_until_ready(out)
        live = (out[0], live[1], out[1])
        times.append(time.monotonic() - begin)
    seconds = statistics.median(times[1:])
    total = seconds * (part.end - part.begin)
    anchors = config.batch.rows * config.batch.anchors
    say(f"  time: {seconds:.2f} s a step, up to {anchors / seconds:.0f} anchors/s, {_hours(total)}")
    return total


def _example(config: TrainConfig, vocab: int) -> dict[str, jax.Array]:
    """A batch of noise, all of it supervised."""
    b = config.batch
    shape = (b.rows // b.micro, b.micro, b.length)
    tokens = np.random.default_rng(0).integers(0, vocab, shape)
    return {
        "tokens": jnp.asarray(tokens, jnp.int32),
        "loss_mask": jnp.ones(shape, bool),
        "segment_ids": jnp.ones(shape, jnp.int32),
        "positions": jnp.broadcast_to(jnp.arange(b.length, dtype=jnp.int32), shape),
    }


def _bytes(count: float) -> str:
    if count < 1000:
        return f"{count:.0f} bytes"
    power = min(int(math.log10(count) // 3), 4)
    return f"{count / 1000**power:.1f} {['', 'kB', 'MB', 'GB', 'TB'][power]}"


def _hours(seconds: float) -> str:
    return f"{seconds / 60:.1f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
