"""The processed distribution against transformers' logits processors, and draws against exact probabilities."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdlite.decoding.penalties import History
from jdlite.decoding.sampling import (
    ACCEPT,
    DRAFT,
    FEW_TOKENS,
    RESIDUAL,
    Sampling,
    any_nan,
    draw,
    gumbel,
    log_probs,
    noise_key,
    processed_logits,
    stack,
)
from jdlite.errors import ConfigError

V = 23
process = jax.jit(
    lambda logits, sampling, history, generated: processed_logits(
        logits, sampling, history=history, generated=generated
    )
)
jitted_draw = jax.jit(draw)


def everything_on(sampling, vocab_size=V):
    """The same sampling with every step compiled in: one compilation for all, and unused steps must change nothing."""
    flags = ("stochastic", "uses_top_k", "uses_top_p", "uses_min_p", "penalises", "min_new")
    banned = jnp.zeros((sampling.top_k.shape[0], vocab_size), bool) if sampling.banned is None else sampling.banned
    return dataclasses.replace(sampling, banned=banned, **dict.fromkeys(flags, True))


def run(logits, rows, *, prompts=None, texts=None, generated=None, stop_ids=None, all_steps=False):
    """`processed_logits` of `[B, N, V]` logits with plain histories; numpy out."""
    B, N, size = logits.shape
    sampling = stack(rows, B, size, stop_ids)
    sampling = everything_on(sampling, size) if all_steps else sampling
    history = None
    if prompts is not None:
        history = History.from_prompt(jnp.asarray(prompts), jnp.full(B, len(prompts[0])), size)
        history = history.update(jnp.asarray(texts), jnp.full(B, len(texts[0])))
    generated = jnp.zeros((B, N), jnp.int32) if generated is None else jnp.asarray(generated, jnp.int32)
    return np.asarray(process(jnp.asarray(logits), sampling, history, generated))


def peer(scores, ids, row: Sampling, prompt_length, stop_ids):
    """The same with transformers' own processors in the order of `generate`."""
    torch = pytest.importorskip("torch")
    import transformers.generation.logits_process as lp

    steps = []
    if row.repetition_penalty != 1:
        steps.append(lp.RepetitionPenaltyLogitsProcessor(row.repetition_penalty))
    if row.min_new_tokens and stop_ids:
        steps.append(lp.MinNewTokensLengthLogitsProcessor(prompt_length, row.min_new_tokens, list(stop_ids)))
    if row.banned_ids:
        steps.append(lp.SuppressTokensLogitsProcessor(row.banned_ids))
    if row.temperature > 0:
        steps.append(lp.TemperatureLogitsWarper(row.temperature))
        if row.top_k:
            steps.append(lp.TopKLogitsWarper(row.top_k))
        if row.top_p < 1:
            steps.append(lp.TopPLogitsWarper(row.top_p))
        if row.min_p:
            steps.append(lp.MinPLogitsWarper(row.min_p))
    scores, ids = torch.tensor(scores)[None], torch.tensor([ids])
    for step in steps:
        scores = step(ids, scores)
    return scores[0].numpy()


def random_logits(seed, *shape, ties=True):
    """Logits on a grid of 1/4, so that equal values are common, or free ones."""
    x = np.random.default_rng(seed).normal(size=shape) * 3
    return (np.round(x * 4) / 4 if ties else x).astype(np.float32)


