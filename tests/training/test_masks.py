"""Assistant masks, compared with transformers' own generation tags and with character-level bookkeeping."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdlite.errors import PromptError
from jdlite.training.masks import chat_text, chat_tokens, render, template_hash
from tests.tiny_target import CHAT, END, REWRITING_CHAT, byte_tokenizer

TOKENIZER = byte_tokenizer()
# The same template with transformers' marks around what the assistant writes.
TAGGED = (
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def message(role, content):
    return {"role": role, "content": content}


texts = st.text(st.sampled_from("ab \né🙂"), max_size=6)
conversations = st.lists(
    st.tuples(st.sampled_from(["user", "assistant", "tool", "system"]), texts).map(lambda x: message(*x)),
    min_size=1,
    max_size=6,
).filter(lambda talk: talk[0]["role"] != "assistant" and any(m["role"] == "assistant" for m in talk))


@given(conversations)
def test_masks_equal_those_of_generation_tags(talk):
    rendered = render(TOKENIZER, talk, stop_ids=[END])
    expected = byte_tokenizer(TAGGED).apply_chat_template(
        talk, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert rendered.tokens.tolist() == expected["input_ids"]
    assert rendered.assistant_mask.astype(int).tolist() == expected["assistant_masks"]
    assert rendered.tokens.dtype == np.int32
    assert rendered.assistant_mask.dtype == bool


def decoded(rendered):
    return TOKENIZER.decode(rendered.tokens[rendered.assistant_mask])


def test_what_follows_the_end_of_the_turn_is_not_the_assistants():
    chat = CHAT.replace("<|end|>{% endfor %}", "<|end|>\n\n{% endfor %}")
    talk = [message("user", "hi"), message("assistant", "ho"), message("user", "x"), message("assistant", "y\n")]
    tokenizer = byte_tokenizer(chat)
    assert decoded(render(tokenizer, talk, stop_ids=[END])) == "ho<|end|>y\n<|end|>"
    # Without stop ids all that the turn adds counts.
    assert decoded(render(tokenizer, talk)) == "ho<|end|>\n\ny\n<|end|>\n\n"


def test_the_opening_of_an_answer_is_not_the_assistants():
    chat = (
        "{% for m in messages %}<|start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and not enable_thinking %}(){% endif %}"
        "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n"
        "{% if not enable_thinking %}(){% endif %}{% endif %}"
    )
    talk = [message("user", "hi"), message("assistant", "(a)b")]
    rendered = render(byte_tokenizer(chat), talk, stop_ids=[END], options={"enable_thinking": False})
    assert decoded(rendered) == "(a)b<|end|>"
    assert TOKENIZER.decode(rendered.tokens).endswith("assistant\n()(a)b<|end|>")


def test_a_rewriting_template_is_refused_unless_the_last_turn_is_wanted():
    tokenizer = byte_tokenizer(REWRITING_CHAT)
    talk = [message("user", "q"), message("assistant", "a"), message("user", "r"), message("assistant", "b")]
    with pytest.raises(PromptError, match=r"writes message 1 differently once later .*history=\"last_turn\""):
        render(tokenizer, talk, stop_ids=[END])
    rendered = render(tokenizer, [*talk, message("user", "s")], stop_ids=[END], history="last_turn")
    assert TOKENIZER.decode(rendered.tokens) == (
        "<|start|>user\nq<|end|><|start|>assistant\n<|end|><|start|>user\nr<|end|><|start|>assistant\nb<|end|>"
    )
    assert decoded(rendered) == "b<|end|>"


def test_a_template_that_opens_answers_differently_is_refused():
    chat = CHAT.replace("<|start|>assistant\n", "<|start|>ASSISTANT\n")
    with pytest.raises(PromptError, match="does not begin the assistant's message 1 as it opens an answer"):
        render(byte_tokenizer(chat), [message("user", "q"), message("assistant", "a")])


def test_tools_and_options_reach_the_template():
    chat = "{% if tools %}{{ tools[0].name }}{% endif %}{{ extra }}" + CHAT
    talk = [message("user", "q")]
    text = chat_text(byte_tokenizer(chat), talk, [{"name": "f"}], opening=True, options={"extra": "e"})
    assert text == "fe<|start|>user\nq<|end|><|start|>assistant\n"
    tokens = chat_tokens(byte_tokenizer(chat), talk, [{"name": "f"}], options={"extra": "e"})
    assert TOKENIZER.decode(tokens) == text


def test_a_greeting_answers_nothing():
    talk = [message("assistant", "hello"), message("user", "q"), message("assistant", "a")]
    assert decoded(render(TOKENIZER, talk, stop_ids=[END])) == "a<|end|>"


def test_errors():
    with pytest.raises(PromptError, match="no assistant message after another one"):
        render(TOKENIZER, [message("user", "q")])
    with pytest.raises(PromptError, match="no chat template"):
        render(byte_tokenizer(None), [message("user", "q"), message("assistant", "a")])
    with pytest.raises(PromptError, match=r"cannot format these messages .no systems"):
        chat_text(byte_tokenizer("{{ raise_exception('no systems') }}"), [message("user", "q")], None, opening=True)


def test_templates_are_told_apart():
    assert template_hash(byte_tokenizer()) == template_hash(byte_tokenizer(CHAT))
    assert template_hash(byte_tokenizer()) != template_hash(byte_tokenizer(REWRITING_CHAT))
