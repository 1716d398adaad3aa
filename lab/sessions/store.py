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
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, delete, or_, select
from sqlalchemy.orm import Session

from engram_lab.lab.sessions import database as engine
from engram_lab.lab.sessions import naming, packing, rows
from engram_lab.lab.sessions.blobs import Blobs
from engram_lab.lab.sessions.database import read, write
from engram_lab.lab.sessions.errors import SessionNameError, StoreError, UnknownSessionError
from engram_lab.lab.sessions.infos import NewRun, RunInfo, SessionInfo, environment, run_request
from engram_lab.lab.sessions.packing import canonical
from engram_lab.lab.sessions.schema import RunModelRow, RunRow, SessionRow, StoreRow, TagRow
from engram_lab.probes.base import Report

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
    with read(database) as db:
        store_id = db.scalars(select(StoreRow.id)).one()
    return Store(
        database, Blobs(folder / "blobs" / store_id)
    )  # two stores may share a folder: each purges its own alone


class Purged(NamedTuple):
    """What a purge took away: sessions, single runs of others, and bytes on the disk."""

    sessions: int
    runs: int
    freed: int


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
        with write(self._database) as db:
            kept = rows.living(db, name) or rows.new_session(db, name)
            rows.annotate(kept, new_note, new_tags)
            self._append(db, kept, [run])
            return rows.run_info(run.row, self._view)

    def add(self, name: str, note: str, tags: Iterable[str], created: datetime, runs: Sequence[NewRun]) -> SessionInfo:
        """Keep a whole session, all of it or nothing; a taken name becomes "name (2)"."""
        if created.tzinfo is None:
            raise StoreError("The time at which a session was made needs its zone.")
        name, note, tags = naming.clean_name(name), naming.clean_note(note), naming.clean_tags(tags)
        prepared = [self._prepare(run) for run in runs]
        with write(self._database) as db:
            kept = rows.new_session(db, rows.free_name(db, name), note, tags, created)
            self._append(db, kept, prepared)
            return self._info(db, kept)

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
        with read(self._database) as db:
            return rows.session_infos(db, conditions, self._view)

    def names(self) -> list[str]:
        """The names of the sessions, last changed first."""
        wanted = select(SessionRow.name).where(SessionRow.deleted.is_(None))
        with read(self._database) as db:
            return list(db.scalars(wanted.order_by(SessionRow.updated.desc(), SessionRow.id)))

    def session(self, name_or_id: str) -> SessionInfo:
        """One session; by its id also from the bin."""
        with read(self._database) as db:
            return self._info(db, rows.find(db, name_or_id))

    def report(self, run_id: str) -> Report:
        """The report of a run, checked against its hash; DamagedBlobError if it is not what was kept."""
        with read(self._database) as db:
            blob = rows.find_run(db, run_id).blob
        return packing.unpack(self._blobs.get(blob))

    def attachment(self, run_id: str, name: str) -> bytes:
        """The bytes kept beside a run under that name."""
        with read(self._database) as db:
            attachments: dict[str, str] = json.loads(rows.find_run(db, run_id).attachments_json)
        if name not in attachments:
            there = ", ".join(attachments) or "none"
            raise UnknownSessionError(f'This run has no attachment "{naming.shown(name)}"; it has {there}.')
        return self._blobs.get(attachments[name])

    def rename(self, name_or_id: str, name: str) -> SessionInfo:
        """Give a session another name; SessionNameError if one that is not in the bin has it."""
        name = naming.clean_name(name)
        with write(self._database) as db:
            session = rows.find(db, name_or_id)
            rows.check_free(db, name, session)
            session.name = name
            rows.touch(session)
            return self._info(db, session)

    def annotate(self, name_or_id: str, note: str | None = None, tags: Iterable[str] | None = None) -> SessionInfo:
        """Replace the note, the tags or both."""
        new_note = None if note is None else naming.clean_note(note)
        new_tags = None if tags is None else naming.clean_tags(tags)
        with write(self._database) as db:
            session = rows.find(db, name_or_id)
            rows.annotate(session, new_note, new_tags)
            return self._info(db, session)

    def duplicate(self, name_or_id: str, name: str) -> SessionInfo:
        """A copy with the same runs under another name; SessionNameError if it is taken."""
        name = naming.clean_name(name)
        with write(self._database) as db:
            original = rows.find(db, name_or_id)
            rows.check_free(db, name)
            session = rows.new_session(db, name, original.note, [tag.name for tag in original.tags])
            copies = [_Prepared(rows.copy(run), {}) for run in original.runs if run.deleted is None]
            self._append(db, session, copies)
            return self._info(db, session)

    def delete(self, name_or_id: str) -> None:
        """Move a session to the bin; `undelete` with its id brings all of it back."""
        with write(self._database) as db:
            session = rows.find(db, name_or_id)
            session.deleted = session.deleted or rows.now()

    def undelete(self, session_id: str) -> SessionInfo:
        """Bring a session back from the bin as it was; if its name is taken by now, as "name (2)"."""
        with write(self._database) as db:
            session = rows.find(db, session_id)
            if session.deleted is not None:
                session.name, session.deleted = rows.free_name(db, session.name), None
                rows.touch(session)
            return self._info(db, session)

    def delete_run(self, run_id: str) -> None:
        """Move one run to the bin."""
        self._mark_run(run_id, rows.now())

    def undelete_run(self, run_id: str) -> None:
        """Bring one run back to its place in its session."""
        self._mark_run(run_id, None)

    def purge(self) -> Purged:
        """Really remove the sessions and runs in the bin, and every file that no run names."""
        with write(self._database) as db:
            sessions, runs = (
                db.scalars(delete(table).where(table.deleted.is_not(None)).returning(table.id)).all()
                for table in (SessionRow, RunRow)
            )
        # The rows are gone for good before their files are; a writer after this one puts its files again (`_append`).
        with write(self._database) as db:
            needed: set[str] = set()
            for run in db.execute(select(RunRow.blob, RunRow.view, RunRow.attachments_json)):
                needed.update((run.blob, *([run.view] if run.view else []), *json.loads(run.attachments_json).values()))
            return Purged(len(sessions), len(runs), self._blobs.sweep(needed))

    def dispose(self) -> None:
        """Close the connections; the store must not be used any more."""
        self._database.reading.dispose()

    def _view(self, sha: str | None) -> dict[str, Any] | None:
        if sha is None:
            return None
        view: dict[str, Any] = json.loads(self._blobs.get(sha))
        return view

    def _mark_run(self, run_id: str, deleted: datetime | None) -> None:
        with write(self._database) as db:
            run = rows.find_run(db, run_id)
            run.deleted = deleted
            rows.touch(rows.find(db, run.session_id))

    def _append(self, db: Session, session: SessionRow, runs: Sequence[_Prepared]) -> None:
        for run in runs:
            for sha, data in run.blobs.items():
                if not self._blobs.has(sha):
                    self._blobs.put(data)
        rows.append(db, session, [run.row for run in runs])

    def _info(self, db: Session, session: SessionRow) -> SessionInfo:
        db.flush()
        (info,) = rows.session_infos(db, [SessionRow.id == session.id], self._view)
        return info

    def _prepare(self, run: NewRun) -> _Prepared:
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
        row = RunRow(
            id=uuid.uuid4().hex,
            probe=report.probe,
            models_json=canonical([model.to_dict() for model in protocol.models]),
            seed=str(protocol.seed),
            versions_json=json.dumps(protocol.versions),
            environment_json=canonical(environment() if run.environment is None else dict(run.environment)),
            created=run.created or rows.now(),
            seconds=run.seconds,
            blob=put(packing.pack(report)),
            view=None if run.view is None else put(_json(run.view)),
            attachments_json=canonical(attachments),
            request=run_request(report.probe, report.config, protocol.models),
            search=naming.folded([report.probe, *naming.texts_of(plain)]),
            models=[
                RunModelRow(position=n, name=rows.model_name(model.name)) for n, model in enumerate(protocol.models)
            ],
        )
        return _Prepared(row, blobs)


class _Prepared(NamedTuple):
    """A run whose blobs are put: its row but for session and position, and the blobs by their hash."""

    row: RunRow
    blobs: dict[str, bytes]


def _json(view: Mapping[str, Any]) -> bytes:
    try:
        return canonical(dict(view)).encode()
    except (TypeError, ValueError) as error:
        raise StoreError(f"The view of a page is plain JSON, and this one is not: {error}.") from error
