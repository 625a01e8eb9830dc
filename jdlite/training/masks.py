"""Which tokens of a conversation are the assistant's, found by rendering the template with and without each turn."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jdlite.errors import PromptError

Message = Mapping[str, Any]
HistoryMode = Literal["append_only", "last_turn"]


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A conversation as tokens.

    Attributes:
        tokens: `[T]` int32.
        assistant_mask: `[T]` bool, True on what the assistant wrote, the token that ends its turn included. The opening
            of the turn (role name, empty thoughts that the template writes itself) is not its own.
    """

    tokens: np.ndarray
    assistant_mask: np.ndarray


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    stop_ids: Collection[int] = (),
    history: HistoryMode = "append_only",
    options: Mapping[str, Any] | None = None,
) -> Rendered:
    """Tokens of a conversation and the mask of the assistant's.

    What the assistant wrote in turn i is the difference between the template's text of the messages before it, with the
    opening of an answer, and its text of the messages up to it. That holds only where the template appends: its text of
    the whole conversation must begin with both. Example, where `|` marks the borders: `user: hi; assistant: |ho;|`.

    Args:
        tokenizer: a fast transformers tokenizer with a chat template.
        messages: the conversation; needs an assistant message. One that begins the conversation answers nothing and is
            not masked.
        tools: passed to the template.
        stop_ids: tokens that end the assistant's turn. What the template writes after the last of them in a turn
            (a line break, usually) is not the assistant's.
        history: `append_only` masks every assistant turn and refuses a template that writes a turn differently once
            later ones follow (as some do with thoughts); `last_turn` ends the conversation with its last assistant
            message and masks that one only, which any template allows.
        options: more arguments of the template.

    Raises:
        PromptError: no assistant message, a template that rewrites or refuses the messages, or a tokenizer that does
            not tell which characters a token stands for.
    """
    turns = [i for i, message in enumerate(messages) if i and message["role"] == "assistant"]
    if not turns:
        raise PromptError(
            "the conversation has no assistant message after another one to learn from; give one or regenerate answers."
        )
    if history == "last_turn":
        turns = turns[-1:]
        messages = messages[: turns[0] + 1]
    whole = chat_text(tokenizer, messages, tools, opening=False, options=options)
    spans = []
    for turn in turns:
        before = chat_text(tokenizer, messages[:turn], tools, opening=True, options=options)
        after = chat_text(tokenizer, messages[: turn + 1], tools, opening=False, options=options)
        if not (after.startswith(before) and whole.startswith(after)):
            raise PromptError(_rewrites(turn, history, appended=after.startswith(before)))
        spans.append((len(before), len(after)))
    return _masked(tokenizer, whole, spans, frozenset(stop_ids))


def _rewrites(turn: int, history: HistoryMode, appended: bool) -> str:
    if not appended:
        return (
            f"the chat template does not begin the assistant's message {turn} as it opens an answer; "
            "check its options (for example thinking) or regenerate the answers."
        )
    advice = 'train on the last turn of each conversation (history="last_turn")' if history == "append_only" else ""
    return (
        f"the chat template writes message {turn} differently once later messages follow; "
        f"{advice or 'use a template that appends'}."
    )


def chat_text(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    opening: bool,
    options: Mapping[str, Any] | None = None,
) -> str:
    """The template's text of some messages.

    Args:
        tokenizer: with a chat template.
        messages: in order.
        tools: passed to the template.
        opening: end with the opening of an answer.
        options: more arguments of the template.

    Raises:
        PromptError: there is no template, or it refuses the messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise PromptError("the tokenizer has no chat template; train on a chat model's target.")
    try:
        return tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=list(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=opening,
            **(options or {}),
        )
    except Exception as error:  # templates raise jinja2's errors and any of Python's
        raise PromptError(
            f"the chat template cannot format these messages ({error}); check roles and contents."
        ) from error


def chat_tokens(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    options: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation that the assistant is to answer, its opening included. Errors as in `chat_text`."""
    text = chat_text(tokenizer, messages, tools, opening=True, options=options)
    # The template writes all special tokens itself.
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def template_hash(tokenizer: Any) -> str:
    """16 hex digits that name the chat template."""
    template = getattr(tokenizer, "chat_template", None)
    return hashlib.sha256(repr(template).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _masked(tokenizer: Any, text: str, spans: Sequence[tuple[int, int]], stop_ids: frozenset[int]) -> Rendered:
    """Tokens of a text and which of them lie in the spans of characters."""
    if not getattr(tokenizer, "is_fast", False):
        raise PromptError(
            "the tokenizer does not tell which characters a token stands for; use the model's fast tokenizer."
        )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    tokens = np.asarray(encoded["input_ids"], np.int32)
    begins, ends = np.asarray(encoded["offset_mapping"], np.int64).reshape(-1, 2).T
    mask = np.zeros(tokens.shape, bool)
    for first, last in spans:
        # A token that reaches over the border holds characters of the opening, so it is not the assistant's alone.
        inside = np.flatnonzero((begins >= first) & (ends <= last) & (ends > begins))
        stops = [i for i in inside if int(tokens[i]) in stop_ids]
        mask[inside[inside <= stops[-1]] if stops else inside] = True
    return Rendered(tokens, mask)
