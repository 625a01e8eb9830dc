"""DLite drafters as Orbax checkpoints: item `params` (a nested dict of arrays) and item `config` (JSON)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from jdlite.checkpoints.assemble import check_dtype
from jdlite.checkpoints.atomic import atomic_folder
from jdlite.checkpoints.dlite import abstract_dlite, check_tensors
from jdlite.errors import CheckpointError, JdliteError, first_line
from jdlite.models.dlite import DLite
from jdlite.models.dlite_config import DLiteConfig

# Raised when the meaning of the items changes.
SCHEMA = 1


def params_tree(model: DLite) -> dict[str, Any]:
    """The parameters as nested dicts with string keys, e.g. `tree["layers"]["0"]["attention"]["q"]["weight"]`."""
    return _nest({path: leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))})


def model_from_params(config: DLiteConfig, tree: Mapping[str, Any], source: str = "the parameters") -> DLite:
    """The network whose parameters are `tree`, as `params_tree` gives it.

    Raises:
        CheckpointError: arrays are missing, unknown or mis-shaped.
    """
    abstract = abstract_dlite(config)
    graph, state = nnx.split(abstract)
    given, flat = _flatten(tree), list(nnx.to_flat_state(state))
    check_tensors(_shapes(given), _wanted(abstract), source)
    return nnx.merge(graph, nnx.from_flat_state([(path, leaf.replace(given[_dotted(path)])) for path, leaf in flat]))


def save_dlite_orbax(
    model: DLite, folder: str | Path, *, info: Mapping[str, Any] | None = None, overwrite: bool = False
) -> Path:
    """Write a drafter as an Orbax checkpoint, atomically.

    Args:
        model: the drafter or teacher.
        folder: the checkpoint to create.
        info: JSON values kept in the config item under `info`: target id and hash, tokenizer hash, training recipe.
        overwrite: replace an existing folder.

    Raises:
        CheckpointError: the folder exists (without `overwrite`) or cannot be written.
    """
    path = Path(folder).expanduser().absolute()
    config = {"schema": SCHEMA, "dlite": model.config.to_dict(), "info": dict(info or {})}
    params = params_tree(model)
    if jax.process_count() > 1:  # Orbax takes what one process holds alone as numpy arrays only
        params = jax.tree.map(np.asarray, params)
    try:
        with atomic_folder(path, overwrite=overwrite) as temporary, _checkpointer() as checkpointer:
            checkpointer.save(
                temporary,
                args=ocp.args.Composite(
                    params=ocp.args.StandardSave(params),
                    config=ocp.args.JsonSave(config),
                ),
                force=True,  # the temporary folder is there, and empty
            )
            # Orbax writes where it saved into its marks; a drafter is given away, and that is nobody's business.
            for mark in temporary.rglob("commit_success.txt"):
                mark.write_text("Checkpoint commit was successful.\n")
    except JdliteError:
        raise
    except Exception as error:  # TensorStore reports a full disk as a ValueError
        reason = first_line(error)
        raise CheckpointError(
            f"cannot write {path} ({reason:.200}); free some space and run the same command again, or choose another "
            "folder."
        ) from error
    return path


def load_dlite_orbax(
    folder: str | Path,
    dtype=None,
    *,
    sharding: Callable[[str, tuple[int, ...]], jax.sharding.Sharding] | None = None,
) -> tuple[DLite, dict[str, Any]]:
    """Read a drafter from an Orbax checkpoint. Other items (optimiser, data) may be there and are not read.

    Args:
        folder: the checkpoint, e.g. one step of a training run.
        dtype: of the parameters; `None` keeps what is stored.
        sharding: (dotted path, shape) to where a parameter goes; this process's first device by default.

    Returns:
        The network and the `info` that was saved with it.

    Raises:
        CheckpointError: the folder is no complete checkpoint, has another schema, or its arrays do not fit its config.
        ConfigError: the stored config cannot be used.
    """
    path = Path(folder).expanduser().absolute()
    absent = [item for item in ("params", "config") if not (path / item).is_dir()]
    if absent:
        raise CheckpointError(
            f"{path} is no DLite checkpoint: it lacks the item {' and '.join(absent)}; give the folder of one step."
        )
    try:
        with _checkpointer() as checkpointer:
            stored = checkpointer.restore(path, args=ocp.args.Composite(config=ocp.args.JsonRestore())).config
            config = _read_config(stored, path)
            metadata = _flatten(checkpointer.metadata(path).item_metadata["params"].tree)
            abstract = abstract_dlite(config)
            check_tensors(_shapes(metadata), _wanted(abstract), str(path))
            kind = None if dtype is None else jnp.dtype(check_dtype(dtype))
            here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            goal = {}
            for parameter, leaf in nnx.to_flat_state(nnx.state(abstract, nnx.Param)):
                dotted, shape = _dotted(parameter), tuple(leaf.get_value().shape)
                where = here if sharding is None else sharding(dotted, shape)
                goal[parameter] = jax.ShapeDtypeStruct(shape, kind or metadata[dotted].dtype, sharding=where)
            args = ocp.args.Composite(params=ocp.args.StandardRestore(_nest(goal)))
            params = checkpointer.restore(path, args=args).params
    except JdliteError:
        raise
    except Exception as error:  # Orbax and TensorStore raise many kinds for files that are cut or absent
        reason = first_line(error)
        raise CheckpointError(f"{path} is not a complete checkpoint ({reason}); use an earlier one.") from error
    return model_from_params(config, params, str(path)), dict(stored.get("info") or {})


def _read_config(stored: Any, path: Path) -> DLiteConfig:
    if not isinstance(stored, Mapping) or "dlite" not in stored:
        raise CheckpointError(f"The config item of {path} describes no DLite drafter; give a drafter's checkpoint.")
    if stored.get("schema") != SCHEMA:
        raise CheckpointError(
            f"{path} has checkpoint schema {stored.get('schema')!r}: this version reads {SCHEMA}; "
            "convert it with the version of jdlite that wrote it."
        )
    return DLiteConfig.from_dict(stored["dlite"])


def _checkpointer() -> ocp.Checkpointer:
    """Of this process alone, whatever others do: a drafter is small, and whoever wants it reads or writes it whole."""
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process{me}"
    )
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=alone),
        params=ocp.StandardCheckpointHandler(multiprocessing_options=alone),
        config=ocp.JsonCheckpointHandler(multiprocessing_options=alone),
    )
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def _dotted(path: tuple) -> str:
    return ".".join(map(str, path))


def _nest(flat: Mapping[tuple, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, last = map(str, path)
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


def _flatten(tree: Mapping[str, Any], prefix: tuple = ()) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        path = (*prefix, key)
        flat |= _flatten(value, path) if isinstance(value, Mapping) else {_dotted(path): value}
    return flat


def _shapes(flat: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in flat.items()}


def _wanted(model: DLite) -> dict[str, tuple[int, ...]]:
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {_dotted(path): tuple(leaf.get_value().shape) for path, leaf in state}
