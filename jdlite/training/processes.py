"""Training in several processes, which run the same program side by side.

Every process must take part in everything that crosses their borders, in the same order. So what decides whether that
happens (stopping, saving, falling back to an earlier checkpoint) is agreed on here, and what only one of them may do,
such as writing a file, is done by the first while the others wait. With one process nothing is sent and nothing waits.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdlite.errors import ConfigError, JdliteError, first_line

T = TypeVar("T")
# Messages are filled up to a multiple of this: each length is a compiled program.
_BLOCK = 4096
# An exit waits so long for the other processes. What the first does alone has ended before (`on_first`).
_SHUTDOWN_SECONDS = 60


def start(coordinator: str | None = None, processes: int | None = None, process: int | None = None) -> None:
    """Join the other processes; comes before anything that looks at devices.

    Args:
        coordinator: `HOST:PORT` where process 0 can be reached by all; without it JAX asks the cluster (SLURM, Open
            MPI, TPU pods, ...), and the other two are left out as well.
        processes: how many there are.
        process: which of them this is, from 0.

    Raises:
        ConfigError: options are half given or do not fit, or the others cannot be reached.
    """
    given = {"--coordinator": coordinator, "--processes": processes, "--process": process}
    absent = [name for name, value in given.items() if value is None]
    if 0 < len(absent) < len(given):
        raise ConfigError(
            f"--coordinator, --processes and --process belong together: {' and '.join(absent)} is missing; give all "
            "three, or --distributed alone where JAX knows the cluster."
        )
    if coordinator is not None and processes is not None and process is not None:
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"--coordinator must be HOST:PORT: got {coordinator!r}; for example 10.0.0.1:8476.")
        if not 0 <= process < processes:
            raise ConfigError(
                f"--process must be from 0 to {processes - 1}: got {process} of {processes} processes; number them "
                "from 0."
            )
    # A SIGTERM is ours to handle: the run stops after the step, and before its first step at once.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process,
            cluster_detection_method=None if coordinator is None else "deactivate",
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        )
    except Exception as error:  # JAX raises several kinds
        raise ConfigError(
            f"the processes cannot find each other ({first_line(error):.200}); give --coordinator, --processes and "
            "--process, and start all of them."
        ) from error
    _meet()


def _meet() -> None:
    """Use each group of devices once, while all are here: on a CPU the first use fails where one is half a minute late,
    later ones wait."""
    agree(False)
    broadcast(np.zeros(1))
    everyone = NamedSharding(Mesh(np.array(jax.devices()), ("all",)), PartitionSpec("all"))
    ones = jax.make_array_from_callback((jax.device_count(),), everyone, lambda part: np.ones(1))
    jnp.sum(ones).block_until_ready()


def count() -> int:
    """How many processes there are."""
    return jax.process_count()


def index() -> int:
    """Which of them this is."""
    return jax.process_index()


def is_first() -> bool:
    """Whether this is the one that writes and speaks."""
    return index() == 0


def agree(flag: bool) -> bool:
    """Whether any process says True; the same answer for all."""
    return flag if count() == 1 else bool(multihost_utils.process_allgather(np.asarray(flag)).any())


def broadcast(arrays: T) -> T:
    """The first process's arrays, for all: a tree of the same shapes and dtypes everywhere, which becomes numpy."""
    if count() == 1:
        return arrays
    return multihost_utils.broadcast_one_to_all(jax.tree.map(np.asarray, arrays))


def on_first(action: Callable[[], T]) -> T:
    """What `action` returns in the first process, a JSON value; the others wait for it.

    It must not need the others, so it may only use arrays of this process (`models.sharding.here`).

    Raises:
        Exception: what `action` raises; a `JdliteError` in the other processes.
    """
    if count() == 1:
        return action()
    value, error = None, None
    if is_first():
        try:
            value = action()
        except Exception as caught:  # whatever it is, the others must not wait forever
            error = caught
    outcome = _broadcast_json([value, error and first_line(error)])
    if error is not None:
        raise error
    if outcome[1] is not None:
        raise JdliteError(f"process 0 has failed, so this one ends too: {outcome[1]}")
    return outcome[0]


@contextlib.contextmanager
def together() -> Iterator[None]:
    """A block in which processes may fail one by one, such as reading files: at its end an error of one ends all."""
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    if agree(error is not None):
        raise error or JdliteError("another process has failed, so this one ends too; the other says why.")


def check_same(value: Any, what: str, todo: str) -> None:
    """Refuse to go on where processes would not do the same.

    Args:
        value: JSON, to be equal in all of them.
        what: that it stands for.
        todo: what the user should do.

    Raises:
        ConfigError: names the processes that differ from the first; raised in all.
    """
    if count() == 1:
        return
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()
    found = multihost_utils.process_allgather(np.frombuffer(digest, np.uint32))
    other = [str(i) for i, row in enumerate(found) if (row != found[0]).any()]
    if other:
        raise ConfigError(f"{what} differ between process 0 and {', '.join(other)}; {todo}.")


def _broadcast_json(value: Any) -> Any:
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    size = int(broadcast(np.int32(text.size)))
    room = np.zeros(-(-size // _BLOCK) * _BLOCK, np.uint8)
    room[: text.size if is_first() else 0] = text if is_first() else 0
    return json.loads(broadcast(room)[:size].tobytes())
