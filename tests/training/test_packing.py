"""Order and packing of an epoch."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jdlite.training.packing import mixed, pack, shuffled


@given(st.lists(st.integers(1, 20), max_size=40), st.integers(20, 30))
def test_rows_hold_every_item_once_and_never_overflow(lengths, length):
    rows = pack(lengths, length)
    assert sorted(item for row in rows for item in row) == list(range(len(lengths)))
    sums = [sum(lengths[item] for item in row) for row in rows]
    assert all(0 < total <= length for total in sums)
    # Best fit opens a row only for what fits nowhere, so no two rows could be one.
    assert all(a + b > length for i, a in enumerate(sums) for b in sums[:i])


@given(st.lists(st.integers(1, 9), max_size=30))
def test_packing_is_best_fit(lengths):
    rooms: list[int] = []
    rows: list[list[int]] = []
    for item, size in enumerate(lengths):
        fitting = [(room, row) for row, room in enumerate(rooms) if room >= size]
        if fitting:
            _, row = min(fitting)
        else:
            row = len(rows)
            rows.append([])
            rooms.append(9)
        rows[row].append(item)
        rooms[row] -= size
    assert pack(lengths, 9) == rows


def test_packing_wastes_little():
    lengths = np.random.default_rng(0).integers(5, 400, 2000).tolist()
    assert sum(lengths) / (512 * len(pack(lengths, 512))) > 0.97


def test_the_docstrings_example():
    assert pack([6, 3, 4, 2], 8) == [[0, 3], [1, 2]]


def reference_mixed(parts, place):
    """SplitMix64 with Python's integers."""
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    base = 0
    for part in parts:
        base = mix((base + golden + part) & mask)
    return mix((base + (place + 1) * golden) & mask)


@given(st.lists(st.integers(-5, 2**40), max_size=3))
def test_numbers_equal_those_of_plain_python(parts):
    assert mixed(*parts, count=5).tolist() == [reference_mixed(parts, place) for place in range(5)]


def test_shuffling_is_a_permutation_of_its_own_for_each_epoch():
    orders = [shuffled(100, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert all(sorted(order.tolist()) == list(range(100)) for order in orders)
    assert len({tuple(order.tolist()) for order in orders}) == 4
    assert shuffled(100, 0, 1).tolist() == orders[1].tolist()


def test_shuffling_is_fair():
    """Each item is as often at each place: chi-square of 4 x 4 counts stays below the 0.1% point of 9 degrees."""
    counts = np.zeros((4, 4))
    for epoch in range(4000):
        counts[np.arange(4), shuffled(4, 7, epoch)] += 1
    assert ((counts - 1000) ** 2 / 1000).sum() < 27.9
