"""`decode`: text, chats or token ids in, tokens and text out, through the jitted loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import platformdirs

from jdlite.checkpoints.target import Target
from jdlite.decoding.costs import (
    costs_file,
    draft_file,
    load_costs,
    load_draft,
    measure_costs,
    measure_draft,
    save_costs,
    save_draft,
)
from jdlite.decoding.policy import Costs, variants
from jdlite.decoding.sampling import GREEDY, Sampling
from jdlite.decoding.session import Result, Session
from jdlite.drafters.base import Drafter
from jdlite.drafters.registry import make_drafter
from jdlite.errors import CapacityError, ConfigError, PromptError

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


def cache_folder() -> Path:
    """Where converted models, cost tables and compiled programs are kept."""
    return Path(platformdirs.user_cache_dir("jdlite", appauthor=False))


def encode_prompt(target: Target, prompt: Prompt) -> list[int]:
    """Token ids of a text, a chat (a list of messages) or a list of ids.

    Raises:
        PromptError: the prompt is empty or of another kind.
    """
    if isinstance(prompt, str):
        ids = target.encode(prompt)
    elif isinstance(prompt, Sequence) and prompt and all(isinstance(m, Mapping) for m in prompt):
        ids = target.encode_chat(prompt)  # pyright: ignore[reportArgumentType]
    elif isinstance(prompt, Sequence) or hasattr(prompt, "__array__"):
        ids = list(prompt)  # pyright: ignore[reportArgumentType]
    else:
        raise PromptError(f"a prompt is a text, a list of messages or a list of token ids: got {prompt!r:.60}.")
    if not ids:
        raise PromptError("a prompt is empty; give at least one token.")
    return ids  # pyright: ignore[reportReturnType]


def encode_stops(target: Target, stop: Sequence[str | int | Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Stop ids and stop sequences from texts, ids and id lists; a text of one token is a stop id.

    A text is matched as the tokens it encodes to on its own; where the model may write it with other tokens (a word
    with and without a leading space), give both.
    """
    ids, sequences = [], []
    for item in [stop] if isinstance(stop, str) else stop:
        tokens = [item] if isinstance(item, int | np.integer) else item
        if isinstance(tokens, str):
            tokens = list(target.need_tokenizer()(tokens, add_special_tokens=False)["input_ids"])
        if not tokens:
            raise ConfigError("a stop text is empty; leave it out or give at least one character.")
        if len(tokens) == 1:
            ids.append(int(tokens[0]))
        else:
            sequences.append([int(t) for t in tokens])
    return ids, sequences


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the stop text begins that is whole first, or None; of several that end together, the longest.

    Text that arrives in pieces is thus cut at the same place as all of it at once.
    """
    found = [(at + len(stop), at) for stop in stops if stop and (at := text.find(stop)) >= 0]
    return min(found)[1] if found else None


def bucket(length: int, limit: int) -> int:
    """Capacity for a length: powers of two and the halves between them (256, 384, 512, 768, ...), so that few distinct
    capacities are compiled; never above `limit`."""
    size = 256
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size // 3 * 4
    return min(size, limit)


def resolve_costs(target: Target, drafter: Drafter, batch: int, budget: str | Costs) -> Costs:
    """The cost table that decides how many nodes are verified.

    Args:
        budget: `"auto"`: the table measured for this machine and model (`calibrate`), or a typical one; `"full"`:
            verify all that is drafted (largest tau); or a table.

    Raises:
        ConfigError: any other budget.
    """
    counts = variants(drafter.max_nodes)
    if isinstance(budget, Costs):
        return budget
    if budget == "full":
        return Costs.free(counts)
    if budget == "auto":
        folder, network = cache_folder(), drafter.fit(target.model).network
        stored = load_costs(costs_file(folder, target.model, batch))
        costs = Costs.typical(counts) if stored is None else stored.resample(counts)
        draft = None if network is None else load_draft(draft_file(folder, target.model, network, batch))
        return costs if draft is None else dataclasses.replace(costs, draft=jnp.float32(draft))
    raise ConfigError(f'budget must be "auto", "full" or a Costs table: got {budget!r}.')


def calibrate(
    target: Target, drafter: str | Drafter, *, batch: int = 1, folder: Path | None = None, **options
) -> Costs:
    """Measure what verifying costs on this machine, once for all drafters, and what a draft of the drafter's network
    costs, if it has one; later calls and `decode(budget="auto")` read the files.

    Args:
        target: the target.
        drafter: whose numbers of nodes the table is for, and whose network is timed.
        batch: B of the decode calls to come.
        folder: where to keep the files; the user's cache folder by default.
        options: for `decoding.costs.measure_costs`.
    """
    drafter = make_drafter(drafter, target.model.dtype.name, target) if isinstance(drafter, str) else drafter
    counts = variants(drafter.max_nodes)
    if counts == (1,):
        return Costs.free(counts)
    folder = folder or cache_folder()
    path = costs_file(folder, target.model, batch)
    costs = load_costs(path)
    if costs is None:
        costs = measure_costs(target.model, batch=batch, **options)
        save_costs(path, costs)
    costs = costs.resample(counts)
    network = drafter.fit(target.model).network
    if network is None:
        return costs
    path = draft_file(folder, target.model, network, batch)
    draft = load_draft(path)
    if draft is None:
        draft = measure_draft(target.model, network, batch=batch)
        save_draft(path, draft)
    return dataclasses.replace(costs, draft=jnp.float32(draft))


def decode(
    target: Target,
    prompts: Prompt | Sequence[Prompt],
    *,
    drafter: str | Drafter = "adapld",
    sampling: Sampling | Sequence[Sampling] = GREEDY,
    max_new_tokens: int | Sequence[int] = 256,
    stop: Sequence[str | int | Sequence[int]] = (),
    use_eos: bool = True,
    seed: int | Sequence[int] = 0,
    capacity: int | None = None,
    budget: str | Costs = "auto",
    cache_dtype=None,
    prefill_chunk: int = 128,
    log_rounds: int = 0,
) -> Result:
    """Decode prompts with speculative decoding: the same tokens as plain decoding, in fewer forwards of the target.

    Example:
        >>> result = jdlite.decode(target, [{"role": "user", "content": "Fix this code: ..."}], max_new_tokens=200)
        >>> print(result.texts[0], result.tau)

    Args:
        target: from `load_target`.
        prompts: a text, a chat (list of messages), a list of token ids, or a list of these (a ragged batch).
        drafter: a name with options (`"adapld"`, `"pld:num_drafts=5"`, `"dlite:FOLDER"`, `"hybrid:FOLDER"`; see
            `make_drafter`) or a `Drafter`. Name a folder once and keep the `Drafter`: each call would read it again.
        sampling: for all rows, or one per row; greedy by default.
        max_new_tokens: budget of all rows, or one per row.
        stop: texts, token ids or token sequences that end a row, besides the target's own end-of-text tokens.
        use_eos: whether the target's end-of-text tokens end a row.
        seed: an integer, or one per row.
        capacity: tokens that a row can hold; by default what prompt and budget need, rounded up to a bucket.
        budget: see `resolve_costs`.
        cache_dtype: of keys and values; the model's by default.
        prefill_chunk: tokens of a row per prefill forward.
        log_rounds: rounds per row to record in `Result.stats.log`.

    Raises:
        PromptError: a prompt is empty or not usable.
        CapacityError: a prompt does not fit.
        ConfigError: an option is not usable.
    """
    drafter = make_drafter(drafter, target.model.dtype.name, target) if isinstance(drafter, str) else drafter
    if not isinstance(drafter, Drafter):
        raise ConfigError(f"a drafter is a name or a Drafter: got {drafter!r:.60}.")
    drafter = drafter.fit(target.model)
    rows = [encode_prompt(target, prompt) for prompt in _as_batch(prompts)]
    limit = target.config.max_position
    longest = max(len(row) for row in rows)
    if longest >= limit:
        raise CapacityError(
            f"a prompt has {longest} tokens but the model's context is {limit}; "
            "shorten the prompt or use another model."
        )
    budgets = np.asarray(max_new_tokens)
    if not np.issubdtype(budgets.dtype, np.integer):
        raise ConfigError(f"max_new_tokens must be whole numbers: got {max_new_tokens!r:.60}.")
    if budgets.shape not in ((), (len(rows),)):
        raise ConfigError(f"max_new_tokens must be one number or one per row: got {budgets.size} for {len(rows)} rows.")
    budgets = np.broadcast_to(budgets, len(rows)).tolist()
    if capacity is None:
        need = max(len(row) + max(new, 0) for row, new in zip(rows, budgets, strict=True))
        capacity = bucket(max(need, drafter.max_depth + 1), limit)
    session = Session(
        target.model,
        drafter,
        batch=len(rows),
        capacity=capacity,
        cache_dtype=cache_dtype,
        prefill_chunk=prefill_chunk,
        costs=resolve_costs(target, drafter, len(rows), budget),
    )
    session.append(rows)
    ids, sequences = encode_stops(target, stop)
    ids += list(target.eos_ids) if use_eos else []
    result = session.decode(
        sampling=sampling,
        max_new_tokens=budgets,
        stop_ids=[ids] * len(rows),
        stop_sequences=[sequences] * len(rows),
        seed=seed,
        log_rounds=log_rounds,
    )
    return dataclasses.replace(result, texts=decode_texts(target, result.tokens))


def decode_texts(target: Target, rows: Sequence[Sequence[int]]) -> list[str] | None:
    """The texts of token lists without special tokens, or None without a tokenizer."""
    if target.tokenizer is None:
        return None
    return [target.tokenizer.decode(list(row), skip_special_tokens=True) for row in rows]


def _as_batch(prompts) -> list:
    """One prompt or a list of prompts, as a list."""
    if not (isinstance(prompts, Sequence) or hasattr(prompts, "__array__")):
        raise PromptError(f"a prompt is a text, a list of messages or a list of token ids: got {prompts!r:.60}.")
    if isinstance(prompts, str) or (len(prompts) and not isinstance(prompts[0], str | Sequence)):
        return [prompts]
    if not len(prompts):
        raise PromptError("there is no prompt; give at least one.")
    return list(prompts)