# Options of a row; the test builds the `Sampling`, since type checkers that are on in tests may draw random numbers.
ROW = st.builds(
    dict,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.9]),
    top_k=st.sampled_from([0, 1, 2, 5, 22, 23, 100]),
    top_p=st.sampled_from([1.0, 0.95, 0.83, 0.5, 0.11, 0.001]),
    min_p=st.sampled_from([0.0, 0.03, 0.21, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    banned_ids=st.lists(st.integers(0, V - 1), max_size=3).map(tuple),
    min_new_tokens=st.sampled_from([0, 2, 5]),
)


@settings(max_examples=120, deadline=None)
@given(ROW, ROW, st.integers(0, 10**6), st.booleans())
def test_equals_transformers(first, second, seed, ties):
    """Two rows with different parameters, two nodes each, after 3 generated tokens."""
    rows, stop_ids = [Sampling(**first), Sampling(**second)], [[1, 4], [7, -1]]
    logits = random_logits(seed, 2, 2, V, ties=ties)
    rng = np.random.default_rng(seed)
    prompts, texts = rng.integers(0, V, (2, 4)), rng.integers(0, V, (2, 3))
    generated = [[3, 3]] * 2
    got = run(logits, rows, prompts=prompts, texts=texts, generated=generated, stop_ids=stop_ids, all_steps=True)
    for b, n in itertools.product(range(2), range(2)):
        stops = [t for t in stop_ids[b] if t >= 0]
        want = peer(logits[b, n], [*prompts[b], *texts[b]], rows[b], 4, stops)
        # Which of several equal logits at the border of top-p stay is up to the sort in transformers: compare as sets.
        np.testing.assert_allclose(np.sort(got[b, n]), np.sort(want), rtol=1e-6)
        both = np.isfinite(got[b, n]) & np.isfinite(want)
        np.testing.assert_allclose(got[b, n][both], want[both], rtol=1e-6)
        assert ties or (both == np.isfinite(want)).all()


@pytest.mark.parametrize(
    "row",
    [
        Sampling(temperature=0.7, top_k=20, top_p=0.95),
        Sampling(temperature=1.0, top_p=0.9, min_p=0.05),
        Sampling(temperature=1.0, top_k=50, repetition_penalty=1.1),
    ],
)
def test_equals_transformers_on_a_large_vocabulary(row):
    logits = random_logits(5, 1, 2, 49_152, ties=False)
    got = run(logits, row, prompts=[[1, 2]], texts=[[3]])
    for n in range(2):
        np.testing.assert_allclose(got[0, n], peer(logits[0, n], [1, 2, 3], row, 2, []), rtol=1e-6)


@settings(max_examples=80, deadline=None)
@given(ROW, st.integers(0, 10**6), st.booleans())
def test_few_tokens_and_many_take_the_same_steps(row, seed, ties):
    """The way for a small top-k against the general way: the same tokens stay, and the same ones are drawn."""
    row = Sampling(**{**row, "temperature": row["temperature"] or 0.6, "top_k": row["top_k"] or 3})
    logits = random_logits(seed, 2, 3, V, ties=ties)
    few = everything_on(stack([row, Sampling()], 2, V))
    assert few.keeps_few
    many = dataclasses.replace(few, keeps_few=False)
    generated = jnp.zeros((2, 3), jnp.int32)
    history = History.from_prompt(jnp.ones((2, 1), jnp.int32), jnp.ones(2, jnp.int32), V)
    kept = [np.asarray(process(jnp.asarray(logits), sampling, history, generated)) for sampling in (few, many)]
    np.testing.assert_array_equal(*kept)
    keys, at = jax.random.split(jax.random.key(seed), 2), jnp.arange(6).reshape(2, 3)
    drawn = [jitted_draw(kept[0], keys, at, sampling) for sampling in (few, many)]
    np.testing.assert_array_equal(*drawn)


@pytest.mark.parametrize("size", [FEW_TOKENS - 1, FEW_TOKENS, FEW_TOKENS + 1, 200])
def test_more_tokens_may_tie_with_the_last_than_are_looked_at(size):
    """All of them stay, each as likely as the others, and the draw is the argmax over all of them."""
    row = Sampling(temperature=1.0, top_k=2)
    sampling = stack(row, 1, 300)
    logits = np.full((1, 1, 300), -5, np.float32)
    logits[..., 17 : 17 + size] = 1.25
    kept = run(logits, row)
    np.testing.assert_array_equal(np.isfinite(kept[0, 0]), logits[0, 0] > 0)
    for at in range(20):
        noise = np.asarray(gumbel(noise_key(jax.random.key(3), at), 300))
        token = jitted_draw(jnp.asarray(kept), jax.random.key(3)[None], jnp.full((1, 1), at), sampling)
        assert int(token[0, 0]) == int(np.argmax(kept[0, 0] + noise))
    # Half of the mass goes from the end of the equal ones.
    half = np.isfinite(run(logits, dataclasses.replace(row, top_p=0.5))[0, 0])
    np.testing.assert_array_equal(np.flatnonzero(half), 17 + np.arange(-(-size // 2)))


def test_logits_that_are_no_numbers_draw_some_id():
    sampling = stack(Sampling(temperature=1.0, top_k=2), 1, V)
    token = jitted_draw(
        jnp.full((1, 1, V), jnp.nan), jax.random.split(jax.random.key(0), 1), jnp.ones((1, 1), int), sampling
    )
    assert 0 <= int(token[0, 0]) < V


@pytest.mark.parametrize("top_p", [0.01, 0.125, 0.25, 0.3, 0.5, 0.75, 0.9])
@pytest.mark.parametrize("size", [4, 8, 16])
def test_top_p_with_all_tokens_equal(top_p, size):
    """Sums fall exactly on the border. As many stay as in transformers, lowest ids first, as argmax would choose."""
    row = Sampling(temperature=1.0, top_p=top_p)
    logits = np.zeros((1, 1, size), np.float32)
    kept = np.isfinite(run(logits, row)[0, 0])
    assert kept.sum() == np.isfinite(peer(logits[0, 0], [0], row, 0, [])).sum() == np.ceil(top_p * size)
    assert kept[: kept.sum()].all()


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6])
def test_top_k_border_of_special_values(k):
    """Zeros of both signs are equal; huge, tiny and infinite values order right."""
    x = np.array([-np.inf, 3e38, -3e38, 0.0, -0.0, 1e-30], np.float32)
    got = run(x[None, None], Sampling(temperature=1.0, top_k=k))[0, 0]
    np.testing.assert_array_equal(got, np.where(x < np.sort(x)[-k], -np.inf, x))


def test_top_k_keeps_ties_and_order_of_steps():
    """top-k first (2, 1, 1 stay), then top-p on what is left: e^2 : e : e = 0.576 : 0.212 : 0.212."""
    logits = np.array([[[1.0, 2.0, 0.5, 1.0]]], np.float32)
    got = run(logits, Sampling(temperature=1.0, top_k=2))[0, 0]
    np.testing.assert_array_equal(np.isfinite(got), [True, True, False, True])
    got = run(logits, Sampling(temperature=1.0, top_k=2, top_p=0.7))[0, 0]
    np.testing.assert_array_equal(np.isfinite(got), [True, True, False, False])


WILD = Sampling(
    temperature=1.7,
    top_k=3,
    top_p=0.4,
    min_p=0.2,
    repetition_penalty=1.8,
    presence_penalty=1.1,
    frequency_penalty=-0.7,
    banned_ids=(0, 5, 9),
    min_new_tokens=9,
)


@settings(max_examples=40, deadline=None)
@given(ROW, st.integers(0, 10**6))
def test_a_row_does_not_depend_on_its_neighbours(row, seed):
    """Bit for bit, also when the neighbours switch on every step."""
    row = Sampling(**row)
    logits = random_logits(seed, 3, 2, V, ties=False)
    rng = np.random.default_rng(seed)
    prompts, texts = rng.integers(0, V, (3, 4)), rng.integers(0, V, (3, 3))
    stops = np.array([[2, 3, -1], [4, -1, -1], [0, 1, 2]])
    alone = run(logits[1:2], row, prompts=prompts[1:2], texts=texts[1:2], stop_ids=stops[1:2, :1], all_steps=True)
    among = run(logits, [WILD, row, WILD], prompts=prompts, texts=texts, stop_ids=stops)
    np.testing.assert_array_equal(among[1], alone[0])


@pytest.mark.parametrize(
    "row",
    [
        Sampling(),
        Sampling(banned_ids=(3,)),
        Sampling(temperature=0.7),
        Sampling(temperature=0.7, top_k=4),
        Sampling(temperature=1.0, top_p=0.6),
        Sampling(temperature=1.3, min_p=0.1),
        Sampling(frequency_penalty=0.4, min_new_tokens=2),
    ],
)
def test_steps_of_the_neighbours_change_nothing(row):
    """Compiled with only the row's own steps, or with all of them: bit for bit the same."""
    logits = random_logits(8, 1, 3, V)
    options = {"prompts": [[1, 2]], "texts": [[3, 3]], "stop_ids": [[5]]}
    np.testing.assert_array_equal(run(logits, row, **options), run(logits, row, **options, all_steps=True))


def test_greedy_batch_is_untouched_and_cheap():
    logits = random_logits(0, 2, 3, V)
    np.testing.assert_array_equal(run(logits, Sampling()), logits)
    sampling = stack(Sampling(top_k=5, top_p=0.3, min_p=0.1), 2, V)
    flags = (sampling.stochastic, sampling.truncates, sampling.penalises, sampling.bans, sampling.min_new)
    assert not any(flags)
    keys = jax.random.split(jax.random.key(0), 2)
    text = str(jax.make_jaxpr(draw)(jnp.asarray(logits), keys, jnp.zeros((2, 3), jnp.int32), sampling))
    assert "argmax" in text
    assert "random" not in text
    assert "threefry" not in text


def test_bfloat16_logits_are_processed_in_float32():
    logits = jnp.asarray(random_logits(1, 1, 1, V), jnp.bfloat16)
    assert (
        processed_logits(logits, stack(Sampling(), 1, V), history=None, generated=jnp.zeros((1, 1), int)).dtype
        == jnp.float32
    )


def test_greedy_row_sees_bans_penalties_and_minimum():
    logits = np.array([[[5.0, 4.0, 3.0, 2.0]]], np.float32)
    keys, zero = jax.random.split(jax.random.key(0), 1), jnp.zeros((1, 1), jnp.int32)

    def token(row, **more):
        sampling = stack(row, 1, 4, more.get("stop_ids"))
        return int(draw(jnp.asarray(run(logits, row, **more)), keys, zero, sampling)[0, 0])

    assert token(Sampling()) == 0
    assert token(Sampling(banned_ids=(0,))) == 1
    assert token(Sampling(banned_ids=(0,), min_new_tokens=2), stop_ids=[[1]], generated=[[1]]) == 2
    assert token(Sampling(banned_ids=(0,), min_new_tokens=2), stop_ids=[[1]], generated=[[2]]) == 1
    assert token(Sampling(repetition_penalty=2.0), prompts=[[0]], texts=[[1]]) == 2
    assert token(Sampling(presence_penalty=3.0), prompts=[[0]], texts=[[0]]) == 1
    assert token(Sampling(presence_penalty=3.0), prompts=[[0]], texts=[[2]]) == 0, "the prompt does not count"


@pytest.mark.parametrize(
    "row",
    [
        Sampling(temperature=1.0, top_k=1),
        Sampling(temperature=1e-6),
        Sampling(temperature=1.0, top_p=1e-6),
        Sampling(temperature=1.0, min_p=1.0),
        Sampling(temperature=1.0, banned_ids=tuple(i for i in range(V) if i != 11)),
    ],
)
def test_one_token_left_equals_greedy(row):
    """Rules that leave one token draw it always, and nothing becomes NaN."""
    logits = random_logits(3, 64, 1, V, ties=False)
    processed = run(logits, row)
    assert not np.isnan(processed).any()
    want = np.full((64, 1), 11) if row.banned_ids else logits.argmax(-1)
    sampling = stack(row, 64, V)
    keys = jax.random.split(jax.random.key(1), 64)
    np.testing.assert_array_equal(jitted_draw(jnp.asarray(processed), keys, jnp.full((64, 1), 5), sampling), want)
    log_p = np.asarray(log_probs(jnp.asarray(processed), sampling))
    np.testing.assert_allclose(np.exp(log_p).sum(-1), 1, rtol=1e-5)
    np.testing.assert_array_equal(log_p.argmax(-1), want)


def test_log_probs_of_greedy_and_warm_rows():
    logits = random_logits(4, 2, 1, V, ties=False)
    sampling = stack([Sampling(), Sampling(temperature=0.5)], 2, V)
    got = np.asarray(log_probs(process(jnp.asarray(logits), sampling, None, jnp.zeros((2, 1), jnp.int32)), sampling))
    np.testing.assert_array_equal(np.exp(got[0, 0]), np.eye(V)[logits[0, 0].argmax()])
    x = logits[1, 0].astype(np.float64) / 0.5
    np.testing.assert_allclose(got[1, 0], x - np.log(np.exp(x).sum()), atol=2e-6)


def test_nan_is_detected_and_minus_infinity_is_not():
    logits = np.zeros((2, 2, V), np.float32)
    logits[0, 1, 7] = np.nan
    logits[1, 0, 1:] = -np.inf
    np.testing.assert_array_equal(any_nan(jnp.asarray(logits)), [[False, True], [False, False]])
    row = Sampling(temperature=0.7, top_k=4, top_p=0.9, min_p=0.1)
    got = run(logits, row)
    assert not np.isnan(got[1]).any()
    assert np.isfinite(got[1, 0]).sum() == 1


# The 0.9999 quantile of chi-square for 1 to 5 degrees of freedom: a fixed seed passes or fails for ever.
CHI2 = {1: 15.137, 2: 18.421, 3: 21.108, 4: 23.513, 5: 25.745}


def g_statistic(counts, p):
    seen = counts > 0
    return 2 * (counts[seen] * np.log(counts[seen] / (counts.sum() * p[seen]))).sum()


@pytest.mark.parametrize(
    "row",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.6, top_k=4),
        Sampling(temperature=1.5, top_p=0.8, banned_ids=(1,)),
    ],
)
def test_draws_follow_the_processed_distribution(row):
    """20,000 rows with their own keys, and the same number of positions of one row."""
    n, logits = 20_000, np.array([1.0, 0.2, -0.5, 0.9, -2.0, 0.0], np.float32)
    processed = jnp.asarray(run(logits[None, None], row))
    p = np.exp(np.float64(processed[0, 0]))
    p /= p.sum()
    keys = jax.random.split(jax.random.key(2), n)
    by_row = jitted_draw(jnp.broadcast_to(processed, (n, 1, 6)), keys, jnp.full((n, 1), 17), stack(row, n, 6))
    by_position = jitted_draw(jnp.broadcast_to(processed, (1, n, 6)), keys[:1], jnp.arange(n)[None], stack(row, 1, 6))
    for tokens in (by_row, by_position):
        counts = np.bincount(np.asarray(tokens).ravel(), minlength=6)
        assert counts[p == 0].sum() == 0
        assert g_statistic(counts, p) < CHI2[(p > 0).sum() - 1]
    biased = np.where(p > 0, p + 0.1, 0)
    assert g_statistic(counts, biased / biased.sum()) > 60, "the test must see a bias"


