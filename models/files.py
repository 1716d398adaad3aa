"""One way to write a file whole or not at all, and to say before the work that it cannot be written."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engram_lab.models.errors import DataError, first_line


def load_json(text: str | bytes) -> Any:
    """What JSON says; ValueError for what is none, is nested too deeply to be read, or holds half a character."""
    try:
        found = json.loads(text)
        json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("it holds half a character (a lone surrogate)") from None
    return found


@contextmanager
def whole(path: Path, *, folder: Path | None = None, durable: bool = False) -> Iterator[Path]:
    """An empty file to write bytes or text into, which takes the place of `path` when the block ends well.

    If the block raises, or the process is killed, `path` stays as it was; only a killed process leaves the fresh file,
    in `folder` (default: that of `path`; both have to be there, on one file system). `path` keeps its mode if it is
    there, and else has that of any new file. A link stays one, and what it points to is written. A device or a pipe is
    never replaced: it gets the bytes. `durable` waits until they are on the disk. Raises OSError.

        with whole(path) as fresh:
            fresh.write_bytes(data)
    """
    path = path.resolve() if path.is_symlink() else path
    if path.exists() and not path.is_file():
        with tempfile.TemporaryDirectory() as scratch:
            fresh = Path(scratch) / "fresh"
            fresh.touch()
            yield fresh
            with fresh.open("rb") as source, path.open("wb") as out:  # a folder raises here
                shutil.copyfileobj(source, out)
        return
    fresh = (folder or path.parent) / f".{path.name[:200]}.{secrets.token_hex(4)}"
    try:
        os.close(os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        mode = (path if path.exists() else fresh).stat().st_mode & 0o777
        yield fresh
        if durable:
            with fresh.open("rb+") as stream:
                os.fsync(stream.fileno())
        fresh.chmod(mode)  # a library may have made it anew: safetensors makes it the owner's alone
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def check_target(path: Path, *inputs: Path) -> None:
    """DataError, before any work, where `path` cannot be written, or is one of the files that are read for it."""
    try:
        if path.is_dir():
            raise DataError(f"{path} is a folder: name a file.")
        if not path.parent.is_dir():
            raise DataError(f"There is no folder {path.parent} for {path.name}: make it first.")
        there = os.path.lexists(path) and path.exists()  # which also raise for a name that no file can have
        path.stat() if there else None
        if there and any(read.exists() and path.samefile(read) for read in inputs):
            raise DataError(f"{path} is read for this, and would be written over: name another file.")
        if there and not os.access(path, os.W_OK):
            raise PermissionError("it cannot be written to")
        if not there or path.is_file():
            _try_a_name(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise DataError(f"{path} cannot be written ({reason}): name another file.") from None


def _try_a_name(path: Path) -> None:
    """OSError where no file of this name, or none beside it, can be made."""
    path.lstat() if os.path.lexists(path) else None
    fresh = path.parent / f".{path.name[:200]}.{secrets.token_hex(4)}"
    os.close(os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        if not path.exists():  # a name that is too long is refused as that of a file, not of the fresh one
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            path.unlink()
    finally:
        fresh.unlink(missing_ok=True)
