"""Keeping, listing, searching, changing and removing sessions; in PostgreSQL too where the tests are given one."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from engram_lab.lab.sessions import (
    DamagedBlobError,
    NewRun,
    SessionNameError,
    Store,
    StoreError,
    UnknownSessionError,
    environment,
    open_store,
    run_request,
)
from engram_lab.lab.sessions.blobs import Blobs
from engram_lab.probes.base import Report
from tests.lab.sessions import made_probe

VIEW = {"page": "lens", "widgets": {"prompt": "naïve \ud800", "k": [1, 2.5, None, True]}, "files": {}}


def names(store: Store, search: str = "", **filters: str) -> list[str]:
    return sorted(session.name for session in store.sessions(search, **filters))  # type: ignore[arg-type]


def test_what_is_kept_is_what_is_opened(store: Store, made: Report, url: str, tmp_path: Path) -> None:
    before = datetime.now(UTC)
    run = store.save(
        made,
        " First é ",
        note="# A *note*",
        tags=("b", "a", "b"),
        seconds=1.25,
        view=VIEW,
        attachments={"x.txt": b"\0a"},
    )
    store.dispose()
    again = open_store(url, tmp_path)
    session = again.session("First é")
    assert (session.name, session.note, session.tags, session.deleted) == ("First é", "# A *note*", ("b", "a"), None)
    assert session.runs == (run,) and again.session(session.id) == session
    assert before <= run.created <= session.updated <= datetime.now(UTC) and session.created.tzinfo is UTC
    assert (run.probe, run.seed, run.seconds, run.session_id) == ("made", 0, 1.25, session.id)
    assert run.models == made.protocol.models and run.versions == made.protocol.versions
    assert run.environment == environment() and set(run.environment) == {
        "machine",
        "system",
        "cpu",
        "threads",
        "device",
    }
    assert session.runs[0].view == VIEW and list(run.attachments) == ["x.txt"]
    assert again.attachment(run.id, "x.txt") == b"\0a"
    back = again.report(run.id)
    assert back == made and back.to_dict() == made.to_dict()
    again.dispose()


def test_runs_stay_in_order_and_the_note_until_another_is_given(store: Store, made: Report) -> None:
    ids = [store.save(made_probe.report(seed), "one", note="n" if seed == 0 else None).id for seed in range(4)]
    session = store.session("one")
    assert [run.id for run in session.runs] == ids and [run.seed for run in session.runs] == [0, 1, 2, 3]
    assert session.note == "n" and session.tags == ()
    store.save(made, "one", note="", tags=["t"])
    assert (store.session("one").note, store.session("one").tags) == ("", ("t",))
    assert store.session("one").runs[0].view is None


def test_any_seed_of_torch(store: Store, made: Report) -> None:
    for seed in (2**64 - 1, -(2**63)):
        assert store.save(made_probe.report(seed), "seeds").seed == seed


def test_a_request_is_its_probe_config_weights_and_dtypes(made: Report) -> None:
    models = made.protocol.models
    one = run_request("made", made.config, models)
    assert one == run_request("made", made_probe.report(seed=9).config, models) and len(one) == 64
    renamed = [dataclasses.replace(models[0], name="other")]
    others = {
        run_request("lens", made.config, models),
        run_request("made", dataclasses.replace(made.config, number=2.0), models),
        run_request("made", made.config, [dataclasses.replace(models[0], fingerprint="x")]),
        run_request("made", made.config, [dataclasses.replace(models[0], dtype="bfloat16")]),
    }
    assert len(others) == 4 and one not in others and run_request("made", made.config, renamed) == one


def test_search_and_filters(store: Store) -> None:
    store.save(made_probe.report(prompt="The RIVER runs 100% of a_b"), "Alpha", note="Straße \\ here", tags=["x_1"])
    store.save(made_probe.report(prompt="An old mill", model="Other"), "beta", tags=["x21"])
    store.save(made_probe.report(prompt="100 of aXb", model="tiny"), "gamma")
    assert names(store) == ["Alpha", "beta", "gamma"]
    assert names(store, "alpha") == names(store, "river") == names(store, "  RUNS riVer alpha ") == ["Alpha"]
    assert names(store, "STRASSE") == ["Alpha"] and names(store, "東京") == ["Alpha", "beta", "gamma"]
    assert names(store, "river mill") == []
    # LIKE's own letters are letters
    assert names(store, "0% of") == ["Alpha"] and names(store, "a_b") == ["Alpha", "beta", "gamma"]  # in the odd text
    assert names(store, "x_1") == ["Alpha"] and names(store, "\\ here") == ["Alpha"] and names(store, "%%") == []
    assert names(store, tag="x_1") == ["Alpha"] and names(store, tag="x") == []
    assert names(store, model="Other") == names(store, model="Other", probe="made") == ["beta"]
    assert names(store, model="other") == names(store, probe="lens") == []
    assert names(store, "gamma", model="tiny") == ["gamma"]
    assert names(store, "\0\ud800", tag="\0", model="\ud800", probe="\0") == []
    with pytest.raises(SessionNameError, match="at most 200"):
        store.sessions("a" * 201)


def test_the_last_changed_comes_first(store: Store, made: Report) -> None:
    for name in ("a", "b", "c"):
        store.save(made, name)
    assert [session.name for session in store.sessions()] == ["c", "b", "a"]
    store.annotate("a", note="x")
    assert [session.name for session in store.sessions()] == ["a", "c", "b"] == store.names()
    store.delete("c")
    assert store.names() == ["a", "b"]


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "a\0", "a" * 121, "a\u2028b", "\ud800"])
def test_names_are_one_line(store: Store, made: Report, name: str) -> None:
    store.save(made, "kept")
    for call in (lambda: store.save(made, name), lambda: store.rename("kept", name)):
        with pytest.raises(SessionNameError, match="one line of 1 to 120 characters"):
            call()
    assert names(store) == ["kept"]
    with pytest.raises(UnknownSessionError):
        store.session(name)


def test_what_a_session_cannot_have_is_refused_and_nothing_kept(store: Store, made: Report) -> None:
    refused = [
        dict(note="\0"), dict(note="\ud800"), dict(note="a" * 100_001), dict(tags=["a\nb"]), dict(tags=[""]),
        dict(tags=map(str, range(41))), dict(seconds=float("nan")), dict(seconds=-1.0), dict(view={"a": object()}),
        dict(view={"a": float("nan")}), dict(attachments={"": b""}), dict(attachments={"a\0": b""}),
    ]  # fmt: skip
    for options in refused:
        with pytest.raises((SessionNameError, StoreError)) as found:
            store.save(made, "one", **options)  # type: ignore[arg-type]
        assert "\n" not in str(found.value) and str(found.value).endswith(".")
    assert store.sessions() == []


def test_names_composed_in_two_ways_are_one(store: Store, made: Report) -> None:
    store.save(made, "caf\u00e9")
    store.save(made, "cafe\u0301")
    assert len(store.sessions()) == 1 and len(store.session("cafe\u0301").runs) == 2
    assert names(store, "CAFE\u0301") == ["caf\u00e9"]


def test_rename_annotate_duplicate(store: Store, made: Report) -> None:
    run = store.save(made, "a", tags=["t"], view=VIEW, attachments={"x": b"1"})
    store.save(made, "b")
    with pytest.raises(SessionNameError, match='There is a session "b" already'):
        store.rename("a", "b")
    with pytest.raises(SessionNameError, match='There is a session "b" already'):
        store.duplicate("a", "b")
    store.rename("a", "first")
    assert store.rename("first", "first").name == "first" and store.rename("first", "second").name == "second"
    assert names(store, "second") == ["second"] and names(store, "first") == []  # it is found by its new name only
    store.rename("second", "c")
    store.annotate("c", note="new", tags=["u"])
    assert (store.session("c").note, store.session("c").tags) == ("new", ("u",)) and names(store, "new u") == ["c"]
    copy = store.duplicate("c", "d")
    assert (copy.note, copy.tags, len(copy.runs)) == ("new", ("u",), 1) and copy.id != run.session_id
    (again,) = copy.runs
    assert again == dataclasses.replace(run, id=again.id, session_id=copy.id) and again.id != run.id
    assert again.view == VIEW and store.attachment(again.id, "x") == b"1" and store.report(again.id) == made
    store.delete("c")
    store.purge()
    assert store.report(again.id) == made and names(store, tag="u", model="tiny") == ["d"]


def test_delete_and_undelete(store: Store, made: Report) -> None:
    first = store.save(made, "a", note="n", tags=["t"], attachments={"x": b"1"}).session_id
    before = store.session("a")
    store.delete("a")
    assert store.sessions() == [] and [session.id for session in store.sessions(deleted=True)] == [first]
    with pytest.raises(UnknownSessionError):
        store.session("a")
    gone = store.session(first)
    assert gone.deleted is not None and gone.runs == before.runs
    store.delete(first)
    assert store.session(first).deleted == gone.deleted  # a second time changes nothing
    store.save(made, "a")  # the name is free
    back = store.undelete(first)
    assert back == dataclasses.replace(before, name="a (2)", updated=back.updated)
    assert store.undelete(first).name == "a (2)" and names(store) == ["a", "a (2)"] and names(store, "(2)") == ["a (2)"]


def test_delete_and_undelete_a_run(store: Store) -> None:
    ids = [store.save(made_probe.report(seed, prompt=f"number{seed}"), "a").id for seed in range(3)]
    store.delete_run(ids[1])
    assert [run.id for run in store.session("a").runs] == [ids[0], ids[2]] and names(store, "number1") == []
    assert store.duplicate("a", "b").runs[1].seed == 2
    store.undelete_run(ids[1])
    assert [run.id for run in store.session("a").runs] == ids
    for call in (store.delete_run, store.undelete_run, store.report):
        with pytest.raises(UnknownSessionError, match='no run "nothing"'):
            call("nothing")
    with pytest.raises(UnknownSessionError, match='no attachment "y"; it has none'):
        store.attachment(ids[0], "y")


def test_add_is_all_or_nothing_and_takes_a_free_name(store: Store, made: Report) -> None:
    then = datetime(2020, 1, 2, 3, 4, 5, 6, tzinfo=UTC)
    runs = [
        NewRun(made, then, 2.0, VIEW, {"x": b"1"}, {"machine": "elsewhere"}),
        NewRun(made_probe.report(1), then + timedelta(hours=1)),
    ]
    for name in ("a", "a (2)", "a (3)"):
        session = store.add("a", "note", ["t"], then.astimezone(), runs)
        assert (session.name, session.created, session.note, session.tags) == (name, then, "note", ("t",))
    assert [run.created for run in session.runs] == [then, then + timedelta(hours=1)]
    assert session.runs[0].environment == {"machine": "elsewhere"} and session.runs[0].view == VIEW
    assert session.runs[1].environment == environment()
    longest = "l" * 120
    assert [store.add(longest, "", (), then, ()).name[-5:] for _ in range(2)] == ["l" * 5, "l (2)"]
    count = len(store.sessions())
    for bad in (NewRun(made, seconds=float("inf")), NewRun(made, then.replace(tzinfo=None))):
        with pytest.raises(StoreError):
            store.add("bad", "", (), then, [*runs, bad])
    with pytest.raises(StoreError, match="zone"):
        store.add("bad", "", (), then.replace(tzinfo=None), [])
    assert len(store.sessions()) == count


def blobs(folder: Path) -> list[Path]:
    return [path for path in (folder / "blobs").rglob("*") if path.is_file()]


def test_purge_removes_what_nobody_needs(store: Store, made: Report, tmp_path: Path) -> None:
    keep = store.save(made, "keep", view=VIEW, attachments={"x": b"both"})
    store.save(made_probe.report(1), "go", attachments={"x": b"both", "y": b"own"})
    gone = store.save(made_probe.report(2), "keep")
    other = open_store(f"sqlite:///{tmp_path / 'other.db'}", tmp_path)  # in the same folder
    theirs = other.save(made_probe.report(3), "theirs")
    assert store.purge() == (0, 0, 0) and len(blobs(tmp_path)) == 7
    store.delete("go")
    store.delete_run(gone.id)
    left, fresh = (store._blobs.folder / "tmp" / name for name in ("left", "fresh"))
    left.write_bytes(b"of a killed process")
    os.utime(left, (time.time() - 4000,) * 2)
    fresh.write_bytes(b"of one that still writes")
    before = sum(path.stat().st_size for path in blobs(tmp_path))
    purged = store.purge()
    assert (purged.sessions, purged.runs) == (1, 1)
    assert purged.freed == before - sum(path.stat().st_size for path in blobs(tmp_path)) > 0
    assert store.sessions(deleted=True) == [] and len(store.session("keep").runs) == 1
    assert len(blobs(tmp_path)) == 5 and not left.exists() and fresh.exists()
    assert store.report(keep.id) == made and store.attachment(keep.id, "x") == b"both" and keep.view == VIEW
    assert other.report(theirs.id) == made_probe.report(3)
    other.dispose()


def test_a_blob_that_a_living_run_names_too_stays(store: Store, made: Report) -> None:
    store.save(made, "a")
    store.delete("a")
    run = store.save(made, "b")
    assert store.purge().freed == 0 and store.report(run.id) == made


def test_a_damaged_or_missing_blob_is_one_sentence(store: Store, made: Report, tmp_path: Path) -> None:
    run = store.save(made, "a")
    (path,) = blobs(tmp_path)
    whole = path.read_bytes()
    for data in (whole[:-1], whole[:50], b"", whole + b"x", whole[:30] + b"\0" + whole[31:], b"\0" * len(whole)):
        path.write_bytes(data)
        with pytest.raises(DamagedBlobError, match=r"^The file \S+ is damaged: .*\.$"):
            store.report(run.id)
    path.unlink()
    with pytest.raises(DamagedBlobError, match=r"^The file \S+ is missing: .*\.$"):
        store.report(run.id)
    assert store.session("a").runs == (run,)  # it can be listed and deleted
    path.write_bytes(b"")
    assert store.report(store.save(made, "a").id) == store.report(run.id) == made  # keeping it again mends it


@contextmanager
def counted(store: Store) -> Iterator[list[str]]:
    """The statements that the store sends meanwhile."""
    sent: list[str] = []

    def note(connection: object, cursor: object, statement: str, *rest: object) -> None:
        sent.append(statement)

    engine = store._database.reading
    sa.event.listen(engine, "before_cursor_execute", note)
    yield sent
    sa.event.remove(engine, "before_cursor_execute", note)


def test_a_listing_takes_as_many_statements_for_one_session_as_for_many(store: Store, made: Report) -> None:
    runs = [NewRun(made)] * 3
    sent = []
    for count in (1, 30):
        for n in range(count):
            store.add(f"s{n}", "", ["a", "b"], datetime.now(UTC), runs)
        with counted(store) as statements:
            found = store.sessions("tiny", model="tiny")
        assert all(len(session.runs) == 3 and session.tags == ("a", "b") for session in found)
        sent.append([text for text in statements if text.startswith("SELECT")])
    assert len(found) == 31 and len(sent[0]) == len(sent[1]) == 3


def test_versions_come_back_in_their_order(store: Store) -> None:
    report = made_probe.report()
    versions = {"python": "3", "a": "1"}
    report = dataclasses.replace(report, protocol=dataclasses.replace(report.protocol, versions=versions))
    run = store.save(report, "a")
    assert json.dumps(run.versions) == json.dumps(versions)


def test_the_bytes_of_a_blob_are_on_the_disk_before_its_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut could leave a file of the right name that is empty."""
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(fd: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")
        fsync(fd)

    def renamed(*paths: Any, **options: Any) -> None:
        done.append("rename")
        replace(*paths, **options)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    Blobs(tmp_path / "blobs").put(b"some bytes")
    assert done[: done.index("rename") + 1][-2:] == ["file", "rename"]
