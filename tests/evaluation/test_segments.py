"""Rows to token ids: history only grows, limits keep whole messages."""

import itertools

import pytest

from jdlite.checkpoints.target import Target
from jdlite.errors import ConfigError, PromptError
from jdlite.evaluation.segments import Limits, Segment, history_after, limit, segments
from jdlite.evaluation.tasks import Row
from tests.tiny_target import CHAT, END, REWRITING_CHAT, byte_tokenizer

MESSAGES = (
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi."},
    {"role": "assistant", "content": "\nHello!"},
    {"role": "tool", "content": "42"},
    {"role": "assistant", "content": "It is 42."},
    {"role": "user", "content": "Thanks."},
)


def target(chat=CHAT):
    return Target(model=None, tokenizer=byte_tokenizer(chat), eos_ids=(END,), source="tiny")  # pyright: ignore


def text_of(tokens):
    return byte_tokenizer().decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def test_transcript_points_stand_before_each_assistant_message_and_at_the_end():
    found = segments(Row(id="a", task="t", messages=MESSAGES), target())
    assert [text_of(s.tokens) for s in found] == [
        "<|start|>system\nBe kind.<|end|><|start|>user\nHi.<|end|><|start|>assistant\n",
        "\nHello!<|end|><|start|>tool\n42<|end|><|start|>assistant\n",
        "It is 42.<|end|><|start|>user\nThanks.<|end|><|start|>assistant\n",
    ]
    assert not any(s.after_answer for s in found)


def test_each_history_is_the_fresh_encoding_of_the_messages_before_it():
    t = target()
    found = segments(Row(id="a", task="t", messages=MESSAGES), t)
    histories = list(itertools.accumulate(list(s.tokens) for s in found))
    assert histories == [t.encode_chat(MESSAGES[:n]) for n in (2, 4, 6)]


def test_a_transcript_that_ends_with_the_assistant_has_no_point_after_it():
    assert len(segments(Row(id="a", task="t", messages=MESSAGES[:5]), target())) == 2


def test_own_answers_are_closed_by_the_template():
    t = target()
    row = Row(id="a", task="t", messages=({"role": "user", "content": "One?"}, {"role": "user", "content": "Two?"}))
    first, second = segments(row, t)
    assert text_of(first.tokens) == "<|start|>user\nOne?<|end|><|start|>assistant\n"
    assert second.after_answer
    answer = t.encode("Yes.")
    whole = "<|start|>user\nOne?<|end|><|start|>assistant\nYes.<|end|><|start|>user\nTwo?<|end|><|start|>assistant\n"
    for given in (answer, [*answer, END]):  # cut by the budget, or stopped by itself
        assert text_of([*first.tokens, *history_after(given, second, t.eos_ids)]) == whole


def test_a_template_that_rewrites_history_is_refused():
    counting = target("{{ messages | length }} messages: " + CHAT)
    with pytest.raises(PromptError, match="writes earlier messages differently"):
        segments(Row(id="a", task="t", messages=MESSAGES), counting)
    t = target(REWRITING_CHAT)
    twice = ({"role": "user", "content": "One?"}, {"role": "user", "content": "Two?"})
    with pytest.raises(PromptError, match="writes earlier messages differently"):
        segments(Row(id="a", task="t", messages=twice), t)
    assert len(segments(Row(id="a", task="t", messages=MESSAGES[:2]), t)) == 1


def test_a_target_without_template_or_tokenizer_says_so():
    with pytest.raises(PromptError, match="no chat template"):
        segments(Row(id="a", task="t", messages=MESSAGES), target(None))
    with pytest.raises(PromptError, match="no tokenizer"):
        segments(Row(id="a", task="t", text="x"), Target(model=None))  # pyright: ignore


def test_texts_and_tokens_pass_as_they_are():
    assert segments(Row(id="a", task="t", tokens=((1, 2), (3,))), target()) == [Segment((1, 2)), Segment((3,))]
    [only] = segments(Row(id="a", task="t", text="abc"), target())
    assert text_of(only.tokens) == "abc"


PARTS = [Segment((i,) * 10) for i in range(6)]


@pytest.mark.parametrize(
    ("limits", "histories"),
    [
        (Limits(), [10, 20, 30, 40, 50, 60]),
        (Limits(max_prompt=40), [10, 20, 30, 40]),
        (Limits(max_prompt=39), [10, 20, 30]),
        (Limits(max_prompt=9), []),
        (Limits(turns=2, choose="first"), [10, 20]),
        (Limits(turns=2, choose="last"), [50, 60]),
        (Limits(turns=2, choose="last", max_prompt=45), [30, 40]),
        (Limits(turns=2), [10, 60]),
        (Limits(turns=3), [10, 30, 60]),
        (Limits(turns=1), [60]),
        (Limits(turns=9), [10, 20, 30, 40, 50, 60]),
    ],
)
def test_limits_keep_the_history_whole(limits, histories):
    kept = limit(PARTS, limits)
    assert list(itertools.accumulate(len(s.tokens) for s in kept)) == histories
    joined = [token for s in kept for token in s.tokens]
    assert joined == [token for s in PARTS for token in s.tokens][: len(joined)]


def test_turns_that_need_answers_are_the_first_ones():
    parts = [Segment((1,)), Segment((2,), after_answer=True), Segment((3,), after_answer=True)]
    assert limit(parts, Limits(turns=2, choose="last")) == parts[:2]


@pytest.mark.parametrize("wrong", [{"turns": -1}, {"choose": "some"}, {"max_prompt": 0}])
def test_wrong_limits(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Limits(**wrong)
