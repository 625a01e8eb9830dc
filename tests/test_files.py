"""Files appear whole or not at all."""

from __future__ import annotations

import os

import pytest

from jdlite.files import atomic_file


def test_written_whole_and_readable_by_all(tmp_path):
    path = tmp_path / "new" / "a.txt"
    with atomic_file(path) as file:
        file.write("grüße\n")
        assert not path.exists()
    assert path.read_bytes() == "grüße\n".encode()
    assert path.stat().st_mode & 0o777 == 0o644
    assert os.listdir(path.parent) == ["a.txt"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError])
def test_a_failure_keeps_what_was_there(tmp_path, error):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def stopped():
        with atomic_file(path) as file:
            file.write("half")
            raise error

    with pytest.raises(error):
        stopped()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_place_that_cannot_be_written_is_an_os_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises((NotADirectoryError, FileExistsError)), atomic_file(tmp_path / "file" / "a.txt"):
        pass
