"""Which implementation of an operation runs: by the device, or by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

import jax

from jdlite.errors import ConfigError

REFERENCE, MOSAIC_TPU, MOSAIC_GPU = "reference", "mosaic_tpu", "mosaic_gpu"

# What is tried, in order, where no name is given; a platform that is not listed runs the reference.
PREFERRED = {
    "tpu": (MOSAIC_TPU, REFERENCE),
    "gpu": (MOSAIC_GPU, REFERENCE),
    "cuda": (MOSAIC_GPU, REFERENCE),
}
# Platforms on which the decoder takes them without being asked: those on whose devices `scripts/gpu_bench.py` has found
# them right. There is none yet, and a wrong kernel would change the text.
PROVEN: tuple[str, ...] = ()
# What `jax.lax.platform_dependent` calls the platforms above.
_LOWERED_AS = {"tpu": "tpu", "gpu": "cuda", "cuda": "cuda"}

# Names that were forced, or None. A user's context is a part of the keys of JAX's caches, so jit traces anew under
# another.
_forced = jax.make_user_context(None)


@contextlib.contextmanager
def use_backend(backend: str | Sequence[str] | None) -> Iterator[None]:
    """Choose the backend of all operations whose caller names none, the decoder among them, while they are traced.

    For tests in an interpreter, and to compile for a device that is not there. It holds in this thread. A function
    under `jax.jit` is traced again where the choice is another, and the compilations of both are kept; a program that
    has been traced stays as it is. With `"reference"` the decoder runs its own code and no kernel. Others are put into
    the program whatever device it is lowered for, so lowering fails where there is no such kernel and no interpreter.

    Example:
        >>> with use_backend("mosaic_tpu"):
        ...     traced = jax.jit(step).trace(*shapes)
        >>> traced.lower(lowering_platforms=("tpu",))

    Args:
        backend: a name, several names to be tried in order, or None to go by the device again.

    Raises:
        ConfigError: a name that is not known, or none in a sequence.
    """
    names = None
    if backend is not None:
        names = (backend,) if isinstance(backend, str) else tuple(backend)
        unknown = [name for name in names if name not in (REFERENCE, MOSAIC_TPU, MOSAIC_GPU)]
        if unknown or not names:
            raise ConfigError(
                f"There is no backend {', '.join(map(repr, unknown)) or 'in an empty list'}; "
                f"choose from {REFERENCE}, {MOSAIC_TPU}, {MOSAIC_GPU}, or None to go by the device."
            )
    with _forced(names):
        yield


def _platform() -> str:
    """Platform of the default device."""
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


def kernels_to_run() -> tuple[str, ...]:
    """Names of the kernels that `with_kernel` tries where this is called, in order; none if own code is to run."""
    if _forced.value is None:
        platform = _platform()
        names = PREFERRED.get(platform, ()) if platform in PROVEN and jax.device_count() == 1 else ()
    else:
        names = _forced.value
    # The caller's code stands for the reference.
    return tuple(takewhile(lambda name: name != REFERENCE, names))


def with_kernel(own: Callable[..., Any], operation: Callable[..., Any], *args) -> Any:
    """`operation(*args, backend=names)` where kernels are to run and one of them can serve, else `own(*args)`.

    Kernels are to run under `use_backend`, and else on a `PROVEN` platform for which `PREFERRED` has some, if there is
    one device: the compiler cannot split a kernel over devices, and tracing cannot tell whether arrays are split.
    Outside of `use_backend` a program that is lowered for another platform after all runs `own` there.

    Args:
        own: the caller's code without kernels.
        operation: an operation of this package.
        args: arrays, or trees of them; the same for both.

    Returns:
        What the chosen one returned; both must give the same shapes and dtypes.
    """
    names = kernels_to_run()
    if not names:
        return own(*args)

    def kernel(*args):
        return operation(*args, backend=names)

    try:
        if _forced.value is not None:
            return kernel(*args)
        return jax.lax.platform_dependent(*args, default=own, **{_LOWERED_AS[_platform()]: kernel})
    except NotImplementedError:
        return own(*args)


def candidates(operation: str, known: Sequence[str], backend: str | Sequence[str] | None) -> tuple[str, ...]:
    """Names of the backends to try, in order.

    Args:
        operation: name of the operation, for the error.
        known: backends that the operation has.
        backend: a name, several names to be tried in order, or None to go by `use_backend`, and outside of it by the
            platform of the default device.

    Returns:
        Names out of `known`; none where `use_backend` names only backends that the operation lacks.

    Raises:
        ConfigError: a name that is not known.
    """
    if backend is None:
        names = PREFERRED.get(_platform(), (REFERENCE,)) if _forced.value is None else _forced.value
        return tuple(name for name in names if name in known)
    names = (backend,) if isinstance(backend, str) else tuple(backend)
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ConfigError(
            f"{operation} has no backend {', '.join(map(repr, unknown)) or 'in an empty list'}; "
            f"choose from {', '.join(known)}, or None to go by the device."
        )
    return names


def dispatch(
    operation: str, backends: Mapping[str, Callable[..., Any]], backend: str | Sequence[str] | None, *args, **kwargs
) -> Any:
    """Call the first backend that can serve.

    A backend says that it cannot by raising NotImplementedError with one sentence, before it computes anything.

    Args:
        operation: name of the operation, for errors.
        backends: implementations by name.
        backend: as in `candidates`.
        args: of the implementation.
        kwargs: of the implementation.

    Raises:
        ConfigError: a name that is not known.
        NotImplementedError: no backend that was tried can serve; the message tells the reason of each.
    """
    reasons = []
    for name in candidates(operation, tuple(backends), backend):
        try:
            return backends[name](*args, **kwargs)
        except NotImplementedError as refusal:
            reasons.append(f"{name}: {refusal}")
    told = " ".join(reasons) or f"It has no backend {' or '.join(_forced.value or ())}."
    raise NotImplementedError(f"{operation} cannot run here. {told}")


def require_mosaic_gpu() -> None:
    """Refuse where the Hopper kernels have not been checked.

    Raises:
        NotImplementedError: JAX older than 0.12, or a default device that is a GPU without Hopper's instructions.
    """
    if jax.__version_info__ < (0, 12):
        raise NotImplementedError(f"The Hopper kernels need JAX 0.12: got {jax.__version__}.")
    if jax.default_backend() in ("gpu", "cuda", "rocm"):
        device = jax.devices()[0]
        if str(getattr(device, "compute_capability", "")) != "9.0":
            raise NotImplementedError(
                f"The kernels are for Hopper GPUs, compute capability 9.0: got {device.device_kind}."
            )
