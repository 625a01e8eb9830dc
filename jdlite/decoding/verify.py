"""The verify forward: the target runs the draft tree, its token after each node is drawn, and a path is accepted."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jdlite.decoding.accept import Acceptance, rejection, sample_and_match, walk
from jdlite.decoding.penalties import History, node_history
from jdlite.decoding.sampling import (
    ACCEPT,
    RESIDUAL,
    any_nan,
    draw,
    gumbel,
    log_probs,
    noise_key,
    processed_logits,
)
from jdlite.decoding.state import DecodeState, Progress, Request
from jdlite.decoding.tree import Tree
from jdlite.drafters.base import Drafter, Proposal
from jdlite.models.decoder import Decoder
from pallas_kernels.backends import with_kernel


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verified:
    """What the verify forward of any number of nodes gives back, padded to the drafter's N.

    Attributes:
        acceptance: the accepted path and the tokens to emit.
        broken: nodes whose logits are not numbers.
        taps: states that the drafter asked for, each `[B, N, D]`.
        top_ids: `[B, N, k]`, most likely next tokens, if it asked for any.
        k, v: keys and values of the nodes, `[L, B, G, N, h]`.
        fused: whether a kernel was the LM head.
    """

    acceptance: Acceptance
    broken: Bool[Array, "B N"]
    taps: tuple[Float[Array, "B N D"], ...]
    top_ids: Int[Array, "B N k"]
    k: Float[Array, "L B G N h"]
    v: Float[Array, "L B G N h"]
    fused: Bool[Array, ""]


# Acceptance, broken nodes, most likely ids, whether a kernel did it.
_Chosen = tuple[Acceptance, Bool[Array, "B n"], Int[Array, "B n k"], Bool[Array, ""]]


@dataclasses.dataclass(frozen=True)
class _Nodes:
    """The first n nodes of each row's proposal, and what decides on the token after each of them.

    Attributes:
        tree, tokens: structure and ids.
        positions: absolute position of each node.
        generated: new tokens of the row before the one that each node predicts.
        history: for penalties, of each node; None without.
        log_q: the law that each node was drawn from, for exact rejection; else None.
        request: sampling and keys of the rows.
        path_length: P, static.
        top_k: most likely ids that are wanted, static.
    """

    tree: Tree
    tokens: Int[Array, "B n"]
    positions: Int[Array, "B n"]
    generated: Int[Array, "B n"]
    history: History | None
    log_q: Float[Array, "B n V"] | None
    request: Request
    path_length: int
    top_k: int

    def accept(self, logits: Float[Array, "B n V"]) -> Acceptance:
        """Accept by all logits."""
        sampling, keys = self.request.sampling, self.request.keys
        if self.log_q is None and sampling.stochastic and self.tokens.shape[1] > 1:
            return walk(self.tree, self.tokens, lambda node: self._draw_at(logits, node), self.path_length)
        processed = processed_logits(logits, sampling, history=self.history, generated=self.generated)
        if self.log_q is None:
            drawn = draw(processed, keys, self.positions + 1, sampling)
            return sample_and_match(self.tree, self.tokens, drawn, self.path_length)
        each = lambda f: jax.vmap(jax.vmap(f, (None, 0)))(keys, self.positions)  # noqa: E731
        # Node i is decided on with the noise of its own position, and draws the token of the next.
        uniforms = each(lambda key, at: jax.random.uniform(noise_key(key, at, ACCEPT)))
        noise = each(lambda key, at: gumbel(noise_key(key, at + 1, RESIDUAL), processed.shape[-1]))
        log_p = log_probs(processed, sampling)
        return rejection(self.tree, self.tokens, log_p, self.log_q, uniforms, noise, self.path_length)

    def _draw_at(self, logits: Float[Array, "B n V"], node: Int[Array, " B"]) -> Int[Array, " B"]:
        """The target's token after one node of each row."""
        at = lambda x: jnp.take_along_axis(x, node.reshape(-1, *[1] * (x.ndim - 1)), axis=1)  # noqa: E731
        sampling, history = self.request.sampling, None if self.history is None else self.history.at_node(node)
        processed = processed_logits(at(logits), sampling, history=history, generated=at(self.generated))
        return draw(processed, self.request.keys, at(self.positions) + 1, sampling)[:, 0]

    def fused(self, hidden: Float[Array, "B n D"], weight: Float[Array, "V D"], backend: tuple[str, ...]) -> _Chosen:
        """Choose and accept in one sweep of the LM head, without logits in memory.

        Raises:
            NotImplementedError: no kernel can do it.
        """
        if self.log_q is not None:
            raise NotImplementedError("Exact rejection needs the target's whole law.")
        # Imported where it is used: Pallas takes long to import, and many never need it.
        from pallas_kernels.verify_head.api import verify_head

        out = verify_head(
            weight,
            hidden,
            self.tree,
            self.tokens,
            self.positions + 1,
            self.request.sampling,
            self.request.keys,
            path_length=self.path_length,
            top_k=self.top_k,
            history=self.history,
            generated=self.generated,
            backend=backend,
        )
        return out.acceptance, out.broken, out.top_ids, out.fused


