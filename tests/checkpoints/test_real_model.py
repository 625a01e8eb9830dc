"""SmolLM2-135M-Instruct: the converted folder decodes and tokenizes as transformers does with the same folder."""

import importlib.util
import re

import jax
import pytest

from jdlite.api import decode
from jdlite.checkpoints.demo import fetch_demo_target
from jdlite.checkpoints.target import load_target
from jdlite.models.config import DecoderConfig
from tests.checkpoints.test_gguf_tokenizer import bpe, pieces

pytestmark = [pytest.mark.slow, pytest.mark.real_model]
NEW_TOKENS = 64

CHATS = [
    "What is the capital of France, and which river runs through it?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List five fruits that are yellow.",
    "Explain in two sentences why the sky is blue.",
    "Translate into Spanish: The cat sleeps on the warm roof.",
    "A train leaves at 14:35 and arrives at 17:10. How long does the journey take?",
    "Give me a recipe for pancakes with exact amounts.",
    "Correct the grammar: She don't likes apples and he go to school yesterday.",
    "Summarise: The meeting was moved to Tuesday because the room was not free on Monday. Everyone agreed.",
    "Name the planets of the solar system in order of distance from the sun.",
]
TEXTS = [
    "Once upon a time, in a village by the sea, there lived",
    "def read_csv(path):\n    rows = []\n    with open(path) as file:\n        for line in file:\n",
    "The three laws of thermodynamics are:\n1.",
    "SELECT name, COUNT(*) FROM orders WHERE year = 2023 GROUP BY",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "To be, or not to be, that is the question:",
    '{"name": "Ada", "born": 1815, "field": "mathematics"}\n{"name": "Alan", "born": 1912, "field":',
    "Dear Sir or Madam,\n\nI am writing to complain about",
    "The quick brown fox jumps over the lazy dog. The quick brown fox jumps over the lazy dog. The quick",
    "<html>\n<body>\n<ul>\n<li>One</li>\n<li>Two</li>\n<li>",
]


@pytest.fixture(scope="module", autouse=True)
def optimised():
    """Real weights want optimised programs; the rest of the suite saves compile time without."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module")
def folder():
    return fetch_demo_target()


@pytest.fixture(scope="module")
def target(folder):
    return load_target(folder)


@pytest.fixture(scope="module")
def greedy_of_transformers(folder, target):
    """Twenty prompts, and what transformers' own `generate` makes of each."""
    import torch
    import transformers

    prompts = [target.encode_chat([{"role": "user", "content": chat}]) for chat in CHATS]
    prompts += [target.encode(text) for text in TEXTS]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        ids = torch.tensor(prompt)[None]
        with torch.no_grad():
            whole = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=2
            )
        answers.append(whole[0, len(prompt) :].tolist())
    return prompts, answers


def test_config_and_stop_ids(target):
    assert target.config == DecoderConfig.smollm2_135m()
    assert target.eos_ids == (2,)


def test_it_speaks_sense(target):
    """A mistake in the order of q and k rows leaves all shapes right and the text nonsense."""
    text = decode(target, [{"role": "user", "content": CHATS[0]}], drafter="plain", max_new_tokens=24).texts[0]
    assert "Paris" in text


@pytest.mark.parametrize("drafter", ["plain", "adapld"])
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_64_greedy_tokens_equal_transformers(target, greedy_of_transformers, drafter):
    prompts, right = greedy_of_transformers
    ours = decode(target, prompts, drafter=drafter, max_new_tokens=NEW_TOKENS)
    for prompt, tokens, expected in zip(prompts, ours.tokens, right, strict=True):
        assert tokens == expected, target.tokenizer.decode(prompt)


def test_tokenizer_equals_plain_byte_pair_encoding(target):
    import json

    model = json.loads(target.tokenizer.backend_tokenizer.to_str())["model"]
    merges = [" ".join(merge) for merge in model["merges"]]
    for text in [*CHATS, *TEXTS, "In 1789, 12345 people paid $3.50 each;\n\n\tthat's 43,207.50!"]:
        right = [i for piece in pieces(text, "smollm") for i in bpe(piece, merges, model["vocab"], False)]
        assert target.encode(text) == right
        assert target.tokenizer.decode(right) == text


def test_chat_format(target):
    text = target.tokenizer.decode(target.encode_chat([{"role": "user", "content": "Hi"}]))
    assert re.fullmatch(
        r"<\|im_start\|>system\n.*<\|im_end\|>\n<\|im_start\|>user\nHi<\|im_end\|>\n<\|im_start\|>assistant\n", text
    )
