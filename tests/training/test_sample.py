"""What `--show-sample` prints."""

from __future__ import annotations

import io

import numpy as np
from rich.console import Console

from jdlite.training.records import Example
from jdlite.training.sample import CONTEXT, SUPERVISED, sample_text, show
from tests.tiny_target import byte_tokenizer

TOKENIZER = byte_tokenizer()


def ids(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def example(prompt, answer):
    a, b = ids(prompt), ids(answer)
    return Example(
        id="p-1",
        tokens=np.array(a + b, np.int32),
        loss_mask=np.array([False] * len(a) + [True] * len(b)),
        prompt_length=len(a),
        finish="stop_id",
    )


def test_supervised_text_is_set_off():
    text = sample_text(example("<|start|>user\n[red]é", "né🙂<|end|>"), TOKENIZER)
    head, *body = text.plain.split("\n", 1)
    assert head == "example p-1, ended by stop_id: 21 tokens, 8 of them supervised"
    assert body == ["<|start|>user\n[red]éné🙂<|end|>\n"]
    styles = {str(span.style): text.plain[span.start : span.end] for span in text.spans}
    assert styles[SUPERVISED] == "né🙂<|end|>"
    assert styles[CONTEXT] == "<|start|>user\n[red]é"


def printed(item, **options):
    out = io.StringIO()
    show(item, TOKENIZER, Console(file=out, width=40, **options))
    return out.getvalue()


def test_without_colours_marks_stand_around_it():
    assert printed(example("q", "a" * 60)).endswith("\nq⟦" + "a" * 60 + "⟧\n\n")
    coloured = printed(example("q", "a"), force_terminal=True, color_system="truecolor")
    assert "\x1b[" in coloured
    assert "⟦" not in coloured


def test_a_packed_row_shows_each_example():
    tokens, mask, segments = (np.zeros((1, 8), kind) for kind in (np.int32, bool, np.int32))
    tokens[0, :5] = ids("abcde")
    mask[0, [1, 3, 4]] = True
    segments[0, :5] = [1, 1, 2, 2, 2]
    text = sample_text({"tokens": tokens, "loss_mask": mask, "segment_ids": segments}, TOKENIZER, marks=True)
    assert text.plain == (
        "row of 8 tokens, 3 of them padding, 2 examples\n"
        "example 1 of 2: 2 tokens, 1 of them supervised\na⟦b⟧\n"
        "example 2 of 2: 3 tokens, 2 of them supervised\nc⟦de⟧\n"
    )
