"""Content-addressed files: folder/ab/abcdef..., named by the SHA-256 of what they hold, zlib-compressed.

A file is written whole beside its place, brought to the disk and only then renamed: at any moment it is there and
right, or not there. What a killed process leaves is a file in folder/tmp, which `sweep` takes away.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import time
import uuid
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from engram_lab.lab.sessions.errors import DamagedBlobError, StoreError

MOST_BYTES = 1 << 30  # uncompressed
WRITING = 3600  # seconds after which a file that is still being written is one that a killed process left
LEVEL = 3  # of zlib: on floats more costs time and saves nothing
_SHA = re.compile(r"[0-9a-f]{64}")


class Blobs:
    """The files below one folder, which is made when the first is put."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, data: bytes) -> str:
        """Keep `data`; the SHA-256 hex under which `get` finds it. StoreError if the folder cannot be written.

        A damaged file of that name is replaced.
        """
        sha = hashlib.sha256(data).hexdigest()
        path = self.path(sha)
        with self._writing():
            with suppress(DamagedBlobError, OSError):
                if self.get(sha) == data:
                    return sha
            path.parent.mkdir(parents=True, exist_ok=True)
            waiting = self.folder / "tmp" / uuid.uuid4().hex
            waiting.parent.mkdir(exist_ok=True)
            try:
                with waiting.open("wb") as file:
                    file.write(zlib.compress(data, LEVEL))
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(waiting, path)
            finally:
                waiting.unlink(missing_ok=True)
            for folder in (path.parent, self.folder):  # the name in its folder, and a folder just made in its own
                _to_disk(folder)
        return sha

    def get(self, sha: str) -> bytes:
        """What was put; DamagedBlobError if it is missing or no longer the same."""
        path = self.path(sha)
        try:
            packed = path.read_bytes()
        except FileNotFoundError:
            raise DamagedBlobError(
                f"The file {path} is missing: bring it back from a copy of the folder, or delete the run that needs it."
            ) from None
        except OSError as error:
            raise DamagedBlobError(f"The file {path} cannot be read ({error.strerror}).") from error
        opened = zlib.decompressobj()
        try:
            data = opened.decompress(packed, MOST_BYTES + 1)
        except zlib.error:
            data = b""
        if not opened.eof or opened.unused_data or hashlib.sha256(data).hexdigest() != sha:
            raise DamagedBlobError(
                f"The file {path} is damaged: bring it back from a copy of the folder, or delete the run that needs it."
            )
        return data

    def has(self, sha: str) -> bool:
        """Whether there is a file of that name."""
        return self.path(sha).is_file()

    def path(self, sha: str) -> Path:
        """Where a blob lies; DamagedBlobError for what is no SHA-256."""
        if not _SHA.fullmatch(sha):
            raise DamagedBlobError(f"The store names a blob {sha[:80]!r}, which is no SHA-256.")
        return self.folder / sha[:2] / sha

    def sweep(self, needed: Collection[str]) -> int:
        """Remove the blobs that are not needed, and what a killed process left of writing; the bytes freed."""
        before, freed = time.time() - WRITING, 0
        for path in [*self._files(), *(self.folder / "tmp").glob("*")]:
            with suppress(FileNotFoundError), self._writing():  # another process may sweep too
                state = path.stat()
                if state.st_mtime < before if path.parent.name == "tmp" else path.name not in needed:
                    path.unlink()
                    freed += state.st_size
        return freed

    def _files(self) -> Iterator[Path]:
        return (path for path in self.folder.glob("[0-9a-f][0-9a-f]/*") if _SHA.fullmatch(path.name))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            way = "free some space" if full else "make it writable"
            raise StoreError(
                f"The folder {self.folder} cannot be written ({error.strerror}): {way}, or choose another folder with "
                "ENGRAM_LAB_DATA or --store."
            ) from error


def _to_disk(folder: Path) -> None:
    """Bring the names in a folder to the disk; Windows does that by itself and cannot open a folder."""
    if os.name == "posix":
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
