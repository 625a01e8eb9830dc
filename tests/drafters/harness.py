"""Plays texts into a drafter the way the decode loop does, and hands an oracle the same facts as plain Python lists.

A `Player` owns the drafter's memory and the token buffer. Prompts go in by ragged prefill chunks, then rounds commit
blocks of random size, each as the accepted path of a random tree with rejected nodes. What the target would have
computed (tapped states, top ids) is random; the history of each row keeps what was committed, for the oracle.
Everything that a drafter must not read holds rubbish that looks real: ids beyond the row, path entries beyond the
count, nodes that were not run.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jdlite.drafters.base import SOURCES, Context, Drafter, Observation, Proposal

CAPACITY, CHUNK, NODES, PATH, HIDDEN, LAYERS = 24, 5, 7, 4, 6, 4


@dataclasses.dataclass
class History:
    """What is known of one row, in plain Python.

    Attributes:
        tokens: known tokens, anchor included.
        states: state of each token that was run, i.e. of all but the anchor.
        top_ids: most likely next ids after each token that was run.
        nodes: every node that was run in order of running, rejected ones included: (token, top ids).
    """

    tokens: list[int]
    states: list[np.ndarray] = dataclasses.field(default_factory=list)
    top_ids: list[list[int]] = dataclasses.field(default_factory=list)
    nodes: list[tuple[int, tuple[int, ...]]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class NumpyProposal:
    """The fields of a `Proposal` as numpy arrays."""

    tokens: np.ndarray
    parents: np.ndarray
    valid: np.ndarray
    gain: np.ndarray
    source: np.ndarray

    @classmethod
    def of(cls, proposal: Proposal) -> NumpyProposal:
        return cls(*(np.asarray(getattr(proposal, field.name)) for field in dataclasses.fields(cls)))


@functools.partial(jax.jit, static_argnames=("batch", "capacity", "vocab"))
def _init(drafter, batch, capacity, vocab):
    return drafter.init(batch, capacity, hidden_size=HIDDEN, vocab_size=vocab, dtype=jnp.float32)


# Contexts and observations travel to the compiled functions as dicts of numpy arrays and are put together there: a test
# makes thousands of them, and one small transfer per field outside of jit would take most of its time.


def to_context(fields: dict) -> Context:
    """The `Context` of what `Player.context` gives."""
    B = fields["lengths"].shape[0]
    return Context(
        keys=jax.random.split(jax.random.key(0), B), temperature=jnp.zeros(B), **jax.tree.map(jnp.asarray, fields)
    )


@jax.jit
def _observe(drafter, memory, context, observation):
    return drafter.observe(memory, to_context(context), Observation(**observation))


@jax.jit
def _propose(drafter, memory, context):
    return drafter.propose(memory, to_context(context))


@jax.jit
def _rollback(drafter, memory, lengths):
    return drafter.rollback(memory, lengths)


class Player:
    """One batch of rows being decoded with a drafter, without a target.

    Args:
        drafter: the drafter under test.
        texts: the whole text of each row; what the "target" says next is read from here.
        seed: of all random choices.
        vocab: ids are `0 .. vocab - 1`.
        capacity: S.
    """

    def __init__(self, drafter: Drafter, texts: list[list[int]], *, seed: int, vocab: int, capacity: int = CAPACITY):
        assert all(1 <= len(text) <= capacity for text in texts)
        self.drafter, self.texts, self.vocab, self.capacity = drafter, texts, vocab, capacity
        self.rng = np.random.default_rng(seed)
        self.needs = drafter.needs(LAYERS)
        self.embedding = self.rng.normal(size=(vocab, HIDDEN)).astype(np.float32)
        self.rows = [History([]) for _ in texts]
        self.memory = _init(drafter, len(texts), capacity, vocab)
        self.prompt_lengths = [0] * len(texts)

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(row.tokens) for row in self.rows], np.int32)

    def context(self) -> dict:
        """Fields of the `Context`, with rubbish beyond each row."""
        buffer = self.rng.integers(0, self.vocab, (len(self.rows), self.capacity)).astype(np.int32)
        for row, history in zip(buffer, self.rows, strict=True):
            row[: len(history.tokens)] = history.tokens
        return {
            "tokens": buffer,
            "lengths": self.lengths,
            "prompt_lengths": np.array(self.prompt_lengths, np.int32),
            "embedding": self.embedding,
        }

    def prefill(self, prompt_lengths: list[int]) -> None:
        """Run prompt[:-1] in chunks; the last prompt token is the first anchor."""
        self.prompt_lengths = list(prompt_lengths)
        done = [0] * len(self.rows)
        for history, text in zip(self.rows, self.texts, strict=True):
            history.tokens = text[:1]
        while any(d < p - 1 for d, p in zip(done, prompt_lengths, strict=True)):
            count = [min(CHUNK, p - 1 - d) for d, p in zip(done, prompt_lengths, strict=True)]
            path = np.tile(np.arange(CHUNK), (len(self.rows), 1))
            valid = np.arange(CHUNK) < np.array(count)[:, None]
            self._forward(np.array(done), path, np.array(count), valid)
            done = [d + c for d, c in zip(done, count, strict=True)]

    def round(self, counts: list[int]) -> None:
        """Commit `counts[b]` tokens of row b (0 to `PATH`), as the accepted path of a random tree."""
        B = len(self.rows)
        path = np.empty((B, PATH), int)
        valid = self.rng.random((B, NODES)) < 0.7
        for b, count in enumerate(counts):
            path[b] = np.r_[0, np.sort(1 + self.rng.choice(NODES - 1, PATH - 1, replace=False))]
            valid[b, path[b, :count]] = True
            path[b, count:] = self.rng.integers(0, NODES, PATH - count)
        self._forward(self.lengths - 1, path, np.array(counts), valid)

    def _forward(self, start, path, count, valid) -> None:
        B, N = valid.shape
        k = self.needs.top_k
        tokens = self.rng.integers(0, self.vocab, (B, N)).astype(np.int32)
        taps = [self.rng.normal(size=(B, N, HIDDEN)).astype(np.float32) for _ in self.needs.taps]
        top_ids = np.argsort(self.rng.random((B, N, self.vocab)), axis=2)[:, :, :k].astype(np.int32)
        next_tokens = self.rng.integers(0, self.vocab, path.shape).astype(np.int32)
        for b, (history, text) in enumerate(zip(self.rows, self.texts, strict=True)):
            for i in range(count[b]):
                node, position = path[b, i], start[b] + i
                tokens[b, node] = text[position]
                next_tokens[b, i] = text[position + 1]
                history.tokens.append(text[position + 1])
                history.states.append(taps[0][b, node] if taps else np.zeros(HIDDEN))
                history.top_ids.append(top_ids[b, node].tolist())
            if count[b]:
                history.nodes += [(int(tokens[b, n]), tuple(top_ids[b, n].tolist())) for n in range(N) if valid[b, n]]
        observation = {
            "tokens": tokens,
            "valid": valid,
            "path": np.asarray(path, np.int32),
            "start": np.asarray(start, np.int32),
            "count": np.asarray(count, np.int32),
            "taps": tuple(taps),
            "top_ids": top_ids,
            "next_tokens": next_tokens,
        }
        self.see(self.context(), observation)

    def see(self, context: dict, observation: dict) -> None:
        """Hand a forward to the drafter; fields of a `Context` and of an `Observation`."""
        self.memory = _observe(self.drafter, self.memory, context, observation)

    def rollback(self, lengths: list[int], texts: list[list[int]]) -> None:
        """Forget tokens from `lengths[b]` on and go on with other texts that agree with what is kept."""
        self.memory = _rollback(self.drafter, self.memory, np.asarray(lengths, np.int32))
        self.texts = texts
        for history, length, text in zip(self.rows, lengths, texts, strict=True):
            assert text[:length] == history.tokens[:length]
            history.tokens = history.tokens[:length]
            history.states = history.states[: length - 1]
            history.top_ids = history.top_ids[: length - 1]

    def fork(self, order: list[int]) -> None:
        """Rebuild the batch from copies of its own rows, as a session does."""
        self.memory = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[np.array(order)]), self.memory)
        self.rows = [
            History(list(r.tokens), list(r.states), list(r.top_ids), list(r.nodes))
            for r in (self.rows[i] for i in order)
        ]
        self.texts = [self.texts[i] for i in order]
        self.prompt_lengths = [self.prompt_lengths[i] for i in order]

    def propose(self) -> NumpyProposal:
        """The proposal as numpy arrays, after the checks that every proposal must pass."""
        proposal = NumpyProposal.of(_propose(self.drafter, self.memory, self.context()))
        check_proposal(proposal, self.drafter, anchor=[row.tokens[-1] for row in self.rows], vocab=self.vocab)
        return proposal

    def advance(self) -> bool:
        """A round with random block sizes, some of them 0; False when every row is at the end of its text."""
        left = [len(text) - len(row.tokens) for text, row in zip(self.texts, self.rows, strict=True)]
        if not any(left):
            return False
        self.round([int(self.rng.integers(0, min(PATH, rest) + 1)) for rest in left])
        return True


def check_proposal(proposal: NumpyProposal, drafter: Drafter, *, anchor: list[int], vocab: int) -> None:
    """What holds for every proposal of every drafter."""
    B = len(anchor)
    assert proposal.tokens.shape == (B, drafter.max_nodes)
    for field in (proposal.parents, proposal.valid, proposal.gain, proposal.source):
        assert field.shape == proposal.tokens.shape
    assert proposal.tokens.dtype == proposal.parents.dtype == proposal.source.dtype == np.int32
    assert proposal.valid.dtype == bool
    assert proposal.gain.dtype == np.float32
    for b in range(B):
        assert proposal.tokens[b, 0] == anchor[b]
        assert proposal.valid[b, 0]
        assert proposal.parents[b, 0] == 0
        children, depth = set(), [0] * drafter.max_nodes
        for i in range(1, drafter.max_nodes):
            parent = proposal.parents[b, i]
            assert 0 <= parent < i
            depth[i] = depth[parent] + 1
            if not proposal.valid[b, i]:
                continue
            assert proposal.valid[b, parent], "a valid node must have valid ancestors"
            assert depth[i] <= drafter.max_depth
            assert 0 <= proposal.tokens[b, i] < vocab
            assert 0 <= proposal.source[b, i] < len(SOURCES)
            assert 0 <= proposal.gain[b, i] <= proposal.gain[b, parent] <= 1
            assert (parent, proposal.tokens[b, i]) not in children, "siblings must differ"
            children.add((parent, proposal.tokens[b, i]))


def paths(proposal: NumpyProposal, row: int) -> dict[tuple[int, ...], str]:
    """Valid drafted nodes of a row: tokens from the root's child to the node, and the node's source."""
    found: dict[int, tuple[int, ...]] = {0: ()}
    sources = {}
    for i in range(1, proposal.tokens.shape[1]):
        if proposal.valid[row, i]:
            found[i] = (*found[int(proposal.parents[row, i])], int(proposal.tokens[row, i]))
            sources[found[i]] = SOURCES[proposal.source[row, i]]
    return sources


def chain_paths(tokens: list[int], source: str = "lexical") -> dict[tuple[int, ...], str]:
    """What `paths` gives for a chain."""
    return {tuple(tokens[: i + 1]): source for i in range(len(tokens))}


def play(drafter: Drafter, texts: list[list[int]], oracle, *, seed: int, vocab: int, capacity: int = CAPACITY) -> None:
    """Decode the texts with random prompts and blocks, and compare every proposal with `oracle(history)`.

    After the texts are through, rows are forked and rolled back to random lengths, and decoded again with other ends.

    Args:
        drafter: the drafter under test.
        texts: one per row.
        oracle: from a row's history to what `paths` must give.
        seed: of all random choices.
        vocab: size of the vocabulary.
        capacity: S.
    """
    player = Player(drafter, texts, seed=seed, vocab=vocab, capacity=capacity)

    def compare():
        proposal = player.propose()
        for b, history in enumerate(player.rows):
            assert paths(proposal, b) == oracle(history), f"row {b}: {history.tokens}"

    rng = player.rng
    player.prefill([int(rng.integers(1, len(text) + 1)) for text in texts])
    compare()
    while player.advance():
        compare()
    player.fork([int(b) for b in rng.integers(0, len(texts), len(texts))])
    compare()
    keep = [int(rng.integers(1, len(row.tokens) + 1)) for row in player.rows]
    ends = [rng.integers(0, vocab, int(rng.integers(0, capacity - length + 1))).tolist() for length in keep]
    player.rollback(keep, [row.tokens[:length] + end for row, length, end in zip(player.rows, keep, ends, strict=True)])
    compare()
    while player.advance():
        compare()
