"""Repetition, presence and frequency penalties, for committed text and for every path of a draft tree."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class History:
    """What the penalties look at: the committed text of each row and, in a draft tree, each node's own path.

    Attributes:
        prompt_seen: `[B, V]` bool, tokens that the prompt contains.
        generated_counts: `[B, V]` int32, how often each token was generated and committed.
        path_tokens: `[B, N]` int32 tokens of the draft nodes, or None for plain decoding.
        on_path: `[B, n, N]` bool or None; `on_path[b, i, j]` says that node j is a drafted node on the path from the
            anchor to node i, i itself included. The anchor is not: it is a committed token and counted already.
            n = N for all nodes; see `at_node` for one.
    """

    prompt_seen: Bool[Array, "B V"]
    generated_counts: Int[Array, "B V"]
    path_tokens: Int[Array, "B N"] | None = None
    on_path: Bool[Array, "B n N"] | None = None

    @classmethod
    def from_prompt(cls, tokens: Int[Array, "B S"], lengths: Int[Array, " B"], vocab_size: int) -> History:
        """The history after a prompt; slots of `tokens` at or past `lengths` are not read."""
        B, S = tokens.shape
        index = jnp.where((jnp.arange(S) < lengths[:, None]) & (tokens >= 0), tokens, vocab_size)
        seen = jnp.zeros((B, vocab_size), bool).at[jnp.arange(B)[:, None], index].set(True, mode="drop")
        return cls(prompt_seen=seen, generated_counts=jnp.zeros((B, vocab_size), jnp.int32))

    def update(self, tokens: Int[Array, "B P"], count: Int[Array, " B"]) -> History:
        """The history after the first `count[b]` of `tokens` were generated and committed."""
        B, P = tokens.shape
        V = self.generated_counts.shape[1]
        index = jnp.where((jnp.arange(P) < count[:, None]) & (tokens >= 0), tokens, V)
        counts = self.generated_counts.at[jnp.arange(B)[:, None], index].add(1, mode="drop")
        return History(prompt_seen=self.prompt_seen, generated_counts=counts)

    def at_node(self, node: Int[Array, " B"]) -> History:
        """The history of one node of each row's tree, for logits `[B, 1, V]` of that node."""
        if self.on_path is None:
            raise ValueError("this history belongs to no draft tree; make one with node_history first.")
        return dataclasses.replace(self, on_path=jnp.take_along_axis(self.on_path, node[:, None, None], axis=1))


def node_history(history: History, tokens: Int[Array, "B N"], ancestors: Bool[Array, "B N N"]) -> History:
    """The history that each node of a draft tree predicts from: committed text plus the drafted tokens up to the node.

    Args:
        history: committed text, the anchor (node 0) included.
        tokens: tokens of the nodes.
        ancestors: `ancestors[b, i, j]` says that node j is an ancestor of node i; the diagonal and column 0 may hold
            anything.
    """
    N = tokens.shape[1]
    on_path = (ancestors | jnp.eye(N, dtype=bool)) & (jnp.arange(N) > 0)
    return dataclasses.replace(history, path_tokens=tokens, on_path=on_path)


def penalised(
    logits: Float[Array, "B n V"],
    history: History,
    *,
    repetition: Float[Array, " B"],
    presence: Float[Array, " B"],
    frequency: Float[Array, " B"],
) -> Float[Array, "B n V"]:
    """Logits after the three penalties. Neutral values (1, 0, 0) leave a row as it is, bit for bit.

    The repetition penalty (Keskar et al. 2019, eq. 2, in the sign-aware form of transformers) looks at prompt and
    generated text; presence and frequency penalty (OpenAI) at generated text only.

    The committed text is dense, `[B, V]`, and shared by all nodes; only the few tokens of each node's own path are
    computed again from their raw logits, so no count of shape `[B, n, V]` exists.
    """

    def penalise(x, seen, count):
        r, p, f = (values[:, None, None] for values in (repetition, presence, frequency))
        x = jnp.where(seen, jnp.where(x < 0, x * r, x / r), x)
        return x - f * count - p * (count > 0)

    counts = history.generated_counts
    result = penalise(logits, (history.prompt_seen | (counts > 0))[:, None], counts[:, None])
    if history.path_tokens is None or history.on_path is None:
        return result
    B, n, V = logits.shape
    tokens, on_path = history.path_tokens, history.on_path
    if on_path.shape[1] != n:
        raise ValueError(f"the history is of {on_path.shape[1]} nodes but the logits are of {n}.")
    column = jnp.broadcast_to(jnp.clip(tokens, 0, V - 1)[:, None, :], on_path.shape)
    # [b, i, j]: how often the token of node j occurs on the path of node i. Nodes j with equal tokens get equal values,
    # so the order in which the scatter below writes them is of no matter.
    equal = (tokens[:, :, None] == tokens[:, None, :]).astype(jnp.int32)
    drafted = jnp.einsum("bik,bkj->bij", on_path.astype(jnp.int32), equal)
    count = jnp.take_along_axis(counts[:, None, :], column[:, :1], axis=2) + drafted
    changed = penalise(jnp.take_along_axis(logits, column, axis=2), True, count)
    index = jnp.where(on_path & (tokens >= 0)[:, None, :], tokens[:, None, :], V)
    return result.at[jnp.arange(B)[:, None, None], jnp.arange(n)[:, None], index].set(changed, mode="drop")
