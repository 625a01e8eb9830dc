"""Key/value cache of fixed capacity with per-row lengths, and the one helper that writes rows into such buffers."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from pallas_kernels.backends import with_kernel


def write_rows(buffer: jax.Array, rows: jax.Array, start: jax.Array, count: jax.Array, *, row: int, slot: int):
    """Write `rows[b, :count[b]]` into `buffer` at slots `start[b] ...` of each row b, touching nothing else.

    A row is read, merged and written back as one window of P slots. The window is shifted left where it would pass the
    end of the buffer, so nothing is clamped silently and no slack slots are needed.

    Args:
        buffer: array with a row axis (size B) and a slot axis (size S >= P).
        rows: same axes as `buffer`, with P slots instead of S.
        start: `[B]` int32, first slot to write.
        count: `[B]` int32, how many of the P rows to write; 0 leaves the row alone. `start + count` must not exceed S.
        row: index of the row axis.
        slot: index of the slot axis.

    Returns:
        The updated buffer (in place when it is donated or a loop carry).
    """
    window, capacity = rows.shape[slot], buffer.shape[slot]
    slots = jnp.arange(window)
    shape = [1] * buffer.ndim
    shape[slot] = window

    def write_one(b, buffer):
        first = jnp.clip(start[b], 0, capacity - window)
        shift = start[b] - first
        begin = [jnp.zeros((), jnp.int32)] * buffer.ndim
        begin[row], begin[slot] = b, first
        size = list(rows.shape)
        size[row] = 1
        old = jax.lax.dynamic_slice(buffer, begin, size)
        new = jax.lax.dynamic_slice_in_dim(rows, b, 1, axis=row).astype(buffer.dtype)
        new = jnp.roll(new, shift, axis=slot)
        keep = ((slots >= shift) & (slots < shift + count[b])).reshape(shape)
        return jax.lax.dynamic_update_slice(buffer, jnp.where(keep, new, old), begin)

    return jax.lax.fori_loop(0, buffer.shape[row], write_one, buffer)


def _write_paths(k_cache, v_cache, k_new, v_new, path, lengths, count) -> tuple[jax.Array, jax.Array]:
    """Write nodes `path[b, :count[b]]` of `[L, B, G, N, h]` behind each row's length."""
    along = jax.vmap(lambda rows, nodes: jnp.take(rows, nodes, axis=2), in_axes=(1, 0), out_axes=1)
    k, v = along(k_new, path), along(v_new, path)
    write = lambda buffer, rows: write_rows(buffer, rows, lengths, count, row=1, slot=3)  # noqa: E731
    return write(k_cache, k), write(v_cache, v)


def _commit_cache(*args, backend):
    # Imported where it is used: Pallas takes long to import, and many never need it.
    from pallas_kernels.commit_cache.api import commit_cache

    return commit_cache(*args, backend=backend)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of the committed tokens that went through the target.

    Attributes:
        k: keys after q/k-norm and rotary embedding, `[L, B, G, S, h]`.
        v: values, `[L, B, G, S, h]`.
        lengths: `[B]` int32, slots in use by each row. Slots at or past a row's length hold rubbish and are never read,
            so rolling back is only a smaller length.
    """

    k: Shaped[Array, "L B G S h"]
    v: Shaped[Array, "L B G S h"]
    lengths: Int[Array, " B"]

    @classmethod
    def zeros(cls, *, layers: int, batch: int, kv_heads: int, capacity: int, head_dim: int, dtype) -> KVCache:
        shape = (layers, batch, kv_heads, capacity, head_dim)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros(batch, jnp.int32))

    @property
    def capacity(self) -> int:
        """S, slots of a row."""
        return self.k.shape[3]

    def append(self, k: jax.Array, v: jax.Array, count: jax.Array) -> KVCache:
        """Commit the first `count[b]` of P new keys and values `[L, B, G, P, h]` to each row."""
        write = lambda buffer, rows: write_rows(buffer, rows, self.lengths, count, row=1, slot=3)  # noqa: E731
        return KVCache(write(self.k, k), write(self.v, v), self.lengths + count)

    def commit(self, k: jax.Array, v: jax.Array, path: Int[Array, "B P"], count: jax.Array) -> KVCache:
        """Commit the keys and values of nodes `path[b, :count[b]]` to each row.

        Where the device has a kernel that serves, it runs (docs/kernels.md).

        Args:
            k: keys of the N nodes of one forward, `[L, B, G, N, h]`; in the cache's dtype, or rounded to it.
            v: their values.
            path: int32 numbers of nodes, in the order in which they are to stand; P at most the capacity.
            count: `[B]` int32, 0 to P; `lengths + count` must not exceed the capacity.
        """
        k, v = with_kernel(_write_paths, _commit_cache, self.k, self.v, k, v, path, self.lengths, count)
        return KVCache(k, v, self.lengths + count)

    def rollback(self, lengths: jax.Array) -> KVCache:
        """Forget everything from `lengths[b]` on; a length past the row's own is ignored."""
        return dataclasses.replace(self, lengths=jnp.minimum(self.lengths, lengths))
