"""Rows of a store: found, made, changed and read; each call in the caller's transaction, changes under its lock."""

from __future__ import annotations

import json
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import Any

from sqlalchemy import ColumnElement, func, inspect, select
from sqlalchemy.orm import Session

from engram_lab.lab.sessions import naming
from engram_lab.lab.sessions.errors import SessionNameError, UnknownSessionError
from engram_lab.lab.sessions.infos import RunInfo, SessionInfo
from engram_lab.lab.sessions.schema import RunModelRow, RunRow, SessionRow, TagRow
from engram_lab.probes.base import ModelProtocol

_LISTED = (
    RunRow.id, RunRow.session_id, RunRow.probe, RunRow.models_json, RunRow.seed, RunRow.versions_json,
    RunRow.environment_json, RunRow.created, RunRow.seconds, RunRow.blob, RunRow.view, RunRow.attachments_json,
    RunRow.request,
)  # fmt: skip
ReadView = Callable[[str | None], dict[str, Any] | None]  # of a blob's hash


def now() -> datetime:
    return datetime.now(UTC)


def model_name(name: str) -> str:
    """A model's name as the filter knows it."""
    return naming.storable(name)[: naming.LONGEST_MODEL]


def has_run(condition: ColumnElement[bool]) -> ColumnElement[bool]:
    """Whether a session has a run, not in the bin, of which the condition holds."""
    return SessionRow.id.in_(select(RunRow.session_id).where(RunRow.deleted.is_(None), condition))


def living(db: Session, name: str) -> SessionRow | None:
    """The session of that name that is not in the bin."""
    return db.scalar(select(SessionRow).where(SessionRow.name == name, SessionRow.deleted.is_(None)))


def find(db: Session, name_or_id: str) -> SessionRow:
    """A session by its id, or by its name if it is not in the bin; UnknownSessionError if there is none."""
    session = db.get(SessionRow, naming.storable(name_or_id))
    if session is None:
        try:
            session = living(db, naming.clean_name(name_or_id))
        except SessionNameError:
            session = None
    if session is None:
        raise UnknownSessionError(
            f'There is no session "{naming.shown(name_or_id)}": "engram-lab session list" and the page Sessions show '
            "what there is."
        )
    return session


def find_run(db: Session, run_id: str) -> RunRow:
    """A run by its id; UnknownSessionError if there is none."""
    run = db.get(RunRow, naming.storable(run_id))
    if run is None:
        raise UnknownSessionError(
            f'There is no run "{naming.shown(run_id)}": "engram-lab session show NAME" lists those of a session.'
        )
    return run


def free_name(db: Session, name: str) -> str:
    """The name, or the first of "name (2)", "name (3)" and so on that no session has."""
    free, n = name, 1
    while living(db, free) is not None:
        n += 1
        end = f" ({n})"
        free = name[: naming.LONGEST_NAME - len(end)].rstrip() + end
    return free


def check_free(db: Session, name: str, but: SessionRow | None = None) -> None:
    """SessionNameError if another session than `but` has that name."""
    if living(db, name) not in (None, but):
        raise SessionNameError(f'There is a session "{name}" already: choose another name, or rename that one first.')


def new_session(
    db: Session, name: str, note: str = "", tags: Sequence[str] = (), created: datetime | None = None
) -> SessionRow:
    """A session without runs."""
    at = now()
    session = SessionRow(id=uuid.uuid4().hex, name=name, search="", created=created or at, updated=at)
    annotate(session, note, tags)
    db.add(session)
    return session


def annotate(session: SessionRow, note: str | None, tags: Sequence[str] | None) -> None:
    """Replace note and tags where given."""
    if note is not None:
        session.note = note
    if tags is not None:
        session.tags = [TagRow(position=n, name=tag) for n, tag in enumerate(tags)]
    touch(session)


def touch(session: SessionRow) -> None:
    """Note that a session has changed, and what a search finds it by."""
    session.search = naming.folded([session.name, *(tag.name for tag in session.tags), session.note])
    session.updated = now()


def append(db: Session, session: SessionRow, runs: Iterable[RunRow]) -> None:
    """Put runs at the end of a session, behind those in the bin too."""
    db.flush()
    last = db.scalar(select(func.max(RunRow.position)).where(RunRow.session_id == session.id))
    for position, run in enumerate(runs, 0 if last is None else last + 1):
        run.session_id, run.position = session.id, position
        db.add(run)
    touch(session)
    db.flush()


def copy(run: RunRow) -> RunRow:
    """The same run under another id, for another session."""
    values = {column.key: getattr(run, column.key) for column in inspect(RunRow).column_attrs}
    models = [RunModelRow(position=model.position, name=model.name) for model in run.models]
    return RunRow(**values | {"id": uuid.uuid4().hex}, models=models)


def session_infos(db: Session, conditions: Sequence[ColumnElement[bool]], read_view: ReadView) -> list[SessionInfo]:
    """The sessions of which the conditions hold, last changed first, with the runs that are not in the bin.

    Three statements, however many there are. Runs are read as columns: as objects they would take three times as long.
    """
    wanted = select(SessionRow).where(*conditions).order_by(SessionRow.updated.desc(), SessionRow.id)
    sessions, ids = db.scalars(wanted).all(), select(SessionRow.id).where(*conditions)
    tags: defaultdict[str, list[str]] = defaultdict(list)
    for tag in db.execute(
        select(TagRow.session_id, TagRow.name).where(TagRow.session_id.in_(ids)).order_by(TagRow.position)
    ):
        tags[tag.session_id].append(tag.name)
    runs: defaultdict[str, list[RunInfo]] = defaultdict(list)
    inside = RunRow.session_id.in_(ids), RunRow.deleted.is_(None)
    for run in db.execute(select(*_LISTED).where(*inside).order_by(RunRow.position)):
        runs[run.session_id].append(run_info(run, read_view))
    return [
        SessionInfo(
            session.id,
            session.name,
            session.note,
            tuple(tags[session.id]),
            session.created,
            session.updated,
            session.deleted,
            tuple(runs[session.id]),
        )
        for session in sessions
    ]


def run_info(run: RunRow | Any, read_view: ReadView) -> RunInfo:
    """A run, or its listed columns, as it is listed."""
    return RunInfo(
        id=run.id,
        session_id=run.session_id,
        probe=run.probe,
        models=_models(run.models_json),
        seed=int(run.seed),
        versions=dict(_parsed(run.versions_json)),
        environment=dict(_parsed(run.environment_json)),
        created=run.created,
        seconds=run.seconds,
        blob=run.blob,
        attachments=dict(_parsed(run.attachments_json)),
        request=run.request,
        read_view=partial(read_view, run.view),
    )


# Most runs of a store say the same of versions, machine and models.
@lru_cache(maxsize=512)
def _models(text: str) -> tuple[ModelProtocol, ...]:
    return tuple(ModelProtocol.from_dict(model) for model in json.loads(text))


@lru_cache(maxsize=512)
def _parsed(text: str) -> dict[str, str]:
    plain: dict[str, str] = json.loads(text)
    return plain
