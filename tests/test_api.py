"""`jdlite.decode`: kinds of prompts, stops, budgets and capacities, and one clear sentence for each bad input."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import jdlite
from jdlite import api
from jdlite.checkpoints.target import Target
from jdlite.decoding.policy import Costs, variants
from jdlite.decoding.sampling import Sampling
from jdlite.drafters.dlite import DLiteDrafter
from jdlite.drafters.hybrid import Hybrid
from jdlite.drafters.plain import Plain
from jdlite.drafters.registry import DRAFTERS, make_drafter
from jdlite.errors import CapacityError, ConfigError, JdliteError, PromptError
from tests.decoding import oracle
from tests.learnt import learnt
from tests.toys import VOCAB, tiny_model

LETTERS = "abcdefghijklm"


class Letters:
    """A tokenizer of one letter per token; m begins every text, as a special token does."""

    chat_template: str | None = None

    def __call__(self, text: str, add_special_tokens: bool = True):
        return {"input_ids": [12] * add_special_tokens * bool(text) + [LETTERS.index(c) for c in text]}

    def decode(self, ids, skip_special_tokens: bool = False) -> str:
        return "".join(LETTERS[i] for i in ids if not (skip_special_tokens and i == 12))

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        return "".join(m["content"] for m in messages) + "l" * add_generation_prompt


class Chatty(Letters):
    chat_template = "{{ messages }}"


@pytest.fixture(scope="module", autouse=True)
def small_capacities():
    """All tests share one compilation per batch size: the capacity of 64 that every call asks for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "bucket", lambda length, limit: min(64, limit))
        yield


@pytest.fixture(scope="module")
def target():
    return Target(model=tiny_model(), tokenizer=Chatty(), eos_ids=(11,))


NEW = 6
decode = functools.partial(jdlite.decode, drafter="plain", max_new_tokens=NEW)


def right(prompt, new=NEW, **kwargs):
    return oracle.decode(tiny_model(), prompt, new, **kwargs)


@pytest.mark.parametrize(
    ("text", "stops", "end"),
    [
        ("abcab", [], None),
        ("abcab", ["x", ""], None),
        ("abcab", ["ca", "b"], 1),
        ("abcab", ["abca", "bc"], 1),  # the inner one is whole first
        ("abcab", ["bc", "abc"], 0),  # both are whole at once
        ("abcab", ["ab"], 0),
    ],
)
def test_first_stop(text, stops, end):
    assert api.first_stop(text, stops) == end


def test_every_kind_of_prompt(target):
    """A text, a chat, ids as list, tuple or array, alone or as a batch."""
    ids = [12, 0, 1, 2]
    for prompt in ("abc", ids, tuple(ids), np.array(ids)):
        result = decode(target, prompt)
        assert (result.tokens[0], result.finish_reasons[0]) == right(ids, stop_id=11)
        assert result.texts == [Chatty().decode(result.tokens[0], skip_special_tokens=True)]
    chat = [{"role": "user", "content": "ab"}]
    assert decode(target, chat).tokens == decode(target, [chat]).tokens == [right([0, 1, 11], stop_id=11)[0]]
    mixed = decode(target, ["abc", chat, ids])
    assert mixed.tokens == [right(p, stop_id=11)[0] for p in (ids, [0, 1, 11], ids)]


def test_without_a_tokenizer_there_is_no_text():
    assert decode(Target(model=tiny_model()), [1, 2]).texts is None


def test_default_drafter_equals_plain(target):
    prompts = ["abcabcabc", "b", "aaaa"]
    assert jdlite.decode(target, prompts, max_new_tokens=NEW).tokens == decode(target, prompts).tokens


def test_stops(target):
    """Texts, ids and sequences, in addition to the target's own end of text, which can be turned off."""
    answer = right([1], 12)[0]
    for stop in ([answer[2]], [answer[1:3]], [LETTERS[answer[2]]], ["".join(LETTERS[t] for t in answer[1:3])]):
        result = decode(target, [1], stop=stop, use_eos=False, max_new_tokens=12)
        tokens = [stop[0]] if isinstance(stop[0], int) else stop[0]
        tokens = [LETTERS.index(c) for c in tokens] if isinstance(tokens, str) else tokens
        assert (result.tokens[0], result.finish_reasons[0]) == right(
            [1], 12, **({"stop_id": tokens[0]} if len(tokens) == 1 else {"stop_sequence": tokens})
        )
    eos = Target(model=tiny_model(), eos_ids=(answer[3],))
    assert decode(eos, [1], max_new_tokens=12).tokens[0] == right([1], 12, stop_id=answer[3])[0]
    assert decode(eos, [1], max_new_tokens=12, use_eos=False).tokens[0] == answer


