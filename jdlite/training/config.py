"""Configuration of a training run: what a YAML file of `configs/` holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jdlite.errors import ConfigError
from jdlite.models.config import DecoderConfig
from jdlite.models.dlite_config import DLiteConfig
from jdlite.models.dlite_teacher import teacher_config
from jdlite.training.data import DataConfig
from jdlite.training.prompts import PromptsConfig
from jdlite.training.regenerate import RegenerateConfig

Dtype = Literal["float32", "bfloat16", "float16"]
Label = Literal["data", "target", "distribution"]


def _at_least(owner: Any, limits: Mapping[str, float], group: str) -> None:
    for name, least in limits.items():
        value = getattr(owner, name)
        if value is not None and not value >= least:  # NaN is refused too
            raise ConfigError(f"{group}.{name} must be at least {least}: got {value}; give a larger number.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """The frozen target.

    Attributes:
        path: Hugging Face folder, hub id or .gguf file; `demo` stands for SmolLM2-135M-Instruct, fetched once.
        dtype: of its weights and activations.
    """

    path: str = "demo"
    dtype: Dtype = "float32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """What one step sees.

    Attributes:
        rows: packed rows per step.
        length: tokens of a row.
        micro_rows: rows that go through the networks at once; gradients are summed over the others (accumulation).
            Divides `rows`; None takes all rows.
        anchors: anchors per row, drawn anew in every step.
        prompt_end: draw the last token before an answer as an anchor too, where decoding drafts first.
        recompute: make the activations inside the drafter's layers again in the backward pass instead of keeping them:
            less memory, about a third more work for the backbone. The result is the same but for rounding.
    """

    rows: int = 32
    length: int = 4096
    micro_rows: int | None = None
    anchors: int = 512
    prompt_end: bool = False
    recompute: bool = False

    def __post_init__(self) -> None:
        _at_least(self, {"rows": 1, "length": 4, "micro_rows": 1, "anchors": 1}, "batch")
        if self.rows % self.micro:
            raise ConfigError(
                f"batch.micro_rows must divide batch.rows: got {self.micro} and {self.rows}; choose a divisor."
            )

    @property
    def micro(self) -> int:
        """Rows that go through the networks at once."""
        return self.rows if self.micro_rows is None else self.micro_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeaturesOptions:
    """Where the target's states come from.

    Attributes:
        source: `online` runs the target in every step. `disk` runs it over all examples once, before the first step,
            and reads its states from the run's folder: (taps + 1) x hidden size numbers per token, for a small target
            and several epochs.
        dtype: of the states on disk.
    """

    source: Literal["online", "disk"] = "online"
    dtype: Dtype = "bfloat16"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossOptions:
    """How losses are weighted and computed.

    Attributes:
        gamma: draft i = 1..K weighs exp(-(i - 1) / gamma).
        contiguous: a label that is not supervised cuts all later ones of its anchor, instead of itself alone.
        label: of the cross-entropy: the `target`'s most likely token, the `data`'s, or the target's whole
            `distribution` (not with `top_k`).
        base_gamma: decay of the auxiliary cross-entropy of the backbone (see `StudentOptions.base_ce`).
        top_k: compare distributions on the target's k most likely tokens, all others counted as one; 0 compares the
            whole vocabulary.
        pairs: (anchor, draft) pairs whose logits are held at once.
        vocab_tile: vocabulary rows of one piece of a product; 0 chooses by platform.
        table_mb: target distributions at all positions of a micro-batch are kept if they fit; otherwise they are
            computed for each anchor again.
    """

    gamma: float = 4.0
    contiguous: bool = False
    label: Label = "target"
    base_gamma: float = 12.0
    top_k: int = 0
    pairs: int = 448
    vocab_tile: int = 0
    table_mb: int = 512

    def __post_init__(self) -> None:
        _at_least(self, {"top_k": 0, "pairs": 1, "vocab_tile": 0, "table_mb": 0}, "loss")
        for name in ("gamma", "base_gamma"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"loss.{name} must be positive: got {getattr(self, name)}; 4 is usual.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """AdamW with a linear warm-up and a cosine to zero.

    Attributes:
        learning_rate: at its highest.
        warmup: share of the steps in which it rises.
        final: share of the learning rate that is left at the end.
        beta1, beta2, epsilon, weight_decay: of AdamW.
        clip: largest norm of the gradient.
    """

    learning_rate: float = 5e-4
    warmup: float = 0.04
    final: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 1.0

    def __post_init__(self) -> None:
        _at_least(self, {"weight_decay": 0, "final": 0, "warmup": 0, "beta1": 0, "beta2": 0}, "optimizer")
        for name in ("learning_rate", "epsilon", "clip"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"optimizer.{name} must be positive: got {getattr(self, name)}.")
        for name in ("warmup", "beta1", "beta2", "final"):
            if getattr(self, name) > 1:
                raise ConfigError(f"optimizer.{name} must be at most 1: got {getattr(self, name)}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TeacherOptions:
    """The history teacher.

    Attributes:
        window: past positions that it sees.
        epochs: passes over the data.
        steps: number of steps, instead of epochs.
        ce, l1: weights of token cross-entropy and of the L1 distance to the target's distribution.
        label: as in `LossOptions`, for the teacher; the paper trains it on the data's tokens.
        learning_rate: its own; None takes the optimizer's.
    """

    window: int = 128
    epochs: float = 8
    steps: int | None = None
    ce: float = 1.0
    l1: float = 0.0
    label: Label = "data"
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        _at_least(self, {"window": 2, "epochs": 0, "steps": 1, "ce": 0, "l1": 0}, "teacher")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudentOptions:
    """The drafter: warm-up on the teacher, then the target itself, under one optimiser and one schedule.

    Attributes:
        warmup_epochs: forward KL from the teacher; the head is the teacher's and frozen.
        transition_epochs: blend of both losses along a cosine, head free.
        stable_epochs: `ce` and `l1` against the target.
        steps: number of steps of all three together, in the proportion of their epochs, instead of epochs.
        ce, l1: weights of token cross-entropy and of the L1 distance to the target's distribution.
        base_ce: weight of an auxiliary token cross-entropy of the backbone's states under the target's LM head.
    """

    warmup_epochs: float = 2
    transition_epochs: float = 0
    stable_epochs: float = 6
    steps: int | None = None
    ce: float = 0.1
    l1: float = 1.0
    base_ce: float = 0.0

    def __post_init__(self) -> None:
        limits = {"warmup_epochs": 0, "transition_epochs": 0, "stable_epochs": 0, "steps": 1}
        _at_least(self, limits | {"ce": 0, "l1": 0, "base_ce": 0}, "student")
        if not self.warmup_epochs + self.transition_epochs + self.stable_epochs > 0:
            raise ConfigError("student has no epochs at all; set stable_epochs.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """When to save.

    Attributes:
        every: steps between two checkpoints.
        keep: newest checkpoints to keep.
    """

    every: int = 500
    keep: int = 2

    def __post_init__(self) -> None:
        _at_least(self, {"every": 1, "keep": 1}, "checkpoint")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """How the drafter is watched.

    Attributes:
        log_every: steps that one line of metrics averages.
        every: steps between two evaluations on held-out text.
        batches: held-out batches of one evaluation.
        prompts: held-out prompts that are decoded for the true tau; 0 is none.
        max_new_tokens: of those decodes.
        max_prompt_tokens: longer prompts are left out.
        tensorboard: write TensorBoard event files too, where tensorboardX is installed.
        wandb: project to log to, where wandb is installed.
    """

    log_every: int = 10
    every: int = 500
    batches: int = 4
    prompts: int = 16
    max_new_tokens: int = 64
    max_prompt_tokens: int = 512
    tensorboard: bool = True
    wandb: str | None = None

    def __post_init__(self) -> None:
        limits = {"log_every": 1, "every": 1, "batches": 0, "prompts": 0, "max_new_tokens": 1, "max_prompt_tokens": 1}
        _at_least(self, limits, "evaluation")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshOptions:
    """Devices of all processes: `data` parts of the rows, `model` parts of the target's layers."""

    data: int = 1
    model: int = 1

    def __post_init__(self) -> None:
        _at_least(self, {"data": 1, "model": 1}, "mesh")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run, from prompts to a drafter.

    Attributes:
        folder: everything of the run is kept here.
        seed: of weights, anchors and the order of the data.
        target: the frozen target.
        drafter: fields of `DLiteConfig`. `preset: NAME` or `preset: target` (its dimensions; the default) gives those
            that are not named.
        initialise: weights of teacher and student at the start: `random` as in the paper, or from the `target`'s last
            layers and LM head.
        start: a drafter's checkpoint to go on from, instead of `initialise`.
        compute_dtype: of the drafter's activations; its weights are kept in float32.
        prompts, regenerate, data: see there.
        batch, features, loss, optimizer, teacher, student, checkpoint, evaluation, mesh: see there.
    """

    folder: str
    seed: int = 0
    target: TargetOptions = TargetOptions()
    drafter: Mapping[str, Any] = dataclasses.field(
        default_factory=dict, metadata={"partial": DLiteConfig, "extra": ("preset",)}
    )
    initialise: Literal["random", "target"] = "random"
    start: str | None = None
    compute_dtype: Dtype = "float32"
    prompts: PromptsConfig = dataclasses.field(default_factory=PromptsConfig)
    regenerate: RegenerateConfig = dataclasses.field(default_factory=RegenerateConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    batch: BatchOptions = BatchOptions()
    features: FeaturesOptions = FeaturesOptions()
    loss: LossOptions = LossOptions()
    optimizer: OptimizerOptions = OptimizerOptions()
    teacher: TeacherOptions = TeacherOptions()
    student: StudentOptions = StudentOptions()
    checkpoint: CheckpointOptions = CheckpointOptions()
    evaluation: EvaluationOptions = EvaluationOptions()
    mesh: MeshOptions = MeshOptions()

    def __post_init__(self) -> None:
        if not self.folder:
            raise ConfigError("folder is empty; name a folder for the run.")
        if self.batch.micro % self.mesh.data:
            raise ConfigError(
                f"mesh.data must divide the rows that go through the networks at once: got {self.mesh.data} for "
                f"{self.batch.micro}; change batch.micro_rows or mesh.data."
            )
        if self.loss.top_k and "distribution" in (self.loss.label, self.teacher.label):
            raise ConfigError(
                f"the label distribution needs the whole vocabulary: got loss.top_k {self.loss.top_k}; set it to 0, or "
                "choose the label target."
            )

    def dlite(self, target: DecoderConfig) -> DLiteConfig:
        """The drafter for `target`, checked.

        Raises:
            ConfigError: fields are missing or refused, or it does not fit the target.
        """
        fields = dict(self.drafter)
        if fields.get("preset", "target") == "target":
            fields.pop("preset", None)
            if "mask_token_id" not in fields:
                raise ConfigError(
                    "drafter.mask_token_id is missing; name a row of the target's embedding that no text uses."
                )
            fields = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
            config = DLiteConfig.for_target(target, **fields)  # pyright: ignore[reportArgumentType]
        else:
            config = DLiteConfig.from_dict(fields)
        config.check_target(target)
        return config

    def teacher_dlite(self, target: DecoderConfig) -> DLiteConfig:
        """The teacher of `dlite(target)`; errors as there."""
        return teacher_config(dataclasses.replace(self.dlite(target), history_layers=None), self.teacher.window)


# What may differ between the start of a run and its continuation without changing what is trained.
FREE_GROUPS = ("folder", "checkpoint", "evaluation", "mesh")
