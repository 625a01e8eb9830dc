"""Stored examples and the journal."""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdlite.errors import CheckpointError, ConfigError
from jdlite.training.journal import Journal
from jdlite.training.records import Example, Records, write_records


def example(name="a-1", tokens=(5, 6, 7), mask=(0, 1, 1), finish="stop_id"):
    return Example(
        id=name,
        tokens=np.array(tokens, np.int32),
        loss_mask=np.array(mask, bool),
        prompt_length=1,
        finish=finish,
        sampling={"temperature": 0.7, "seed": 3},
        target="f" * 8,
    )


def same(a, b):
    return (
        a.tokens.tolist() == b.tokens.tolist()
        and a.loss_mask.tolist() == b.loss_mask.tolist()
        and (a.id, a.prompt_length, a.finish, a.sampling, a.target)
        == (b.id, b.prompt_length, b.finish, b.sampling, b.target)
        and (a.tokens.dtype, a.loss_mask.dtype) == (b.tokens.dtype, b.loss_mask.dtype)
    )


@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), max_size=20))
def test_bytes_round_trip(pairs):
    one = example(tokens=[t for t, _ in pairs], mask=[m for _, m in pairs])
    assert same(Example.from_bytes(one.to_bytes()), one)


def test_damaged_bytes_are_refused():
    data = example().to_bytes()
    for bad in (b"", data[:10], data[:-1], data + b"x", b"XXXX" + data[4:]):
        with pytest.raises(CheckpointError, match="a stored example is damaged"):
            Example.from_bytes(bad)


def test_tokens_and_mask_must_fit():
    with pytest.raises(ValueError, match="tokens"):
        example(mask=(0, 1))


def test_records_are_read_back_from_several_shards(tmp_path):
    stored = [example(f"n-{i}", range(i + 1), [1] * (i + 1), "length" if i == 2 else "stop_id") for i in range(7)]
    write_records(tmp_path, stored, run={"target": "x"}, shard_records=3)
    records = Records(tmp_path)
    assert len(records) == 7
    assert all(same(a, b) for a, b in zip(records, stored, strict=True))
    assert same(records[6], stored[6])
    assert records.table["length"].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert records.table["id"].tolist() == [f"n-{i}".encode() for i in range(7)]
    assert records.index["finish"] == {"stop_id": 6, "length": 1}
    assert records.index["supervised"] == records.index["tokens"] == 28
    assert records.run == {"target": "x"}
    assert len(list((tmp_path / "records").glob("*.arecord"))) == 3
    assert same(pickle.loads(pickle.dumps(records))[4], stored[4])
    with pytest.raises(IndexError):
        records[7]


def files(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_same_examples_give_the_same_bytes(tmp_path):
    for name in ("x", "y"):
        write_records(tmp_path / name, [example("a-1"), example("b-1")], run={"seed": 1})
    assert files(tmp_path / "x") == files(tmp_path / "y")


def test_several_threads_may_read(tmp_path):
    stored = [example(f"n-{i}", [i], [1]) for i in range(50)]
    write_records(tmp_path, stored, run={}, shard_records=7)
    records, wrong = Records(tmp_path), []

    def read(offset):
        wrong.extend(i for i in range(offset, 50) if records[i].tokens.tolist() != [i])

    threads = [threading.Thread(target=read, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_writing_replaces_whole_or_not_at_all(tmp_path):
    write_records(tmp_path, [example("old-1")], run={})

    def broken():
        yield example("new-1")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_records(tmp_path, broken(), run={})
    assert [e.id for e in Records(tmp_path)] == ["old-1"]
    write_records(tmp_path, [example("new-1")], run={})
    assert [e.id for e in Records(tmp_path)] == ["new-1"]
    assert [path.name for path in tmp_path.iterdir()] == ["records"]


def test_absent_and_damaged_records_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no training records .*run the regenerate stage first"):
        Records(tmp_path)
    write_records(tmp_path, [example(f"n-{i}") for i in range(3)], run={})
    index = tmp_path / "records" / "index.json"
    content = json.loads(index.read_text())
    index.write_text(json.dumps(content | {"records": 4}))
    with pytest.raises(CheckpointError, match=r"are damaged .*count differently"):
        Records(tmp_path)
    index.write_text(json.dumps(content | {"version": 9}))
    with pytest.raises(CheckpointError, match="version 9 instead of 1"):
        Records(tmp_path)
    index.write_text(json.dumps(content))
    shard = tmp_path / "records" / content["shards"][0]["file"]
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="arecord cannot be read"):
        Records(tmp_path)[0]


def test_a_full_disk_is_a_clear_error(tmp_path):
    """A limit on the size of files stands for a full disk."""
    rng = np.random.default_rng(0)
    big = (example(f"n-{i}", rng.integers(0, 2**31, 50_000), [1] * 50_000) for i in range(20))
    before = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[0][1]))
    try:
        with pytest.raises(CheckpointError, match=r"cannot write .*; free some space"):
            write_records(tmp_path, big, run={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before[0])
        signal.signal(signal.SIGXFSZ, before[1])
    assert list(tmp_path.iterdir()) == []


# The journal.


def test_a_journal_keeps_what_was_appended(tmp_path):
    path = tmp_path / "journal"
    first = Journal(path)
    first.append(example("a-1"))
    first.append(example("b-1", (9,), (1,)))
    assert "a-1" in first
    assert same(first["b-1"], example("b-1", (9,), (1,)))
    first.close()
    again = Journal(path)
    assert list(again.places) == ["a-1", "b-1"]
    again.append(example("c-1"))
    assert same(again["c-1"], example("c-1"))
    again.close()


def test_a_torn_end_is_cut_off(tmp_path):
    """Whatever part of the last example was written, the others stay and writing goes on."""
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.append(example("a-1"))
    whole = os.path.getsize(path)
    journal.append(example("b-1"))
    journal.close()
    data = path.read_bytes()
    for size in range(whole, len(data)):
        path.write_bytes(data[:size])
        torn = Journal(path)
        assert list(torn.places) == ["a-1"]
        torn.append(example("b-1"))
        torn.close()
        assert path.read_bytes() == data


def test_a_damaged_end_is_cut_off(tmp_path):
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.append(example("a-1"))
    journal.append(example("b-1"))
    journal.close()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert list(Journal(path).places) == ["a-1"]


def test_one_process_at_a_time(tmp_path):
    journal = Journal(tmp_path / "journal")
    with pytest.raises(ConfigError, match="another process is writing"):
        Journal(tmp_path / "journal")
    journal.close()
    Journal(tmp_path / "journal").close()


def test_a_full_disk_keeps_what_was_appended(tmp_path):
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.append(example("a-1"))
    size = os.path.getsize(path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, before[0][1]))
    try:
        with pytest.raises(CheckpointError, match=r"cannot write .*; free some space"):
            journal.append(example("b-1"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before[0])
        signal.signal(signal.SIGXFSZ, before[1])
    journal.append(example("c-1"))
    journal.close()
    assert list(Journal(path).places) == ["a-1", "c-1"]


def test_a_journal_that_cannot_be_opened(tmp_path):
    with pytest.raises(CheckpointError, match="cannot write"):
        Journal(tmp_path / "none" / "journal")
