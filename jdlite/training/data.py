"""Batches to train on: stored examples, shuffled and packed anew each epoch, fed by Grain from any step on."""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import grain
import numpy as np

from jdlite.errors import CheckpointError, ConfigError
from jdlite.training.packing import pack, shuffled
from jdlite.training.records import CUT, Records

Batch = dict[str, np.ndarray]
Split = Literal["train", "held_out"]
# Rows of a run without end; Grain wants a number.
_ENDLESS = 2**40


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """How stored examples become batches.

    Attributes:
        held_out_fraction: share of the conversations that is never trained on, chosen by a hash of their id. Above 0 it
            is at least one conversation, where there are two.
        truncated: what to do with answers that were cut at the limit of new tokens: `drop` or `keep`.
        long: what to do with examples that are longer than a row: `truncate` keeps their beginning, `drop` leaves them
            out.
        min_supervised: least number of supervised tokens of an example; others are left out.
        prefetch: batches that are made ahead.
    """

    held_out_fraction: float = 0.02
    truncated: Literal["drop", "keep"] = "drop"
    long: Literal["truncate", "drop"] = "truncate"
    min_supervised: int = 2
    prefetch: int = 2

    def __post_init__(self) -> None:
        if not 0 <= self.held_out_fraction < 1:
            raise ConfigError(
                f"held_out_fraction must be at least 0 and below 1: got {self.held_out_fraction}; 0.02 is usual."
            )
        if self.min_supervised < 1:
            raise ConfigError(f"min_supervised must be at least 1: got {self.min_supervised}; 2 is usual.")
        if self.prefetch < 0:
            raise ConfigError(f"prefetch must not be negative: got {self.prefetch}; 2 is usual.")


class States(Protocol):
    """The target's states by number of the record (`feature_store.FeatureStore`)."""

    @property
    def row_shape(self) -> tuple[int, int]:
        """Layers and width."""
        ...

    def __getitem__(self, record: int) -> np.ndarray:
        """`[size, *row_shape]`."""
        ...


class PackedRows:
    """Rows of packed examples by number: those of epoch 0, then of epoch 1, and so on.

    Every epoch holds each example once, in its own order and its own packing, both functions of the seed and the epoch.
    So any row can be made without those before it.

    Attributes:
        chosen: `[n]` numbers of the records in use.
        counts: how many examples are in use and how many were left out, by reason.

    Args:
        records: stored examples.
        chosen: numbers of the records to use.
        length: T, tokens of a row; longer examples are cut.
        seed: of order and packing.
        rows: how many rows there are to be, or None for one epoch's.
        states: the target's states of a record, `[size, M + 1, D]`, by its number, which become the field `states`.
    """

    def __init__(
        self,
        records: Records,
        chosen: np.ndarray,
        *,
        length: int,
        seed: int,
        rows: int | None,
        states: States | None = None,
    ):
        self._records, self._chosen, self._length, self._seed = records, chosen, length, seed
        self._states = states
        self._lengths = np.minimum(records.table["length"][chosen], length)
        self._begins = [0]  # first row of each epoch that was planned so far
        self._plans: dict[int, list[list[int]]] = {}
        self._lock = threading.Lock()
        self._rows = self.rows_before(1) if rows is None else rows

    def __len__(self) -> int:
        return self._rows

    def rows_before(self, epoch: int) -> int:
        """Rows of all epochs before this one."""
        with self._lock:
            while len(self._begins) <= epoch:
                self._plan(len(self._begins) - 1)
            return self._begins[epoch]

    def __getitem__(self, i: int) -> Batch:
        """Row i: the fields of a batch without the axis B."""
        documents = self.documents(i)
        row: Batch = {name: np.zeros(self._length, kind) for name, kind in _FIELDS.items()}
        if self._states is not None:
            row["states"] = np.zeros((self._length, *self._states.row_shape), np.float32)
        at = 0
        for segment, document in enumerate(documents, 1):
            example = self._records[int(self._chosen[document])]
            size = min(example.tokens.size, self._length)
            here = slice(at, at + size)
            row["tokens"][here] = example.tokens[:size]
            row["loss_mask"][here] = example.loss_mask[:size]
            row["segment_ids"][here] = segment
            row["positions"][here] = np.arange(size)
            if self._states is not None:
                row["states"][here] = self._states[int(self._chosen[document])]
            at += size
        return row

    def documents(self, i: int) -> list[int]:
        """What row i holds, as places in `chosen`, in order."""
        with self._lock:
            while self._begins[-1] <= i:
                self._plan(len(self._begins) - 1)
            epoch = bisect.bisect_right(self._begins, i) - 1
            return self._plan(epoch)[i - self._begins[epoch]]

    def _plan(self, epoch: int) -> list[list[int]]:
        """Documents of each row of an epoch; the newest two plans are kept."""
        if epoch not in self._plans:
            order = shuffled(len(self._chosen), self._seed, epoch, 0)
            packed = pack(self._lengths[order].tolist(), self._length)
            # Rows that were opened late are emptier; they must not all come last.
            rows = [[int(order[item]) for item in packed[row]] for row in shuffled(len(packed), self._seed, epoch, 1)]
            self._plans[epoch] = rows
            if len(self._begins) == epoch + 1:
                self._begins.append(self._begins[-1] + len(rows))
            for old in sorted(self._plans)[:-2]:
                if old != epoch:
                    del self._plans[old]
        return self._plans[epoch]


