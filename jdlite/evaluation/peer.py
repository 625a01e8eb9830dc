"""transformers' own generation on the same prompts and weights, for the same table as jdlite's drafters.

Prefill is done outside of the timing, as for jdlite: all tokens but the newest are run into a cache, and `generate`
goes on from there, so that its forwards are decode forwards only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jdlite.errors import CheckpointError, ConfigError

PLAIN, LOOKUP = "transformers", "transformers:pld"
PEERS = (PLAIN, LOOKUP)


@dataclasses.dataclass(frozen=True)
class PeerRun:
    """One timed `generate`.

    Attributes:
        tokens: new tokens.
        seconds: of the whole `generate` call; prefill is not in it.
        forwards: passes of the model in it.
    """

    tokens: list[int]
    seconds: float
    forwards: int


class TransformersPeer:
    """A causal language model in torch, float32, with a cache that grows with the history.

    Args:
        folder: Hugging Face folder or hub id of the target's weights.
        stop_ids: the target's end-of-text tokens.
        threads: of torch.
        lookup_tokens: `prompt_lookup_num_tokens`.

    Raises:
        ConfigError: torch is not installed.
        CheckpointError: the weights cannot be loaded.
    """

    def __init__(self, folder: str | Path, stop_ids: Sequence[int], *, threads: int = 2, lookup_tokens: int = 10):
        try:
            import torch
        except ImportError as error:
            raise ConfigError(
                "--peer transformers needs torch, which is not installed; install jdlite[parity] or leave the peer out."
            ) from error
        import transformers

        if str(folder).endswith(".gguf"):
            raise ConfigError(
                f"--peer transformers needs a Hugging Face folder, but the target is {folder}; "
                "give the same weights as a folder with --peer-weights."
            )
        torch.set_num_threads(threads)
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"transformers cannot load {folder} ({error}); give a Hugging Face folder."
            ) from error
        self._torch, self._transformers = torch, transformers
        self.model: Any = model.eval()
        # transformers renamed this argument within its version 5.
        names = inspect.signature(self.model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        # Prompt lookup's first forward would run the whole prompt again, cached or not.
        self._prepare = self.model.prepare_inputs_for_generation
        self.model.prepare_inputs_for_generation = self._only_new
        # The checkpoint's sampling defaults must not mix with ours.
        self.model.generation_config = transformers.GenerationConfig()
        self.stop_ids, self.lookup_tokens = list(stop_ids), lookup_tokens
        self.reset()

    def reset(self) -> None:
        """Begin a new row."""
        self.tokens: list[int] = []
        self._cache: Any = self._transformers.DynamicCache(config=self.model.config)

    def _only_new(self, input_ids, *args, **kwargs) -> dict:
        """Inputs of a forward without the tokens that are cached."""
        inputs = self._prepare(input_ids, *args, **kwargs)
        new = input_ids.shape[1] - self._cache.get_seq_length()
        for name in ("input_ids", "position_ids", "cache_position"):
            if inputs.get(name) is not None and inputs[name].shape[-1] > new:
                inputs[name] = inputs[name][..., -new:].contiguous()
        return inputs

    def append(self, tokens: Sequence[int], chunk: int = 512) -> None:
        """Add to the history and run everything but the newest token."""
        self.tokens += list(tokens)
        with self._torch.inference_mode():
            for begin in range(self._cache.get_seq_length(), len(self.tokens) - 1, chunk):
                piece = self._torch.tensor([self.tokens[begin : min(begin + chunk, len(self.tokens) - 1)]])
                self.model(input_ids=piece, use_cache=True, logits_to_keep=1, **{self._cache_name: self._cache})

    def decode(self, kind: str, max_new_tokens: int) -> PeerRun:
        """Generate greedily from the present history, and forget the outcome.

        Args:
            kind: one of `PEERS`.
            max_new_tokens: budget.
        """
        torch = self._torch
        options: dict[str, Any] = {"prompt_lookup_num_tokens": self.lookup_tokens} if kind == LOOKUP else {}
        config = self._transformers.GenerationConfig(
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=self.stop_ids or None,
            pad_token_id=self.stop_ids[0] if self.stop_ids else 0,
            **options,
        )
        ids = torch.tensor([self.tokens])
        with torch.inference_mode(), self._counting() as count:
            begin = time.perf_counter()
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                **{self._cache_name: self._cache},
            )
            seconds = time.perf_counter() - begin
        surplus = self._cache.get_seq_length() - (len(self.tokens) - 1)
        if surplus > 0:
            self._cache.crop(-surplus)
        return PeerRun(out[0, len(self.tokens) :].tolist(), seconds, count[0])

    @contextlib.contextmanager
    def _counting(self) -> Iterator[list[int]]:
        """Counts forwards of the model."""
        count = [0]

        def hook(*_) -> None:
            count[0] += 1

        handle = self.model.register_forward_pre_hook(hook)
        try:
            yield count
        finally:
            handle.remove()
