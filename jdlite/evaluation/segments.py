"""From a `Row` to token ids: what to append before each point at which the target decodes.

History only ever grows. A chat template that writes earlier messages differently once later ones are there cannot be
decoded with a live cache, and is refused.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

from jdlite.checkpoints.target import Target
from jdlite.errors import ConfigError, PromptError
from jdlite.evaluation.tasks import Message, Row

CHOICES = ("even", "first", "last")
# Stands for an answer that is not known yet while the text around it is worked out.
_PLACEHOLDER = "(the answer of the assistant goes here)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Which part of a row is decoded.

    Attributes:
        turns: points to decode at per row, at most; 0 for all.
        choose: which of the points: `even` spreads them from the first to the last, `first`, or `last`.
        max_prompt: tokens of history, at most; points after more are left out. Whole messages are kept or dropped.
    """

    turns: int = 0
    choose: str = "even"
    max_prompt: int | None = None

    def __post_init__(self) -> None:
        if self.turns < 0:
            raise ConfigError(f"turns must be 0 (all) or more: got {self.turns}.")
        if self.choose not in CHOICES:
            raise ConfigError(f"choose must be one of {', '.join(CHOICES)}: got {self.choose!r}.")
        if self.max_prompt is not None and self.max_prompt < 1:
            raise ConfigError(f"max_prompt must be at least 1 token: got {self.max_prompt}.")


@dataclasses.dataclass(frozen=True)
class Segment:
    """What to append before one decode.

    Attributes:
        tokens: ids to append.
        after_answer: whether the target's own previous answer, without its stop id, goes before them.
    """

    tokens: tuple[int, ...]
    after_answer: bool = False


def segments(row: Row, target: Target, limits: Limits = Limits()) -> list[Segment]:
    """The segments of a row for this target, limited; empty where even the first is too long.

    Raises:
        PromptError: the target cannot format the row, or its chat template does not only append.
    """
    if row.tokens:
        found = (Segment(ids) for ids in row.tokens)
    elif row.text:
        found = iter([Segment(tuple(target.encode(row.text)))])
    elif row.keeps_answers:
        found = _own_answers(row.messages, target)
    else:
        found = _transcript(row.messages, target)
    return limit(found, limits)


def limit(found: Iterable[Segment], limits: Limits) -> list[Segment]:
    """Drop what is too long, then choose points; a point that is not decoded is still part of the history."""
    kept, total = [], 0
    for segment in found:
        total += len(segment.tokens)
        if limits.max_prompt is not None and total > limits.max_prompt:
            break
        kept.append(segment)
    if not limits.turns or len(kept) <= limits.turns:
        return kept
    if any(segment.after_answer for segment in kept):  # later turns need the answers to the earlier ones
        return kept[: limits.turns]
    n, k = len(kept), limits.turns
    if limits.choose == "even":
        chosen = {round(i * (n - 1) / (k - 1)) for i in range(k)} if k > 1 else {n - 1}
    else:
        chosen = set(range(k)) if limits.choose == "first" else set(range(n - k, n))
    merged: list[Segment] = []
    waiting: tuple[int, ...] = ()
    for i, segment in enumerate(kept):
        waiting += segment.tokens
        if i in chosen:
            merged.append(Segment(waiting))
            waiting = ()
    return merged


def _encode(text: str, target: Target) -> tuple[int, ...]:
    # The template writes all special tokens itself. Pieces are encoded one by one, as a live session gets them.
    return tuple(target.need_tokenizer()(text, add_special_tokens=False, verbose=False)["input_ids"])


def _appended(whole: str, known: str, target: Target) -> str:
    """What `whole` adds to `known`."""
    if not whole.startswith(known):
        raise PromptError(
            f"the chat template of {target.source or 'the target'} writes earlier messages differently once later ones "
            "follow, so a cache cannot be kept over the turns of this conversation; use a template that only appends, "
            "or rows of one turn."
        )
    return whole[len(known) :]


def _transcript(messages: Sequence[Message], target: Target) -> Iterator[Segment]:
    """A point where each assistant message stands, and one at the end if the last message is not the assistant's."""
    places = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i]
    if messages[-1]["role"] != "assistant":
        places.append(len(messages))
    whole = target.render_chat(messages, add_generation_prompt=messages[-1]["role"] != "assistant")
    known = ""
    for place in places:
        text = target.render_chat(messages[:place])
        _appended(whole, text, target)
        yield Segment(_encode(_appended(text, known, target), target))
        known = text


def _own_answers(messages: Sequence[Message], target: Target) -> Iterator[Segment]:
    """A point after each user message; the target's answers come between."""
    places = [i + 1 for i, m in enumerate(messages) if m["role"] == "user"]
    places[-1] = len(messages)
    given: list[Message] = list(messages[: places[0]])
    text = target.render_chat(given)
    yield Segment(_encode(text, target))
    for before, place in itertools.pairwise(places):
        given += [{"role": "assistant", "content": _PLACEHOLDER}, *messages[before:place]]
        longer = target.render_chat(given)
        yield Segment(_encode(_appended(longer, text + _PLACEHOLDER, target), target), after_answer=True)
        text = longer


def history_after(answer: Sequence[int], segment: Segment, stop_ids: Sequence[int]) -> list[int]:
    """Ids to append for a segment, given the target's answer before it: the template closes the answer itself."""
    if not segment.after_answer:
        return list(segment.tokens)
    answer = list(answer)
    if answer and answer[-1] in stop_ids:
        answer.pop()
    return answer + list(segment.tokens)
