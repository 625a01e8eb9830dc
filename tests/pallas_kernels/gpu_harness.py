"""Running Hopper kernels without a GPU: the interpreter with its race detector, and real compilation by ptxas."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import mmap
import os
import re
import tempfile
from pathlib import Path

import jax
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

DEVICES = {"h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200 141GB HBM3e"}
PLUGIN = "jax-cuda13-plugin and jax-cuda13-pjrt of JAX's version, nvidia-cuda-nvcc and nvidia-nvvm"


@contextlib.contextmanager
def gpu_interpreter():
    """Run Mosaic GPU kernels on this machine; a race fails the test. Skips where JAX has no such interpreter.

    Races of wgmma operands are not seen by any version: kernels have a variant without wgmma for that.
    """
    params = getattr(plgpu, "InterpretGPUParams", None)
    if params is None:
        pytest.skip("the Mosaic GPU interpreter needs JAX 0.12 (make test-kernels)")
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as interpreter

    interpreter.reset_gpu_interpret_mode_state()
    try:
        with plgpu.force_gpu_interpret_mode(params(detect_races=True)):  # pyright: ignore[reportAttributeAccessIssue]
            yield
        assert not interpreter.get_races().races_found, "a data race was found"
    finally:
        interpreter.reset_gpu_interpret_mode_state()


def _target_configs() -> dict[str, str]:
    """Descriptions of devices by name, as they stand in the CUDA plugin's shared object."""
    plugin = pytest.importorskip("jax_plugins.xla_cuda13", reason=f"compiling for Hopper needs {PLUGIN}")
    marker = b"# proto-message: stream_executor.GpuTargetConfigProto"
    found = {}
    with (
        Path(plugin.__file__).with_name("xla_cuda_plugin.so").open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        at = data.find(marker)
        while at >= 0:
            text = data[at : data.find(b"\0", at)].decode()
            name = re.search(r'device_description_str: "(.*)"', text)
            if name:
                found[name.group(1)] = text
            at = data.find(marker, at + 1)
    return found


@functools.cache
def gpu_device(name: str):
    """An H100 or H200 to compile for; the test is skipped where JAX's CUDA plugin is not installed."""
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        pytest.skip("compiling for Hopper needs JAX_PLATFORMS=cpu in the environment (make test-kernels)")
    configs = _target_configs()
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        name, platform="cuda", target_config=configs[DEVICES[name]], topology="1x1x1"
    )
    return topology.devices[0]


@dataclasses.dataclass(frozen=True)
class Resources:
    """What ptxas and the kernel's launch say of one kernel.

    Attributes:
        registers: of a thread.
        spills: bytes stored to and loaded from local memory because registers ran out.
        shared: bytes of shared memory of a block.
        ptx: the code before ptxas.
    """

    registers: int
    spills: int
    shared: int
    ptx: str


def compile_for_gpu(function, device: str, *args, donate_argnums=()):
    """`function`, which has one kernel, compiled for one `device`; `args` may be shapes only.

    Returns:
        The compiled function and the kernel's `Resources`, None for a kernel that this process has compiled before.
    """
    where = jax.sharding.SingleDeviceSharding(gpu_device(device))
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), args)
    dumps = ("MOSAIC_GPU_DUMP_PTX", "MOSAIC_GPU_DUMP_PTXAS", "MOSAIC_GPU_DUMP_RESOURCES")
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOSAIC_GPU_DUMP_TO", folder)
        for name in dumps:
            patch.setenv(name, "1")
        traced = jax.jit(function, donate_argnums=donate_argnums).trace(*placed)
        compiled = traced.lower(lowering_platforms=("cuda",)).compile()
        return compiled, _resources(Path(folder))


def _resources(folder: Path) -> Resources | None:
    """What was dumped in `folder` for one kernel."""
    # Lowering and compiling number their files on their own, so names do not match.
    files = [list(folder.glob(f"*{ending}")) for ending in (".ptxas", ".resources.txt", ".ptx")]
    if not files[0]:
        return None
    assert [len(paths) for paths in files] == [1, 1, 1], files
    report, launch, ptx = (paths[0].read_text() for paths in files)

    def number(pattern: str, text: str) -> int:
        found = re.search(pattern, text)
        assert found, text
        return int(found.group(1))

    return Resources(
        registers=number(r"Used (\d+) registers", report),
        spills=number(r"(\d+) bytes spill stores", report) + number(r"(\d+) bytes spill loads", report),
        shared=number(r"smem_scratch_bytes=(\d+)", launch),
        ptx=ptx,
    )
