"""A sweep on a Dask cluster of two worker processes: the same as here, bit for bit."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engram_lab.lab.sessions import open_store
from engram_lab.lab.sweep import cluster as sweep_dask
from engram_lab.lab.sweep import grid
from engram_lab.lab.sweep import run as sweep_run
from tests.lab.sweep.test_sweep import Capture, lens, reports_of, run, runs_of, written

distributed = pytest.importorskip("distributed")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with distributed.LocalCluster(
        n_workers=2, processes=True, threads_per_worker=1, dashboard_address=None, silence_logs=50
    ) as made:
        with distributed.Client(made, set_as_default=False) as client:  # or the first that is ready takes every cell
            client.run(importlib.import_module, "engram_lab.lab.sweep.cluster")
        yield made


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/store.db"


@pytest.mark.slow
def test_the_table_and_the_reports_are_those_of_a_sweep_here(
    cluster: Any, shipped: Path, tmp_path: Path, store: str, capsys: Capture
) -> None:
    prompts = ["The river runs", "past the old mill", "into the sea", "the the the"]
    file = written(tmp_path, lens(shipped, target=[" the", "not one token"], prompt=prompts))
    here, there = tmp_path / "here.parquet", tmp_path / "there.parquet"
    assert run(file, store, "--save", "here", "--out", here) == 1
    told = capsys.readouterr().err
    assert run(file, store, "--save", "there", "--out", there, "--dask", cluster.scheduler_address) == 1
    out, err = capsys.readouterr()
    assert "16 cells: 8 computed by 2 workers, 0 taken from the session, 8 failed." in out
    assert err == told and "not one token" in err, "the same cells fail for the same reason"
    assert here.read_bytes() == there.read_bytes()
    assert sorted(reports_of(store, "here")) == sorted(reports_of(store, "there")), "kept as they come"
    assert {own.blob for own in runs_of(store, "here")} == {own.blob for own in runs_of(store, "there")}

    first = runs_of(store, "there")
    assert run(file, store, "--save", "there", "--dask", cluster.scheduler_address) == 1
    assert "0 computed, 8 taken from the session, 8 failed" in capsys.readouterr().out
    assert runs_of(store, "there") == first
    with distributed.Client(cluster.scheduler_address, set_as_default=False) as client:
        assert set(client.run(lambda: len(sweep_dask._opened)).values()) == {0}, "no model stays open in a worker"


@pytest.mark.slow
def test_what_is_not_done_is_cancelled(cluster: Any, shipped: Path, tmp_path: Path, store: str) -> None:
    """As after Ctrl-C: nothing stays behind on the cluster, and the next sweep goes on."""
    found = grid.read(written(tmp_path, lens(shipped, seed=list(range(20)))))
    opened = open_store(store)
    jobs, ledger = sweep_run.jobs_of(found), sweep_run.Ledger(opened, found, "half")
    with sweep_dask.connected(cluster.scheduler_address) as client:
        outcomes = sweep_dask.run_there(found, jobs, ledger, client)
        with contextlib.closing(outcomes):
            assert next(outcomes).run is not None
        deadline = time.monotonic() + 20
        while tasks := client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks)):
            assert time.monotonic() < deadline, f"{tasks} tasks are left"
            time.sleep(0.05)
        assert len(jobs) == 80 and 1 <= len(opened.session("half").runs) < 40


@pytest.mark.slow
def test_the_cells_of_a_lost_worker_are_computed_again(cluster: Any, shipped: Path, tmp_path: Path, store: str) -> None:
    (tmp_path / "set.txt").write_text("The river runs\npast the old mill\ninto the sea\n" * 12, encoding="utf-8")
    content = lens(shipped, seed=list(range(6)), prompts="set.txt", bootstrap=20_000)
    del content["options"]["prompt"]
    found = grid.read(written(tmp_path, content))
    opened = open_store(store)
    jobs, ledger = sweep_run.jobs_of(found), sweep_run.Ledger(opened, found, "lost")
    with sweep_dask.connected(cluster.scheduler_address) as client:
        outcomes = sweep_dask.run_there(found, jobs, ledger, client)
        first = next(outcomes)
        os.kill(client.run(os.getpid)[first.where], signal.SIGKILL)
        rest = list(outcomes)
    assert all(outcome.run is not None for outcome in [first, *rest])
    assert sorted(outcome.job.cells for outcome in [first, *rest]) == [(n,) for n in range(12)]
    assert len({own.request for own in opened.session("lost").runs}) == 12 == len(opened.session("lost").runs)


def test_no_scheduler_is_one_sentence(
    tmp_path: Path, store: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_dask, "WAIT", 1.0)
    file = written(tmp_path, {"probe": "lens", "options": {"model": "m", "prompt": "a"}})
    for address in ("tcp://127.0.0.1:9", "nonsense://a", "tcp://"):
        assert run(file, store, "--dask", address) == 2
        out, err = capsys.readouterr()
        assert out == "" and f"No Dask scheduler answers at {address}" in err and err.count("\n") == 1, err
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert run(file, store, "--dask", "tcp://127.0.0.1:9") == 2
    assert capsys.readouterr().err == '--dask needs the package distributed: pip install "engram-lab[dask]".\n'