def test_neighbouring_positions_are_independent():
    n = 20_000
    processed = jnp.zeros((1, n, 2), jnp.float32)
    row = Sampling(temperature=1.0)
    tokens = np.asarray(
        jitted_draw(processed, jax.random.split(jax.random.key(3), 1), jnp.arange(n)[None], stack(row, 1, 2))
    )[0]
    pairs = np.bincount(tokens[0::2] * 2 + tokens[1::2], minlength=4)
    assert g_statistic(pairs, np.full(4, 0.25)) < CHI2[3]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.integers(0, 2**31 - 1))
def test_same_key_and_position_give_the_same_token(seed, position):
    """Whatever N or B, and whatever the neighbours do."""
    size, row = 301, Sampling(temperature=2.0)
    one = jnp.asarray(random_logits(seed, 1, 1, size, ties=False))
    key = jax.random.key(seed)
    want = int(jitted_draw(one, key[None], jnp.array([[position]]), stack(row, 1, size))[0, 0])
    many = jnp.broadcast_to(one, (3, 5, size))
    keys = jax.random.split(jax.random.key(99), 3).at[1].set(key)
    positions = jnp.arange(15).reshape(3, 5).at[1, 3].set(position)
    got = jitted_draw(many, keys, positions, stack([Sampling(), row, WILD], 3, size))
    assert int(got[1, 3]) == want
    assert got[0].tolist() == [int(one.argmax())] * 5


