"""The store: sessions are kept, listed, changed, thrown into the bin and brought back.

Every change is one short transaction under the store's write lock, so that threads and processes may share a store.
Blobs are put before it; inside it those that a purge has just taken are put again.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, or_, select, update

from engram_lab.lab.sessions import database as engine
from engram_lab.lab.sessions import naming, packing, rows
from engram_lab.lab.sessions.blobs import Blobs
from engram_lab.lab.sessions.errors import SessionNameError, StoreError, UnknownSessionError
from engram_lab.lab.sessions.infos import NewRun, RunInfo, SessionInfo, environment, run_request
from engram_lab.lab.sessions.packing import canonical
from engram_lab.lab.sessions.reading import run_infos, session_infos
from engram_lab.lab.sessions.schema import RunModelRow, RunRow, SessionRow, StoreRow, TagRow
from engram_lab.probes.base import Report

KEPT = 3600  # seconds for which a purge spares a blob that no row names: its row may be on the way
LONGEST_QUERY = 200  # characters


def open_store(url: str | None = None, folder: Path | None = None) -> Store:
    """The store of a URL (default: $ENGRAM_LAB_STORE, or store.db in the data folder), made if there is none.

    Arrays lie below `folder`; by default beside the SQLite file, or for PostgreSQL in the data folder, which servers
    that share a database must share too. StoreError, one sentence, if it cannot be opened.
    """
    parsed = engine.parse(url)
    if folder is None:
        sqlite = parsed.get_backend_name() == "sqlite"
        folder = Path(str(parsed.database)).parent if sqlite else engine.data_folder()
    database = engine.connect(parsed)
    with engine.read(database) as connection:
        own = connection.execute(select(StoreRow.id)).scalar_one()
    return Store(database, Blobs(folder / "blobs" / own))  # two stores may share a folder: each purges its own alone


class Store:
    """Sessions by name or id; made by `open_store`. Errors: StoreError, UnknownSessionError, SessionNameError."""

    def __init__(self, database: engine.Database, blobs: Blobs) -> None:
        self.name = database.name  # the URL as it may be shown
        self._database = database
        self._blobs = blobs

    def save(
        self,
        report: Report,
        session: str,
        *,
        note: str | None = None,
        tags: Iterable[str] | None = None,
        seconds: float | None = None,
        view: Mapping[str, Any] | None = None,
        attachments: Mapping[str, bytes] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> RunInfo:
        """Keep a run at the end of the session of that name, which is made if there is none.

        A note and tags replace those of the session; `environment` is that of the process that computed it, by
        default this one.
        """
        name = naming.clean_name(session)
        new_note = None if note is None else naming.clean_note(note)
        new_tags = None if tags is None else naming.clean_tags(tags)
        run = self._prepare(NewRun(report, None, seconds, view, attachments or {}, environment))
        with engine.write(self._database) as connection:
            found = rows.living(connection, name)
            if found is None:
                found = rows.insert_session(connection, name, new_note or "", new_tags or ())
            elif new_note is not None or new_tags is not None:
                rows.annotate(connection, found, new_note, new_tags)
            self._insert_runs(connection, found, [run])
            (info,) = run_infos(connection, [RunRow.id == run.row["id"]], self._view)
            return info

    def add(self, name: str, note: str, tags: Iterable[str], created: datetime, runs: Sequence[NewRun]) -> SessionInfo:
        """Keep a whole session, all of it or nothing; a taken name becomes "name (2)"."""
        if created.tzinfo is None:
            raise StoreError("The time at which a session was made needs its zone.")
        name, note, tags = naming.clean_name(name), naming.clean_note(note), naming.clean_tags(tags)
        prepared = [self._prepare(run) for run in runs]
        with engine.write(self._database) as connection:
            found = rows.insert_session(connection, rows.free_name(connection, name), note, tags, created)
            self._insert_runs(connection, found, prepared)
            return self._info(connection, found)

    def sessions(
        self,
        search: str = "",
        *,
        probe: str | None = None,
        model: str | None = None,
        tag: str | None = None,
        deleted: bool = False,
    ) -> list[SessionInfo]:
        """The sessions, last changed first, whose texts hold every word of `search` and a run of such a probe, model.

        Searched are names, notes, tags and the texts of the runs' requests; capitals make no difference.
        `deleted` lists those in the bin instead.
        """
        if len(search) > LONGEST_QUERY:
            raise SessionNameError(f"A search has at most {LONGEST_QUERY} characters; this one has {len(search)}.")
        conditions: list[ColumnElement[bool]] = []
        conditions.append(SessionRow.deleted.is_not(None) if deleted else SessionRow.deleted.is_(None))
        for word in naming.folded([search]).split():
            inside = rows.has_run(RunRow.search.contains(word, autoescape=True))
            conditions.append(or_(SessionRow.search.contains(word, autoescape=True), inside))
        if probe is not None:
            conditions.append(rows.has_run(RunRow.probe == naming.storable(probe)))
        if model is not None:
            named = select(RunModelRow.run_id).where(RunModelRow.name == rows.model_name(model))
            conditions.append(rows.has_run(RunRow.id.in_(named)))
        if tag is not None:
            tagged = select(TagRow.session_id).where(TagRow.name == naming.storable(tag))
            conditions.append(SessionRow.id.in_(tagged))
        with engine.read(self._database) as connection:
            return session_infos(connection, conditions, self._view)

    def names(self) -> list[str]:
        """The names of the sessions, last changed first."""
        wanted = select(SessionRow.name).where(SessionRow.deleted.is_(None))
        with engine.read(self._database) as connection:
            return list(connection.execute(wanted.order_by(SessionRow.updated.desc(), SessionRow.id)).scalars())

    def session(self, name_or_id: str) -> SessionInfo:
        """One session; by its id also from the bin."""
        with engine.read(self._database) as connection:
            return self._info(connection, rows.find(connection, name_or_id))

    def report(self, run_id: str) -> Report:
        """The report of a run, checked against its hash; DamagedBlobError if it is not what was kept."""
        with engine.read(self._database) as connection:
            blob = connection.execute(select(RunRow.blob).where(RunRow.id == naming.storable(run_id))).scalar()
        if blob is None:
            raise _no_run(run_id)
        return packing.unpack(self._blobs.get(blob))

    def attachment(self, run_id: str, name: str) -> bytes:
        """The bytes kept beside a run under that name."""
        wanted = select(RunRow.attachments_json).where(RunRow.id == naming.storable(run_id))
        with engine.read(self._database) as connection:
            text = connection.execute(wanted).scalar()
        if text is None:
            raise _no_run(run_id)
        attachments: dict[str, str] = json.loads(text)
        if name not in attachments:
            there = ", ".join(attachments) or "none"
            raise UnknownSessionError(f'This run has no attachment "{naming.shown(name)}"; it has {there}.')
        return self._blobs.get(attachments[name])

    def rename(self, name_or_id: str, name: str) -> SessionInfo:
        """Give a session another name; SessionNameError if one that is not in the bin has it."""
        name = naming.clean_name(name)
        with engine.write(self._database) as connection:
            found = rows.find(connection, name_or_id)
            rows.check_free(connection, name, found)
            connection.execute(update(SessionRow).where(SessionRow.id == found).values(name=name))
            rows.touch(connection, found)
            return self._info(connection, found)

    def annotate(self, name_or_id: str, note: str | None = None, tags: Iterable[str] | None = None) -> SessionInfo:
        """Replace the note, the tags or both."""
        new_note = None if note is None else naming.clean_note(note)
        new_tags = None if tags is None else naming.clean_tags(tags)
        with engine.write(self._database) as connection:
            found = rows.find(connection, name_or_id)
            rows.annotate(connection, found, new_note, new_tags)
            return self._info(connection, found)

    def duplicate(self, name_or_id: str, name: str) -> SessionInfo:
        """A copy with the same runs under another name; SessionNameError if it is taken."""
        name = naming.clean_name(name)
        with engine.write(self._database) as connection:
            original = self._info(connection, rows.find(connection, name_or_id))
            rows.check_free(connection, name)
            found = rows.insert_session(connection, name, original.note, original.tags)
            here = (RunRow.session_id == original.id, RunRow.deleted.is_(None))
            runs = connection.execute(select(RunRow.__table__).where(*here).order_by(RunRow.position)).mappings()
            copies = [
                rows.Prepared({**row, "id": uuid.uuid4().hex}, tuple(model.name for model in run.models), {})
                for row, run in zip(runs, original.runs, strict=True)
            ]
            self._insert_runs(connection, found, copies)
            return self._info(connection, found)

    def delete(self, name_or_id: str) -> None:
        """Move a session to the bin; `undelete` with its id brings all of it back."""
        with engine.write(self._database) as connection:
            here = SessionRow.id == rows.find(connection, name_or_id), SessionRow.deleted.is_(None)
            connection.execute(update(SessionRow).where(*here).values(deleted=rows.now()))

    def undelete(self, session_id: str) -> SessionInfo:
        """Bring a session back from the bin as it was; if its name is taken by now, as "name (2)"."""
        with engine.write(self._database) as connection:
            found = self._info(connection, rows.find(connection, session_id))
            if found.deleted is not None:
                name = rows.free_name(connection, found.name)
                back = update(SessionRow).where(SessionRow.id == found.id).values(name=name, deleted=None)
                connection.execute(back)
                rows.touch(connection, found.id)
            return self._info(connection, found.id)

    def delete_run(self, run_id: str) -> None:
        """Move one run to the bin."""
        self._mark_run(run_id, rows.now())

    def undelete_run(self, run_id: str) -> None:
        """Bring one run back to its place in its session."""
        self._mark_run(run_id, None)

    def purge(self) -> int:
        """Really remove what is in the bin, and files that nobody names and nobody may be about to; the bytes freed."""
        with engine.write(self._database) as connection:
            connection.execute(delete(SessionRow).where(SessionRow.deleted.is_not(None)))
            connection.execute(delete(RunRow).where(RunRow.deleted.is_not(None)))
        with engine.write(self._database) as connection:  # a writer after this one looks whether its blobs are there
            needed: set[str] = set()
            for blob, view, text in connection.execute(select(RunRow.blob, RunRow.view, RunRow.attachments_json)):
                needed.update((blob, *([view] if view else []), *json.loads(text).values()))
            return self._blobs.sweep(KEPT, needed.__contains__)

    def dispose(self) -> None:
        """Close the connections; the store must not be used any more."""
        self._database.reading.dispose()

    def _view(self, sha: str | None) -> dict[str, Any] | None:
        if sha is None:
            return None
        view: dict[str, Any] = json.loads(self._blobs.get(sha))
        return view

    def _mark_run(self, run_id: str, deleted: datetime | None) -> None:
        with engine.write(self._database) as connection:
            wanted = select(RunRow.session_id).where(RunRow.id == naming.storable(run_id))
            session_id = connection.execute(wanted).scalar()
            if session_id is None:
                raise _no_run(run_id)
            connection.execute(update(RunRow).where(RunRow.id == run_id).values(deleted=deleted))
            rows.touch(connection, session_id)

    def _insert_runs(self, connection: Connection, session_id: str, runs: Sequence[rows.Prepared]) -> None:
        for run in runs:
            for sha, data in run.blobs.items():
                if not self._blobs.has(sha):
                    self._blobs.put(data)
        rows.insert_runs(connection, session_id, runs)

    def _info(self, connection: Connection, session_id: str) -> SessionInfo:
        (info,) = session_infos(connection, [SessionRow.id == session_id], self._view)
        return info

    def _prepare(self, run: NewRun) -> rows.Prepared:
        """Put the blobs of a run, and its row but for the place; StoreError for what cannot be kept."""
        report, protocol = run.report, run.report.protocol
        if run.seconds is not None and not (math.isfinite(run.seconds) and run.seconds >= 0):
            raise StoreError(f"A run takes a number of seconds, which {run.seconds} is not.")
        if run.created is not None and run.created.tzinfo is None:
            raise StoreError("The time at which a run was made needs its zone.")
        blobs: dict[str, bytes] = {}

        def put(data: bytes) -> str:
            sha = self._blobs.put(data)
            blobs[sha] = data
            return sha

        names = [naming.clean_name(name, "The name of an attachment", 200) for name in run.attachments]
        attachments = {name: put(data) for name, data in zip(names, run.attachments.values(), strict=True)}
        plain = report.config.to_dict()
        row = {
            "id": uuid.uuid4().hex,
            "probe": report.probe,
            "models_json": canonical([model.to_dict() for model in protocol.models]),
            "seed": str(protocol.seed),
            "versions_json": json.dumps(protocol.versions),
            "environment_json": canonical(environment() if run.environment is None else dict(run.environment)),
            "created": run.created or rows.now(),
            "seconds": run.seconds,
            "blob": put(packing.pack(report)),
            "view": None if run.view is None else put(_json(run.view)),
            "attachments_json": canonical(attachments),
            "request": run_request(report.probe, report.config, protocol.models),
            "search": naming.folded([report.probe, *naming.texts_of(plain)]),
            "deleted": None,
        }
        return rows.Prepared(row, tuple(model.name for model in protocol.models), blobs)


def _json(view: Mapping[str, Any]) -> bytes:
    try:
        return canonical(dict(view)).encode()
    except (TypeError, ValueError) as error:
        raise StoreError(f"The view of a page is plain JSON, and this one is not: {error}.") from error


def _no_run(run_id: str) -> UnknownSessionError:
    return UnknownSessionError(
        f'There is no run "{naming.shown(run_id)}": "engram-lab session show NAME" lists those of a session.'
    )
