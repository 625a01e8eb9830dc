"""How many drafted nodes are worth verifying: expected tokens per unit of time, from measured costs and kept scores.

Pure functions of small arrays. Drafters state a prior probability for each node; `Reliability` learns, per row and
while decoding, how often nodes of that prior and source really are accepted; `choose` weighs the expected tokens of
each compiled number of nodes against its cost. `Earnings` keeps what a drafter's network brought in, and
`Earnings.worth_running` says whether that pays for its own forward.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jdlite.decoding.tree import Tree
from jdlite.drafters.base import MODEL, SOURCES

# Upper edges of the classes that priors are sorted into; finer where branches of low probability differ.
EDGES = (0.02, 0.04, 0.07, 0.12, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
BINS = len(EDGES) + 1
# A prior counts as this many observed trials: few, since no prior knows how repetitive a text is.
PRIOR_STRENGTH = 1.0
# What is remembered of earlier rounds after one more; old evidence fades, so nodes that once failed are tried again.
MEMORY = 0.98
# A verify must promise this many times the tokens per cost of a plain step: the best of several uncertain promises is
# on average too good (docs/measurements.md, "The policy, replayed").
MARGIN = 1.2
# Least path probability of a draft. It is worth verifying where that is free, and float32 sums must show it.
MIN_GAIN = 1e-4
# Until it has been seen at work for about this many rounds, a network is believed to earn twice what it costs. As old
# evidence fades, one that earns nothing is still run in MEMORY's complement times this share of the rounds, 8%.
TRIAL_ROUNDS = 4.0
NODE_COUNTS = (1, 4, 8, 16, 40)


def variants(max_nodes: int) -> tuple[int, ...]:
    """Numbers of nodes that are compiled for a drafter of `max_nodes`: 39 gives `(1, 4, 8, 16, 39)`."""
    return (*(n for n in NODE_COUNTS if n < max_nodes), max_nodes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Costs:
    """Time of a verify forward as a straight line in the committed length, for each compiled number of nodes.

    Attributes:
        fixed: `[n]` float32, cost at length 0, relative to a plain step at length 0.
        per_token: `[n]` float32, added cost per committed token.
        counts: numbers of nodes that are compiled, static; the last must be the drafter's `max_nodes`.
        draft: scalar float32, cost of a draft of the drafter's network, if it has one; 0 where that does not count.
    """

    fixed: Float[Array, " n"]
    per_token: Float[Array, " n"]
    counts: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    draft: float | Float[Array, ""] = dataclasses.field(default_factory=lambda: jnp.zeros((), jnp.float32))

    @classmethod
    def free(cls, counts: tuple[int, ...]) -> Costs:
        """Every forward costs the same: verify all nodes that may be accepted (largest tau)."""
        return cls(jnp.ones(len(counts), jnp.float32), jnp.zeros(len(counts), jnp.float32), counts)

    @classmethod
    def typical(cls, counts: tuple[int, ...]) -> Costs:
        """A guess for a machine that was not measured: a node more costs 6% of a plain step."""
        fixed = jnp.asarray([1 + 0.06 * (n - 1) for n in counts], jnp.float32)
        return cls(fixed, jnp.zeros(len(counts), jnp.float32), counts)

    def resample(self, counts: tuple[int, ...]) -> Costs:
        """The costs of other numbers of nodes, on straight lines between those measured (beyond them, on the last)."""
        if counts == self.counts:
            return self
        measured = jnp.asarray(self.counts, jnp.float32)
        wanted = jnp.asarray(counts, jnp.float32)

        def line(values: jax.Array) -> jax.Array:
            if len(self.counts) == 1:
                return jnp.broadcast_to(values, len(counts))
            left = jnp.clip(jnp.searchsorted(measured, wanted, side="right") - 1, 0, len(self.counts) - 2)
            share = (wanted - measured[left]) / (measured[left + 1] - measured[left])
            return values[left] + share * (values[left + 1] - values[left])

        return Costs(line(self.fixed), line(self.per_token), counts, self.draft)

    def at(self, length: jax.Array) -> Float[Array, " n"]:
        """Cost of each number of nodes when the longest row has `length` committed tokens."""
        return self.fixed + self.per_token * length


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reliability:
    """How often verified nodes were accepted, by source and by class of the drafter's own prior.

    Attributes:
        hits: `[B, sources * BINS]` float32, fading count of accepted nodes.
        trials: `[B, sources * BINS]` float32, fading count of verified nodes whose parent was accepted.
    """

    hits: Float[Array, "B C"]
    trials: Float[Array, "B C"]

    @classmethod
    def zeros(cls, batch: int) -> Reliability:
        shape = (batch, len(SOURCES) * BINS)
        return cls(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))

    def update(
        self, cell: Int[Array, "B N"], tried: Bool[Array, "B N"], hit: Bool[Array, "B N"], active: Bool[Array, " B"]
    ) -> Reliability:
        """Count one round; rows that are not active keep their scores."""
        cells = jax.nn.one_hot(cell, self.hits.shape[1], dtype=jnp.float32)
        fade = jnp.where(active, MEMORY, 1.0)[:, None]
        tried = tried & active[:, None]
        count = lambda mask: jnp.einsum("bn,bnc->bc", mask.astype(jnp.float32), cells)  # noqa: E731
        return Reliability(self.hits * fade + count(tried & hit), self.trials * fade + count(tried))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Earnings:
    """What a drafter's network brought in, as fading sums over rounds. Each is `[B]` float32.

    Attributes:
        earned: tokens accepted that the network alone had offered, less what verifying its nodes cost in plain steps.
        run: rounds in which it ran.
        others: tokens accepted from any other source.
        rounds: all rounds.
    """

    earned: Float[Array, " B"]
    run: Float[Array, " B"]
    others: Float[Array, " B"]
    rounds: Float[Array, " B"]

    @classmethod
    def zeros(cls, batch: int) -> Earnings:
        return cls(*(jnp.zeros(batch, jnp.float32) for _ in range(4)))

    def update(
        self,
        source: Int[Array, "B N"],
        verified: Bool[Array, "B N"],
        accepted: Bool[Array, "B N"],
        surplus: Float[Array, ""],
        ran: Bool[Array, ""],
        active: Bool[Array, " B"],
    ) -> Earnings:
        """Count one round; rows that are not active keep their sums.

        Args:
            source: of each node.
            verified: nodes that were run, the anchor left out.
            accepted: nodes that were accepted, the anchor left out.
            surplus: what the verify forward cost beyond a plain step, in plain steps; shared among the nodes.
            ran: whether the network did.
            active: rows that decode.
        """
        count = lambda mask: jnp.sum(mask, axis=1, dtype=jnp.float32)  # noqa: E731
        own = source == MODEL
        share = count(verified & own) / jnp.maximum(count(verified), 1.0)
        fade = jnp.where(active, MEMORY, 1.0)
        add = lambda old, new: old * fade + jnp.where(active, new, 0.0)  # noqa: E731
        return Earnings(
            add(self.earned, count(accepted & own) - surplus * share),
            add(self.run, ran.astype(jnp.float32)),
            add(self.others, count(accepted & ~own)),
            add(self.rounds, 1.0),
        )

    def worth_running(self, active: Bool[Array, " B"], draft: jax.Array | float) -> Bool[Array, ""]:
        """Whether the next draft of the network is expected to earn its cost, for the batch as a whole.

        A token is worth the time in which the other sources make one, so what a draft must earn grows with their
        success. The answer depends on past rounds alone, so drafts that are sampled stay exact.

        Args:
            active: rows that decode.
            draft: its cost in plain steps.
        """
        total = lambda x: jnp.sum(jnp.where(active, x, 0.0))  # noqa: E731
        rows = total(1.0)
        rate = 1 + total(self.others) / jnp.maximum(total(self.rounds), 1.0)
        need = draft * rate
        earned = total(self.earned) + 2 * need * TRIAL_ROUNDS * rows
        return (need <= 0) | (earned >= need * (total(self.run) + TRIAL_ROUNDS * rows))


def conditional(gain: Float[Array, "B N"], tree: Tree) -> Float[Array, "B N"]:
    """Probability of each node given that its parent is accepted; 1 for the anchor. NaN counts as 0."""
    gain = jnp.clip(jnp.nan_to_num(gain, nan=0.0), 0.0, 1.0).at[:, 0].set(1.0)
    parent = jnp.take_along_axis(gain, tree.parents, axis=1)
    return jnp.clip(gain / jnp.maximum(parent, 1e-6), 0.0, 1.0).at[:, 0].set(1.0)


def cells(prior: Float[Array, "B N"], source: Int[Array, "B N"]) -> Int[Array, "B N"]:
    """Index of each node's score: its source and the class of its conditional prior."""
    return source * BINS + jnp.sum(prior[..., None] > jnp.asarray(EDGES), axis=-1, dtype=jnp.int32)


