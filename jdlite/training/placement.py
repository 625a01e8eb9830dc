"""Where the arrays of a training run lie on its devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jdlite.errors import ConfigError
from jdlite.models.sharding import make_mesh
from jdlite.training.config import TrainConfig


class Placement:
    """Where arrays go: rows of a batch over the mesh's `data` axis, the drafter whole on every device.

    Raises:
        ConfigError: JAX was started with several processes.
    """

    def __init__(self, config: TrainConfig):
        if jax.process_count() > 1:
            raise ConfigError(
                f"training runs in one process, which may have many devices: JAX was started with "
                f"{jax.process_count()}; run it on one machine, and split it by mesh.data and mesh.model."
            )
        self._micro = config.batch.micro
        m = config.mesh
        self.mesh = None if m.data * m.model == 1 else make_mesh(data=m.data, model=m.model)

    def rows(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """`[B, T, ...]` as micro-batches `[n, rows, T, ...]`."""
        cut = {name: x.reshape(-1, min(self._micro, len(x)), *x.shape[1:]) for name, x in batch.items()}
        if self.mesh is None:
            return {name: jnp.asarray(value) for name, value in cut.items()}
        where = NamedSharding(self.mesh, PartitionSpec(None, "data"))
        return {name: jax.device_put(value, where) for name, value in cut.items()}

    def whole(self, tree: Any) -> Any:
        """On all devices."""
        if self.mesh is None:
            return tree
        return jax.device_put(tree, NamedSharding(self.mesh, PartitionSpec()))
