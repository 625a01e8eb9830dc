"""Requests from plain Python values."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jdlite.decoding.policy import Costs, variants
from jdlite.decoding.sampling import GREEDY, Sampling, stack
from jdlite.decoding.state import Request
from jdlite.decoding.stops import make_stops
from jdlite.drafters.base import Drafter
from jdlite.errors import ConfigError
from jdlite.models.decoder import Decoder


def make_request(
    model: Decoder,
    drafter: Drafter,
    batch: int,
    *,
    sampling: Sampling | Sequence[Sampling] = GREEDY,
    stop_ids: Sequence[Sequence[int]] | None = None,
    stop_sequences: Sequence[Sequence[Sequence[int]]] | None = None,
    seed: int | Sequence[int] = 0,
    costs: Costs | None = None,
) -> Request:
    """How a batch is to be decoded, as arrays.

    Args:
        model: the target.
        drafter: whose proposals are to be verified.
        batch: B.
        sampling: of all rows, or one per row.
        stop_ids: one list of token ids per row, or None for no stop ids.
        stop_sequences: one list of token sequences per row, or None for none.
        seed: an integer, or one per row.
        costs: of verifying, from `calibrate`; by default all that is drafted is verified.

    Raises:
        ConfigError: a value that cannot be used, or not one per row.
    """
    stops = make_stops(stop_ids, stop_sequences, batch)
    return Request(
        sampling=stack(sampling, batch, model.config.vocab_size, stops.ids),
        stops=stops,
        keys=row_keys(seed, batch),
        costs=Costs.free(variants(drafter.max_nodes)) if costs is None else costs,
    )


def row_keys(seed: int | Sequence[int], batch: int) -> jax.Array:
    """`[B]` typed keys. One seed gives row b the b-th stream of it; a list gives each row its own seed's stream 0."""
    seeds = np.asarray(seed)
    if seeds.shape not in ((), (batch,)) or not np.issubdtype(seeds.dtype, np.integer):
        got = f"{len(seeds)} for {batch} rows" if seeds.ndim == 1 else f"{seed!r:.60}"
        raise ConfigError(f"seed must be one integer or one per row: got {got}.")
    if not seeds.ndim:
        return jax.vmap(partial(jax.random.fold_in, jax.random.key(int(seeds))))(jnp.arange(batch))
    return jnp.stack([jax.random.fold_in(jax.random.key(int(s)), 0) for s in seeds])
