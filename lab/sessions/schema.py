"""The tables of a store. A change here needs a revision in migrations/versions and its name in REVISION.

Times are UTC without a zone, so that SQLite and PostgreSQL hold the same. Columns ending in `_json` hold canonical
JSON, `search` the case-folded text that a search looks through, `deleted` when the row went to the bin.
"""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import DateTime, Dialect, Double, ForeignKey, Index, String, Text, TypeDecorator
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

REVISION = "sessions_and_runs"  # the newest of migrations/versions


class Moment(TypeDecorator[datetime]):
    """An aware datetime."""

    impl = DateTime
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.replace(tzinfo=UTC)


class Base(DeclarativeBase):
    """All tables of a store."""


class StoreRow(Base):
    """One row: the store's own id, which names its folder of blobs. Writers lock it."""

    __tablename__ = "store"
    id: Mapped[str] = mapped_column(String(32), primary_key=True)


class SessionRow(Base):
    __tablename__ = "sessions"
    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    name: Mapped[str] = mapped_column(String(120))
    note: Mapped[str] = mapped_column(Text)
    search: Mapped[str] = mapped_column(Text, deferred=True)
    created: Mapped[datetime] = mapped_column(Moment)
    updated: Mapped[datetime] = mapped_column(Moment, index=True)
    deleted: Mapped[datetime | None] = mapped_column(Moment)
    tags: Mapped[list[TagRow]] = relationship(order_by="TagRow.position", cascade="all, delete-orphan")
    runs: Mapped[list[RunRow]] = relationship(order_by="RunRow.position", viewonly=True)  # appended by their position


# Names are unique among the sessions that are not in the bin.
Index(
    "one_of_a_name",
    SessionRow.name,
    unique=True,
    sqlite_where=SessionRow.deleted.is_(None),
    postgresql_where=SessionRow.deleted.is_(None),
)


class TagRow(Base):
    __tablename__ = "tags"
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id", ondelete="CASCADE"), primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(60), index=True)


class RunRow(Base):
    __tablename__ = "runs"
    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id", ondelete="CASCADE"), index=True)
    position: Mapped[int]
    probe: Mapped[str] = mapped_column(String(60))
    models_json: Mapped[str] = mapped_column(Text)
    seed: Mapped[str] = mapped_column(String(40))  # as text: torch takes seeds of 64 bits without a sign
    versions_json: Mapped[str] = mapped_column(Text)
    environment_json: Mapped[str] = mapped_column(Text)
    created: Mapped[datetime] = mapped_column(Moment)
    seconds: Mapped[float | None] = mapped_column(Double)
    blob: Mapped[str] = mapped_column(String(64))
    view: Mapped[str | None] = mapped_column(String(64))  # a blob of JSON: it may hold the files brought to a page
    attachments_json: Mapped[str] = mapped_column(Text)  # name -> blob
    request: Mapped[str] = mapped_column(String(64))
    search: Mapped[str] = mapped_column(Text, deferred=True)
    deleted: Mapped[datetime | None] = mapped_column(Moment)
    models: Mapped[list[RunModelRow]] = relationship(order_by="RunModelRow.position", cascade="all, delete-orphan")


class RunModelRow(Base):
    """The models of a run by name, for the filter."""

    __tablename__ = "run_models"
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(Text, index=True)
