"""PromptLookup against a plain-Python oracle, and its rules on texts worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from jaxtyping import TypeCheckError

from jdlite.drafters.lookup import PromptLookup
from jdlite.errors import ConfigError
from tests.drafters.harness import CAPACITY, Player, chain_paths, paths, play
from tests.drafters.oracles.lookup import prompt_lookup
from tests.drafters.strategies import VOCAB, batches, seeds

DRAFTERS = [
    PromptLookup(num_drafts=6),
    PromptLookup(num_drafts=3, match="last"),
    PromptLookup(num_drafts=30, ngram_max=10),
    PromptLookup.transformers(num_drafts=4),
    PromptLookup.vllm(num_drafts=5, ngram_min=2, ngram_max=4),
    PromptLookup.original(num_drafts=4),
    PromptLookup.original(num_drafts=2),
]


@pytest.mark.parametrize("drafter", DRAFTERS, ids=str)
@given(texts=batches(), seed=seeds)
@settings(max_examples=25, deadline=None)
def test_equals_oracle(drafter, texts, seed):
    def oracle(history):
        return chain_paths(
            prompt_lookup(
                history.tokens,
                num_drafts=drafter.num_drafts,
                ngram_max=drafter.ngram_max,
                ngram_min=drafter.ngram_min,
                match=drafter.match,
                full=drafter.full_continuation,
            )
        )

    play(drafter, texts, oracle, seed=seed, vocab=VOCAB)


def drafts(drafter: PromptLookup, text: list[int]) -> list[int]:
    player = Player(drafter, [text], seed=0, vocab=VOCAB)
    player.prefill([len(text)])
    found = list(paths(player.propose(), 0))
    return list(found[-1]) if found else []


@pytest.mark.parametrize(
    ("drafter", "text", "expected"),
    [
        (PromptLookup(num_drafts=2), [1, 2, 3, 4, 1, 2], [3, 4]),
        (PromptLookup(num_drafts=2, ngram_max=1), [1, 3, 1, 4, 1], [3, 1]),
        (PromptLookup(num_drafts=2, ngram_max=1, match="last"), [1, 3, 1, 4, 1], [4, 1]),
        # The longer n-gram wins over the earlier short one.
        (PromptLookup(num_drafts=1), [2, 5, 1, 2, 6, 1, 2], [6]),
        # A hit at the very end: the only continuation is the anchor itself.
        (PromptLookup(num_drafts=5), [3, 3], [3]),
        (PromptLookup(num_drafts=5, match="last"), [3, 3, 3, 3], [3]),
        (PromptLookup(num_drafts=2, match="first", ngram_max=1), [3, 3, 3, 3], [3, 3]),
        (PromptLookup.original(num_drafts=3), [3, 3, 4, 3], [3, 4, 3]),
        (PromptLookup.original(num_drafts=4), [3, 3, 4, 3], []),
        (PromptLookup.vllm(num_drafts=3), [1, 2, 3, 4, 0, 1, 2, 3, 4], []),
        (PromptLookup.vllm(num_drafts=3), [5, 1, 2, 3, 4, 0, 5, 1, 2, 3, 4], [0, 5, 1]),
        (PromptLookup(), [1], []),
        (PromptLookup(), [1, 2], []),
        (PromptLookup(), [0, 0, 1], []),
    ],
)
def test_by_hand(drafter, text, expected):
    assert drafts(drafter, text) == expected


@pytest.mark.parametrize(("num_drafts", "ngram"), [(10, 2), (3, 4)])
def test_transformers_preset_equals_transformers(num_drafts, ngram):
    torch = pytest.importorskip("torch")
    candidates = pytest.importorskip("transformers.generation.candidate_generator")
    theirs = candidates.PromptLookupCandidateGenerator(
        num_output_tokens=num_drafts, max_matching_ngram_size=ngram, max_length=1000
    )
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 1 + i % 5, 1 + i % CAPACITY).tolist() for i in range(120)]
    drafter = PromptLookup.transformers(num_drafts=num_drafts, max_matching_ngram_size=ngram)
    player = Player(drafter, texts, seed=0, vocab=5)
    player.prefill([len(text) for text in texts])
    proposal = player.propose()
    for b, text in enumerate(texts):
        found = theirs.get_candidates(torch.tensor([text]))[0][0].tolist()
        assert paths(proposal, b) == chain_paths(found[len(text) :])


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"num_drafts": 0}, "num_drafts"),
        ({"ngram_min": 0}, "ngram_min"),
        ({"ngram_min": 4, "ngram_max": 3}, "ngram_max"),
        ({"match": "best"}, "match"),
    ],
)
def test_refuses_bad_options(options, word):
    # With type checks switched on, a wrong choice is refused by them first.
    with pytest.raises((ConfigError, TypeCheckError), match=word):
        PromptLookup(**options)
