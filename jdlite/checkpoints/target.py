"""A target: a decoder with its tokenizer, stop ids and generation defaults."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jdlite.checkpoints.assemble import parameter_paths
from jdlite.checkpoints.gguf import load_gguf
from jdlite.checkpoints.huggingface import load_huggingface, load_tokenizer, read_json, resolve_folder
from jdlite.errors import CheckpointError, PromptError
from jdlite.models.config import DecoderConfig
from jdlite.models.decoder import Decoder
from jdlite.models.sharding import here


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A target model and what is needed to talk to it.

    Attributes:
        model: the decoder.
        tokenizer: a transformers tokenizer, or None.
        eos_ids: tokens that end a text, from the generation config, else the model config, else the tokenizer.
        source: path or hub id that it was loaded from; informational.
        generation: the checkpoint's generation defaults (`generation_config.json`).
    """

    model: Decoder
    tokenizer: Any = None
    eos_ids: tuple[int, ...] = ()
    source: str = ""
    generation: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def config(self) -> DecoderConfig:
        """Shape and options of the model."""
        return self.model.config

    @functools.cached_property
    def weights_hash(self) -> str:
        """SHA-256 over names, shapes, dtypes and values of all parameters, in hex; computed at first use."""
        digest = hashlib.sha256()
        for path, leaf in sorted(parameter_paths(self.model).items()):
            value = np.asarray(here(leaf.get_value()))
            digest.update(f"{path} {value.dtype.name} {value.shape}\n".encode())
            digest.update(np.ascontiguousarray(value).view(np.uint8).data)
        return digest.hexdigest()

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 over names, shapes, and the first and last row in bfloat16 of all parameters, in hex.

        Tells models apart in no time, and is the same whether the weights were loaded in float32 or in bfloat16.
        """
        digest = hashlib.sha256()
        for path, leaf in sorted(parameter_paths(self.model).items()):
            value = here(leaf.get_value())
            digest.update(f"{path} {value.shape}\n".encode())
            for row in (value[0], value[-1]):
                digest.update(np.asarray(row).astype(jnp.bfloat16).tobytes())
        return digest.hexdigest()

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain text.

        Raises:
            PromptError: the target has no tokenizer.
        """
        return list(self.need_tokenizer()(text)["input_ids"])

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **options
    ) -> list[int]:
        """Token ids of a conversation in the model's chat format.

        Args:
            messages: `{"role": ..., "content": ...}` in order.
            add_generation_prompt: end with the opening of the assistant's turn.
            options: passed on to the chat template (for example `tools` or `enable_thinking`).

        Raises:
            PromptError: the target has no tokenizer or no chat template, or the template refuses the messages.
        """
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, **options)
        # The template writes all special tokens itself.
        return list(self.need_tokenizer()(text, add_special_tokens=False)["input_ids"])

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **options
    ) -> str:
        """Text of a conversation in the model's chat format; arguments and errors as in `encode_chat`."""
        tokenizer = self.need_tokenizer()
        if not getattr(tokenizer, "chat_template", None):
            raise PromptError(
                f"{self.source or 'the target'} has no chat template; give a plain prompt or a chat model."
            )
        try:
            return tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **options
            )
        except Exception as error:  # templates raise jinja2's errors and any of Python's
            raise PromptError(
                f"the chat template cannot format these messages ({error}); check roles and contents."
            ) from error

    def need_tokenizer(self):
        """The tokenizer.

        Raises:
            PromptError: the target has none.
        """
        if self.tokenizer is None:
            raise PromptError(f"{self.source or 'the target'} has no tokenizer; give token ids instead of text.")
        return self.tokenizer


def _eos_ids(generation: Mapping[str, Any], config: Mapping[str, Any], tokenizer) -> tuple[int, ...]:
    """Stop ids from the first source that has any."""
    for value in (generation.get("eos_token_id"), config.get("eos_token_id"), getattr(tokenizer, "eos_token_id", None)):
        if value is not None:
            ids = value if isinstance(value, list | tuple) else [value]
            return tuple(int(i) for i in ids)
    return ()


def load_target(
    path_or_repo: str | Path,
    dtype="float32",
    *,
    placement=None,
    progress: Callable[[int, int], None] | None = None,
) -> Target:
    """Load a target from a Hugging Face folder, a hub id or a `.gguf` file.

    Example: `target = load_target("Qwen/Qwen3-0.6B", dtype="bfloat16")`.

    Args:
        path_or_repo: folder, hub id or GGUF file.
        dtype: of the parameters: float32, bfloat16 or float16.
        placement: where each parameter goes (`jdlite.models.sharding.placement`); folders only.
        progress: called with (tensors done, tensors in all).

    Raises:
        CheckpointError: the files are absent or damaged, or do not fit together.
        ConfigError: the model is not supported.
    """
    path = Path(path_or_repo).expanduser()
    if path.suffix == ".gguf":
        if placement is not None:
            raise CheckpointError(
                "placement is for Hugging Face folders; convert the GGUF file with convert_gguf first."
            )
        model, tokenizer, generation = load_gguf(path, dtype, progress)
        hf: dict[str, Any] = {}
    else:
        folder = resolve_folder(path_or_repo)
        hf = read_json(folder / "config.json")
        generation = read_json(folder / "generation_config.json", required=False)
        # The tokenizer first: it is quick, and so are its errors.
        tokenizer = load_tokenizer(folder)
        model = load_huggingface(folder, dtype, placement=placement, progress=progress)
    return Target(
        model=model,
        tokenizer=tokenizer,
        eos_ids=_eos_ids(generation, hf, tokenizer),
        source=str(path_or_repo),
        generation=generation,
    )
