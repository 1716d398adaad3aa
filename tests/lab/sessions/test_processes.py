"""Several processes and threads on one store, and processes that are killed while they write.

The others are forked from a server that has imported the lab, so that each starts at once. ENGRAM_LAB_FULL=1 kills
more of them.
"""

from __future__ import annotations

import multiprocessing
import random
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import pytest

from engram_lab.lab.sessions import Store, open_store
from engram_lab.probes.base import Report
from tests.full import FULL
from tests.lab.sessions import made_probe, writers

KILLS, OPENING_KILLS = (300, 60) if FULL else (8, 3)
MOST = 10_000  # seeds of a killed process's session; none gets that far

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL and the fork server are POSIX")


@pytest.fixture(scope="module")
def context() -> Iterator[BaseContext]:
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["tests.lab.sessions.writers", "alembic.command", "sqlalchemy.dialects.sqlite"])
    yield made


def started(context: BaseContext, *arguments: Any) -> Any:
    """A process that keeps runs; see writers.keep."""
    child = context.Process(target=writers.keep, args=arguments)  # type: ignore[attr-defined]
    child.start()
    return child


def check(store: Store) -> dict[int, str]:
    """That every listed run opens with all that was kept beside it; its seed -> its session."""
    found = {}
    for session in store.sessions():
        assert session.tags == ("t",) and session.note == f"up to {session.runs[-1].seed}"
        for run in session.runs:
            assert store.report(run.id) == made_probe.report(run.seed)
            assert run.view == writers.VIEW and store.attachment(run.id, "x") == b"%d" % run.seed
            found[run.seed] = session.name
    assert sum(len(session.runs) for session in store.sessions()) == len(found)
    return found


def sound(url: str) -> None:
    """That SQLite finds nothing wrong with its file."""
    if url.startswith("sqlite"):
        connection = sqlite3.connect(url.removeprefix("sqlite:///"))
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        connection.close()


@pytest.mark.slow
def test_a_kill_loses_at_most_the_run_in_progress(url: str, tmp_path: Path, context: BaseContext) -> None:
    moments = random.Random(6)
    told: set[int] = set()
    for n in range(KILLS):
        listening, telling = context.Pipe(duplex=False)
        seeds = range(n * MOST, (n + 1) * MOST)
        child = started(context, url, tmp_path, (f"s{n % 3}",), seeds, telling)
        telling.close()
        assert listening.poll(60)
        time.sleep(moments.uniform(0, 0.12))
        child.kill()
        child.join()
        assert child.exitcode == -9
        try:
            while True:
                told.add(listening.recv())
        except EOFError:
            listening.close()
    store = open_store(url, tmp_path)
    found = check(store)
    sound(url)
    assert told <= found.keys() and len(told) >= KILLS  # each has kept one before it is killed
    unheard = sorted(found.keys() - told)  # killed after the commit, before it could tell
    assert len({seed // MOST for seed in unheard}) == len(unheard)
    assert all(seed == 0 or seed % MOST == 0 or seed - 1 in told for seed in unheard)
    store.dispose()


@pytest.mark.slow
def test_a_kill_while_the_store_is_made(tmp_path: Path, context: BaseContext, made: Report) -> None:
    moments = random.Random(7)
    kept = 0
    for n in range(OPENING_KILLS):
        url = f"sqlite:///{tmp_path / str(n) / 'store.db'}"
        listening, telling = context.Pipe(duplex=False)
        child = started(context, url, tmp_path / str(n), ("a",), range(MOST), telling)
        telling.close()
        end = time.monotonic() + 60
        while not (tmp_path / str(n) / "store.db").exists() and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.08))
        child.kill()
        child.join()
        listening.close()
        store = open_store(url)
        kept += bool(check(store))
        store.save(made_probe.report(MOST), "b", note=f"up to {MOST}", tags=["t"], view=writers.VIEW,
                   attachments={"x": b"%d" % MOST})  # fmt: skip
        assert MOST in check(store)
        store.dispose()
        sound(url)
    assert kept < OPENING_KILLS  # some were killed before their first run was kept


@pytest.mark.slow
def test_two_processes_write_at_once(url: str, tmp_path: Path, context: BaseContext) -> None:
    """Both open, and one makes, the store; both write to one session and to one of their own."""
    go = context.Event()
    pipes = [context.Pipe() for _ in range(2)]
    children = [
        started(context, url, tmp_path, ("both", f"own {n}"), range(50 * n, 50 * n + 50), pipe[1], go)
        for n, pipe in enumerate(pipes)
    ]
    go.set()
    for child in children:
        child.join(120)
        assert child.exitcode == 0
    store = open_store(url, tmp_path)
    sizes = {session.name: len(session.runs) for session in store.sessions()}
    assert sizes == {"both": 50, "own 0": 25, "own 1": 25}
    seeds = sorted(run.seed for session in store.sessions() for run in session.runs)
    assert seeds == list(range(100))
    for session in store.sessions():
        assert all(store.report(run.id) == made_probe.report(run.seed) for run in session.runs)
    store.dispose()
    sound(url)


def test_threads_write_read_and_purge_at_once(store: Store, made: Report) -> None:
    problems: list[BaseException] = []
    store.save(made, "all", note="up to 0", tags=["t"])

    def work(n: int) -> None:
        try:
            for k in range(5):
                run = store.save(made_probe.report(100 * n + k), "all")
                own = store.save(made, f"own {n} {k}")
                assert store.report(run.id).protocol.seed == run.seed
                store.delete(own.session_id)
                store.purge()
                assert store.sessions("all")
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert len(store.session("all").runs) == 41 and store.session("all").name == "all"


def test_a_purge_between_the_blob_and_its_row(store: Store, made: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row is still to come, so a purge takes the blobs, and they are put again."""
    prepare = store._prepare

    def slow(run: object) -> object:
        prepared = prepare(run)  # type: ignore[arg-type]
        assert store.purge().freed > 0 and not store._blobs.has(prepared.row.blob)
        return prepared

    monkeypatch.setattr(store, "_prepare", slow)
    run = store.save(made, "a", view=writers.VIEW, attachments={"x": b"1"})
    assert store.report(run.id) == made and run.view == writers.VIEW and store.attachment(run.id, "x") == b"1"
