"""The database under a store: from a URL to an engine of the newest schema. All that only one kind has stands here."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
from sqlalchemy import Connection, Engine, create_engine, event, inspect, select, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session

from engram_lab.lab.sessions.errors import StoreError
from engram_lab.lab.sessions.schema import REVISION, StoreRow

MIGRATIONS = Path(__file__).parent / "migrations"
WAIT = 30  # seconds for another writer's transaction, each of which takes milliseconds
_UPGRADE_KEY = 0x656E6772  # of PostgreSQL's advisory lock while a schema is brought up to date
_upgrading = threading.Lock()  # Alembic's context is one for the process

_WRITABLE = "make its file and folder writable, or give another with --store"
_WAYS_OUT = {  # part of a database's message -> what to do
    "locked": f"another process has been writing for {WAIT} s, so try again when it is done",
    "readonly": _WRITABLE,
    "unable to open": _WRITABLE,
    "I/O error": "look whether its disk is whole and has space, or give another with --store",
    "full": "free some space, or give another with --store",
    "not a database": "give a file that the lab made, or a new one, with --store",
    "malformed": "bring it back from a copy, or give another with --store",
}


@dataclass(frozen=True)
class Database:
    """Two engines over one pool: `reading` sees one moment, `writing` takes the write lock when it begins."""

    url: URL
    reading: Engine
    writing: Engine

    @property
    def name(self) -> str:
        """The URL as it may be shown: without the password, and a file's path as it is."""
        if self.url.get_backend_name() == "sqlite":
            return f"sqlite:///{self.url.database}"
        return self.url.render_as_string(hide_password=True)


def data_folder() -> Path:
    """Where this user's lab keeps things: $ENGRAM_LAB_DATA, or the system's place for such data."""
    named = os.environ.get("ENGRAM_LAB_DATA")
    return Path(named).expanduser() if named else platformdirs.user_data_path("engram-lab", appauthor=False)


def parse(url: str | None) -> URL:
    """The URL of a store; without one that of $ENGRAM_LAB_STORE or the file store.db of the data folder."""
    given = url or os.environ.get("ENGRAM_LAB_STORE")
    if not given:
        return URL.create("sqlite", database=str(data_folder() / "store.db"))
    try:
        parsed = make_url(given)
    except (ArgumentError, ValueError):
        parsed = None
    if parsed is not None and parsed.get_backend_name() == "sqlite":
        named = parsed.database or ":memory:"
        if ":memory:" in named or named.startswith("file:") or parsed.query or parsed.host:
            raise StoreError(f'The store "{given}" names no file: write sqlite:///folder/store.db.')
        return URL.create("sqlite", database=str(Path(named).expanduser().absolute()))
    if parsed is not None and parsed.get_backend_name() == "postgresql":
        return parsed.set(drivername="postgresql+psycopg")
    shown = given if parsed is None and "@" not in given else parsed and parsed.render_as_string()
    raise StoreError(
        f"The store {shown or 'that was given'} is no URL of one: write sqlite:///folder/store.db or "
        "postgresql://user:password@host/database."
    )


def connect(url: URL) -> Database:
    """The database of a URL, made if it is a file that is not there; StoreError if it cannot be reached."""
    made = _sqlite(url) if url.get_backend_name() == "sqlite" else _postgresql(url)
    try:
        with translated(made):
            _upgrade(made)
    except BaseException:
        made.reading.dispose()
        raise
    return made


def _sqlite(url: URL) -> Database:
    folder = Path(str(url.database)).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"The folder {folder} of the store cannot be made ({error.strerror}): choose another with ENGRAM_LAB_DATA "
            "or --store."
        ) from error
    reading = create_engine(url)

    @event.listens_for(reading, "connect")
    def on_connect(connection: Any, record: object) -> None:
        connection.isolation_level = None  # the driver begins nothing by itself; see on_begin
        for pragma in (f"busy_timeout={WAIT * 1000}", "foreign_keys=ON", "synchronous=FULL"):
            connection.execute(f"PRAGMA {pragma}")
        end = time.monotonic() + WAIT
        while True:  # the one pragma that does not wait for other processes by itself
            try:
                connection.execute("PRAGMA journal_mode=WAL")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > end:
                    raise
                time.sleep(0.01)

    @event.listens_for(reading, "begin")
    def on_begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get("writing")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return Database(url, reading, reading.execution_options(writing=True))


def _postgresql(url: URL) -> Database:
    try:
        engine = create_engine(url, pool_pre_ping=True, connect_args={"connect_timeout": 10})
    except ImportError as error:
        raise StoreError("PostgreSQL needs another package: pip install 'engram-lab[postgres]'.") from error
    return Database(url, engine.execution_options(isolation_level="REPEATABLE READ"), engine)


@contextmanager
def translated(database: Database) -> Iterator[None]:
    """StoreError, one sentence, for whatever the database raises inside."""
    try:
        yield
    except (SQLAlchemyError, sqlite3.Error, OverflowError, UnicodeError) as error:
        cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
        lines = str(cause).strip().splitlines() or [type(cause).__name__]
        reason = lines[0][:300].rstrip(".")
        ways = [way for part, way in _WAYS_OUT.items() if part in reason]
        way = ways[0] if ways else "check the URL and the rights, or give another with --store"
        raise StoreError(f"The store {database.name} cannot be used ({reason}): {way}.") from error


@contextmanager
def write(database: Database) -> Iterator[Session]:
    """A transaction that no other writer of the store runs beside; committed at the end."""
    with translated(database), Session(database.writing) as db, db.begin():
        db.execute(select(StoreRow.id).with_for_update())  # SQLite has the lock already and ignores it
        yield db


@contextmanager
def read(database: Database) -> Iterator[Session]:
    """A transaction that sees one moment."""
    with translated(database), Session(database.reading) as db, db.begin():
        yield db


def _upgrade(database: Database) -> None:
    """Bring the schema to REVISION; StoreError for one that is newer than this lab."""
    with database.reading.begin() as connection:
        if _revision(connection) == REVISION:
            return
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    with _upgrading, database.writing.begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _UPGRADE_KEY})
        found = _revision(connection)  # another process may have done it meanwhile
        known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
        if found is not None and found not in known:
            raise StoreError(
                f'The store {database.name} was written by a newer version of the lab (its schema is "{found}"): '
                "update Engram Lab, or give another with --store."
            )
        if found != REVISION:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")


def _revision(connection: Connection) -> str | None:
    """What Alembic noted of the schema, or None in an empty database."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
