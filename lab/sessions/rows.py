"""The statements of which a store's changes are made; each runs in the caller's transaction, under the write lock."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, func, insert, select, update

from engram_lab.lab.sessions import naming
from engram_lab.lab.sessions.errors import SessionNameError, UnknownSessionError
from engram_lab.lab.sessions.schema import RunModelRow, RunRow, SessionRow, TagRow


@dataclass(frozen=True)
class Prepared:
    """A run whose blobs are put: its row but for session and position, the names of its models, the blobs by hash."""

    row: dict[str, Any]
    models: tuple[str, ...]
    blobs: dict[str, bytes]


def now() -> datetime:
    return datetime.now(UTC)


def model_name(name: str) -> str:
    """A model's name as the filter knows it."""
    return naming.storable(name)[: naming.LONGEST_MODEL]


def has_run(condition: ColumnElement[bool]) -> ColumnElement[bool]:
    """Whether a session has a run, not in the bin, of which the condition holds."""
    return SessionRow.id.in_(select(RunRow.session_id).where(RunRow.deleted.is_(None), condition))


def living(connection: Connection, name: str) -> str | None:
    """The id of the session of that name that is not in the bin."""
    wanted = select(SessionRow.id).where(SessionRow.name == name, SessionRow.deleted.is_(None))
    return connection.execute(wanted).scalar()


def find(connection: Connection, name_or_id: str) -> str:
    """The id of a session by its id, or by its name if it is not in the bin; UnknownSessionError if there is none."""
    given = naming.storable(name_or_id)
    if connection.execute(select(SessionRow.id).where(SessionRow.id == given)).scalar():
        return given
    try:
        found = living(connection, naming.clean_name(name_or_id))
    except SessionNameError:
        found = None
    if found is None:
        raise UnknownSessionError(
            f'There is no session "{naming.shown(name_or_id)}": "engram-lab session list" and the page Sessions show '
            "what there is."
        )
    return found


def free_name(connection: Connection, name: str) -> str:
    """The name, or the first of "name (2)", "name (3)" and so on that no session has."""
    free, n = name, 1
    while living(connection, free) is not None:
        n += 1
        end = f" ({n})"
        free = name[: naming.LONGEST_NAME - len(end)].rstrip() + end
    return free


def check_free(connection: Connection, name: str, own: str | None = None) -> None:
    """SessionNameError if another session than `own` has that name."""
    if living(connection, name) not in (None, own):
        raise SessionNameError(f'There is a session "{name}" already: choose another name, or rename that one first.')


def insert_session(
    connection: Connection, name: str, note: str, tags: Sequence[str], created: datetime | None = None
) -> str:
    """A new session without runs; its id."""
    found, at = uuid.uuid4().hex, now()
    connection.execute(
        insert(SessionRow).values(id=found, name=name, note=note, search="", created=created or at, updated=at)
    )
    annotate(connection, found, note, tags)
    return found


def annotate(connection: Connection, session_id: str, note: str | None, tags: Sequence[str] | None) -> None:
    """Replace note and tags where given."""
    if note is not None:
        connection.execute(update(SessionRow).where(SessionRow.id == session_id).values(note=note))
    if tags is not None:
        connection.execute(delete(TagRow).where(TagRow.session_id == session_id))
        rows = [{"session_id": session_id, "position": n, "name": tag} for n, tag in enumerate(tags)]
        if rows:
            connection.execute(insert(TagRow), rows)
    touch(connection, session_id)


def touch(connection: Connection, session_id: str) -> None:
    """Note that a session has changed, and what a search finds it by."""
    here = SessionRow.id == session_id
    name, note = connection.execute(select(SessionRow.name, SessionRow.note).where(here)).one()
    tags = connection.execute(select(TagRow.name).where(TagRow.session_id == session_id).order_by(TagRow.position))
    search = naming.folded([name, *tags.scalars(), note])
    connection.execute(update(SessionRow).where(here).values(search=search, updated=now()))


def insert_runs(connection: Connection, session_id: str, runs: Iterable[Prepared]) -> None:
    """Append runs to a session."""
    last = select(func.coalesce(func.max(RunRow.position), -1)).where(RunRow.session_id == session_id)
    start = connection.execute(last).scalar_one() + 1
    rows, models = [], []
    for position, run in enumerate(runs, start):
        rows.append(run.row | {"session_id": session_id, "position": position})
        for n, name in enumerate(run.models):
            models.append({"run_id": run.row["id"], "position": n, "name": model_name(name)})
    if rows:
        connection.execute(insert(RunRow), rows)
    if models:
        connection.execute(insert(RunModelRow), models)
    touch(connection, session_id)