def test_noise_is_finite_at_both_ends_of_the_random_bits(monkeypatch):
    ends = np.array([0, 1, 2**31, 2**32 - 2, 2**32 - 1], np.uint32)
    monkeypatch.setattr(jax.random, "bits", lambda key, shape, dtype: jnp.asarray(ends))
    noise = np.asarray(gumbel(jax.random.key(0), 5))
    assert np.isfinite(noise).all()
    uniform = (ends.astype(np.float64) + 0.5) / 2**32
    np.testing.assert_allclose(noise[:3], -np.log(-np.log1p(-uniform[:3])), rtol=1e-6)


def test_noise_has_fine_steps_where_it_is_large():
    """The largest of 150,000 numbers must not be a tie; with 23 random bits one draw in a few is."""
    noise = np.sort(np.asarray(jax.vmap(lambda k: gumbel(k, 150_000))(jax.random.split(jax.random.key(5), 20))), axis=1)
    assert (noise[:, -1] > noise[:, -2]).all()
    assert abs(noise[:, -1].mean() - np.log(150_000) - 0.5772) < 1.0


def test_keys_that_depend_on_the_batch_are_refused():
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 1)
    with pytest.raises(ConfigError, match="are rbg keys"):
        draw(jnp.zeros((1, 1, V)), keys, jnp.zeros((1, 1), jnp.int32), stack(Sampling(temperature=1.0), 1, V))