_FIELDS = {"tokens": np.int32, "loss_mask": bool, "segment_ids": np.int32, "positions": np.int32}


class _Padded:
    """One epoch's rows, filled up with empty ones to whole batches."""

    def __init__(self, rows: PackedRows, multiple: int):
        self._rows, self._count = rows, -(-len(rows) // multiple) * multiple

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: int) -> Batch:
        if i < len(self._rows):
            return self._rows[i]
        return {name: np.zeros_like(value) for name, value in self._rows[0].items()}


class _Share:
    """The rows of one process: of every micro-batch its own block, so that the processes' blocks side by side are it.

    Batches of all processes' shares stand at the same place, so the state of one iterator is that of all.
    """

    def __init__(self, rows: PackedRows | _Padded, micro: int, process: tuple[int, int]):
        index, count = process
        self._rows, self._count = rows, len(rows) // count
        self._own, self._micro, self._first = micro // count, micro, index * (micro // count)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: int) -> Batch:
        micro, row = divmod(i, self._own)
        return self._rows[micro * self._micro + self._first + row]


class Batches(Iterator[Batch]):
    """Batches in order, from any point on.

    `get_state` is a JSON value; a new iterator of the same dataset that is given it goes on with exactly the batches
    that the old one would have given.
    """

    def __init__(self, iterator: grain.DatasetIterator, fingerprint: str):
        self._iterator, self._fingerprint = iterator, fingerprint

    def __next__(self) -> Batch:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """Where it stands."""
        return {"data": self._fingerprint, **self._iterator.get_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go to where another iterator stood.

        Raises:
            CheckpointError: the state is of other data or other options, whose batches would differ.
        """
        if state.get("data") != self._fingerprint:
            raise CheckpointError(
                f"the data differ from those of the checkpoint ({self._fingerprint} instead of {state.get('data')}): "
                "other records, row length, batch size, seed or data options; restore them or start a new run."
            )
        self._iterator.set_state({name: value for name, value in state.items() if name != "data"})

    def close(self) -> None:
        """Stop making batches ahead."""
        self._iterator.close()


class Dataset:
    """Batches of one split. Iterating begins at the first batch.

    A batch is a dict of numpy arrays `[B, T]`: `tokens` int32; `loss_mask` bool, True on tokens to learn from, the
    end-of-turn token included; `segment_ids` int32, 0 for padding and 1, 2, ... for the examples that share a row;
    `positions` int32, which begin at 0 in each example.

    Attributes:
        records: the stored examples.
        counts: examples `used`, and left out by reason: `cut` (at the limit of new tokens), `long`, `unsupervised`
            (too few supervised tokens), `broken` (the target's logits were not numbers), `other_split`.
        fingerprint: names data and options; equal fingerprints mean equal batches.
    """

    def __init__(
        self,
        records: Records,
        config: DataConfig,
        counts: Mapping[str, int],
        rows: PackedRows,
        *,
        batch: int,
        micro: int,
        process: tuple[int, int],
        repeat: bool,
        fingerprint: str,
    ):
        self.records, self.counts, self.fingerprint = records, dict(counts), fingerprint
        self._config, self._rows, self._batch = config, rows, batch
        share = _Share(rows if repeat else _Padded(rows, batch), micro, process)
        source = grain.MapDataset.source(share)  # pyright: ignore[reportArgumentType]
        self._batches = source.batch(batch // process[1], drop_remainder=True)

    def steps(self, epochs: int = 1) -> int:
        """Batches of the first `epochs` epochs, at least one. Packing differs by epoch, so these are no multiples."""
        return max(self._rows.rows_before(epochs) // self._batch, 1)

    def __iter__(self) -> Batches:
        ahead = self._config.prefetch
        options = grain.ReadOptions(num_threads=min(ahead, 4), prefetch_buffer_size=ahead)
        return Batches(iter(self._batches.to_iter_dataset(options)), self.fingerprint)


def make_dataset(
    folder: str | Path,
    config: DataConfig,
    *,
    batch: int,
    length: int,
    seed: int,
    micro_rows: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
    split: Split = "train",
    repeat: bool | None = None,
    states: States | None = None,
) -> Dataset:
    """Batches from a folder that the regenerate stage filled.

    Args:
        folder: of the run, which holds `records`.
        config: options.
        batch: B, rows of a step over all processes; each process gets `batch / process_count` of them.
        length: T, tokens of a row.
        seed: of order and packing.
        micro_rows: rows of a micro-batch over all processes, of which each process gets a block; divides `batch`. None
            takes all.
        process_index: which process this is.
        process_count: how many there are.
        split: `train` or `held_out`.
        repeat: epoch after epoch without end, or one epoch whose last batch is filled up with padding; by default the
            former for `train` and the latter for `held_out`.
        states: the target's, from disk; batches then have a field `states`, float32 `[B, T, M + 1, D]`.

    Raises:
        CheckpointError: there are no records.
        ConfigError: no example can be used, or numbers do not fit.
    """
    micro = batch if micro_rows is None else micro_rows
    if min(batch, micro, process_count) < 1 or batch % micro or micro % process_count:
        raise ConfigError(
            f"each of {process_count} processes must get the same whole number of rows: got a batch of {batch} in "
            f"parts of {micro}; choose a part that divides the batch and that the number of processes divides."
        )
    if not 0 <= process_index < process_count:
        raise ConfigError(f"processes are numbered 0 to {process_count - 1}: got {process_index}; give one of these.")
    if length < 2:
        raise ConfigError(f"rows must have at least 2 tokens: got {length}; give the longest example's length or so.")
    repeat = split == "train" if repeat is None else repeat
    records = Records(folder)
    chosen, counts = _choose(records, config, length, split)
    if not chosen.size:
        reasons = ", ".join(f"{number} {reason}" for reason, number in counts.items() if number and reason != "used")
        raise ConfigError(
            f"the loss mask of the whole {split} split is empty: none of {len(records)} examples in {folder} can be "
            f"used ({reasons or 'there are none'}); regenerate with a larger max_new_tokens or change the data options."
        )
    rows = PackedRows(records, chosen, length=length, seed=seed, rows=_ENDLESS if repeat else None, states=states)
    digest = hashlib.sha256(records.table[chosen].tobytes())
    digest.update(repr((chosen.tolist(), length, batch, seed, split, repeat)).encode())
    return Dataset(
        records,
        config,
        counts,
        rows,
        batch=batch,
        micro=micro,
        process=(process_index, process_count),
        repeat=repeat,
        fingerprint=digest.hexdigest()[:16],
    )


def used_records(records: Records, config: DataConfig, length: int) -> np.ndarray:
    """Numbers of the records of both splits that can be used, ascending; arguments as for `make_dataset`."""
    splits: tuple[Split, ...] = ("train", "held_out")
    return np.sort(np.concatenate([_choose(records, config, length, split)[0] for split in splits]))


def held_out_prompts(folder: str | Path, config: DataConfig, limit: int | None = None) -> list[list[int]]:
    """Token ids of the held-out prompts, each up to the opening of the answer, in an order without meaning.

    Args:
        folder: of the run, which holds `records`.
        config: as for training; decides which conversations are held out.
        limit: how many at most.

    Raises:
        CheckpointError: there are no records.
    """
    records = Records(folder)
    ranks = _ranks(records)
    numbers = np.flatnonzero(_held_out(ranks, config.held_out_fraction))
    numbers = numbers[np.argsort(ranks[numbers], kind="stable")][:limit]
    examples = (records[int(i)] for i in numbers)
    return [example.tokens[: example.prompt_length].tolist() for example in examples]


def _choose(records: Records, config: DataConfig, length: int, split: Split) -> tuple[np.ndarray, Counter[str]]:
    """Numbers of the records of a split that can be used, and how many are left out, by reason."""
    table = records.table
    left = np.ones(len(table), bool)
    counts: Counter[str] = Counter()

    def leave_out(reason: str, where: np.ndarray) -> None:
        nonlocal left
        counts[reason] = int((left & where).sum())
        left &= ~where

    held_out = _held_out(_ranks(records), config.held_out_fraction)
    leave_out("other_split", held_out != (split == "held_out"))
    cut = np.isin(table["finish"], [reason.encode() for reason in CUT - {"error"}])
    leave_out("broken", table["finish"] == b"error")
    leave_out("cut", cut & (config.truncated == "drop"))
    leave_out("long", (table["length"] > length) & (config.long == "drop"))
    # Supervised tokens that a row of this length can hold.
    supervised = np.minimum(table["supervised"], length - table["first"])
    leave_out("unsupervised", supervised < config.min_supervised)
    counts["used"] = int(left.sum())
    return np.flatnonzero(left), counts


def _ranks(records: Records) -> np.ndarray:
    """`[n]` numbers in 0 ... 1, one per conversation: turns of the same conversation stay together."""

    def rank(name: bytes) -> float:
        digest = hashlib.sha256(b"held out " + name.partition(b"-")[0]).digest()
        return int.from_bytes(digest[:8]) / 2.0**64

    return np.array([rank(name) for name in records.table["id"].tolist()], np.float64)


def _held_out(ranks: np.ndarray, fraction: float) -> np.ndarray:
    """`[n]` bool: the conversations that are never trained on."""
    distinct = np.unique(ranks)
    if not fraction or distinct.size < 2:
        return np.zeros(ranks.shape, bool)
    # At least one conversation on either side.
    border = min(max(fraction, distinct[1]), distinct[-1])
    return ranks < border
