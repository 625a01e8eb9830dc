"""Acceptance of a verified draft: sample and match for any tree, exact rejection for a chain drawn from a known law."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jdlite.decoding.tree import Tree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Acceptance:
    """The accepted path of each row.

    Attributes:
        path: `[B, P]` int32, nodes from the anchor down; entries past the accepted ones are 0.
        accepted: `[B]` int32, drafted tokens accepted (0 to P - 1).
        emitted: `[B, P]` int32; the first `accepted + 1` are the new tokens: the accepted drafts, then the bonus token.
        on_path: `[B, N]` bool, nodes of the path.
    """

    path: Int[Array, "B P"]
    accepted: Int[Array, " B"]
    emitted: Int[Array, "B P"]
    on_path: Bool[Array, "B N"]


def _follow(tree: Tree, stepped: Bool[Array, "B N"], drawn: Int[Array, "B N"], path_length: int) -> Acceptance:
    """Walk down the nodes that were all stepped into; the deepest reached one ends the path (lowest index on a tie)."""
    stepped = (stepped & tree.valid).at[:, 0].set(True)
    reached = ~jnp.any(tree.ancestors & ~stepped[:, None, :], axis=-1)
    leaf = jnp.argmax(jnp.where(reached, tree.depth + 1, 0), axis=1)
    on_path = jnp.take_along_axis(tree.ancestors, leaf[:, None, None], axis=1)[:, 0]
    N = tree.depth.shape[1]
    at_depth = on_path[:, None, :] & (tree.depth[:, None, :] == jnp.arange(path_length)[None, :, None])
    path = jnp.sum(at_depth * jnp.arange(N, dtype=jnp.int32), axis=-1, dtype=jnp.int32)
    accepted = jnp.take_along_axis(tree.depth, leaf[:, None], axis=1)[:, 0]
    return Acceptance(path, accepted, jnp.take_along_axis(drawn, path, axis=1), on_path)


def sample_and_match(tree: Tree, tokens: Int[Array, "B N"], drawn: Int[Array, "B N"], path_length: int) -> Acceptance:
    """Descend while a child carries the token drawn from the target at its parent.

    Only the target is ever sampled, so the output law is the target's whatever the tree was (Sequoia, arXiv 2402.12374,
    section 3.2); the tree must not depend on the noise of the draws. For a deterministic tree no lossless rule accepts
    more. Greedy decoding is the case where `drawn` is the argmax.

    Args:
        tree: structure of the proposal.
        tokens: ids of the nodes.
        drawn: the target's token after each node.
        path_length: P, static; at least the largest depth plus one.
    """
    wanted = jnp.take_along_axis(drawn, tree.parents, axis=1)
    return _follow(tree, tokens == wanted, drawn, path_length)


def walk(
    tree: Tree, tokens: Int[Array, "B N"], draw_at: Callable[[Int[Array, " B"]], Int[Array, " B"]], path_length: int
) -> Acceptance:
    """`sample_and_match` one step at a time, drawing only at the nodes that are visited.

    Worth it where a draw costs more than its share of a batched one: processing and drawing over a large vocabulary for
    each of 40 nodes takes longer than doing so for the few on the path.

    Args:
        tree: structure of the proposal.
        tokens: ids of the nodes.
        draw_at: the target's token after one node of each row.
        path_length: P, static; at least the largest depth plus one.
    """
    B, N = tokens.shape
    zeros = jnp.zeros((B, path_length), jnp.int32)

    def going(carry):
        _, _, moving, _, _ = carry
        return jnp.any(moving)

    def step(carry):
        depth, node, moving, path, emitted = carry
        drawn = draw_at(node)
        here = (jnp.arange(path_length) == depth) & moving[:, None]
        path, emitted = jnp.where(here, node[:, None], path), jnp.where(here, drawn[:, None], emitted)
        child = tree.valid & (tree.parents == node[:, None]) & (tokens == drawn[:, None]) & (jnp.arange(N) > 0)
        moving = moving & jnp.any(child, axis=1)
        return depth + 1, jnp.where(moving, jnp.argmax(child, axis=1), node).astype(jnp.int32), moving, path, emitted

    start = (jnp.zeros((), jnp.int32), jnp.zeros(B, jnp.int32), jnp.ones(B, bool), zeros, zeros)
    _, node, _, path, emitted = jax.lax.while_loop(going, step, start)
    accepted = jnp.take_along_axis(tree.depth, node[:, None], axis=1)[:, 0]
    on_path = jnp.take_along_axis(tree.ancestors, node[:, None, None], axis=1)[:, 0]
    return Acceptance(path, accepted, emitted, on_path)


def rejection(
    tree: Tree,
    tokens: Int[Array, "B N"],
    log_p: Float[Array, "B N V"],
    log_q: Float[Array, "B N V"],
    uniforms: Float[Array, "B N"],
    gumbels: Float[Array, "B N V"],
    path_length: int,
) -> Acceptance:
    """Exact speculative sampling of a chain (Leviathan et al., arXiv 2211.17192, algorithm 1).

    Draft i, drawn from `q_i`, is accepted when `u < p(x) / q(x)`, strictly, so that a token of probability zero never
    is.
    At the first rejection the token comes from the normalised residual `max(p - q, 0)`; when all are accepted, from p.

    Args:
        tree: a chain.
        tokens: ids of the nodes.
        log_p: the target's processed log probabilities after each node.
        log_q: the law that node i was drawn from, given its parent; node 0's is not used. A law with NaN in it is taken
            as a point mass on the drafted token, which is exact for a token chosen without looking at the noise.
        uniforms: `[0, 1)`, for the decision on each node; independent of the noise that drew the drafts.
        gumbels: standard Gumbel noise for the token drawn after each node.
        path_length: P, static.
    """
    V = log_p.shape[-1]
    broken = jnp.any(jnp.isnan(log_q), axis=-1, keepdims=True)
    log_q = jnp.where(broken, jnp.where(jax.nn.one_hot(tokens, V, dtype=bool), 0.0, -jnp.inf), log_q)
    pick = lambda table: jnp.take_along_axis(table, tokens[..., None], axis=-1)[..., 0]  # noqa: E731
    log_p_parent = jnp.take_along_axis(log_p, tree.parents[..., None], axis=1)
    p, q = jnp.exp(pick(log_p_parent)), jnp.exp(pick(log_q))
    stepped = uniforms * q < p

    # Node i's own draw: from the residual against its child's law where it has a child, else from p.
    q_child = jnp.exp(jnp.concatenate([log_q[:, 1:], log_q[:, :1]], axis=1))
    has_child = jnp.concatenate([tree.valid[:, 1:], jnp.zeros_like(tree.valid[:, :1])], axis=1)[..., None]
    residual = jnp.maximum(jnp.exp(log_p) - q_child, 0.0)
    empty = jnp.sum(residual, axis=-1, keepdims=True) <= 0.0
    law = jnp.where(has_child & ~empty, jnp.log(residual), log_p)
    drawn = jnp.argmax(jnp.where(law > -jnp.inf, law + gumbels, -jnp.inf), axis=-1).astype(jnp.int32)
    taken = _follow(tree, stepped, drawn, path_length)
    # An accepted draft is emitted itself; what was drawn after its parent would have replaced it.
    drafts = jnp.take_along_axis(tokens, jnp.roll(taken.path, -1, axis=1), axis=1)
    kept = jnp.arange(path_length) < taken.accepted[:, None]
    return dataclasses.replace(taken, emitted=jnp.where(kept, drafts, taken.emitted))
