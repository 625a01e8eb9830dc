"""Tau by length of the conversation: forks of one session give what decoding each whole prompt gives."""

from __future__ import annotations

import pytest

import jdlite
from jdlite.errors import PromptError
from jdlite.evaluation.tasks import Row
from tests.scripts import load_script
from tests.tiny_target import save_tiny_target


@pytest.fixture(scope="module")
def script():
    return load_script("tau_by_length")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return jdlite.load_target(str(save_tiny_target(tmp_path_factory.mktemp("target"))))


def say(role, content):
    return {"role": role, "content": content}


HISTORY = [
    Row(id="a", task="t", messages=(say("user", "abab"), say("assistant", "abba"), say("user", "left out"))),
    Row(id="b", task="t", messages=(say("system", "no"), say("user", "cd" * 9), say("assistant", "dc" * 9))),
]
ASKED = [Row(id=text, task="t", messages=(say("user", text),)) for text in ("abc", "abab")]


@pytest.mark.slow
def test_each_length_is_what_decoding_the_whole_prompt_gives(script, target):
    first = list(HISTORY[0].messages[:2])
    second = [*first, *HISTORY[1].messages[1:]]
    longest = len(target.encode_chat(second, add_generation_prompt=False))
    history = [*HISTORY, Row(id="c", task="t", messages=HISTORY[0].messages)]
    results = script.measure(target, "pld", history, ASKED, [0, longest - 1, longest], 20)
    for said, (shared, tau, accepted) in zip([[], first, second], results, strict=True):
        prompts = [target.encode_chat([*said, *row.messages]) for row in ASKED]
        assert all(prompt[:shared] == prompts[0][:shared] for prompt in prompts)
        assert shared >= len(target.encode_chat(said, add_generation_prompt=False) if said else [])
        alone = [jdlite.decode(target, [prompt], drafter="pld", max_new_tokens=20, budget="full") for prompt in prompts]
        rounds = sum(int(result.stats.rounds.sum()) for result in alone)
        assert tau == pytest.approx(sum(int(result.stats.emitted.sum()) for result in alone) / rounds)
        wanted = sum(result.stats.accepted_at.sum(axis=0) for result in alone) / rounds
        assert accepted == pytest.approx(list(wanted))


def test_a_history_that_is_too_short_is_refused(script, target):
    with pytest.raises(PromptError, match="ends before 4096 tokens"):
        next(script.measure(target, "plain", HISTORY, ASKED, [0, 4096], 4))