def test_streams_of_noise_differ():
    key = jax.random.key(7)
    keys = [noise_key(key, p, s) for p in (0, 1, 12345) for s in (None, DRAFT, ACCEPT, RESIDUAL)]
    assert len({tuple(jax.random.key_data(k).tolist()) for k in keys}) == len(keys)
    assert jax.random.key_data(noise_key(key, 5)).tolist() == jax.random.key_data(jax.random.fold_in(key, 5)).tolist()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; give 0"),
        ({"temperature": float("nan")}, "temperature is nan; give a finite"),
        ({"temperature": 1e-9}, "at least 1e-06"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"presence_penalty": float("inf")}, "presence_penalty is inf"),
        ({"banned_ids": (1, -1)}, "banned_ids holds -1"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1"),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(ConfigError, match=words):
        Sampling(**options)


@pytest.mark.parametrize("options", [{"temperature": True}, {"top_k": 1.5}, {"frequency_penalty": "1"}])
def test_options_of_a_wrong_type(options):
    """One clear sentence, unless a type checker is on and refuses first."""
    name, value = next(iter(options.items()))
    with pytest.raises((ConfigError, TypeError), match=rf"{name} is {value!r}|[Tt]ype-check"):
        Sampling(**options)


def test_bad_batches():
    with pytest.raises(ConfigError, match="2 samplings were given for a batch of 3"):
        stack([Sampling()] * 2, 3, V)
    with pytest.raises(ConfigError, match="row 1 bans token 23, but the vocabulary has 23"):
        stack([Sampling(), Sampling(banned_ids=(V,))], 2, V)
    with pytest.raises(ConfigError, match="row 0 bans every token"):
        stack(Sampling(banned_ids=(0, 1, 2), min_new_tokens=1), 1, 4, [[3]])
    with pytest.raises(ValueError, match="needs a history"):
        run(np.zeros((1, 1, V), np.float32), Sampling(presence_penalty=1.0))


def test_generation_config():
    qwen = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2], "typical_p": 1.0}
    assert Sampling.from_generation_config(qwen) == Sampling(temperature=0.6, top_k=20, top_p=0.95)
    assert Sampling.from_generation_config({"do_sample": True}) == Sampling(temperature=1.0, top_k=50)
    assert Sampling.from_generation_config({"temperature": 0.6, "top_k": 20}) == Sampling()
    banned = {"suppress_tokens": [5, 3], "bad_words_ids": [[9]], "min_new_tokens": 2, "top_h": None}
    assert Sampling.from_generation_config(banned) == Sampling(banned_ids=(3, 5, 9), min_new_tokens=2)
    with pytest.raises(ConfigError, match="typical_p, which jdlite does not have"):
        Sampling.from_generation_config({"typical_p": 0.5})
    with pytest.raises(ConfigError, match="bad_words_ids of several tokens"):
        Sampling.from_generation_config({"bad_words_ids": [[1, 2]]})
