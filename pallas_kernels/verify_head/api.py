"""The head of a verify forward on whatever device there is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jdlite.decoding.penalties import History
from jdlite.decoding.sampling import SamplingArrays
from jdlite.decoding.tree import Tree
from jdlite.errors import ConfigError
from pallas_kernels.backends import MOSAIC_GPU, MOSAIC_TPU, REFERENCE, dispatch
from pallas_kernels.verify_head import mosaic_gpu, mosaic_tpu, reference
from pallas_kernels.verify_head.types import Verified

__all__ = ["Verified", "verify_head"]

_BACKENDS = {
    REFERENCE: reference.verify_head,
    MOSAIC_TPU: mosaic_tpu.verify_head,
    MOSAIC_GPU: mosaic_gpu.verify_head,
}


def verify_head(
    weight: Float[Array, "V D"],
    hidden: Float[Array, "B N D"],
    tree: Tree,
    drafts: Int[Array, "B N"],
    positions: Int[Array, "B N"],
    sampling: SamplingArrays,
    keys: Any = None,
    *,
    path_length: int,
    top_k: int = 0,
    history: History | None = None,
    generated: Int[Array, "B N"] | None = None,
    row_major: bool = False,
    backend: str | Sequence[str] | None = None,
) -> Verified:
    """Draw the target's token after each node of a draft tree and walk down the nodes that carry what was drawn.

    With x = hidden W^T, summed in float32 and not rounded afterwards:

        tokens   = draw(processed_logits(x, sampling), keys, positions)     (jdlite.decoding.sampling)
        accepted = sample_and_match(tree, drafts, tokens)                   (jdlite.decoding.accept)

    In a greedy row the token is the argmax, the lowest id on a tie; in one with a temperature it is
    `argmax_v x_v / temperature + gumbel(noise_key(key, position), V)_v`, so it depends on no other node and no other
    row. A backend that fuses keeps a running maximum, sum of exponentials and list of the k largest logits (Milakov and
    Gimelshein, arXiv 1805.02867) and writes no logits. `Decoder.logits` of a bfloat16 model rounds to bfloat16, so
    equal tokens are promised against plain decoding through this operation, and not against that method.

    Args:
        weight: of the LM head as stored, float32 or bfloat16 (or another float, which no kernel has).
        hidden: final-normed states of the nodes, in any float dtype; they are cast to the weight's.
        tree: structure of the proposal.
        drafts: ids of the nodes; node 0 is the anchor.
        positions: absolute position of the token that is drawn after each node: row length plus depth.
        sampling: of each row.
        keys: `[B]` typed threefry keys, one per row; needed when some row has a temperature.
        path_length: P, static; at least the largest depth plus one.
        top_k: how many of the largest unprocessed logits to return per node, static.
        history: needed when the sampling penalises; from `node_history`.
        generated: new tokens of the row before the one that each node predicts; needed with a minimum of new tokens.
        row_major: the weight was pinned to row-major order (`jax.experimental.layout.Format`), static. A TPU stores it
            transposed otherwise where D is no multiple of 128, and copies it wherever rows are gathered from it, as
            from a tied embedding. A wrong word costs a copy of the weight per call and changes no result.
        backend: `"reference"`, `"mosaic_tpu"`, `"mosaic_gpu"`, several names to try in order, or None to go by the
            device.

    Returns:
        Tokens, their log-probabilities, most likely ids, acceptance, and whether the sweep was fused.

    Raises:
        ConfigError: inputs that do not go together, or an unknown backend.
        NotImplementedError: no backend that was tried can serve; all reasons are told. The reference serves everything.
    """
    V, D = weight.shape
    B, N = drafts.shape
    wanted = {"hidden": (B, N, D), "positions": (B, N), "tree": (B, N), "temperature": (B,)}
    given = {
        "hidden": hidden.shape,
        "positions": positions.shape,
        "tree": tree.parents.shape,
        "temperature": sampling.temperature.shape,
    }
    if keys is not None:
        wanted["keys"], given["keys"] = (B,), keys.shape
    if generated is not None:
        wanted["generated"], given["generated"] = (B, N), generated.shape
    wrong = [f"{name} is {given[name]} and not {wanted[name]}" for name in wanted if given[name] != wanted[name]]
    if wrong:
        raise ConfigError(f"The inputs of the verify head do not go together: {', '.join(wrong)}.")
    for name, x in (("weight", weight), ("hidden", hidden)):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ConfigError(f"The {name} of the verify head must be of a float dtype: got {x.dtype}.")
    if not (V and D and B and N):
        raise ConfigError(f"No axis of the verify head may be empty: got V = {V}, D = {D}, B = {B} and N = {N}.")
    if not 0 <= top_k <= V:
        raise ConfigError(f"top_k must be from 0 to {V}, the size of the vocabulary: got {top_k}.")
    if path_length < 1:
        raise ConfigError(f"path_length counts the anchor, so it must be at least 1: got {path_length}.")
    if sampling.stochastic and keys is None:
        raise ConfigError("Some row has a temperature above 0 and no keys were given; pass one key per row.")
    if sampling.penalises and history is None:
        raise ConfigError("Some row uses penalties and no history was given; pass one from node_history.")
    if sampling.min_new and generated is None:
        raise ConfigError("Some row has a minimum of new tokens; pass generated, the new tokens before each node's.")
    return dispatch(
        "verify_head",
        _BACKENDS,
        backend,
        weight,
        hidden,
        tree,
        drafts,
        positions,
        sampling,
        keys,
        top_k,
        path_length,
        history,
        generated,
        row_major,
    )
