"""Placing a decoder and its cache on a device mesh by rules on logical axis names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jdlite.errors import ConfigError
from jdlite.models.cache import KVCache

# Logical axis name to mesh axis. A logical axis without a rule (None, or not in the table) is kept whole.
Rules = Mapping[str, str | None]

# Tensor parallelism over `model`: each layer's first products are split by their outputs (heads, mlp) and its last by
# their inputs, so one sum across devices ends attention and one ends the feed-forward. Batch rows go over `data`.
DEFAULT_RULES: Rules = {
    "vocab": "model",
    "heads": "model",
    "kv_heads": "model",
    "mlp": "model",
    "embed": None,
    "batch": "data",
}

# Logical axes of `KVCache.k` and `.v`, `[L, B, G, S, h]`.
CACHE_AXES = (None, "batch", "kv_heads", None, None)


def make_mesh(*, data: int = 1, model: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of `data * model` devices whose shardings the compiler propagates.

    Args:
        data: parts that the rows of a batch are split into.
        model: parts that each layer is split into.
        devices: which devices; all by default. Those of several processes are taken process by process, so that the
            rows of each are neighbours.

    Raises:
        ConfigError: there are not `data * model` devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    if data < 1 or model < 1 or data * model != len(devices):
        raise ConfigError(
            f"a mesh of data={data} and model={model} needs {data * model} devices: got {len(devices)}; choose sizes "
            "whose product is the number of devices, or pass fewer devices."
        )
    names, kinds = ("data", "model"), (AxisType.Auto, AxisType.Auto)
    if len({device.process_index for device in devices}) == 1:
        return jax.make_mesh((data, model), names, kinds, devices=devices)
    devices.sort(key=lambda device: (device.process_index, device.id))
    return Mesh(np.array(devices).reshape(data, model), names, axis_types=kinds)


def _check_mesh(mesh: Mesh) -> None:
    # In an Explicit mesh every gather and product of the model would have to name its output sharding.
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ConfigError(
            f"the mesh must have axes of type Auto: got {', '.join(str(kind) for kind in mesh.axis_types)}; make it "
            "with jdlite.models.sharding.make_mesh or pass axis_types to jax.make_mesh."
        )


def spec_for(
    axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh, rules: Rules = DEFAULT_RULES, *, name: str = "array"
) -> PartitionSpec:
    """The partition of one array.

    Example: on a mesh `(data=2, model=4)`, an embedding table with axes `("vocab", "embed")` and shape `(1000, 64)`
    gives `PartitionSpec("model", None)`: each of the four `model` columns holds 250 rows.

    Args:
        axes: logical name of each dimension, None for one that is never split.
        shape: of the array.
        mesh: the devices.
        rules: logical axis to mesh axis. A mesh axis that the mesh does not have is an error.
        name: of the array, for messages.

    Raises:
        ConfigError: one mesh axis would split two dimensions, a dimension does not divide, or the mesh lacks an axis.
    """
    if len(axes) != len(shape):
        raise ConfigError(
            f"{name} has {len(shape)} dimensions but {len(axes)} logical axes, {tuple(axes)}; name each one."
        )
    targets = [None if axis is None else rules.get(axis) for axis in axes]
    seen: dict[str, str | None] = {}
    for axis, target, size in zip(axes, targets, shape, strict=True):
        if target is None:
            continue
        if target not in mesh.shape:
            raise ConfigError(
                f"the rule {axis} -> {target} names no axis of the mesh ({', '.join(map(str, mesh.axis_names))}); "
                "make the mesh with that axis or change the rule."
            )
        if target in seen:
            raise ConfigError(
                f"mesh axis {target} would split two dimensions of {name}, {seen[target]} and {axis}; give one of them "
                "another mesh axis or None."
            )
        if size % mesh.shape[target]:
            raise ConfigError(
                f"dimension {axis} of {name} has size {size}, which mesh axis {target} of size {mesh.shape[target]} "
                f"does not divide; use a smaller {target} axis or the rule {axis} -> None."
            )
        seen[target] = axis
    return PartitionSpec(*targets)


def placement(mesh: Mesh, rules: Rules = DEFAULT_RULES):
    """A function `(path, logical axes, shape) -> NamedSharding`, as `load_target(..., placement=...)` takes it."""

    _check_mesh(mesh)

    def place(path: str, axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
        return NamedSharding(mesh, spec_for(axes, shape, mesh, rules, name=path))

    return place


def put(value: Any, sharding: NamedSharding) -> Any:
    """An array, or its shape, with this sharding, whose devices may belong to several processes.

    An array that lies on devices of this process alone must be the same in all of them.
    """
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
    if sharding.is_fully_addressable or not getattr(value, "is_fully_addressable", True):
        return jax.device_put(value, sharding)
    host = np.asarray(value)
    return jax.make_array_from_callback(host.shape, sharding, lambda part: host[part])


def here(tree: Any) -> Any:
    """Arrays that several processes share as this one holds them, on its own devices; others are left as they are.

    Each process must hold all parts of every array, as on a mesh whose `model` axis lies inside a process.
    """

    def own(x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.is_fully_addressable:
            return x
        spec = x.sharding.spec  # pyright: ignore[reportAttributeAccessIssue]
        sharding = NamedSharding(x.sharding.mesh.local_mesh, spec)  # pyright: ignore[reportAttributeAccessIssue]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, [part.data for part in x.addressable_shards])

    return jax.tree.map(own, tree)


def shard_model(model: Any, mesh: Mesh, rules: Rules = DEFAULT_RULES) -> Any:
    """A copy of an NNX module whose parameters lie on the mesh, by the `axes` metadata of each parameter.

    Parameters without that metadata are replicated. Everything is checked before anything is moved. Of a module of
    shapes (`nnx.eval_shape`) the shapes name their sharding, which is what compiling for devices that are not there
    takes.

    Args:
        model: a `Decoder`, or any module whose parameters carry `axes`.
        mesh: the devices.
        rules: logical axis to mesh axis.

    Raises:
        ConfigError: see `spec_for`.
    """
    place = placement(mesh, rules)
    config = getattr(model, "config", None)
    for axis, count in (("heads", "num_heads"), ("kv_heads", "num_kv_heads")):
        # A weight's rows may divide where its heads do not; a head must stay on one device.
        if hasattr(config, count):
            spec_for((axis,), (getattr(config, count),), mesh, rules, name="the attention")
    graph, state = nnx.split(model)
    flat = []
    for path, leaf in nnx.to_flat_state(state):
        value = leaf.get_value()
        axes = leaf.get_metadata().get("axes") or (None,) * value.ndim
        flat.append((path, leaf, value, place(".".join(map(str, path)), axes, value.shape)))
    moved = [(path, leaf.replace(put(value, sharding))) for path, leaf, value, sharding in flat]
    return nnx.merge(graph, nnx.from_flat_state(moved))


def shard_cache(cache: KVCache, mesh: Mesh, rules: Rules = DEFAULT_RULES) -> KVCache:
    """The cache, or its shapes, on the mesh: rows by the rule of `batch`, heads by the rule of `kv_heads`.

    Raises:
        ConfigError: see `spec_for`.
    """

    _check_mesh(mesh)

    def place(value, axes, name):
        return put(value, NamedSharding(mesh, spec_for(axes, value.shape, mesh, rules, name=name)))

    return dataclasses.replace(
        cache,
        k=place(cache.k, CACHE_AXES, "the key cache"),
        v=place(cache.v, CACHE_AXES, "the value cache"),
        lengths=place(cache.lengths, ("batch",), "the cache lengths"),
    )
