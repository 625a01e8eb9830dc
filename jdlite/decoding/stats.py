"""What a decode call counts. Counts are exact; times belong to `jdlite.bench`."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jdlite.drafters.base import SOURCES

# In the loop, and as a `Result` holds them.
Numbers = Array | np.ndarray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stats:
    """Counters of one decode call, all int32.

    Attributes:
        forwards: passes of the target.
        rounds: `[B]`, rounds in which the row was still running.
        emitted: `[B]`, new tokens, bonus tokens included, tokens cut after a stop not. `emitted / rounds` is tau.
        drafted: `[B]`, drafted nodes that were verified.
        accepted_at: `[B, P - 1]`, rounds in which at least d + 1 drafted tokens were accepted and kept, by d.
        accepted_from: `[B, sources]`, accepted and kept tokens by where they came from (`drafters.base.SOURCES`).
        uses: `[n]`, forwards by compiled number of nodes (`policy.variants`).
        fused_heads: forwards whose LM head and choice of tokens were one kernel (docs/kernels.md). What a kernel cannot
            do exactly, such as top-p or penalties, is done over all logits and not counted here.
        log: `[B, R, 3]`, for each of the first R rounds of a row: nodes verified (anchor included), drafts accepted,
            tokens emitted. R is 0 unless asked for.
    """

    forwards: Int[Numbers, ""]
    rounds: Int[Numbers, " B"]
    emitted: Int[Numbers, " B"]
    drafted: Int[Numbers, " B"]
    accepted_at: Int[Numbers, "B D"]
    accepted_from: Int[Numbers, "B C"]
    uses: Int[Numbers, " n"]
    fused_heads: Int[Numbers, ""]
    log: Int[Numbers, "B R 3"]

    @classmethod
    def zeros(cls, batch: int, path_length: int, variants: int, log_rounds: int = 0) -> Stats:
        zeros = lambda *shape: jnp.zeros(shape, jnp.int32)  # noqa: E731
        return cls(
            forwards=zeros(),
            rounds=zeros(batch),
            emitted=zeros(batch),
            drafted=zeros(batch),
            accepted_at=zeros(batch, path_length - 1),
            accepted_from=zeros(batch, len(SOURCES)),
            uses=zeros(variants),
            fused_heads=zeros(),
            log=zeros(batch, log_rounds, 3),
        )

    def update(
        self,
        *,
        active: Bool[Array, " B"],
        verified: Bool[Array, "B N"],
        path: Int[Array, "B P"],
        source: Int[Array, "B N"],
        accepted: Int[Array, " B"],
        kept: Int[Array, " B"],
        variant: Int[Array, ""],
        forwards: int = 1,
        fused: Bool[Array, ""] | bool = False,
    ) -> Stats:
        """Count one round.

        Args:
            active: rows that were running.
            verified: nodes that went through the target, anchor included.
            path: accepted nodes, anchor first.
            source: where each node came from.
            accepted: drafts accepted.
            kept: tokens emitted after cutting.
            variant: index of the compiled number of nodes that ran.
            forwards: passes of the target in this round.
            fused: whether a kernel was the LM head of the forward that was verified.
        """
        B, P = path.shape
        one = active.astype(jnp.int32)
        kept = jnp.where(active, kept, 0)
        drafts = jnp.minimum(jnp.where(active, accepted, 0), kept)
        nodes = jnp.sum(verified, axis=1, dtype=jnp.int32)
        here = jnp.arange(1, P) <= drafts[:, None]
        sources = jax.nn.one_hot(jnp.take_along_axis(source, path[:, 1:], axis=1), len(SOURCES), dtype=jnp.int32)
        log, uses = jnp.asarray(self.log), jnp.asarray(self.uses)
        if log.shape[1]:
            record = jnp.stack([nodes, accepted, kept], axis=1)
            at = jnp.where(active, self.rounds, log.shape[1])
            log = log.at[jnp.arange(B), at].set(record, mode="drop")
        return Stats(
            forwards=self.forwards + forwards,
            rounds=self.rounds + one,
            emitted=self.emitted + kept,
            drafted=self.drafted + one * (nodes - 1),
            accepted_at=self.accepted_at + here,
            accepted_from=self.accepted_from + jnp.sum(sources * here[..., None], axis=1),
            uses=uses.at[variant].add(1),
            fused_heads=self.fused_heads + jnp.asarray(fused, jnp.int32),
            log=log,
        )