def test_one_stop_text_is_not_taken_letter_by_letter(target):
    answer = right([1], 12)[0]
    text = "".join(LETTERS[t] for t in answer[2:4])
    assert (
        decode(target, [1], stop=text, use_eos=False, max_new_tokens=12).tokens[0]
        == (right([1], 12, stop_sequence=answer[2:4])[0])
    )


def test_budgets_and_seeds_per_row(target):
    result = decode(target, [[1], [2], [3]], max_new_tokens=[0, 1, 3], use_eos=False)
    assert result.tokens == [right([b + 1], n)[0] for b, n in enumerate((0, 1, 3))]
    hot = Sampling(temperature=1.0)
    one = decode(target, [[1], [1], [1]], sampling=hot, seed=[4, 5, 4], use_eos=False).tokens
    assert one[0] == one[2] != one[1]
    assert one[1] == right([1], sampling=hot, seed=5)[0]


def test_numpy_numbers_are_numbers(target):
    result = decode(target, [1], max_new_tokens=np.int64(3), seed=np.int64(1), stop=[np.int64(11)], use_eos=False)
    assert result.tokens[0] == right([1], 3, stop_id=11)[0]


@pytest.mark.parametrize(("length", "size"), [(1, 256), (256, 256), (257, 384), (384, 384), (385, 512), (513, 768)])
def test_bucket(length, size, monkeypatch):
    monkeypatch.undo()
    bucket = ORIGINAL_BUCKET
    assert bucket(length, 10**6) == size
    assert bucket(length, 300) == min(size, 300)


ORIGINAL_BUCKET = api.bucket


def test_buckets_are_few_and_close():
    """Never below the length, at most half above it, powers of two and the halves between them."""
    sizes = {ORIGINAL_BUCKET(n, 2**20) for n in range(1, 40_000, 7)}
    assert sizes == {256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152}
    for n in range(256, 40_000, 7):
        assert n <= ORIGINAL_BUCKET(n, 2**20) <= 1.5 * n + 1


def test_capacity_of_choice(target):
    exact = decode(target, [1] * 6, capacity=6 + NEW, use_eos=False)
    assert exact.finish_reasons == ["length"]
    short = decode(target, [1] * 10, capacity=6 + NEW, use_eos=False)
    assert (short.tokens[0], short.finish_reasons[0]) == right([1] * 10, capacity=12)


def test_context_ends_the_answer(target):
    small = Target(model=tiny_model(max_position=40))
    result = jdlite.decode(small, [[1, 2, 3] * 12], drafter="plain", max_new_tokens=100)
    assert len(result.tokens[0]) == 4
    assert result.finish_reasons == ["capacity"]