def top_ids(logits: Float[Array, "B N V"], k: int) -> Int[Array, "B N k"]:
    """The k most likely tokens after each node, best first."""
    if not k:
        return jnp.zeros((*logits.shape[:2], 0), jnp.int32)
    return jax.lax.top_k(logits, k)[1].astype(jnp.int32)


def verify(
    n: int,
    model: Decoder,
    drafter: Drafter,
    state: DecodeState,
    request: Request,
    progress: Progress,
    proposal: Proposal,
    tree: Tree,
) -> Verified:
    """Run the first n nodes through the target and accept.

    Where the device has a kernel that serves, it is the LM head and chooses the tokens (docs/kernels.md).

    Args:
        n: static.
        model: the target.
        drafter: has made the proposal.
        state: of the rows, not changed.
        request: how to sample.
        progress: of the rows.
        proposal: with log_q, acceptance is by exact rejection, else by sample and match.
        tree: structure of the proposal.
    """
    N = drafter.max_nodes
    needs = drafter.needs(model.config.num_layers)
    tree, tokens = tree.first(n), proposal.tokens[:, :n]
    positions = (state.lengths - 1)[:, None] + tree.depth
    history = progress.history
    nodes = _Nodes(
        tree=tree,
        tokens=tokens,
        positions=positions,
        generated=(state.lengths - progress.prompt_lengths)[:, None] + tree.depth,
        history=None if history is None else node_history(history, tokens, tree.ancestors),
        log_q=None if proposal.log_q is None else proposal.log_q[:, :n],
        request=request,
        path_length=drafter.max_depth + 1,
        top_k=needs.top_k,
    )

    def of_all_logits(hidden: Float[Array, "B n D"]) -> _Chosen:
        logits = model.logits(hidden)
        return nodes.accept(logits), any_nan(logits), top_ids(logits, nodes.top_k), jnp.array(False)

    def of_kernel(hidden: Float[Array, "B n D"], backend: tuple[str, ...]) -> _Chosen:
        return nodes.fused(hidden, model.head_weight, backend)

    with jax.named_scope(f"verify_{n}"):
        out = model(tokens, positions, tree.ancestors, state.cache, needs.taps)
        acceptance, broken, ids, fused = with_kernel(of_all_logits, of_kernel, out.hidden)
    pad = lambda x, axis: jnp.pad(x, [(0, N - n if a == axis else 0) for a in range(x.ndim)])  # noqa: E731
    return Verified(
        acceptance=dataclasses.replace(acceptance, on_path=pad(acceptance.on_path, 1)),
        broken=pad(broken, 1),
        taps=tuple(pad(t, 1) for t in out.taps),
        top_ids=pad(ids, 1),
        k=pad(out.k, 3),
        v=pad(out.v, 3),
        fused=fused,
    )
