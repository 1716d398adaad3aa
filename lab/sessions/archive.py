"""A session as one zip, to keep or to send: manifest.json and what it names, each as blobs/<its SHA-256>.

The same session gives the same bytes. Reading trusts nothing: names, sizes, hashes, types and dates are all checked,
nothing is written anywhere before everything has been, and what is wrong is said in one sentence (ArchiveError).
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import os
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from engram_lab.lab.ask.view import View
from engram_lab.lab.sessions import NewRun, naming, packing
from engram_lab.models.errors import LabError
from engram_lab.models.files import whole
from engram_lab.probes import module_of

if TYPE_CHECKING:
    from engram_lab.lab.sessions import SessionInfo, Store

FORMAT = 1
MANIFEST = "manifest.json"
MOST_BYTES = 256 << 20  # of all members together, uncompressed
LARGEST_MANIFEST = 8 << 20
MOST_RUNS, MOST_MEMBERS = 2000, 8000
MOST_NAMES, LONGEST = 100, 1000  # names in an environment, and characters of one or of its value
_CHUNK = 1 << 20
_MEMBER = re.compile(r"manifest\.json|blobs/[0-9a-f]{64}")
_HASH = re.compile(r"[0-9a-f]{64}")
_MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}\+00:00")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_END, _END64 = b"PK\x05\x06", b"PK\x06\x07"  # how the last record of a zip begins, and that of one beyond 4 GB


class ArchiveError(LabError):
    """A file that is no session of the lab, or one that is damaged, too large or made to do harm."""


@dataclass(frozen=True)
class Archive:
    """What a file holds, all of it checked."""

    name: str
    note: str
    tags: tuple[str, ...]
    created: datetime
    runs: tuple[NewRun, ...]


def export_session(store: Store, name_or_id: str, target: Path | IO[bytes]) -> SessionInfo:
    """Write a session to a path, whole or not at all, or to an open file that can seek.

    Raises UnknownSessionError, and ArchiveError for one that is larger than what can be imported.
    """
    session = store.session(name_or_id)
    blobs: dict[str, bytes] = {}

    def put(data: bytes) -> str:
        name = hashlib.sha256(data).hexdigest()
        blobs[name] = data
        return name

    manifest = {
        "format": FORMAT,
        "name": session.name,
        "note": session.note,
        "tags": list(session.tags),
        "created": _written(session.created),
        "runs": [
            {
                "probe": run.probe,
                "created": _written(run.created),
                "seconds": run.seconds,
                "environment": run.environment,
                "view": _put_view(run.view, put),
                "attachments": {name: put(store.attachment(run.id, name)) for name in run.attachments},
                "report": put(packing.pack(store.report(run.id))),
            }
            for run in session.runs
        ],
    }
    text = json.dumps(manifest, ensure_ascii=False, allow_nan=False, sort_keys=True, indent=1).encode()
    size = len(text) + sum(map(len, blobs.values()))
    if size > MOST_BYTES or len(text) > LARGEST_MANIFEST or len(session.runs) > MOST_RUNS or len(blobs) >= MOST_MEMBERS:
        raise ArchiveError(
            f'"{session.name}" has {len(session.runs)} runs and {size / 1e6:.0f} MB, more than the {MOST_RUNS} runs '
            f"and {MOST_BYTES / 1e6:.0f} MB of one file: put some of its runs into another session."
        )
    if isinstance(target, Path):
        with whole(target) as fresh, fresh.open("wb") as file:
            _write(file, text, blobs)
    else:
        _write(target, text, blobs)
    return session


def _write(file: IO[bytes], manifest: bytes, blobs: Mapping[str, bytes]) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as out:
        for name, data in [(MANIFEST, manifest), *((f"blobs/{name}", blobs[name]) for name in sorted(blobs))]:
            member = zipfile.ZipInfo(name)  # of 1980, as always
            member.compress_type = zipfile.ZIP_DEFLATED
            member.create_system = 3  # the same bytes on Windows
            member.external_attr = (stat.S_IFREG | 0o644) << 16
            out.writestr(member, data)


def _written(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="microseconds")


def _put_view(view: dict[str, Any] | None, put: Callable[[bytes], str]) -> dict[str, Any] | None:
    """A view with its files by their hashes, so that runs that share one hold it once."""
    if view is None:
        return None
    files = {key: [name, put(data)] for key, (name, data) in View.from_dict(view).files.items()}
    return view | {"files": files}


def import_session(store: Store, data: bytes | Path, name: str | None = None) -> SessionInfo:
    """Put what a file holds into the store, all or nothing; raises ArchiveError. A taken name becomes "name (2)"."""
    found = read_archive(data)
    return store.add(name or found.name, found.note, found.tags, found.created, found.runs)


def read_archive(data: bytes | Path) -> Archive:
    """The session of a file; ArchiveError, in one sentence, for any other file."""
    name = data.name if isinstance(data, Path) else "The file"
    with open(data, "rb") if isinstance(data, Path) else io.BytesIO(data) as file:
        try:
            return _read(file)
        except LabError as error:
            reason = str(error).rstrip(".")
            raise ArchiveError(f"{name} cannot be read as a session of the lab: {reason}.") from error
        # What zipfile, zlib, json and Unicode raise for bytes that are no zip, no JSON, no text, nested too deep.
        except (
            zipfile.BadZipFile, zlib.error, struct.error, EOFError, RuntimeError, ValueError, OverflowError, OSError,
        ) as error:  # fmt: skip
            raise ArchiveError(f"{name} cannot be read as a session of the lab: it is damaged.") from error


def _read(file: IO[bytes]) -> Archive:
    _check_end(file)
    with zipfile.ZipFile(file) as archive:
        members = _members(archive)
        left = MOST_BYTES

        def read(name: str, most: int) -> bytes:
            nonlocal left
            data = _content(archive, members[name], min(most, left))
            left -= len(data)
            return data

        if MANIFEST not in members:
            raise ArchiveError(f"it has no {MANIFEST}")
        manifest = _manifest(read(MANIFEST, LARGEST_MANIFEST))
        blobs: dict[str, bytes] = {}
        for name in members:
            if name != MANIFEST:
                blobs[name] = read(name, MOST_BYTES)
                if hashlib.sha256(blobs[name]).hexdigest() != name.rpartition("/")[2]:
                    raise ArchiveError(f"the content of {name[:20]}… is not what its name says")
    return _archive(manifest, blobs)


def _check_end(file: IO[bytes]) -> None:
    """Before zipfile reads the list of members: it is where it has to be, and short."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 42))
    tail = file.read()
    if tail[-22:-18] != _END:
        raise ArchiveError("it is no zip, or one with something behind it")
    members, listed = struct.unpack("<HI", tail[-12:-6])
    if tail[:4] == _END64 or members > MOST_MEMBERS or listed > 200 * members:
        raise ArchiveError(f"it has more than {MOST_MEMBERS} members, or a list of them that does not fit")


