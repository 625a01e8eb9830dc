"""Which implementation of an operation runs: by the device, or by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


def candidates(operation: str, known: Sequence[str], backend: str | Sequence[str] | None) -> tuple[str, ...]:
    """Names of the backends to try, in order.

    Args:
        operation: name of the operation, for the error.
        known: backends that the operation has.
        backend: a name, several names to be tried in order, or None to go by the platform of the default device.

    Raises:
        ConfigError: a name that is not known.
    """
    if backend is None:
        return tuple(name for name in PREFERRED.get(jax.default_backend(), (REFERENCE,)) if name in known)
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
    raise NotImplementedError(f"{operation} cannot run here. {' '.join(reasons)}")


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
