"""Weights at the start of training: random as in the paper, or taken from the target."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jdlite.checkpoints.dlite import abstract_dlite
from jdlite.checkpoints.dlite_orbax import params_tree
from jdlite.errors import ConfigError
from jdlite.models.decoder import Decoder
from jdlite.models.dlite import DLite
from jdlite.models.dlite_config import DLiteConfig

Params = dict[str, Any]


class Template:
    """A network without its weights: turns a nested dict of arrays, as `params_tree` gives it, into a `DLite`.

    The dict, and not the module, is what gradients, optimisers and checkpoints see.
    """

    def __init__(self, config: DLiteConfig):
        self.config = config
        self._graph, state = nnx.split(abstract_dlite(config))
        self._leaves = list(nnx.to_flat_state(state))

    def build(self, params: Params, dtype=None) -> DLite:
        """The network with these weights, cast to `dtype` (None keeps theirs)."""
        filled = []
        for path, leaf in self._leaves:
            value = params
            for key in path:
                value = value[str(key)]
            filled.append((path, leaf.replace(value if dtype is None else value.astype(dtype))))  # pyright: ignore
        return nnx.merge(self._graph, nnx.from_flat_state(filled))


def lm_head(target: Decoder) -> jax.Array:
    """The target's LM head `[V, D]`: its embedding table when the two are tied."""
    return (target.embed if target.lm_head is None else target.lm_head).weight[...]


def random_params(config: DLiteConfig, seed: int) -> Params:
    """Float32 weights as the network's constructor draws them: normal(0, 0.02), norms 1, biases 0."""

    @jax.jit
    def draw():
        return params_tree(DLite(config, rngs=nnx.Rngs(seed)))

    return draw()


def target_params(config: DLiteConfig, target: Decoder, seed: int, moment: np.ndarray | None = None) -> Params:
    """Float32 weights from the target, and random ones where it has no counterpart.

    - The drafter's layers are the target's last ones, its final norm is the target's. States of the target enter the
      drafter's attention through `context_norm` where the target's layer has its own norm before attention, so that one
      starts as the mean of theirs.
    - The rank-R head starts as the best approximation of the LM head W on the target's own states, in the least squares
      of their logits: with C = E[x x^T] of final-normed states x and W C^(1/2) = U S V^T, W_o = U S^(1/2), and the part
      of W_u for the backbone state is S^(1/2) V^T C^(-1/2). E has the directions of U S, with entries of order one.
      The states matter: they may lie mostly across the leading singular directions of W alone.
    - Fused history states start as the mean of the layers.

    Args:
        config: must have the dimensions of the target's layers.
        target: any decoder of this library.
        seed: for what stays random.
        moment: C, `[D, D]` (`second_moment`); None takes all directions as equally likely.

    Raises:
        ConfigError: the layers differ in shape, or the target has fewer.
    """
    t = target.config
    names = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "qk_norm")
    wrong = [
        f"{name} {getattr(config, name)} instead of {getattr(t, name)}"
        for name in names
        if getattr(config, name) != getattr(t, name)
    ]
    if config.num_layers > t.num_layers:
        wrong.append(f"num_layers {config.num_layers} of the target's {t.num_layers}")
    if wrong:
        raise ConfigError(
            f"initialise: target copies layers, which differ: {'; '.join(wrong)}; change the drafter, or use random."
        )
    params = random_params(config, seed)
    D, R, M = config.hidden_size, config.rank, config.num_taps
    begin = t.num_layers - config.num_layers
    norms = []
    for i in range(config.num_layers):
        layer = target.layers[begin + i]
        _copy(params["layers"][str(i)], nnx.to_pure_dict(nnx.state(layer, nnx.Param)))
        norms.append(layer.attention_norm.scale[...].astype(jnp.float32))
    norm = jnp.mean(jnp.stack(norms), axis=0)
    params["norm"]["scale"] = target.final_norm.scale[...].astype(jnp.float32)
    params["context_norm"]["scale"] = norm
    if config.draft_history:
        J = len(config.history_taps)
        params["history_norm"]["scale"] = norm
        params["history_fuse"]["weight"] = jnp.tile(jnp.eye(D), (1, J)) / J
    if config.feature_concat == "feature":
        params["feature_fuse"]["weight"] = jnp.tile(jnp.eye(D), (1, M)) / M

    head = np.asarray(lm_head(target), np.float32)
    spread, inverse = _roots(np.eye(D) if moment is None else moment)
    weighted = head @ spread.astype(np.float32)
    # Right singular vectors from the small D x D matrix.
    values, vectors = np.linalg.eigh(weighted.T.astype(np.float64) @ weighted.astype(np.float64))
    keep = min(R, D)
    values, vectors = values[::-1][:keep], vectors[:, ::-1][:, :keep]
    root = np.maximum(values, 1e-12) ** 0.25  # square root of a singular value
    projected = weighted @ vectors.astype(np.float32)
    own = params["head"]
    scale = float(np.sqrt(np.mean(projected**2))) or 1.0
    own["prev_embedding"] = own["prev_embedding"].at[:, :keep].set(projected / scale)
    if config.head_output == "low_rank":
        own["output"]["weight"] = jnp.zeros((config.vocab_size, R)).at[:, :keep].set(projected / root)
        own["mix"]["weight"] = own["mix"]["weight"].at[:keep, R:].set((inverse @ vectors * root).T)
    else:
        own["mix"]["weight"] = own["mix"]["weight"].at[:, R:].set(jnp.eye(D))
    # Copies: a training step gives its buffers up, and the target must keep its own.
    return jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), params)


def second_moment(states: Iterable[np.ndarray]) -> np.ndarray:
    """C = E[x x^T] over states `[n, D]` of any number of examples, float64 `[D, D]`."""
    total, count = 0.0, 0
    for x in states:
        x = np.asarray(x, np.float64)
        total, count = total + x.T @ x, count + len(x)
    return np.asarray(total) / max(count, 1)


def _roots(moment: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """C^(1/2) and C^(-1/2), with a floor for directions that the states never took."""
    D = moment.shape[0]
    values, vectors = np.linalg.eigh(moment + 1e-4 * np.trace(moment) / D * np.eye(D))
    root = np.sqrt(np.maximum(values, 1e-30))
    return (vectors * root) @ vectors.T, (vectors / root) @ vectors.T


def _copy(ours: Params, theirs: Mapping[Any, Any]) -> None:
    """Overwrite the arrays of a layer by those of the same name; biases, which a drafter has not, are left out."""
    for name, value in ours.items():
        if isinstance(value, dict):
            _copy(value, theirs[name])
        else:
            ours[name] = jnp.asarray(theirs[name], jnp.float32)
