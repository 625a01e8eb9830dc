"""Batches: what they hold, their order, resuming, splits and filters."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from jdlite.errors import CheckpointError, ConfigError
from jdlite.training.data import DataConfig, held_out_prompts, make_dataset
from jdlite.training.records import Example, write_records

ALL = DataConfig(held_out_fraction=0.0, min_supervised=1)
LENGTH = 16


def make_example(i, prompt, answer, finish="stop_id", name=None):
    """Tokens of example i are 100 i + 1, 100 i + 2, ..."""
    size = prompt + answer
    return Example(
        id=name or f"{i:024x}-1",
        tokens=np.arange(100 * i + 1, 100 * i + size + 1, dtype=np.int32),
        loss_mask=np.arange(size) >= prompt,
        prompt_length=prompt,
        finish=finish,
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """40 examples of 3 to 11 tokens."""
    rng = np.random.default_rng(5)
    examples = [make_example(i, int(rng.integers(1, 5)), int(rng.integers(2, 8))) for i in range(40)]
    folder = tmp_path_factory.mktemp("data")
    write_records(folder, examples, run={}, shard_records=16)
    return folder, examples


def make(folder, config=ALL, batch=2, length=LENGTH, seed=3, **options):
    return make_dataset(folder, config, batch=batch, length=length, seed=seed, **options)


def take(iterator, count):
    return [next(iterator) for _ in range(count)]


def documents(batch):
    """`(tokens, mask, positions)` of each document of a batch."""
    found = []
    for row in range(batch["tokens"].shape[0]):
        segments = batch["segment_ids"][row]
        used = int((segments > 0).sum())
        # Documents stand one after the other and padding comes last.
        assert (segments[used:] == 0).all()
        assert np.isin(np.diff(segments[:used]), (0, 1)).all()
        assert not batch["loss_mask"][row, used:].any()
        assert not batch["tokens"][row, used:].any()
        for segment in range(1, int(segments.max(initial=0)) + 1):
            here = segments == segment
            found.append(tuple(batch[name][row, here].tolist() for name in ("tokens", "loss_mask", "positions")))
    return found


def same(a, b):
    return all((a[name] == b[name]).all() for name in a) and a.keys() == b.keys()


def test_shapes_and_types(store):
    batch = next(iter(make(store[0], batch=3)))
    assert {name: (value.shape, value.dtype.name) for name, value in batch.items()} == {
        "tokens": ((3, LENGTH), "int32"),
        "loss_mask": ((3, LENGTH), "bool"),
        "segment_ids": ((3, LENGTH), "int32"),
        "positions": ((3, LENGTH), "int32"),
    }


def test_every_epoch_holds_each_example_once(store):
    folder, examples = store
    data = make(folder, batch=1)
    expected = sorted((e.tokens.tolist(), e.loss_mask.tolist(), list(range(e.tokens.size))) for e in examples)
    iterator, done, orders = iter(data), 0, []
    for epoch in range(3):
        steps = data.steps(epoch + 1) - done
        done += steps
        seen = [document for batch in take(iterator, steps) for document in documents(batch)]
        assert sorted(seen) == [tuple(e) for e in expected]
        orders.append(tuple(tokens[0] for tokens, _, _ in seen))
    assert len(set(orders)) == 3
    iterator.close()


def test_rows_are_packed(store):
    folder, examples = store
    tokens = sum(e.tokens.size for e in examples)
    assert tokens / (make(folder, batch=1).steps() * LENGTH) > 0.85


def test_batches_depend_on_the_seed_alone(store):
    first, again = (take(iter(make(store[0])), 12) for _ in range(2))
    assert all(same(a, b) for a, b in zip(first, again, strict=True))
    other = take(iter(make(store[0], seed=4)), 12)
    assert not any(same(a, b) for a, b in zip(first, other, strict=True))
    # Making batches ahead changes nothing.
    slow = take(iter(make(store[0], DataConfig(held_out_fraction=0.0, min_supervised=1, prefetch=0))), 12)
    assert all(same(a, b) for a, b in zip(first, slow, strict=True))


@pytest.mark.parametrize("stop", [0, 1, 5, 11, 25])
def test_a_restored_iterator_goes_on_with_the_same_batches(store, stop):
    iterator = iter(make(store[0]))
    take(iterator, stop)
    state = json.loads(json.dumps(iterator.get_state()))
    expected = take(iterator, 15)
    fresh = iter(make(store[0]))
    fresh.set_state(state)
    assert all(same(a, b) for a, b in zip(take(fresh, 15), expected, strict=True))
    # Also one that has run already, and backwards.
    iterator.set_state(state)
    assert iterator.get_state() == state
    assert all(same(a, b) for a, b in zip(take(iterator, 15), expected, strict=True))


def test_a_state_of_other_data_is_refused(store):
    state = iter(make(store[0])).get_state()
    for options in ({"seed": 4}, {"batch": 4}, {"length": 17}, {"config": DataConfig(held_out_fraction=0.3)}):
        with pytest.raises(CheckpointError, match="the data differ from those of the checkpoint"):
            iter(make(store[0], **options)).set_state(state)


def test_splits_are_disjoint_and_complete(store):
    folder, examples = store
    config = DataConfig(held_out_fraction=0.3, min_supervised=1)
    train, held_out = (make(folder, config, split=split, repeat=False) for split in ("train", "held_out"))
    seen = [Counter(tokens[0] for batch in data for tokens, _, _ in documents(batch)) for data in (train, held_out)]
    assert not seen[0] & seen[1]
    assert seen[0] + seen[1] == Counter(int(e.tokens[0]) for e in examples)
    assert (train.counts["used"], held_out.counts["used"]) == (seen[0].total(), seen[1].total())
    assert 4 <= seen[1].total() <= 20
    assert train.counts["other_split"] == held_out.counts["used"]
    prompts = held_out_prompts(folder, config)
    assert {p[0] for p in prompts} == set(seen[1])
    by_first = {int(e.tokens[0]): e.tokens[: e.prompt_length].tolist() for e in examples}
    assert all(p == by_first[p[0]] for p in prompts)
    assert held_out_prompts(folder, config, 3) == prompts[:3]
    assert held_out_prompts(folder, ALL) == []


def test_one_epoch_ends_with_padding(store):
    data = make(store[0], batch=7, repeat=False)
    batches = list(data)
    assert all(batch["tokens"].shape == (7, LENGTH) for batch in batches)
    assert sum(len(documents(batch)) for batch in batches) == 40
    assert (batches[-1]["segment_ids"][-1] == 0).all()


def test_the_smallest_share_holds_out_a_conversation(tmp_path):
    # Two turns of one conversation stay together.
    names = [f"{'a' * 24}-1", f"{'a' * 24}-3", f"{'b' * 24}-1"]
    write_records(tmp_path, [make_example(i, 2, 3, name=name) for i, name in enumerate(names)], run={})
    config = DataConfig(held_out_fraction=1e-9)
    sizes = {make(tmp_path, config, split=split, batch=1).counts["used"] for split in ("train", "held_out")}
    assert sizes == {1, 2}


def filtered(tmp_path, config, length=LENGTH):
    examples = [
        make_example(0, 3, 5),
        make_example(1, 3, 5, "length"),
        make_example(2, 3, 5, "capacity"),
        make_example(3, 3, 5, "error"),
        make_example(4, 10, 20),
        make_example(5, 20, 5),
        make_example(6, 3, 1),
        make_example(7, 3, 0),
    ]
    write_records(tmp_path, examples, run={})
    data = make(tmp_path, config, batch=1, length=length, repeat=False)
    found = {tokens[0] // 100: (tokens, mask) for batch in data for tokens, mask, _ in documents(batch)}
    return found, data.counts


def test_what_is_left_out_is_counted(tmp_path):
    found, counts = filtered(tmp_path, DataConfig(held_out_fraction=0.0))
    assert sorted(found) == [0, 4]
    assert counts == {"used": 2, "cut": 2, "broken": 1, "long": 0, "unsupervised": 3, "other_split": 0}
    tokens, mask = found[4]
    assert (len(tokens), sum(mask)) == (16, 6)


def test_filters_can_be_changed(tmp_path):
    config = DataConfig(held_out_fraction=0.0, truncated="keep", long="drop", min_supervised=1)
    found, counts = filtered(tmp_path, config)
    assert sorted(found) == [0, 1, 2, 6]
    assert (counts["long"], counts["cut"], counts["broken"]) == (2, 0, 1)
    found, _ = filtered(tmp_path, DataConfig(held_out_fraction=0.0, min_supervised=6), length=32)
    assert sorted(found) == [4]


def test_a_run_without_supervision_is_refused(tmp_path):
    write_records(tmp_path, [make_example(0, 3, 5, "length"), make_example(1, 3, 0)], run={})
    with pytest.raises(ConfigError, match=r"loss mask of the whole train split is empty: none of 2 .*1 cut, 1 unsup"):
        make(tmp_path)
    with pytest.raises(ConfigError, match="loss mask of the whole held_out split is empty"):
        make(tmp_path, split="held_out")


def test_wrong_numbers_are_refused(store, tmp_path):
    with pytest.raises(CheckpointError, match="holds no training records"):
        make(tmp_path)
    with pytest.raises(ConfigError, match=r"each of 2 processes must get .* rows: got a batch of 3"):
        make(store[0], batch=3, process_count=2)
    with pytest.raises(ConfigError, match=r"got a batch of 4 in parts of 3"):
        make(store[0], batch=4, micro_rows=3)
    with pytest.raises(ConfigError, match=r"numbered 0 to 1: got 2"):
        make(store[0], process_index=2, process_count=2)
    with pytest.raises(ConfigError, match="rows must have at least 2 tokens: got 1"):
        make(store[0], length=1)
    for options in ({"held_out_fraction": 1.0}, {"min_supervised": 0}, {"prefetch": -1}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            DataConfig(**options)
