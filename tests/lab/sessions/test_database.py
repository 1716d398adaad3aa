"""Opening a store: URLs, migrations, and what cannot be opened or written, each in one sentence."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from pathlib import Path

import alembic.autogenerate
import pytest
import sqlalchemy as sa
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from engram_lab.lab.sessions import Store, StoreError, database, open_store, schema
from engram_lab.models.errors import LabError
from engram_lab.probes.base import Report
from tests.lab.sessions import writers

FORK = multiprocessing.get_context("fork") if sys.platform == "linux" else None


def sentence(url: str, folder: Path | None = None) -> str:
    with pytest.raises(LabError) as found:
        open_store(url, folder)
    text = str(found.value)
    assert isinstance(found.value, StoreError) and text.endswith(".") and "\n" not in text and len(text) < 500
    return text


def test_the_default_is_in_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Report) -> None:
    monkeypatch.delenv("ENGRAM_LAB_STORE", raising=False)
    monkeypatch.setenv("ENGRAM_LAB_DATA", str(tmp_path / "data"))
    store = open_store()
    store.save(made, "a")
    assert (tmp_path / "data" / "store.db").is_file() and (tmp_path / "data" / "blobs").is_dir()
    monkeypatch.setenv("ENGRAM_LAB_STORE", f"sqlite:///{tmp_path / 'elsewhere' / 'b.db'}")
    other = open_store()
    other.save(made, "b")
    assert (tmp_path / "elsewhere" / "b.db").is_file() and (tmp_path / "elsewhere" / "blobs").is_dir()
    for opened in (store, other):
        opened.dispose()


def test_the_revisions_make_the_tables_of_the_schema(store: Store) -> None:
    script = ScriptDirectory(str(database.MIGRATIONS))
    assert script.get_heads() == [schema.REVISION]
    with store._database.reading.connect() as connection:
        context = MigrationContext.configure(connection)
        assert context.get_current_revision() == schema.REVISION
        assert alembic.autogenerate.compare_metadata(context, schema.Base.metadata) == []


def test_a_store_of_a_newer_lab_is_left_alone(url: str, tmp_path: Path) -> None:
    store = open_store(url, tmp_path)
    with store._database.writing.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = 'from_the_future'"))
    store.dispose()
    said = sentence(url, tmp_path)
    assert "newer version of the lab" in said and '"from_the_future"' in said and "update Engram Lab" in said


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("nonsense", "is no URL of one"),
        ("", ""),
        ("mysql://me:secret@host/name", "is no URL of one"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
        ("sqlite:///file:a.db?mode=ro&uri=true", "names no file"),
        ("postgresql://me:secret@127.0.0.1:1/name", ""),
        ("postgresql://me:secret@127.0.0.1:not/name", "is no URL of one"),
    ],
)
def test_a_url_that_leads_nowhere(url: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGRAM_LAB_STORE", "nonsense")
    said = sentence(url, tmp_path)
    assert says in said and "secret" not in said


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "a.db").write_bytes(b"not a database at all" * 100)
    assert "file is not a database" in sentence(f"sqlite:///{tmp_path / 'a.db'}")
    assert "cannot be made" in sentence(f"sqlite:///{tmp_path / 'a.db' / 'b' / 'c.db'}")
    assert "unable to open" in sentence(f"sqlite:///{tmp_path}")


def test_a_damaged_database(tmp_path: Path, made: Report) -> None:
    url = f"sqlite:///{tmp_path / 'a.db'}"
    store = open_store(url)
    for n in range(5):
        store.save(made, f"s{n}", note="a" * 5000)
    store.dispose()
    whole = (tmp_path / "a.db").read_bytes()
    (tmp_path / "a.db").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StoreError, match=r"malformed.*bring it back from a copy"):
        open_store(url).sessions()


@pytest.mark.skipif(FORK is None, reason="limits of a process, as Linux has them")
@pytest.mark.parametrize("trouble", ["full disk", "read-only"])
def test_a_folder_that_cannot_be_written(trouble: str, made: Report) -> None:
    """In a process that may write little, or is not the owner; what was kept before stays."""
    # Another user must get there, and pytest's own folder is closed again whenever another run of it begins.
    with tempfile.TemporaryDirectory() as outer:
        Path(outer).chmod(0o711)
        in_trouble(trouble, Path(outer) / "store", made)


def in_trouble(trouble: str, folder: Path, made: Report) -> None:
    url = f"sqlite:///{folder / 'a.db'}"
    store = open_store(url)
    store.save(made, "before", attachments={"large": os.urandom(300_000)})
    store.dispose()
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    assert FORK is not None
    said = FORK.SimpleQueue()
    child = FORK.Process(target=writers.in_trouble, args=(trouble, url, said))
    child.start()
    sentences = said.get()
    child.join()
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    assert sentences and all(text.endswith(".") and "\n" not in text for text in sentences), sentences
    way = "space" if trouble == "full disk" else "writable"
    assert all(way in text for text in sentences), sentences
    store = open_store(url)
    assert [session.name for session in store.sessions()] == ["before"]
    assert store.report(store.session("before").runs[0].id) == made
    store.dispose()


def test_without_the_driver_of_postgresql(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    said = sentence("postgresql://a@127.0.0.1:1/b", tmp_path)
    assert said == "PostgreSQL needs another package: pip install 'engram-lab[postgres]'."
