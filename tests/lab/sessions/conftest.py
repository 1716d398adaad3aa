"""A store in a folder of its own, or in the PostgreSQL database that ENGRAM_LAB_TEST_POSTGRES names (and empties)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from engram_lab.lab.sessions import Store, open_store
from engram_lab.probes.base import Report
from tests.lab.sessions import made_probe

POSTGRES = os.environ.get("ENGRAM_LAB_TEST_POSTGRES")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Report:
    """A report of the tests' own probe, which the lab knows while a test runs."""
    monkeypatch.setitem(sys.modules, made_probe.AT, made_probe)
    return made_probe.report()


@pytest.fixture(params=["sqlite", *(["postgresql"] if POSTGRES else [])])
def url(request: pytest.FixtureRequest, tmp_path: Path, made: Report) -> str:
    """Of a store that is not there yet, in a lab that knows the tests' own probe."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'store.db'}"
    assert POSTGRES
    engine = sa.create_engine(sa.make_url(POSTGRES).set(drivername="postgresql+psycopg"))
    with engine.begin() as connection:
        connection.execute(sa.text("DROP SCHEMA public CASCADE"))
        connection.execute(sa.text("CREATE SCHEMA public"))
    engine.dispose()
    return POSTGRES


@pytest.fixture
def store(url: str, tmp_path: Path) -> Iterator[Store]:
    opened = open_store(url, tmp_path)
    yield opened
    opened.dispose()
