"""The jitted loop: catch the cache up with the known tokens, then rounds of draft, verify, accept, commit, observe."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jdlite.decoding import policy
from jdlite.decoding.penalties import History
from jdlite.decoding.state import DecodeState, Progress, Request, context
from jdlite.decoding.stats import Stats
from jdlite.decoding.stops import Finish, cut, recent_tokens
from jdlite.decoding.tree import Tree, order_by_gain
from jdlite.decoding.verify import Verified, top_ids, verify
from jdlite.drafters.base import Drafter, Observation
from jdlite.models.decoder import Decoder

# Nodes for which the LM head runs at once in prefill; bounds the [rows, V] array.
HEAD_ROWS = 256


def _chunked_top_ids(model: Decoder, hidden: jax.Array, k: int) -> Int[Array, "B T k"]:
    """Most likely next tokens of T positions without a `[B, T, V]` array."""
    B, T, D = hidden.shape
    if not k:
        return jnp.zeros((B, T, 0), jnp.int32)
    piece = max(1, min(T, HEAD_ROWS // B))
    padded = jnp.pad(hidden, ((0, 0), (0, -T % piece), (0, 0)))
    pieces = padded.reshape(B, -1, piece, D).swapaxes(0, 1)
    ids = jax.lax.map(lambda x: top_ids(model.logits(x), k), pieces)
    return ids.swapaxes(0, 1).reshape(B, -1, k)[:, :T]


def catch_up(model: Decoder, drafter: Drafter, state: DecodeState, *, chunk: int = 128) -> DecodeState:
    """Run the known tokens that the target has not seen, all but each row's newest (its anchor), in chunks.

    Prefill of a prompt and of what a session appends are the same thing: `state.append` and then this. One compilation
    serves any number of tokens.

    Args:
        model: the target.
        drafter: observes every chunk.
        state: with `cache.lengths < lengths - 1` in rows that have something to run.
        chunk: tokens of a row per forward, static.

    Returns:
        The state with `cache.lengths == lengths - 1` (0 for an empty row).
    """
    C = min(chunk, state.capacity)
    B = state.lengths.shape[0]
    needs = drafter.needs(model.config.num_layers)
    steps = jnp.arange(C, dtype=jnp.int32)
    path = jnp.broadcast_to(steps, (B, C))
    mask = jnp.broadcast_to(steps[:, None] >= steps, (B, C, C))
    goal = jnp.maximum(state.lengths - 1, 0)

    def behind(state: DecodeState):
        return jnp.any(state.cache.lengths < goal)

    def advance(state: DecodeState) -> DecodeState:
        start = state.cache.lengths
        count = jnp.clip(goal - start, 0, C)
        take = lambda slots: jnp.take_along_axis(state.tokens, jnp.minimum(slots, state.capacity - 1), axis=1)  # noqa: E731
        slots = start[:, None] + steps
        tokens = take(slots)
        with jax.named_scope("prefill"):
            out = model(tokens, slots, mask, state.cache, needs.taps)
        cache = state.cache.append(out.k, out.v, count)
        seen = Observation(
            tokens=tokens,
            valid=steps < count[:, None],
            path=path,
            start=start,
            count=count,
            taps=out.taps,
            top_ids=_chunked_top_ids(model, out.hidden, needs.top_k),
            next_tokens=take(slots + 1),
        )
        lengths = jnp.where(count > 0, start + count + 1, jnp.minimum(start + 1, state.lengths))
        memory = drafter.observe(state.memory, context(model, state, lengths, None, lengths), seen)
        return dataclasses.replace(state, cache=cache, memory=memory)

    return jax.lax.while_loop(behind, advance, state)


def start(
    model: Decoder,
    drafter: Drafter,
    state: DecodeState,
    request: Request,
    max_new_tokens: Int[Array, " B"],
    *,
    log_rounds: int = 0,
) -> Progress:
    """Begin a decode call on a state that has caught up.

    Args:
        max_new_tokens: budget of each row; 0 finishes it at once.
        log_rounds: how many rounds per row to record in `Stats.log`, static.
    """
    B = state.lengths.shape[0]
    counts = request.costs.counts
    finish = jnp.where(state.lengths >= state.capacity, int(Finish.CAPACITY), int(Finish.RUNNING))
    finish = jnp.where(max_new_tokens <= 0, int(Finish.LENGTH), finish).astype(jnp.int32)
    history = None
    if request.sampling.penalises:
        history = History.from_prompt(state.tokens, state.lengths, model.config.vocab_size)
    stats = Stats.zeros(B, drafter.max_depth + 1, len(counts), log_rounds)
    return Progress(finish, max_new_tokens.astype(jnp.int32), state.lengths, history, stats)


def decode_round(
    model: Decoder, drafter: Drafter, state: DecodeState, request: Request, progress: Progress
) -> tuple[DecodeState, Progress]:
    """One round: draft, verify, accept, commit, observe. Every running row emits at least one token."""
    counts = request.costs.counts
    active = progress.finish == Finish.RUNNING
    room = state.capacity - state.lengths
    with jax.named_scope("draft"):
        cost = request.costs.at(jnp.max(state.lengths).astype(jnp.float32))
        earnings, run_network = state.earnings, jnp.asarray(True)
        if drafter.network is not None:
            run_network = earnings.worth_running(active, request.costs.draft / cost[0])
        here = context(model, state, state.lengths, request, progress.prompt_lengths, run_network)
        proposal = drafter.propose(state.memory, here)
        tree = Tree.from_parents(proposal.parents, proposal.valid)
        extra_forwards = 0
        if drafter.lookahead:
            positions = (state.lengths - 1)[:, None] + tree.depth
            ahead = model(proposal.tokens, positions, tree.ancestors, state.cache)
            next_ids = jnp.argmax(model.logits(ahead.hidden), axis=-1).astype(jnp.int32)
            proposal = drafter.extend(state.memory, here, proposal, next_ids)
            tree = Tree.from_parents(proposal.parents, proposal.valid)
            extra_forwards = 1
        # Node at depth d is of use only if d + 1 tokens may still be emitted.
        useful = tree.depth < jnp.minimum(progress.budget, room)[:, None]
        # A drafter's mistake must not reach a gather: ids outside the vocabulary are no drafts.
        useful = useful & (proposal.tokens >= 0) & (proposal.tokens < model.config.vocab_size)
        proposal = dataclasses.replace(proposal, valid=tree.valid & useful & active[:, None])
        proposal = dataclasses.replace(proposal, valid=proposal.valid.at[:, 0].set(True))
        tree = dataclasses.replace(tree, valid=proposal.valid)

        prior = policy.conditional(proposal.gain, tree)
        cell = policy.cells(prior, proposal.source)
        gain = policy.calibrate(prior, cell, state.reliability, tree)
        proposal = dataclasses.replace(proposal, gain=gain)
        if proposal.log_q is None:
            proposal, cell = order_by_gain(proposal, cell)
            tree = Tree.from_parents(proposal.parents, proposal.valid)
        choice = policy.choose(jnp.where(tree.valid, proposal.gain, 0.0), active, cost, counts)

    branches = [partial(verify, n, model, drafter, state, request, progress, proposal, tree) for n in counts]
    out: Verified = branches[0]() if len(branches) == 1 else jax.lax.switch(choice, list(branches))

    with jax.named_scope("commit"):
        taken = out.acceptance
        P = taken.path.shape[1]
        # Nothing after a node whose logits are not numbers can be trusted.
        broken = jnp.take_along_axis(out.broken, taken.path, axis=1) & (jnp.arange(P) <= taken.accepted[:, None])
        sound = jnp.where(jnp.any(broken, axis=1), jnp.argmax(broken, axis=1), taken.accepted + 1).astype(jnp.int32)
        offered = jnp.where(active, sound, 0)
        recent = recent_tokens(state.tokens, state.lengths, progress.prompt_lengths, request.stops.history)
        kept, reason = cut(taken.emitted, offered, recent, request.stops, progress.budget, room)
        failed = active & jnp.any(broken, axis=1) & (reason == Finish.RUNNING)
        reason = jnp.where(failed, int(Finish.ERROR), reason)

        old_lengths = state.lengths
        cache = state.cache.commit(out.k, out.v, taken.path, kept)
        new = dataclasses.replace(state, cache=cache).append(taken.emitted, kept)

    with jax.named_scope("observe"):
        n_used = jnp.asarray(counts)[choice]
        verified = tree.valid & (jnp.arange(drafter.max_nodes) < n_used)
        seen = Observation(
            tokens=proposal.tokens,
            valid=verified & active[:, None],
            path=taken.path,
            start=old_lengths - 1,
            count=kept,
            taps=out.taps,
            top_ids=out.top_ids,
            next_tokens=taken.emitted,
        )
        after = context(model, new, new.lengths, request, progress.prompt_lengths)
        memory = drafter.observe(state.memory, after, seen)
        parent_on_path = jnp.take_along_axis(taken.on_path, tree.parents, axis=1)
        drafts = jnp.arange(drafter.max_nodes) > 0
        reliability = state.reliability.update(cell, verified & parent_on_path & drafts, taken.on_path, active)
        if drafter.network is not None:
            surplus = cost[choice] / cost[0] - 1
            earnings = earnings.update(
                proposal.source, verified & drafts, taken.on_path & drafts, surplus, run_network, active
            )
        stats = progress.stats.update(
            active=active,
            verified=verified,
            path=taken.path,
            source=proposal.source,
            accepted=taken.accepted,
            kept=kept,
            variant=choice,
            forwards=1 + extra_forwards,
            fused=out.fused,
        )
    history = None if progress.history is None else progress.history.update(taken.emitted, kept)
    state = dataclasses.replace(new, memory=memory, reliability=reliability, earnings=earnings)
    finish = jnp.where(active, reason, progress.finish)
    return state, Progress(finish, progress.budget - kept, progress.prompt_lengths, history, stats)


def decode_rounds(
    model: Decoder,
    drafter: Drafter,
    state: DecodeState,
    request: Request,
    progress: Progress,
    max_rounds: int | Int[Array, ""] = 2**31 - 1,
) -> tuple[DecodeState, Progress]:
    """Run rounds until every row has finished, or `max_rounds` of them (streaming): a pure function to call inside jit.

    Args:
        model: the target.
        drafter: as in `init_state`.
        state: has caught up; give it up (donate it) when you jit.
        request: how to decode.
        progress: from `start`, or from an earlier call that stopped early.
        max_rounds: may be traced.

    Returns:
        `(state, progress)`. Row b's new tokens are `state.tokens[b, progress.prompt_lengths[b] : state.lengths[b]]`.
    """

    def running(carry):
        done, _, progress = carry
        return (done < max_rounds) & jnp.any(progress.finish == Finish.RUNNING)

    def step(carry):
        done, state, progress = carry
        state, progress = decode_round(model, drafter, state, request, progress)
        return done + 1, state, progress

    _, state, progress = jax.lax.while_loop(running, step, (jnp.zeros((), jnp.int32), state, progress))
    return state, progress
