"""DLite in plain numpy float64, from the formulas, one row at a time and one query at a time.

Parameters go by the names of the official checkpoints, matrices `[out, in]`, so this also pins the name table down.
"""

from __future__ import annotations

import math

import numpy as np


def norm(x, scale, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * scale


def rotate(x, position, theta):
    half = len(x) // 2
    out = np.empty_like(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def silu(x):
    return x / (1 + np.exp(-x))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def attend(p, layer, config, queries, keys):
    """`queries`, `keys`: lists of (input, position); returns the attention output of each query."""
    name = f"layers.{layer}.self_attn"
    H, G, h = config.num_heads, config.num_kv_heads, config.head_dim

    def heads(x, position, kind):
        y = (p[f"{name}.{kind}_proj.weight"] @ x).reshape(-1, h)
        if kind != "v":
            if config.qk_norm:
                y = norm(y, p[f"{name}.{kind}_norm.weight"], config.norm_eps)
            y = np.stack([rotate(row, position, config.rope_theta) for row in y])
        return y

    k = [heads(x, position, "k") for x, position in keys]
    v = [heads(x, position, "v") for x, position in keys]
    out = []
    for x, position in queries:
        q = heads(x, position, "q")
        mixed = []
        for head in range(H):
            group = head // (H // G)
            scores = np.array([q[head] @ key[group] for key in k]) / math.sqrt(h)
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            mixed.append(sum(w * value[group] for w, value in zip(weights, v, strict=True)))
        out.append(p[f"{name}.o_proj.weight"] @ np.concatenate(mixed))
    return out


def history_state(p, config, states):
    """Fused state of one past position; `states`: `[J, D]`, layers in order."""
    return norm(p["history_fuse.weight"] @ np.concatenate(list(states)), p["history_norm.weight"], config.norm_eps)


def backbone(p, config, a, tokens, features, embedding, past=None):
    """States `[K, D]` of the drafted positions.

    Args:
        p: parameters by official name.
        config: a `DLiteConfig`.
        a: absolute position of the anchor.
        tokens: the newest known tokens that exist (at most A), the anchor last.
        features: `[M, D]`, states of position a - 1.
        embedding: `[V, D]`.
        past: for a history, fused states by absolute position (any others are ignored).
    """
    eps, K = config.norm_eps, config.num_drafts
    if config.feature_concat == "sequence":
        table = p["layer_depth_embedding.weight"]
        with_depth = [f + table[layer] for f, layer in zip(features, config.taps, strict=True)]
        slots = [norm(f, p["context_norm.weight"], eps) for f in with_depth]
    else:
        slots = [norm(p["feature_fuse.weight"] @ np.concatenate(list(features)), p["context_norm.weight"], eps)]
    if config.draft_history:
        window = [t for t in range(a - config.draft_history, a - 1) if t >= 0]
        context = [(past[t], t) for t in window] + [(slot, a - 1) for slot in slots]
        first = a - len(tokens) + 1
    else:
        # Local positions: the first real token has 0, the context the position before the anchor, but not below 0.
        context = [(slot, max(len(tokens) - 2, 0)) for slot in slots]
        first = 0
    ids = list(tokens) + [config.mask_token_id] * K
    rows = [(embedding[token], first + i) for i, token in enumerate(ids)]
    stream = config.context_mode == "stream"
    if stream:
        rows, context = context + rows, []
    for layer in range(config.num_layers):
        gamma = p[f"layers.{layer}.input_layernorm.weight"]
        normed = [(norm(x, gamma, eps), position) for x, position in rows]
        mixed = attend(p, layer, config, normed, context + normed)
        after = []
        for (x, position), m in zip(rows, mixed, strict=True):
            y = x + m
            z = norm(y, p[f"layers.{layer}.post_attention_layernorm.weight"], eps)
            mlp = f"layers.{layer}.mlp"
            gated = silu(p[f"{mlp}.gate_proj.weight"] @ z) * (p[f"{mlp}.up_proj.weight"] @ z)
            after.append((y + p[f"{mlp}.down_proj.weight"] @ gated, position))
        rows = after
    return np.stack([norm(x, p["norm.weight"], eps) for x, _ in rows[-K:]])


def recur(p, config, state, token):
    name, R = "sequential_head", config.rank
    joined = np.concatenate([state, p[f"{name}.prev_token_embedding.weight"][token]])
    both = p[f"{name}.state_proj.weight"] @ joined + p[f"{name}.state_proj.bias"]
    gate = sigmoid(both[:R])
    return gate * state + (1 - gate) * np.tanh(both[R:])


def draft(p, config, hidden, tokens, choose, lm_head=None):
    """Draft K tokens with `choose(logits, step)`.

    Returns:
        The tokens and the logits `[K, V]` that each was chosen from.
    """
    name = "sequential_head"
    state = np.zeros(config.rank)
    if len(tokens) > 1:
        state = recur(p, config, state, tokens[-2])
    previous, drafts, seen = tokens[-1], [], []
    for step, h in enumerate(hidden):
        state = recur(p, config, state, previous)
        u = p[f"{name}.state_hidden_mlp.weight"] @ np.concatenate([state, h]) + p[f"{name}.state_hidden_mlp.bias"]
        logits = (p[f"{name}.output_proj.weight"] if lm_head is None else lm_head) @ u
        previous = int(choose(logits, step))
        drafts.append(previous)
        seen.append(logits)
    return drafts, np.stack(seen)
