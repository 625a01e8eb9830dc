"""Text from tokens that arrive in pieces, and chats whose session equals a fresh one after every turn."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jdlite.checkpoints.target import load_target
from jdlite.conversation import Conversation, Sync, TextStream
from jdlite.decoding.session import Session
from jdlite.drafters.lookup import PromptLookup
from jdlite.errors import CapacityError, PromptError
from tests.tiny_target import REWRITING_CHAT, byte_tokenizer, save_tiny_target

TOKENIZER = byte_tokenizer()
# Few letters, so that stop texts occur; characters of one to four bytes.
TEXTS = st.text(st.sampled_from("abc\né€😀"), max_size=30)


@settings(max_examples=200)
@example(text="a😀a", stops=["😀", "a😀a"], cuts=[5])
@example(text="a😀a", stops=["😀", "a😀a"], cuts=[])
@example(text="cab", stops=["b", "ab"], cuts=[1, 1])
@given(TEXTS, st.lists(TEXTS.filter(bool).map(lambda s: s[:3]), max_size=3), st.lists(st.integers(0, 5), max_size=200))
def test_pieces_join_to_the_text_before_the_first_stop(text, stops, cuts):
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    # Of stop texts that overlap, the one that is whole first.
    ends = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    stream, out = TextStream(TOKENIZER, stops), []
    for size in [*cuts, len(ids)]:
        out.append(stream.push(ids[:size]))
        ids = ids[size:]
    out.append(stream.flush())
    right = text[: min(ends)[1]] if ends else text
    assert "".join(out) == stream.text == right
    assert "\N{REPLACEMENT CHARACTER}" not in stream.text
    assert stream.stopped == bool(ends)


def test_text_is_given_out_as_soon_as_it_is_certain():
    stream = TextStream(TOKENIZER, ["ab!"])
    euro = TOKENIZER("€", add_special_tokens=False)["input_ids"]
    assert len(euro) == 3
    assert [stream.push([i]) for i in euro] == ["", "", "€"]
    assert [stream.push(TOKENIZER(c, add_special_tokens=False)["input_ids"]) for c in "xaab?"] == [
        "x",
        "",
        "a",
        "",
        "ab?",
    ]


def test_bytes_that_never_become_a_character_are_not_lost():
    euro = TOKENIZER("€", add_special_tokens=False)["input_ids"]
    stream = TextStream(TOKENIZER)
    assert stream.push(euro[:2]) == ""
    assert stream.flush() == TOKENIZER.decode(euro[:2])


@pytest.fixture(scope="module", params=["plain template", "rewriting template"])
def target(request, tmp_path_factory):
    chat = {} if request.param == "plain template" else {"chat": REWRITING_CHAT}
    return load_target(save_tiny_target(tmp_path_factory.mktemp("chat") / "hf", **chat))


def new_chat(target, capacity=512):
    return Conversation(target, Session(target.model, PromptLookup(), capacity=capacity))


def common(a, b):
    """Length of the common beginning."""
    return max(n for n in range(min(len(a), len(b)) + 1) if a[:n] == b[:n])


def user(text):
    return {"role": "user", "content": text}


def test_every_turn_equals_a_fresh_session(target):
    chat = new_chat(target)
    for text in ("what is up?", "what is up? again", "and now?"):
        before = chat.session.tokens[0]
        sync = chat.add(user(text))
        right = target.encode_chat(chat.messages)
        assert chat.session.tokens[0] == right
        kept = common(before, right)
        assert sync == Sync(kept=kept, dropped=len(before) - kept, appended=len(right) - kept)
        fresh = new_chat(target)
        fresh.session.append([right])
        wanted = fresh.session.decode(max_new_tokens=12, stop_ids=[list(target.eos_ids)])
        answer = "".join(chat.reply(max_new_tokens=12, rounds_per_yield=2))
        assert chat.last is not None
        assert chat.last.result is not None
        assert chat.last.result.tokens == wanted.tokens
        assert answer == target.tokenizer.decode(wanted.tokens[0], skip_special_tokens=True)
        assert chat.messages[-1] == {"role": "assistant", "content": answer}


def test_undo_goes_back_to_before_the_question(target):
    chat = new_chat(target)
    assert not chat.undo()
    chat.add(user("one"))
    list(chat.reply(max_new_tokens=4))
    before, messages = chat.session.tokens[0], chat.messages
    chat.add(user("two"))
    list(chat.reply(max_new_tokens=4))
    assert chat.undo()
    assert chat.messages == messages
    # Between turns the template may close the answer that the session left open.
    history = target.encode_chat(messages, add_generation_prompt=False)
    kept = chat.session.lengths[0]
    assert chat.session.tokens[0] == history[:kept]
    if target.tokenizer.chat_template != REWRITING_CHAT:
        assert kept >= common(before, history)
    chat.add(user("three"))
    assert chat.session.tokens[0] == target.encode_chat(chat.messages)
    assert chat.undo()
    assert chat.undo()
    assert chat.session.lengths == [0]


def test_a_turn_that_does_not_fit_changes_nothing(target):
    chat = new_chat(target, capacity=64)
    chat.add(user("hello"))
    before, messages = chat.session.tokens, chat.messages
    with pytest.raises(CapacityError, match="the capacity is 64; use a larger capacity"):
        chat.add(user("x" * 60))
    assert chat.session.tokens == before
    assert chat.messages == messages
    np.testing.assert_array_equal(chat.session.state.cache.lengths, [len(before[0]) - 1])


def test_an_answer_that_is_left_early_counts_as_far_as_it_was_shown(target):
    chat = new_chat(target)
    chat.add(user("hello"))
    pieces = chat.reply(max_new_tokens=40, rounds_per_yield=1)
    shown = next(pieces) + next(pieces)
    pieces.close()
    assert chat.messages[-1]["content"] == shown
    chat.add(user("go on"))
    assert chat.session.tokens[0] == target.encode_chat(chat.messages)


def test_a_session_of_several_rows_is_refused(target):
    with pytest.raises(PromptError, match="needs a session of one row: got 2"):
        Conversation(target, Session(target.model, PromptLookup(), batch=2, capacity=64))
