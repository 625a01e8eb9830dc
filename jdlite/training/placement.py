"""Where the arrays of a training run lie on its devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdlite.errors import ConfigError
from jdlite.models.sharding import make_mesh, put
from jdlite.training import processes
from jdlite.training.config import MeshOptions, TrainConfig


def training_mesh(options: MeshOptions) -> Mesh | None:
    """The devices of all processes; None for a single device.

    Raises:
        ConfigError: there are not so many devices, or processes would share a row.
    """
    if options.data % processes.count():
        raise ConfigError(
            f"mesh.data must be a multiple of the number of processes, each of which takes whole rows: got "
            f"{options.data} for {processes.count()}; with {jax.device_count()} devices in all, choose mesh.data and "
            "mesh.model so that their product is that number."
        )
    if options.data * options.model == 1:
        return None
    return make_mesh(data=options.data, model=options.model)


class Placement:
    """Where arrays go: rows of a batch over the mesh's `data` axis, the drafter whole on every device.

    Args:
        config: of the run.
        alone: only over the devices of this process, which then works on whole batches by itself.

    Raises:
        ConfigError: see `training_mesh`.
    """

    def __init__(self, config: TrainConfig, *, alone: bool = False):
        self.mesh = training_mesh(config.mesh)
        self._processes = 1 if alone else processes.count()
        if alone and self.mesh is not None:
            self.mesh = self.mesh.local_mesh
        self._micro = config.batch.micro // self._processes

    @property
    def replicated(self) -> NamedSharding | None:
        """The sharding of what is whole on every device; None where there is one device."""
        return None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())

    def rows(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """This process's rows `[B / processes, T, ...]` as micro-batches of all, `[n, rows, T, ...]`."""
        cut = {name: x.reshape(-1, min(self._micro, len(x)), *x.shape[1:]) for name, x in batch.items()}
        if self.mesh is None:
            return {name: jnp.asarray(value) for name, value in cut.items()}
        where = NamedSharding(self.mesh, PartitionSpec(None, "data"))
        shape = lambda x: (x.shape[0], x.shape[1] * self._processes, *x.shape[2:])  # noqa: E731
        return {name: jax.make_array_from_process_local_data(where, x, shape(x)) for name, x in cut.items()}

    def whole(self, tree: Any) -> Any:
        """On all devices."""
        where = self.replicated
        return tree if where is None else jax.tree.map(lambda x: put(x, where), tree)

    def fetch(self, tree: Any) -> Any:
        """Numpy arrays with the parts of all processes, which must all call this."""
        return jax.tree.map(np.asarray, self.whole(tree))