BAD = {
    "no prompts": ([], {}, PromptError, "there is no prompt"),
    "empty text": ("", {}, PromptError, "a prompt is empty"),
    "empty ids": ([[]], {}, PromptError, "a prompt is empty"),
    "empty among others": ([[1], [], [2]], {}, PromptError, "a prompt is empty"),
    "id too large": ([VOCAB], {}, PromptError, "holds token 13, but ids go from 0 to 12"),
    "negative id": ([1, -1], {}, PromptError, "holds token -1"),
    "fractional id": ([[1.5]], {}, PromptError, "flat list of integer token ids"),
    "no prompt at all": (None, {}, PromptError, "a prompt is a text"),
    "a number": (5, {}, PromptError, "a prompt is a text"),
    "a number among texts": (["a", 5], {}, PromptError, "a prompt is a text"),
    "longer than the context": ([1] * 300, {}, CapacityError, "300 tokens but the model's context is 256"),
    "longer than the capacity": ([1] * 20, {"capacity": 10}, CapacityError, "20 tokens but the capacity is 10"),
    "capacity above the context": ([1], {"capacity": 1000}, CapacityError, "context of 256 tokens: got 1000"),
    "capacity of nothing": ([1], {"capacity": 0}, CapacityError, "capacity must"),
    "capacity below a draft": ([1], {"capacity": 8, "drafter": "adapld"}, CapacityError, "one draft of 31 tokens"),
    "unknown drafter": ([1], {"drafter": "adapl"}, ConfigError, "no drafter 'adapl'; did you mean 'adapld'"),
    "unknown option": ([1], {"drafter": "adapld:n=3"}, ConfigError, "does not understand 'n=3'; its options are"),
    "bad option": ([1], {"drafter": "adapld:copy_length=0"}, ConfigError, "copy_length of at least 1"),
    "option of the wrong kind": ([1], {"drafter": "adapld:copy_length=many"}, ConfigError, "copy_length"),
    "option of plain": ([1], {"drafter": "plain:k=3"}, ConfigError, "its options are: none"),
    "drafter of another kind": ([1], {"drafter": 3}, ConfigError, "a drafter is a name"),
    "negative budget": ([1], {"max_new_tokens": -1}, ConfigError, "max_new_tokens must not be negative: got -1"),
    "budgets of other rows": ([1], {"max_new_tokens": [1, 2]}, ConfigError, "got 2 for 1 rows"),
    "fractional budget": ([1], {"max_new_tokens": 2.5}, ConfigError, "max_new_tokens must be"),
    "seeds of other rows": ([1], {"seed": [1, 2]}, ConfigError, "got 2 for 1 rows"),
    "samplings of other rows": ([1], {"sampling": [Sampling()] * 2}, ConfigError, "2 samplings"),
    "empty stop": ([1], {"stop": [""]}, ConfigError, "stop text is empty"),
    "negative stop": ([1], {"stop": [-3]}, ConfigError, "stop token -3"),
    "bans everything": ([1], {"sampling": Sampling(banned_ids=tuple(range(VOCAB)))}, ConfigError, "bans every token"),
    "unknown cost budget": ([1], {"budget": "fast"}, ConfigError, 'must be "auto", "full" or a Costs table'),
    "costs of another drafter": ([1], {"budget": Costs.free((1, 4))}, ConfigError, "costs must be for a drafter of 1"),
    "prefill chunk of nothing": ([1], {"prefill_chunk": 0}, ConfigError, "prefill_chunk must be at least 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_sentence(target, case):
    prompts, wrong, error, message = BAD[case]
    with pytest.raises(error, match=message) as caught:
        decode(target, prompts, **wrong)
    assert isinstance(caught.value, JdliteError)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith((".", "?"))


def test_text_and_chat_need_what_they_need(target):
    bare, plain = Target(model=tiny_model(), source="some/model"), Target(model=tiny_model(), tokenizer=Letters())
    with pytest.raises(PromptError, match="some/model has no tokenizer; give token ids instead"):
        decode(bare, "abc")
    with pytest.raises(PromptError, match="has no tokenizer"):
        decode(bare, [1], stop=["abc"])
    with pytest.raises(PromptError, match="no chat template"):
        decode(plain, [{"role": "user", "content": "a"}])
    with pytest.raises(PromptError, match="cannot format these messages"):
        decode(target, [{"role": "user"}])


def test_cost_tables(target, tmp_path, monkeypatch):
    """`auto` takes a typical table until this machine was measured, and the measured one from then on."""
    monkeypatch.setattr(api, "cache_folder", lambda: tmp_path)
    drafter = make_drafter("pld:num_drafts=2")
    counts = variants(3)
    assert counts == (1, 3)
    typical = api.resolve_costs(target, drafter, 1, "auto")
    np.testing.assert_allclose(typical.fixed, Costs.typical(counts).fixed)
    np.testing.assert_allclose(api.resolve_costs(target, drafter, 1, "full").fixed, [1, 1])
    measured = jdlite.calibrate(target, drafter, capacity=16, repeats=1)
    again = api.resolve_costs(target, drafter, 1, "auto")
    np.testing.assert_array_equal(again.fixed, measured.fixed)
    assert measured.counts == counts
    monkeypatch.setattr(api, "measure_costs", lambda *a, **k: pytest.fail("measured twice"))
    np.testing.assert_array_equal(jdlite.calibrate(target, "pld:num_drafts=2").fixed, measured.fixed)
    assert jdlite.calibrate(target, "plain").counts == (1,)
    table = Costs(jnp.ones(2), jnp.zeros(2), counts)
    assert api.resolve_costs(target, drafter, 1, table) is table


def test_the_draft_of_a_network_is_measured_once(target, tmp_path, monkeypatch):
    """Alone or in a hybrid, and used by `auto` from then on."""
    monkeypatch.setattr(api, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(api, "measure_costs", lambda *a, **k: Costs(jnp.ones(2), jnp.zeros(2), (1, 4)))
    dlite = DLiteDrafter(model=learnt(VOCAB))
    hybrid = Hybrid(make_drafter("pld"), dlite)
    assert api.resolve_costs(target, dlite, 1, "auto").draft == 0
    draft = jdlite.calibrate(target, dlite).draft
    assert 0 < draft < np.inf
    monkeypatch.setattr(api, "measure_draft", lambda *a, **k: pytest.fail("measured twice"))
    for drafter in (dlite, hybrid):
        assert jdlite.calibrate(target, drafter).draft == draft
        assert api.resolve_costs(target, drafter, 1, "auto").draft == draft
        assert api.resolve_costs(target, drafter, 1, "full").draft == 0
    assert jdlite.calibrate(target, "pld").draft == 0


def test_registry():
    for name, kind in DRAFTERS.items():
        assert type(make_drafter(name)) is kind
    assert make_drafter("plain") == Plain()
    assert make_drafter("pld:num_drafts=5,full_continuation=true,match=last") == DRAFTERS["pld"](
        num_drafts=5, full_continuation=True, match="last"
    )  # pyright: ignore[reportCallIssue]
