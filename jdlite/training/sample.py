"""Showing what a run trains on: one example with the supervised tokens set off."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from jdlite.training.records import Example

SUPERVISED, CONTEXT, NOTE = "bold green", "dim", "bold cyan"
# Stand around supervised text where there are no colours.
_OPEN, _CLOSE = "⟦", "⟧"


def show(item: Example | Mapping[str, np.ndarray], tokenizer: Any, console: Console | None = None) -> None:
    """Print an example, or the first row of a batch with all examples that are packed into it.

    Text that is learned from is green, the rest is dim; without colours it stands in ⟦ ⟧.

    Args:
        item: a stored example, or a batch as `data.make_dataset` makes them.
        tokenizer: to decode with.
        console: where to print; standard output by default.
    """
    console = console or Console(highlight=False)
    console.print(sample_text(item, tokenizer, marks=console.color_system is None), soft_wrap=True)


def sample_text(item: Example | Mapping[str, np.ndarray], tokenizer: Any, *, marks: bool = False) -> Text:
    """What `show` prints.

    Args:
        item: as in `show`.
        tokenizer: as in `show`.
        marks: put ⟦ ⟧ around supervised text.
    """
    text = Text()
    if isinstance(item, Example):
        text.append(f"example {item.id}, ended by {item.finish}: {_counts(item.loss_mask)}\n", NOTE)
        _append(text, item.tokens, item.loss_mask, tokenizer, marks)
        return text
    tokens, mask, segments = (np.asarray(item[name])[0] for name in ("tokens", "loss_mask", "segment_ids"))
    padding = int((segments == 0).sum())
    count = int(segments.max(initial=0))
    text.append(f"row of {tokens.size} tokens, {padding} of them padding, {count} examples\n", NOTE)
    for segment in range(1, count + 1):
        here = segments == segment
        text.append(f"example {segment} of {count}: {_counts(mask[here])}\n", NOTE)
        _append(text, tokens[here], mask[here], tokenizer, marks)
    return text


def _counts(mask: np.ndarray) -> str:
    return f"{mask.size} tokens, {int(mask.sum())} of them supervised"


def _append(text: Text, tokens: np.ndarray, mask: np.ndarray, tokenizer: Any, marks: bool) -> None:
    """Add the tokens in runs of equal mask: decoded one by one, a character of several tokens would be lost."""
    borders = [0, *(np.flatnonzero(np.diff(mask.astype(int))) + 1).tolist(), mask.size]
    for first, last in itertools.pairwise(borders):
        if first == last:
            continue
        piece = tokenizer.decode(tokens[first:last].tolist(), skip_special_tokens=False)
        supervised = bool(mask[first])
        text.append(f"{_OPEN}{piece}{_CLOSE}" if supervised and marks else piece, SUPERVISED if supervised else CONTEXT)
    text.append("\n")
