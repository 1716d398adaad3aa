"""One way to write a file whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(path: Path, *, folder: Path | None = None, durable: bool = False) -> Iterator[Path]:
    """An empty file to write bytes or text into, which takes the place of `path` when the block ends well.

    If the block raises, or the process is killed, `path` stays as it was; only a killed process leaves the fresh file,
    in `folder` (default: that of `path`; both have to be there, on one file system). `path` keeps its mode if it is
    there, and else has that of any new file. `durable` waits until the bytes are on the disk. Raises OSError.

        with whole(path) as fresh:
            fresh.write_bytes(data)
    """
    fresh = (folder or path.parent) / f".{path.name}.{secrets.token_hex(4)}"
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
