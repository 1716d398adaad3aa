"""A file is written whole or not at all, whatever happens while it is written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engram_lab.models.files import whole


@pytest.fixture(params=[False, True], ids=["", "durable"])
def durable(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_bytes_and_text_take_the_place_of_what_was_there(tmp_path: Path, durable: bool) -> None:
    file = tmp_path / "a.json"
    for content in ("first", "zweite Fassung: ä\n"):
        with whole(file, durable=durable) as fresh:
            fresh.write_text(content, encoding="utf-8")
            assert fresh.parent == tmp_path and fresh != file
        assert file.read_text(encoding="utf-8") == content
    with whole(file, durable=durable) as fresh:
        fresh.write_bytes(b"\x00\xff")
    assert file.read_bytes() == b"\x00\xff"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_what_stops_it_leaves_the_file_as_it_was(tmp_path: Path, error: BaseException) -> None:
    file = tmp_path / "a"
    for before in (None, b"old"):
        if before is not None:
            file.write_bytes(before)
        with pytest.raises(type(error)), whole(file) as fresh:
            fresh.write_bytes(b"half")
            raise error
        assert (file.read_bytes() if file.exists() else None) == before
        assert list(tmp_path.iterdir()) == ([file] if before else [])


def test_a_killed_process_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    file, code = tmp_path / "a", "import os, sys; from pathlib import Path; from engram_lab.models.files import whole\n"
    file.write_bytes(b"old")
    code += "with whole(Path(sys.argv[1])) as fresh:\n    fresh.write_bytes(b'half')\n    os.kill(os.getpid(), 9)\n"
    assert subprocess.run([sys.executable, "-c", code, file]).returncode == -signal.SIGKILL
    assert file.read_bytes() == b"old"


@pytest.mark.skipif(os.name != "posix", reason="modes are of posix")
def test_the_mode_is_kept_or_that_of_any_new_file(tmp_path: Path) -> None:
    plain, file = tmp_path / "plain", tmp_path / "a"
    plain.touch()
    for mode in (plain.stat().st_mode, None, 0o100600):
        if mode is None:
            file.chmod(0o640)
        elif file.exists():
            file.chmod(mode)
        before = file.stat().st_mode if file.exists() else plain.stat().st_mode
        with whole(file) as fresh:
            fresh.unlink()  # as safetensors does, which makes it anew for the owner alone
            os.close(os.open(fresh, os.O_CREAT | os.O_WRONLY, 0o600))
        assert file.stat().st_mode == before


def test_the_fresh_file_lies_where_it_is_told(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    with whole(tmp_path / "a", folder=tmp_path / "tmp") as fresh:
        assert fresh.parent == tmp_path / "tmp"
        fresh.write_bytes(b"x")
    assert (tmp_path / "a").read_bytes() == b"x" and not list((tmp_path / "tmp").iterdir())


def test_a_folder_that_is_not_there_is_an_error_and_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), whole(tmp_path / "no" / "a"):
        pass
    assert not list(tmp_path.iterdir())
