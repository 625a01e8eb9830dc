"""Checkpoints of a training run: all that is needed to go on as if nothing had happened.

A step's folder holds the Orbax items `params`, `opt_state`, `train`, `data` and `config` (docs/checkpoints.md). It is
written beside its final name and renamed, so a step is there whole or not at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jdlite.checkpoints.dlite_orbax import SCHEMA
from jdlite.errors import CheckpointError, ConfigError, JdliteError, first_line
from jdlite.models.dlite_config import DLiteConfig
from jdlite.training import processes

ITEMS = ("params", "opt_state", "train", "data", "config")


@dataclasses.dataclass
class RunState:
    """A run between two steps.

    Attributes:
        params: weights of the trained network.
        opt_state: of the optimiser; its step count decides the learning rate.
        train: JSON values: `step`, sums since the last line of metrics, the best tau so far.
        data: JSON values: where the data stands.
    """

    params: Any
    opt_state: Any
    train: dict[str, Any]
    data: Any

    @property
    def step(self) -> int:
        """Steps that were made."""
        return int(self.train["step"])


class RunCheckpoints:
    """The checkpoints of one phase of a run.

    Saving is asynchronous: the state is copied, and a thread writes it while training goes on. The newest `keep`
    steps stay. Several processes share the folder, and must all make the same calls.

    Args:
        folder: of the phase; step N is the folder `N` in it.
        keep: how many to keep.
        dlite: the network.
        info: JSON values about where the run comes from: target, hashes, training configuration.
        say: called with a sentence when something needs attention.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep: int,
        dlite: DLiteConfig,
        info: Mapping[str, Any],
        say: Callable[[str], None],
    ):
        self.folder = Path(folder).expanduser().absolute()
        self.config = {"schema": SCHEMA, "dlite": dlite.to_dict(), "info": dict(info)}
        self.say = say
        self.saved: int | None = None
        self._keep = keep
        self._pending: int | None = None
        with self._plain_errors("open"):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._manager = self._open()

    def _open(self) -> ocp.CheckpointManager:
        quiet_orbax()
        json, arrays = ocp.JsonCheckpointHandler, ocp.StandardCheckpointHandler
        return ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(max_to_keep=self._keep, cleanup_tmp_directories=True),
            item_handlers={
                "params": arrays(),
                "opt_state": arrays(),
                "train": json(),
                "data": json(),
                "config": json(),
            },
        )

    def save(self, state: RunState, *, wait: bool = False) -> None:
        """Begin to save a step; a step that is there already is left as it is.

        Raises:
            CheckpointError: this or the previous save could not be written; says which step is safe.
        """
        with self._plain_errors("write"):
            self._settle()
            if state.step in self._manager.all_steps():
                return
            # The next step gives these buffers up, and on a CPU the writer would share them.
            arrays = jax.tree.map(jnp.copy, (state.params, state.opt_state))
            self._manager.save(
                state.step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardSave(arrays[0]),
                    opt_state=ocp.args.StandardSave(arrays[1]),
                    train=ocp.args.JsonSave(state.train),
                    data=ocp.args.JsonSave({"state": state.data}),
                    config=ocp.args.JsonSave(self.config),
                ),
            )
            self._pending = state.step
            if wait:
                self._settle()

    def _settle(self) -> None:
        self._manager.wait_until_finished()
        if self._pending is not None:
            self.saved, self._pending = self._pending, None

    def wait(self) -> None:
        """Until what was saved is on disk.

        Raises:
            CheckpointError: it could not be written.
        """
        with self._plain_errors("write"):
            self._settle()

    def restore(self, params: Any, opt_state: Any, accept: Callable[[Mapping[str, Any]], None]) -> RunState | None:
        """The newest step that is complete, or None when there is none.

        A damaged step is moved aside (`N.damaged`), said, and the one before is taken.

        Args:
            params, opt_state: arrays, or their shapes with shardings, as the run would start with.
            accept: called with the stored `info`; raises when the run is another one.

        Raises:
            CheckpointError: the stored arrays have other names, shapes or dtypes; all are named. Or no step is sound.
            ConfigError: from `accept`.
        """
        damaged, state = [], None
        processes.check_same(
            self.steps(),
            f"the checkpoints of {self.folder}",
            "put the run's folder on a file system that all processes share",
        )
        for step in reversed(self.steps()):
            reason = "another process cannot read it"
            try:
                state = self._restore(step, params, opt_state, accept)
            except JdliteError:
                raise
            except Exception as error:  # Orbax and TensorStore raise many kinds for files that are cut or absent
                state, reason = None, first_line(error)
            if processes.agree(state is None):
                damaged.append(step)
                self.say(f"checkpoint {self.folder / str(step)} is damaged ({reason:.120}); trying an earlier one.")
                continue
            self._set_aside(damaged)
            self.saved = step
            return state
        if damaged:
            raise CheckpointError(
                f"all checkpoints of {self.folder} are damaged ({', '.join(map(str, damaged))}); remove the folder to "
                "begin anew."
            )
        return None

    def _restore(self, step: int, params, opt_state, accept) -> RunState:
        json = ocp.args.JsonRestore
        read: Any = self._manager.restore(step, args=ocp.args.Composite(config=json(), train=json(), data=json()))
        where = self.folder / str(step)
        if read.config.get("schema") != SCHEMA:
            raise CheckpointError(
                f"{where} has checkpoint schema {read.config.get('schema')!r}: this version reads {SCHEMA}; "
                "go on with the version of jdlite that wrote it."
            )
        accept(read.config["info"])
        differences = [
            f"{name}: {read.config['dlite'].get(name)!r} is stored, {value!r} is configured"
            for name, value in self.config["dlite"].items()
            if read.config["dlite"].get(name) != value
        ]
        if differences:
            raise ConfigError(
                f"{where} holds another drafter: {'; '.join(differences)}; configure it as it was, or choose another "
                "folder."
            )
        metadata = self._manager.item_metadata(step)
        check_arrays(metadata["params"].tree, params, f"{where}/params")
        check_arrays(metadata["opt_state"].tree, opt_state, f"{where}/opt_state")
        arrays: Any = self._manager.restore(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardRestore(_abstract(params)),
                opt_state=ocp.args.StandardRestore(_abstract(opt_state)),
            ),
        )
        return RunState(arrays.params, arrays.opt_state, dict(read.train), read.data["state"])

    def _set_aside(self, steps: list[int]) -> None:
        """Move damaged steps away, since they will be written again."""
        if not steps:
            return
        self._manager.close()
        processes.on_first(lambda: self._rename(steps))
        self._manager = self._open()

    def _rename(self, steps: list[int]) -> None:
        for step in steps:
            aside = self.folder / f"{step}.damaged"
            shutil.rmtree(aside, ignore_errors=True)
            (self.folder / str(step)).rename(aside)

    def steps(self) -> list[int]:
        """Steps that are there, ascending."""
        return sorted(self._manager.all_steps())

    def close(self) -> None:
        """Wait for what is being written; errors are those of `wait`."""
        with self._plain_errors("write"):
            self._settle()
            self._manager.close()

    @contextlib.contextmanager
    def _plain_errors(self, verb: str) -> Iterator[None]:
        try:
            yield
        except JdliteError:
            raise
        except Exception as error:  # TensorStore reports a full disk as a ValueError
            reason = first_line(error)
            safe = "no step is saved yet" if self.saved is None else f"step {self.saved} is safe"
            raise CheckpointError(
                f"cannot {verb} checkpoints in {self.folder} ({reason:.200}); {safe}: free some space and run the same "
                "command again."
            ) from error


