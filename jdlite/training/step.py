"""The jitted training step: target forward, anchors, losses, gradient, update; and the evaluation of held-out rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdlite.models.decoder import Decoder
from jdlite.training.anchors import Anchors, choose, draft_weights, eligible, gather_anchors
from jdlite.training.config import Label, TrainConfig
from jdlite.training.features import TargetStates, backbone_states, head_outputs, stored_states, target_states
from jdlite.training.initialise import Params, Template, lm_head
from jdlite.training.law import Law, Pieces, make_law
from jdlite.training.losses import Parts, Weights, surrogate
from jdlite.training.stages import Plan, Stage, learning_rate

Batch = dict[str, jax.Array]
Sums = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scalars:
    """What changes from step to step without a new compilation."""

    ce: jax.Array
    l1: jax.Array
    kl: jax.Array
    base_ce: jax.Array
    free_head: jax.Array


def make_optimizer(plan: Plan, config: TrainConfig) -> optax.GradientTransformation:
    """Clipping and AdamW under the plan's one schedule."""
    o = config.optimizer
    return optax.chain(
        optax.clip_by_global_norm(o.clip),
        optax.adamw(
            lambda step: learning_rate(step, plan, o),
            b1=o.beta1,
            b2=o.beta2,
            eps=o.epsilon,
            weight_decay=o.weight_decay,
        ),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One stage's computation; `train` and `evaluate` are pure and are jitted by the caller.

    Attributes:
        config: the run's.
        stage: decides which networks and losses are computed.
        template: of the network that is trained.
        teacher: of the frozen teacher, in stages that use it.
        optimizer: from `make_optimizer`.
        label: of the cross-entropy.
        stored: layers whose outputs come with the batch (`features.stored_states`); None runs the target.
    """

    config: TrainConfig
    stage: Stage
    template: Template
    teacher: Template | None
    optimizer: optax.GradientTransformation
    label: Label
    stored: tuple[int, ...] | None = None

    def train(
        self,
        target: Decoder,
        teacher: Params | None,
        params: Params,
        opt_state: Any,
        batch: Batch,
        key: jax.Array,
        scalars: Scalars,
    ) -> tuple[Params, Any, Sums]:
        """One update. Where loss or gradient are not finite nothing is changed, and `finite` is 0.

        Args:
            target: frozen.
            teacher: its parameters, or None.
            params: master weights, float32.
            opt_state: of the optimiser.
            batch: arrays `[micro-batches, rows, T]`.
            key: of this step; decides the anchors.
            scalars: weights of the losses.
        """
        anchors, scale = self._anchors(batch, key)
        base_scale = self._scale(anchors.supervised, self.config.loss.base_gamma) if self.stage.uses_base else scale
        micro = {"batch": batch, "anchors": anchors, "scale": scale, "base_scale": base_scale}

        def add(carry, micro):
            total, sums = carry
            out, gradient = jax.value_and_grad(self._loss, has_aux=True)(params, target, teacher, micro, scalars)
            return (jax.tree.map(jnp.add, total, gradient), jax.tree.map(jnp.add, sums, out[1])), None

        first = jax.tree.map(lambda x: x[0], micro)
        if batch["tokens"].shape[0] == 1:
            (_, sums), gradient = jax.value_and_grad(self._loss, has_aux=True)(params, target, teacher, first, scalars)
        else:
            shapes = jax.eval_shape(lambda: self._loss(params, target, teacher, first, scalars)[1])
            empty = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
            begin = (jax.tree.map(jnp.zeros_like, params), empty)
            (gradient, sums), _ = jax.lax.scan(add, begin, micro)
        # A frozen head must not move under weight decay either.
        hold = lambda tree: {**tree, "head": jax.tree.map(lambda x: x * scalars.free_head, tree["head"])}  # noqa: E731
        gradient = hold(gradient)
        norm = optax.tree.norm(gradient)
        finite = jnp.isfinite(sums["loss"]) & jnp.isfinite(norm)
        updates, new_state = self.optimizer.update(gradient, opt_state, params)
        new_params = optax.apply_updates(params, hold(updates))
        keep = lambda new, old: jnp.where(finite, new, old)  # noqa: E731
        sums |= {"gradient_norm": norm, "finite": finite.astype(jnp.float32)}
        return jax.tree.map(keep, new_params, params), jax.tree.map(keep, new_state, opt_state), sums

    def evaluate(self, target: Decoder, params: Params, batch: Batch, key: jax.Array) -> Sums:
        """Sums over the held-out rows of one batch `[1, rows, T]`, compared with the target's distributions."""
        anchors, scale = self._anchors(batch, key)
        micro = {"batch": batch, "anchors": anchors, "scale": scale, "base_scale": scale}
        o = self.config.student
        values = (o.ce, o.l1, 0.0, 0.0, 1.0)
        scalars = Scalars(*(jnp.float32(v) for v in values))
        first = jax.tree.map(lambda x: x[0], micro)
        return self._loss(params, target, None, first, scalars, held_out=True)[1]

    def _anchors(self, batch: Batch, key: jax.Array) -> tuple[Anchors, jax.Array]:
        """Anchors of all micro-batches, and the weight of every draft, which sum to 1."""
        b, d = self.config.batch, self.template.config
        names = ("tokens", "loss_mask", "segment_ids")
        flat = {name: batch[name].reshape(-1, batch[name].shape[-1]) for name in names}
        candidates = eligible(flat["loss_mask"], flat["segment_ids"], prompt_end=b.prompt_end)
        positions, valid = choose(key, candidates, b.anchors)
        anchors = gather_anchors(positions, valid, flat, group=d.anchor_group_size, drafts=d.num_drafts)
        micro = batch["tokens"].shape[:2]
        anchors = jax.tree.map(lambda x: x.reshape(*micro, *x.shape[1:]), anchors)
        return anchors, self._scale(anchors.supervised, self.config.loss.gamma)

    def _scale(self, supervised: jax.Array, gamma: float) -> jax.Array:
        shape = supervised.shape
        weights = draft_weights(
            supervised.reshape(-1, *shape[-2:]), gamma, contiguous=self.config.loss.contiguous
        ).reshape(shape)
        return weights / jnp.maximum(jnp.sum(weights), 1e-6)

    def _law(self, target: Decoder, states: TargetStates, index: jax.Array, used: jax.Array, pieces: Pieces) -> Law:
        o, shape = self.config.loss, states.hidden.shape[:2]
        N = shape[0] * shape[1]
        fits = 4 * N * (2 * o.top_k or pieces.tile * pieces.tiles) <= o.table_mb * 2**20
        # Rows of the batch lie on different devices of a mesh; the shared table would mix them.
        shared = fits and index.size > N and self.config.mesh.data == 1
        needed = jnp.zeros(N, bool).at[index.reshape(-1)].max(used.reshape(-1)).reshape(shape)
        return make_law(states.hidden, lm_head(target), needed, pieces, shared=shared, top_k=o.top_k)

    def _loss(self, params, target, teacher, micro, scalars: Scalars, *, held_out: bool = False):
        """The loss of one micro-batch, in the form of `surrogate`, and sums to be logged."""
        c, d = self.config, self.template.config
        batch, anchors, scale = micro["batch"], micro["anchors"], micro["scale"]
        model = self.template.build(params, jnp.dtype(c.compute_dtype))
        uses_teacher = self.stage.uses_teacher and not held_out
        if self.stored is not None:
            states = stored_states(batch, self.stored)
        else:
            layers = set(d.captured_layers)
            if uses_teacher:
                assert self.teacher is not None
                layers |= set(self.teacher.config.captured_layers)
            states = target_states(target, batch, tuple(sorted(layers)))
        embedding = target.embed.weight[...]
        segments = batch["segment_ids"]
        hidden = backbone_states(model, states, anchors, segments, embedding, recompute=c.batch.recompute)
        u = head_outputs(model, hidden, anchors)

        B, P = anchors.positions.shape
        K, T = d.num_drafts, segments.shape[1]
        rows = T * jnp.arange(B)[:, None, None]
        index = rows + jnp.minimum(anchors.positions[..., None] + jnp.arange(K), T - 1)
        # In pieces of whole anchors: their drafts share most positions.
        pieces = Pieces.of(d.vocab_size, B, K, pairs=c.loss.pairs, tile=c.loss.vocab_tile)
        wants_law = held_out or self.stage.uses_l1 or (self.stage.uses_tokens and self.label != "data")
        law = self._law(target, states, index, anchors.supervised, pieces) if wants_law else None
        taught = None
        if uses_teacher:
            assert self.teacher is not None
            frozen = jax.lax.stop_gradient(self.teacher.build(teacher, jnp.dtype(c.compute_dtype)))
            t_hidden = backbone_states(frozen, states, anchors, segments, embedding)
            t_u = jax.lax.stop_gradient(head_outputs(frozen, t_hidden, anchors))
            taught = (t_u, _output(frozen, target))
        own = model.head.output is not None
        shared: dict[str, Any] = {"law": law, "label": self.label}
        value, loss, parts = surrogate(
            u.reshape(B, P, K, -1),
            params["head"]["output"]["weight"] if own else lm_head(target),
            index,
            anchors.labels,
            scale,
            Weights(scalars.ce, scalars.l1, scalars.kl),
            pieces,
            teacher=taught,
            learn_output=own and self.stage.learns_head and not held_out,
            **shared,
        )
        sums = {"loss": loss, **_sums(parts, anchors, scale, batch)}
        if self.stage.uses_base and not held_out:
            base = surrogate(
                hidden.reshape(B, P, K, -1),
                lm_head(target),
                index,
                anchors.labels,
                micro["base_scale"],
                Weights(ce=scalars.base_ce),
                pieces,
                learn_output=False,
                **shared,
            )
            value += base[0]
            sums["loss"] += base[1]
            sums["base_ce"] = jnp.sum(micro["base_scale"] * base[2].ce)
        return value, sums


def _output(model, target: Decoder) -> jax.Array:
    return lm_head(target) if model.head.output is None else model.head.output.weight[...]


def _sums(parts: Parts, anchors: Anchors, scale: jax.Array, batch: Batch) -> Sums:
    """What is logged, as sums over a micro-batch."""
    used = anchors.supervised.astype(jnp.float32)
    accept = 1 - parts.l1 / 2
    # Anchors all of whose drafts are supervised: the others would look worse than they are.
    whole = jnp.min(used, axis=-1)
    tau = lambda x: jnp.sum(whole * (1 + jnp.sum(jnp.cumprod(x, axis=-1), axis=-1)))  # noqa: E731
    return {
        "ce": jnp.sum(scale * parts.ce),
        "l1": jnp.sum(scale * parts.l1),
        "kl": jnp.sum(scale * parts.kl),
        "accept": jnp.sum(used * accept, axis=(0, 1)),
        "match": jnp.sum(used * parts.match, axis=(0, 1)),
        "pairs": jnp.sum(used, axis=(0, 1)),
        "tau": tau(accept),
        "greedy_tau": tau(parts.match),
        "whole": jnp.sum(whole),
        "anchors": jnp.sum(anchors.valid.astype(jnp.float32)),
        "tokens": jnp.sum((batch["segment_ids"] > 0).astype(jnp.float32)),
    }


def jit_train(step: Step, where: jax.sharding.Sharding | None = None) -> Callable:
    """The compiled update; parameters and optimiser state are given up to it. Results lie `where`."""
    return jax.jit(step.train, donate_argnames=("params", "opt_state"), out_shardings=where)


def jit_evaluate(step: Step, where: jax.sharding.Sharding | None = None) -> Callable:
    """The compiled evaluation; its sums lie `where`."""
    return jax.jit(step.evaluate, out_shardings=where)
