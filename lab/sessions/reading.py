"""Rows of a store as SessionInfo and RunInfo: three queries for each thousand of sessions."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from sqlalchemy import ColumnElement, Connection, select

from engram_lab.lab.sessions.infos import RunInfo, SessionInfo
from engram_lab.lab.sessions.schema import RunRow, SessionRow, TagRow
from engram_lab.probes.base import ModelProtocol

ReadView = Callable[[str | None], dict[str, Any] | None]  # of a blob's hash
_AT_ONCE = 1000  # ids in a statement: databases limit their parameters
_RUN = (
    RunRow.id, RunRow.session_id, RunRow.probe, RunRow.models_json, RunRow.seed, RunRow.versions_json,
    RunRow.environment_json, RunRow.created, RunRow.seconds, RunRow.blob, RunRow.view, RunRow.attachments_json,
    RunRow.request,
)  # fmt: skip


def session_infos(
    connection: Connection, conditions: Sequence[ColumnElement[bool]], read_view: ReadView
) -> list[SessionInfo]:
    """The sessions of which the conditions hold, last changed first, with the runs that are not in the bin."""
    columns = (SessionRow.id, SessionRow.name, SessionRow.note, SessionRow.created, SessionRow.updated)
    statement = select(*columns, SessionRow.deleted).where(*conditions)
    found = connection.execute(statement.order_by(SessionRow.updated.desc(), SessionRow.id)).all()
    tags: defaultdict[str, list[str]] = defaultdict(list)
    runs: defaultdict[str, list[RunInfo]] = defaultdict(list)
    for ids in _parts([row.id for row in found]):
        ordered = select(TagRow.session_id, TagRow.name).order_by(TagRow.session_id, TagRow.position)
        for session_id, tag in connection.execute(ordered.where(TagRow.session_id.in_(ids))):
            tags[session_id].append(tag)
        for run in run_infos(connection, [RunRow.session_id.in_(ids), RunRow.deleted.is_(None)], read_view):
            runs[run.session_id].append(run)
    return [
        SessionInfo(id, name, note, tuple(tags[id]), created, updated, deleted, tuple(runs[id]))
        for id, name, note, created, updated, deleted in found
    ]


def run_infos(connection: Connection, conditions: Sequence[ColumnElement[bool]], read_view: ReadView) -> list[RunInfo]:
    """The runs of which the conditions hold, in the order of their sessions."""
    models = _Parsed(lambda text: tuple(ModelProtocol.from_dict(model) for model in json.loads(text)))
    plain = _Parsed(json.loads)
    statement = select(*_RUN).where(*conditions).order_by(RunRow.session_id, RunRow.position)
    return [
        RunInfo(
            id=row[0],
            session_id=row[1],
            probe=row[2],
            models=models[row[3]],
            seed=int(row[4]),
            versions=dict(plain[row[5]]),
            environment=dict(plain[row[6]]),
            created=row[7],
            seconds=row[8],
            blob=row[9],
            attachments=dict(plain[row[11]]),
            request=row[12],
            read_view=partial(read_view, row[10]),
        )
        for row in connection.execute(statement)
    ]


class _Parsed(dict[str, Any]):
    """Text -> what it says; most runs of a store say the same of versions, machine and models."""

    def __init__(self, parse: Callable[[str], Any]) -> None:
        super().__init__()
        self._parse = parse

    def __missing__(self, text: str) -> Any:
        self[text] = made = self._parse(text)
        return made


def _parts(ids: list[str]) -> Iterator[list[str]]:
    return (ids[start : start + _AT_ONCE] for start in range(0, len(ids), _AT_ONCE))