def _members(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """The members by name, if none is anything but a plain file that belongs here."""
    found: dict[str, zipfile.ZipInfo] = {}
    for member in archive.infolist():
        name = member.orig_filename  # as it stands in the file; `filename` ends at the first NUL
        if not _MEMBER.fullmatch(name) or name != member.filename:
            raise ArchiveError(f"{_shown(name)} does not belong into it")
        if name in found:
            raise ArchiveError(f"it holds {name[:20]} twice")
        if member.flag_bits & 0x1:
            raise ArchiveError("it is encrypted")
        if stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG):
            raise ArchiveError(f"{name[:20]} is a link or no plain file")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ArchiveError("it is compressed in a way that the lab does not use")
        found[name] = member
    return found


def _content(archive: zipfile.ZipFile, member: zipfile.ZipInfo, most: int) -> bytes:
    """The bytes of a member, whatever its header says of their number; never more than `most` are unpacked."""
    parts, size = [], 0
    with archive.open(member) as stream:
        while part := stream.read(_CHUNK):
            size += len(part)
            if size > most:
                raise ArchiveError(f"it unpacks to more than the {MOST_BYTES / 1e6:.0f} MB that one file may have")
            parts.append(part)
    if size != member.file_size:
        raise ArchiveError(f"{member.filename[:20]} is cut off")
    return b"".join(parts)


def _manifest(data: bytes) -> dict[str, Any]:
    """The manifest, of a format that this version reads."""

    def refuse(value: str) -> None:
        raise ArchiveError(f"its manifest holds {value}, which is no number")

    stored = json.loads(data.decode(), parse_constant=refuse)
    json.dumps(stored, ensure_ascii=False).encode()  # half a surrogate is no text: UnicodeEncodeError
    if not isinstance(stored, dict) or type(stored.get("format")) is not int:
        raise ArchiveError("its manifest has no format number")
    if stored["format"] > FORMAT:
        raise ArchiveError(
            f"it has format {stored['format']} of a newer version of the lab, while this one reads format {FORMAT}: "
            "update the lab"
        )
    if stored["format"] != FORMAT:
        raise ArchiveError(f"it has format {stored['format']}, which there never was")
    return stored