def calibrate(
    prior: Float[Array, "B N"], cell: Int[Array, "B N"], reliability: Reliability, tree: Tree
) -> Float[Array, "B N"]:
    """Path probability of each node, with priors corrected by what was seen: `[B, N]`, at least `MIN_GAIN`, and 0 for
    invalid nodes."""
    hits = jnp.take_along_axis(reliability.hits, cell, axis=1)
    trials = jnp.take_along_axis(reliability.trials, cell, axis=1)
    each = ((PRIOR_STRENGTH * prior + hits) / (PRIOR_STRENGTH + trials)).at[:, 0].set(1.0)
    log_each = jnp.log(jnp.maximum(each, 1e-12))
    path = jnp.einsum("bij,bj->bi", tree.ancestors.astype(jnp.float32), log_each)
    return jnp.where(tree.valid, jnp.maximum(jnp.exp(path), MIN_GAIN), 0.0)


def choose(
    gain: Float[Array, "B N"], active: Bool[Array, " B"], cost: Float[Array, " n"], counts: tuple[int, ...]
) -> Int[Array, ""]:
    """Index into `counts` of the number of nodes with the most expected tokens per cost, for the batch as a whole.

    Gains must stand in falling order in each row, the anchor's 1 first: verifying n nodes then yields the sum of the
    first n in expectation. What costs more than the first of `counts` must be worth `MARGIN` times as much, and the
    smaller number wins a tie, so a batch without drafts takes a plain step.
    """
    expected = jnp.cumsum(jnp.where(active[:, None], gain, 0.0).sum(axis=0))
    at = jnp.asarray([n - 1 for n in counts])
    cost = jnp.where(cost > cost[0], cost * MARGIN, cost)
    return jnp.argmax(expected[at] / cost).astype(jnp.int32)