def quiet_orbax() -> None:
    """Keep Orbax from warning about folders that are no step and about items that nobody asked for."""
    logging.getLogger("absl").setLevel(logging.ERROR)


def flat_arrays(tree: Any) -> dict[str, Any]:
    """Leaves by their dotted path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    name = lambda key: str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))))  # noqa: E731
    return {".".join(map(name, path)): leaf for path, leaf in leaves}


def check_arrays(found: Any, wanted: Any, source: str) -> None:
    """Compare names, shapes and dtypes.

    Raises:
        CheckpointError: names all that differ.
    """
    stored, ours = flat_arrays(found), flat_arrays(wanted)
    problems = [f"missing {name}" for name in sorted(ours.keys() - stored.keys())]
    problems += [f"unknown {name}" for name in sorted(stored.keys() - ours.keys())]
    for name in sorted(ours.keys() & stored.keys()):
        a, b = stored[name], ours[name]
        shapes = tuple(a.shape), tuple(b.shape)
        dtypes = np.dtype(a.dtype).name, np.dtype(b.dtype).name
        if shapes[0] != shapes[1] or dtypes[0] != dtypes[1]:
            problems.append(f"{name} is {dtypes[0]}{list(shapes[0])} instead of {dtypes[1]}{list(shapes[1])}")
    if problems:
        raise CheckpointError(
            f"the arrays of {source} do not fit this run: {'; '.join(problems)}; go on with the configuration that "
            "wrote them, or choose another folder."
        )


def _abstract(tree: Any) -> Any:
    def shape(x):
        sharding = getattr(x, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(shape, tree)
