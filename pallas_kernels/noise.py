"""The random numbers of Gumbel-max sampling, one at a time from a counter, in operations that kernels have.

Number i of a key is what `jdlite.decoding.sampling.gumbel(key, V)` has at index i, whatever V is, so a kernel that
sweeps the vocabulary in tiles draws the same token as a function that sees all of it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Rotations of the rounds and the parity constant of threefry2x32 (Salmon et al., "Parallel random numbers: as easy as
# 1, 2, 3", 2011, table 2 and section 3.3).
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def threefry_bits(key0: jax.Array, key1: jax.Array, index: jax.Array) -> jax.Array:
    """Random bits number `index` of a threefry key, as int32.

    They are those of `jax.random.bits(key, (n,), uint32)` with `jax_threefry_partitionable`, JAX's default: the two
    words of the block for the 64-bit counter (0, index), combined by exclusive or.

    Args:
        key0: first word of the key, int32, broadcast against `index`.
        key1: second word.
        index: int32 counters.
    """
    # int32 throughout: sums wrap as unsigned ones do, and kernels have no unsigned shift operators.
    keys = (key0, key1, key0 ^ key1 ^ jnp.int32(_PARITY))
    x0 = jnp.broadcast_to(key0, jnp.broadcast_shapes(key0.shape, index.shape))
    x1 = index + key1
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            left = jax.lax.shift_left(x1, jnp.int32(rotation))
            x1 = (left | jax.lax.shift_right_logical(x1, jnp.int32(32 - rotation))) ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + jnp.int32(group + 1)
    return x0 ^ x1


def _uniform(bits: jax.Array) -> jax.Array:
    """Numbers between 0 and 1, both excluded, from int32 random bits."""
    high = jax.lax.shift_right_logical(bits, jnp.int32(16)).astype(jnp.float32)
    low = (bits & jnp.int32(0xFFFF)).astype(jnp.float32)
    # Both halves are exact and their sum is rounded once: the float32 nearest to the unsigned number.
    uniform = (high * jnp.float32(65536) + low + jnp.float32(0.5)) * jnp.float32(2**-32)
    return jnp.minimum(uniform, jnp.float32(1 - 2**-24))


def gumbel_from_bits(bits: jax.Array) -> jax.Array:
    """Standard Gumbel numbers, float32, from int32 random bits, as `jdlite.decoding.sampling.gumbel` makes them."""
    return -jnp.log(-jnp.log1p(-_uniform(bits)))


def gumbel_without_log1p(bits: jax.Array) -> jax.Array:
    """`gumbel_from_bits` but for the last places, for Mosaic GPU, which lacks log1p."""
    uniform = _uniform(bits)
    # log(1 - x) = log(w) x / (1 - w) with w the rounding of 1 - x: the errors of w cancel (Kahan).
    rounded = jnp.float32(1) - uniform
    missing = jnp.float32(1) - rounded
    tiny = missing == 0
    ratio = uniform / jnp.where(tiny, jnp.float32(1), missing)
    return -jnp.log(jnp.where(tiny, uniform, -jnp.log(rounded) * ratio))


def key_words(keys: jax.Array) -> jax.Array:
    """The words of typed threefry keys, int32 `[..., 2]`.

    Raises:
        NotImplementedError: keys of another kind, or JAX is set to number their bits in another way.
    """
    if str(jax.random.key_impl(keys)) != "threefry2x32":
        raise NotImplementedError(
            f"Keys are {jax.random.key_impl(keys)} keys, and only those of "
            "jax.random.key(seed, impl='threefry2x32') can be counted through."
        )
    if not jax.config.jax_threefry_partitionable:  # pyright: ignore[reportAttributeAccessIssue]
        raise NotImplementedError("jax_threefry_partitionable is off, and only with it are random bits independent.")
    return jax.lax.bitcast_convert_type(jax.random.key_data(keys), jnp.int32)
