"""Building a `Decoder` from stored tensors without ever allocating random weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from jdlite.checkpoints.mapping import IDENTITY, Transform
from jdlite.errors import CheckpointError, ConfigError
from jdlite.models.config import DecoderConfig
from jdlite.models.decoder import Decoder

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
# Bit pattern of the exponent field: all ones means infinity or NaN.
_EXPONENT = {"float32": (np.uint32, 0x7F800000), "bfloat16": (np.uint16, 0x7F80), "float16": (np.uint16, 0x7C00)}

Placement = Callable[[str, tuple, tuple[int, ...]], "jax.sharding.Sharding"]


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file that has not been read yet.

    Attributes:
        shape: as stored, which is also the parameter's.
        read: returns the part that an index (a tuple of slices, `()` for everything) selects, as a fresh array.
    """

    shape: tuple[int, ...]
    read: Callable[[tuple], np.ndarray]


def check_dtype(dtype) -> str:
    """The name of a supported parameter dtype.

    Raises:
        ConfigError: it is not one of float32, bfloat16, float16.
    """
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}: got {name}; choose one of them.")
    return name


def abstract_decoder(config: DecoderConfig, dtype) -> Decoder:
    """A `Decoder` of shapes only."""
    return nnx.eval_shape(lambda: Decoder(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0)))


def parameter_paths(model: Decoder) -> dict[str, nnx.Param]:
    """Every parameter by its dotted path, in the order of the model."""
    return {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def all_finite(array: np.ndarray) -> bool:
    """Whether a float32, bfloat16 or float16 array has neither NaN nor infinity (on its bits: ml_dtypes is slow)."""
    unsigned, mask = _EXPONENT[array.dtype.name]
    bits = np.ascontiguousarray(array).view(unsigned)
    return not bool(((bits & unsigned(mask)) == mask).any())


def assemble(
    config: DecoderConfig,
    tensors: Mapping[str, StoredTensor],
    lookup: Callable[[str], tuple[str, Transform]],
    *,
    dtype,
    source: str,
    ignore: Callable[[str], bool] = lambda name: False,
    placement: Placement | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Decoder:
    """Fill a decoder from stored tensors, one tensor at a time.

    Args:
        config: what the file says that the model is.
        tensors: what the file holds.
        lookup: parameter path to (name in the file, transform).
        dtype: of the parameters; stored values are cast.
        source: name of the file or folder, for messages.
        ignore: names that may be in the file and are no parameter.
        placement: `(path, logical axes, shape)` to the sharding of a parameter; parts are then read by range.
        progress: called with (tensors done, tensors in all).

    Raises:
        CheckpointError: names or shapes differ from the config's (all differences at once), or a value is not finite.
    """
    name_of_dtype = check_dtype(dtype)
    graph, state = nnx.split(abstract_decoder(config, name_of_dtype))
    flat = [(path, ".".join(map(str, path)), leaf) for path, leaf in nnx.to_flat_state(state)]
    wanted = {dotted: lookup(dotted) for _, dotted, _ in flat}
    shapes = {wanted[dotted][0]: tuple(leaf.get_value().shape) for _, dotted, leaf in flat}
    _check_names(tensors, shapes, ignore, source)

    filled = []
    for done, (path, dotted, leaf) in enumerate(flat):
        name, transform = wanted[dotted]
        shape = shapes[name]

        def part(index: Any, name=name, transform=transform) -> np.ndarray:
            # Only a plain copy commutes with taking a part.
            plain = transform is IDENTITY
            array = tensors[name].read(index if plain else ())
            array = array if plain else transform.load(array, config)[index]
            with np.errstate(over="ignore", invalid="ignore"):  # reported below, with the tensor's name
                array = np.ascontiguousarray(array.astype(DTYPES[name_of_dtype], copy=False))
            if not all_finite(array):
                raise CheckpointError(
                    f"tensor {name} of {source} has values that are NaN or infinite as {name_of_dtype}; get a sound "
                    "copy of the checkpoint, or load it in a wider dtype."
                )
            return array

        if placement is None:
            value = jnp.asarray(part(()))
        else:
            where = placement(dotted, leaf.get_metadata()["axes"], shape)
            value = jax.make_array_from_callback(shape, where, part)
        filled.append((path, leaf.replace(value)))
        if progress is not None:
            progress(done + 1, len(flat))
    return nnx.merge(graph, nnx.from_flat_state(filled))


def _check_names(tensors, shapes: Mapping[str, tuple[int, ...]], ignore, source: str) -> None:
    problems = []
    if missing := sorted(shapes.keys() - tensors.keys()):
        problems.append(f"missing {_list(missing)}")
    if unknown := sorted(n for n in tensors.keys() - shapes.keys() if not ignore(n)):
        problems.append(f"unknown {_list(unknown)}")
    wrong = [
        f"{name} {list(tensors[name].shape)} instead of {list(shape)}"
        for name, shape in sorted(shapes.items())
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    if wrong:
        problems.append(f"mis-shaped {_list(wrong)}")
    if problems:
        raise CheckpointError(
            f"the tensors of {source} do not fit its configuration: {'; '.join(problems)}. "
            "Check that the configuration and the weights belong together."
        )


def _list(names: list[str], limit: int = 40) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