def _archive(manifest: dict[str, Any], blobs: Mapping[str, bytes]) -> Archive:
    fields = _Fields(manifest, "the session", {"format", "name", "note", "tags", "created", "runs"})
    name, note = naming.clean_name(fields.text("name")), naming.clean_note(fields.text("note"))
    tags = naming.clean_tags(fields.texts("tags"))
    stored = fields.of("runs", list)
    if len(stored) > MOST_RUNS:
        raise ArchiveError(f"it has more than {MOST_RUNS} runs")
    used: set[str] = set()

    def take(blob: object) -> bytes:
        if not isinstance(blob, str) or not _HASH.fullmatch(blob) or f"blobs/{blob}" not in blobs:
            raise ArchiveError("it names a blob that it does not hold")
        used.add(f"blobs/{blob}")
        return blobs[f"blobs/{blob}"]

    runs = []
    for n, run in enumerate(stored, 1):
        try:
            runs.append(_run(run, take))
        except LabError as error:
            raise ArchiveError(f"run {n}: {error}") from error
    if len(used) < len(blobs):
        raise ArchiveError("it holds a blob that no run names")
    return Archive(name, note, tags, fields.moment("created"), tuple(runs))


def _run(stored: Any, take: Callable[[object], bytes]) -> NewRun:
    """A run of the manifest with its report, view and attachments."""
    keys = {"probe", "created", "seconds", "environment", "view", "attachments", "report"}
    fields = _Fields(stored, "a run", keys)
    probe, seconds = fields.text("probe"), fields.stored["seconds"]
    try:
        module_of(probe)
    except LookupError:
        raise ArchiveError(f"this version of the lab has no probe {_shown(probe)}") from None
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if seconds is not None and not (number and math.isfinite(seconds) and 0 <= seconds < 1e9):
        raise ArchiveError("its duration is no number of seconds")
    environment = fields.of("environment", dict)
    if len(environment) > MOST_NAMES or not all(map(_is_line, [*environment, *environment.values()])):
        raise ArchiveError("its environment is no list of names and values")
    attachments = fields.of("attachments", dict)
    if any(naming.clean_name(name, "The name of an attachment", 200) != name for name in attachments):
        raise ArchiveError("the name of an attachment has space around it")
    report = packing.unpack(take(fields.stored["report"]))
    if report.probe != probe:
        raise ArchiveError(f"it says that it is of {probe}, but its report is of {report.probe}")
    packing.pack(report)  # so that a text that cannot be stored is refused here
    view = fields.stored["view"]
    return NewRun(
        report=report,
        created=fields.moment("created"),
        seconds=None if seconds is None else float(seconds),
        environment=environment,
        view=None if view is None else _view(view, take),
        attachments={name: take(blob) for name, blob in attachments.items()},
    )


def _view(stored: Any, take: Callable[[object], bytes]) -> dict[str, Any]:
    files = stored.get("files") if isinstance(stored, dict) else None
    if not isinstance(files, dict) or not all(isinstance(file, list) and len(file) == 2 for file in files.values()):
        raise ArchiveError("its view holds no files as they have to be")
    whole = {key: [name, base64.b64encode(take(blob)).decode()] for key, (name, blob) in files.items()}
    return View.from_dict(stored | {"files": whole}).to_dict()


def _is_line(text: object) -> bool:
    return isinstance(text, str) and len(text) <= LONGEST and not _CONTROL.search(text)


def _shown(text: str) -> str:
    """A name out of a file, short and without anything that a terminal would obey."""
    return ascii(text if len(text) <= 60 else text[:59] + "…")


class _Fields:
    """A JSON object with exactly these keys, whose values are asked for by type."""

    def __init__(self, stored: Any, what: str, keys: set[str]) -> None:
        if not isinstance(stored, dict) or set(stored) != keys:
            raise ArchiveError(f"{what} needs the keys {', '.join(sorted(keys))}, and these alone")
        self.stored: dict[str, Any] = stored

    def of(self, key: str, kind: type) -> Any:
        if not isinstance(self.stored[key], kind):
            raise ArchiveError(f'"{key}" is not of the type that it has to be')
        return self.stored[key]

    def text(self, key: str) -> str:
        text: str = self.of(key, str)
        return text

    def texts(self, key: str) -> tuple[str, ...]:
        texts = self.of(key, list)
        if not all(isinstance(text, str) for text in texts):
            raise ArchiveError(f'"{key}" is no list of texts')
        return tuple(texts)

    def moment(self, key: str) -> datetime:
        text = self.text(key)
        if not _MOMENT.fullmatch(text) or not 1970 <= int(text[:4]) <= 9998:
            raise ArchiveError(f'"{key}" is no moment in UTC')
        return datetime.fromisoformat(text)
