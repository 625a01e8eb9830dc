"""The sequential head of DLite: a gated recurrence of width R over the drafted tokens, with direct low-rank logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jdlite.errors import ConfigError
from jdlite.models.dlite_config import DLiteConfig
from jdlite.models.layers import Linear, project
from pallas_kernels.low_rank_head.types import HeadWeights

# Picks the next token of each row: (float32 logits [B, V], step) -> (tokens [B], anything to keep per step).
Choose = Callable[[jax.Array, jax.Array], tuple[jax.Array, Any]]


class SequentialHead(nnx.Module):
    """Turns the K backbone states into logits, one after another, each given the token chosen before.

    With y_0 the anchor and s_0 = 0 (or primed, see `start`), for T = 1..K:

        [g ; c] = W_s [s_{T-1} ; E[y_{T-1}]] + b_s
        s_T     = sigmoid(g) s_{T-1} + (1 - sigmoid(g)) tanh(c)
        u_T     = W_u [s_T ; h_T] + b_u
        logits  = W_o u_T

    The backbone state h does not enter the recurrence, so its part of W_u is one product for all K. The state s is kept
    in float32.

    Attributes:
        prev_embedding: E, `[V, R]`, the head's own table.
        state_proj: W_s, `[2R, 2R]`; the first R rows are the gate.
        mix: W_u, `[R, R + D]`, or `[D, R + D]` when the target's LM head is the output.
        output: W_o, `[V, R]`; `None` when the target's LM head is the output.
    """

    def __init__(self, config: DLiteConfig, dtype, rngs: nnx.Rngs):
        V, D, R = config.vocab_size, config.hidden_size, config.rank
        own = config.head_output == "low_rank"
        shared = {"dtype": dtype, "rngs": rngs}
        init = nnx.initializers.normal(0.02)
        self.prev_embedding = nnx.Param(init(rngs.params(), (V, R), dtype), axes=("vocab", None))
        self.state_proj = Linear(2 * R, 2 * R, bias=True, axes=(None, None), **shared)
        self.mix = Linear(R + D, R if own else D, bias=True, axes=(None, None), **shared)
        self.output = Linear(R, V, bias=False, axes=("vocab", None), **shared) if own else None
        self.rank = R

    def weights(self) -> HeadWeights:
        """The parameters of a head with an output matrix, as `pallas_kernels.low_rank_head` takes them."""
        assert self.output is not None
        return HeadWeights(
            embed=self.prev_embedding[...],
            state_weight=self.state_proj.weight[...],
            state_bias=self._bias(self.state_proj),
            mix_weight=self.mix.weight[...],
            mix_bias=self._bias(self.mix),
            output=self.output.weight[...],
        )

    def start(self, tokens: Int[Array, "B A"]) -> Float[Array, "B R"]:
        """State before the first draft: zero, or one step from zero on the token before the anchor when A > 1.

        Args:
            tokens: the newest known tokens, the anchor last.
        """
        state = jnp.zeros((tokens.shape[0], self.rank), jnp.float32)
        return state if tokens.shape[1] == 1 else self.step(state, tokens[:, -2])

    def step(self, state: Float[Array, "*B R"], previous: Int[Array, "*B"]) -> Float[Array, "*B R"]:
        """One step of the recurrence on the token chosen before."""
        weight, bias = self.state_proj.weight[...], self._bias(self.state_proj)
        both = jnp.concatenate([state.astype(weight.dtype), self._embed(previous)], axis=-1)
        return _gate(state, project(both, weight, bias))

    def teacher_forced(
        self, hidden: Float[Array, "B K D"], previous: Int[Array, "B K"], state: Float[Array, "B R"]
    ) -> Float[Array, "B K U"]:
        """Head outputs u when the tokens before each draft are given.

        Args:
            hidden: backbone states of the drafted positions.
            previous: `previous[b, T]` is the token before draft T: the anchor, then the known drafts.
            state: from `start`.

        Returns:
            u, of width R (`low_rank`) or D (`lm_head`); `logits` turns (some of) them into logits.
        """

        weight = self.state_proj.weight[...]
        # What the tokens decide is one product for all K; only the R-wide product on the state stays serial.
        token_parts = project(self._embed(previous), weight[:, self.rank :], self._bias(self.state_proj))
        state_weight = weight[:, : self.rank]

        def body(state, token_part):
            state = _gate(state, project(state.astype(weight.dtype), state_weight) + token_part)
            return state, state

        _, states = jax.lax.scan(body, state, token_parts.swapaxes(0, 1))
        mix_state, hidden_parts = self._mix_parts(hidden)
        return project(states.swapaxes(0, 1).astype(weight.dtype), mix_state) + hidden_parts

    def unroll(
        self,
        hidden: Float[Array, "B K D"],
        anchor: Int[Array, " B"],
        state: Float[Array, "B R"],
        choose: Choose,
        lm_head: Float[Array, "V D"] | None = None,
    ) -> tuple[Int[Array, "B K"], Any]:
        """Draft K tokens one by one, each chosen from the logits that follow the ones before.

        Args:
            hidden: backbone states of the drafted positions.
            anchor: newest known token of each row.
            state: from `start`.
            choose: picks the tokens of one step.
            lm_head: the target's LM head, for `head_output="lm_head"`.

        Returns:
            The tokens, and what `choose` returned beside them, stacked on axis 1.
        """

        mix_state, hidden_parts = self._mix_parts(hidden)

        def body(carry, x):
            state, previous = carry
            hidden_part, step = x
            state = self.step(state, previous)
            u = project(state.astype(mix_state.dtype), mix_state) + hidden_part
            tokens, kept = choose(self.logits(u, lm_head), step)
            tokens = tokens.astype(jnp.int32)
            return (state, tokens), (tokens, kept)

        steps = jnp.arange(hidden.shape[1])
        carry = (state, anchor.astype(jnp.int32))
        _, out = jax.lax.scan(body, carry, (hidden_parts.swapaxes(0, 1), steps))
        return jax.tree.map(lambda x: x.swapaxes(0, 1), out)

    def beam(
        self,
        hidden: Float[Array, "B K D"],
        anchor: Int[Array, " B"],
        state: Float[Array, "B R"],
        width: int,
        lm_head: Float[Array, "V D"] | None = None,
    ) -> tuple[Int[Array, "B K W"], Int[Array, "B K W"], Float[Array, "B K W"]]:
        """The likeliest W continuations of each length 1..K, by beam search: the backbone's states serve all of them.

        Of the W best tokens after each of the W paths of one length, the W likeliest paths of the next length go on, as
        EAGLE-2 (arXiv 2406.16858, section 4.1) grows its tree. A width of 1 gives the greedy chain.

        Args:
            hidden: backbone states of the drafted positions.
            anchor: newest known token of each row.
            state: from `start`.
            width: W, at most the vocabulary.
            lm_head: the target's LM head, for `head_output="lm_head"`.

        Returns:
            By length, the likeliest path first: the last token of each path, which path of the length before it
            continues (0 for the first token), and its log-probability as a whole, float32.
        """
        B, W = anchor.shape[0], width
        mix_state, hidden_parts = self._mix_parts(hidden)
        take = lambda x, index: jnp.take_along_axis(x, index, axis=1)  # noqa: E731

        def body(carry, hidden_part):
            states, previous, log_path = carry
            states = self.step(states, previous)
            u = project(states.astype(mix_state.dtype), mix_state) + hidden_part[:, None]
            logits = self.logits(u.reshape(B * W, -1), lm_head)
            best, tokens = jax.lax.top_k(logits, W)
            # Rounding must not make a path likelier than its beginning.
            log_q = jnp.minimum(best - jax.nn.logsumexp(logits, axis=-1, keepdims=True), 0.0)
            joint = (log_path[:, :, None] + log_q.reshape(B, W, W)).reshape(B, W * W)
            log_path, place = jax.lax.top_k(joint, W)
            parents, tokens = place // W, take(tokens.reshape(B, W * W), place)
            return (take(states, parents[..., None]), tokens, log_path), (tokens, parents, log_path)

        # All paths begin as one.
        carry = (
            jnp.broadcast_to(state[:, None], (B, W, self.rank)),
            jnp.broadcast_to(anchor.astype(jnp.int32)[:, None], (B, W)),
            jnp.broadcast_to(jnp.where(jnp.arange(W) == 0, 0.0, -jnp.inf), (B, W)),
        )
        _, out = jax.lax.scan(body, carry, hidden_parts.swapaxes(0, 1))
        return jax.tree.map(lambda x: x.swapaxes(0, 1), out)

    def logits(self, u: Float[Array, "*B U"], lm_head: Float[Array, "V D"] | None = None) -> Float[Array, "*B V"]:
        """Next-token logits in float32.

        Raises:
            ConfigError: the head has no output matrix and none is given, or has one and is given another.
        """
        if self.output is not None and lm_head is None:
            return project(u, self.output.weight[...]).astype(jnp.float32)
        if self.output is None and lm_head is not None:
            return project(u, lm_head.astype(u.dtype)).astype(jnp.float32)
        raise ConfigError(
            f"The target's LM head belongs to head_output='lm_head' alone: this head has "
            f"{'an' if self.output is not None else 'no'} output matrix of its own and was given "
            f"{'no LM head; pass' if lm_head is None else 'an LM head; leave out'} lm_head."
        )

    def _embed(self, tokens):
        return jnp.take(self.prev_embedding[...], tokens, axis=0, mode="clip")

    def _mix_parts(self, hidden):
        """The part of W_u for the state, and what the backbone states contribute with the bias, `[B, K, U]`."""
        weight = self.mix.weight[...]
        return weight[:, : self.rank], project(hidden, weight[:, self.rank :], self._bias(self.mix))

    @staticmethod
    def _bias(linear: Linear):
        assert linear.bias is not None
        return linear.bias[...]


def _gate(state, both):
    """New float32 state from the old one and [g ; c]."""
    gate, candidate = jnp.split(both.astype(jnp.float32), 2, axis=-1)
    gate = jax.nn.sigmoid(gate)
    return gate * state + (1 - gate) * jnp.tanh(candidate)
