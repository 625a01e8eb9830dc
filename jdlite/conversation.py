"""Text on top of a `Session`: tokens to text while they arrive, and a chat whose cache is kept from turn to turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jdlite.api import encode_stops, first_stop
from jdlite.checkpoints.target import Target
from jdlite.decoding.session import Result, Session
from jdlite.errors import PromptError

# What tokenizers put where bytes are not, or not yet, a character.
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Turns tokens that arrive in pieces into text that can be shown at once.

    Two things are held back until more tokens come: bytes that do not make a whole character yet, and text that may be
    the beginning of a stop text. All pieces joined, `flush` included, are the text of all tokens up to the stop text.

    Args:
        tokenizer: a transformers tokenizer.
        stops: texts at which to end; they are not given out.
    """

    def __init__(self, tokenizer, stops: Sequence[str] = ()):
        self.text = ""
        self.stopped = False
        self._tokenizer, self._stops = tokenizer, [s for s in stops if s]
        self._ids: list[int] = []
        # Tokens before `_read` are text already; those from `_context` on are decoded again with what follows, because
        # a tokenizer may write a token differently at the beginning of a text.
        self._context, self._read = 0, 0
        self._held = ""

    def push(self, ids: Sequence[int]) -> str:
        """Take in tokens and give out the text that is now certain."""
        return self._advance(ids, last=False)

    def flush(self) -> str:
        """The rest of the text; no tokens may follow."""
        return self._advance((), last=True)

    def _advance(self, ids: Sequence[int], last: bool) -> str:
        if self.stopped:
            return ""
        self._ids.extend(ids)
        before = self._decode(self._ids[self._context : self._read])
        now = self._decode(self._ids[self._context :])
        if last or not now.endswith(_UNFINISHED):
            self._held += now[len(before) :]
            self._context, self._read = self._read, len(self._ids)
        end = first_stop(self._held, self._stops)
        if end is None:
            end = len(self._held) - (0 if last else self._may_become_a_stop())
        else:
            self.stopped = True
        out, self._held = self._held[:end], self._held[end:]
        self.text += out
        return out

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True) if ids else ""

    def _may_become_a_stop(self) -> int:
        """Length of the longest end of the held text that some stop text begins with."""
        longest = max((len(stop) for stop in self._stops), default=1)
        for length in range(min(longest - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0


class Reply:
    """One streamed answer of a session of one row: iterate for pieces of text.

    Attributes:
        text: what was given out so far.
        result: the session's result; None while running, and where a stop text that no stop tokens spell ended it.

    Args:
        target: whose tokenizer and end-of-text tokens to use.
        session: has at least one token.
        stop: texts, ids or token lists that end the answer; stop texts are not given out.
        use_eos: whether the target's end-of-text tokens end it.
        options: for `Session.stream`.
    """

    def __init__(
        self,
        target: Target,
        session: Session,
        *,
        stop: Sequence[str | int | Sequence[int]] = (),
        use_eos: bool = True,
        **options: Any,
    ):
        self.result: Result | None = None
        ids, sequences = encode_stops(target, stop)
        ids += list(target.eos_ids) if use_eos else []
        self._stream = TextStream(target.need_tokenizer(), [s for s in stop if isinstance(s, str)])
        self._items = session.stream(stop_ids=[ids], stop_sequences=[sequences], **options)

    @property
    def text(self) -> str:
        """What was given out so far."""
        return self._stream.text

    def __iter__(self) -> Iterator[str]:
        for item in self._items:
            if isinstance(item, Result):
                self.result = item
            elif self._stream.stopped:
                # The model wrote the stop text with other tokens than the tokenizer does; the session would go on.
                break
            elif piece := self._stream.push(item[0]):
                yield piece
        if tail := self._stream.flush():
            yield tail


@dataclasses.dataclass(frozen=True)
class Sync:
    """How a conversation was brought up to date.

    Attributes:
        kept: tokens whose cache was kept.
        dropped: tokens that were rolled back because the chat template wrote them differently this time.
        appended: tokens that were added.
    """

    kept: int
    dropped: int
    appended: int


class Conversation:
    """A chat on a session of one row. Each turn runs only what is new.

    The chat template formats the whole history each turn. Where the outcome begins as the session's tokens do, the rest
    is appended; where the template rewrote something (some drop earlier thoughts), the session is first rolled back to
    the common beginning. So the session always holds what a fresh one would hold.

    Example:
        >>> chat = Conversation(target, Session(target.model, drafter, capacity=4096))
        >>> chat.add({"role": "user", "content": "Hello!"})
        >>> for piece in chat.reply(max_new_tokens=100):
        ...     print(piece, end="")
    """

    def __init__(self, target: Target, session: Session):
        if session.batch != 1:
            raise PromptError(f"a conversation needs a session of one row: got {session.batch}.")
        self.target, self.session = target, session
        self.messages: list[Mapping[str, Any]] = []

    def add(self, *messages: Mapping[str, Any]) -> Sync:
        """Add messages and run what is new, the opening of the assistant's turn included.

        Raises:
            PromptError: the chat template refuses the messages; nothing was added.
            CapacityError: the conversation would not fit; nothing was added.
        """
        history = [*self.messages, *messages]
        begin = self.session.tokens[0]
        ids = self.target.encode_chat(history)
        kept = _common(begin, ids)
        self.session.rollback([kept])
        try:
            self.session.append([ids[kept:]])
        except ValueError:
            # What was rolled back is appended again, so that the session is as it was.
            self.session.append([begin[kept:]])
            raise
        self.messages = history
        return Sync(kept, len(begin) - kept, len(ids) - kept)

    def reply(self, **options: Any) -> Iterator[str]:
        """Stream the assistant's answer as text and add it to the messages, also when the caller stops early.

        Args:
            options: as for `Reply`.
        """
        reply = self.last = Reply(self.target, self.session, **options)
        try:
            yield from reply
        finally:
            self.messages = [*self.messages, {"role": "assistant", "content": reply.text}]

    last: Reply | None = None

    def undo(self) -> bool:
        """Forget the newest user turn and all that followed it; False where there is none."""
        turns = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if not turns:
            return False
        self.messages = self.messages[: turns[-1]]
        try:
            ids = self.target.encode_chat(self.messages, add_generation_prompt=False) if self.messages else []
        except PromptError:  # a template may refuse a history without a question
            ids = []
        self.session.rollback([_common(self.session.tokens[0], ids)])
        return True


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
