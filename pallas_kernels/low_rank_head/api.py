"""The low-rank head on whatever device there is."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jdlite.errors import ConfigError
from pallas_kernels.backends import MOSAIC_GPU, MOSAIC_TPU, REFERENCE, candidates, dispatch
from pallas_kernels.low_rank_head import mosaic_gpu, mosaic_tpu, reference
from pallas_kernels.low_rank_head.mosaic_tpu import PackedHead
from pallas_kernels.low_rank_head.types import Drafts, HeadWeights, quantise

__all__ = ["Drafts", "HeadWeights", "PackedHead", "low_rank_head", "output_logits", "prepare", "quantise"]


def _reference(weights, *args):
    if isinstance(weights, PackedHead):
        raise NotImplementedError("These weights are packed for a TPU; pass them as they are stored.")
    return reference.low_rank_head(weights, *args)


_BACKENDS = {
    REFERENCE: _reference,
    MOSAIC_TPU: mosaic_tpu.low_rank_head,
    MOSAIC_GPU: mosaic_gpu.low_rank_head,
}


def prepare(weights: HeadWeights, backend: str | Sequence[str] | None = None) -> HeadWeights | PackedHead:
    """The weights in the layout that a backend reads, to be made once and kept.

    Without it a backend that needs another layout copies W_o on every call.

    Args:
        weights: as stored.
        backend: as in `low_rank_head`; the first name counts.

    Raises:
        ConfigError: shapes that do not go together, or an unknown backend.
        NotImplementedError: the backend cannot serve such weights.
    """
    _check_weights(weights)
    name = candidates("low_rank_head", tuple(_BACKENDS), backend)[0]
    return mosaic_tpu.pack(weights) if name == MOSAIC_TPU else weights


def low_rank_head(
    weights: HeadWeights | PackedHead,
    hidden: Float[Array, "B K D"],
    anchor: Int[Array, " B"],
    state: Float[Array, "B R"],
    *,
    keys: Key[Array, "B K"] | None = None,
    temperature: Float[Array, " B"] | None = None,
    backend: str | Sequence[str] | None = None,
) -> Drafts:
    """Draft K tokens of each row, one after another, without logits in memory.

    With y_0 the anchor and s_0 the given state, for T = 1..K (DLite's sequential head, arXiv 2610.23787, as in
    `jdlite.models.dlite_head`):

        [g ; c] = W_s [s_{T-1} ; E[y_{T-1}]] + b_s
        s_T     = sigmoid(g) s_{T-1} + (1 - sigmoid(g)) tanh(c)
        u_T     = W_u [s_T ; h_T] + b_u
        y_T     = argmax_v (W_o u_T)_v / temperature + noise_v

    Products are summed in float32; s stays float32, and u is rounded once to the dtype of the weights. The lowest id
    wins a tie. The noise is Gumbel's, `jdlite.decoding.sampling.gumbel(keys[b, T], V)`, so the choice is a draw from
    `softmax(W_o u / temperature)` that depends on the key alone and on no neighbour.

    Args:
        weights: as stored, or from `prepare`.
        hidden: backbone states h of the drafted positions.
        anchor: newest known token of each row; an id outside the vocabulary counts as the nearest one inside.
        state: s_0, float32; zero, or primed.
        keys: typed threefry keys, one per draw: `noise_key(row key, absolute position, DRAFT)`. None takes the argmax.
        temperature: of each row; rows with 0 take the argmax. None means 1 with keys and 0 without.
        backend: `"reference"`, `"mosaic_tpu"`, `"mosaic_gpu"`, several names to try in order, or None to go by the
            device.

    Returns:
        Tokens, their log-probabilities and u. A row whose logits hold a NaN gets a NaN log-probability and some token.

    Raises:
        ConfigError: shapes that do not go together, or an unknown backend.
        NotImplementedError: no backend that was tried can serve; all reasons are told.
    """
    if isinstance(weights, HeadWeights):
        _check_weights(weights)
        width, rank = weights.mix_weight.shape[1] - weights.embed.shape[1], weights.embed.shape[1]
    else:
        width, rank = weights.mix_hidden.shape[0], weights.output.shape[0]
    B, K = hidden.shape[:2]
    wanted = {"hidden": (B, K, width), "anchor": (B,), "state": (B, rank)}
    given = {"hidden": hidden.shape, "anchor": anchor.shape, "state": state.shape}
    if keys is not None:
        wanted["keys"], given["keys"] = (B, K), keys.shape
        temperature = jnp.ones(B, jnp.float32) if temperature is None else temperature
    if temperature is not None:
        wanted["temperature"], given["temperature"] = (B,), temperature.shape
    _check("The inputs of the low-rank head", given, wanted)
    if temperature is not None and keys is None:
        raise ConfigError("A temperature was given and no keys to draw with; pass keys, or leave out the temperature.")
    return dispatch("low_rank_head", _BACKENDS, backend, weights, hidden, anchor, state, keys, temperature)


def output_logits(weights: HeadWeights | PackedHead, u: Float[Array, "*B R"]) -> Float[Array, "*B V"]:
    """`W_o u` in float32: the logits that `low_rank_head` chose a token from, of its `u`.

    Args:
        weights: as stored, or from `prepare`.
        u: `Drafts.u`, or some of it.
    """
    return mosaic_tpu.logits(weights, u) if isinstance(weights, PackedHead) else reference.logits(weights, u)


def _check(what: str, given: dict, wanted: dict) -> None:
    wrong = [f"{name} is {given[name]} and not {wanted[name]}" for name in wanted if given[name] != wanted[name]]
    if wrong:
        raise ConfigError(f"{what} do not go together: {', '.join(wrong)}.")


def _check_weights(weights: HeadWeights) -> None:
    V, R = weights.embed.shape
    D = weights.mix_weight.shape[1] - R
    wanted = {
        "state_weight": (2 * R, 2 * R),
        "state_bias": (2 * R,),
        "mix_weight": (R, R + D),
        "mix_bias": (R,),
        "output": (V, R),
    }
    if weights.output_scale is not None:
        wanted["output_scale"] = (V,)
    _check("The weights of the low-rank head", {name: getattr(weights, name).shape for name in wanted}, wanted)
    rounded = weights.output.dtype.itemsize == 1
    if rounded != (weights.output_scale is not None):
        raise ConfigError(
            f"An output matrix of eight bits goes with scales and no other does: got {weights.output.dtype} "
            f"{'without' if rounded else 'with'} output_scale."
        )
