"""A sweep's cells computed here: each model opened once, each finished cell kept in the session at once.

Cells that ask for the same are one job. A job whose request is in the session already is taken from it; the request
holds the fingerprints of the weights, so that a changed model is computed again.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from engram_lab.lab.fronts import front, settled
from engram_lab.lab.sessions import RunInfo, Store, UnknownSessionError, run_request
from engram_lab.lab.sweep.grid import Cell, Sweep
from engram_lab.models.errors import LabError, first_line
from engram_lab.models.handle import Handle
from engram_lab.models.pool import ModelKey, Pool
from engram_lab.probes import running
from engram_lab.probes.base import ModelProtocol, Progress, Protocol, Report

KEPT_MODELS = 3  # open at a time, or as many as one cell needs
DEPENDS = "depends.json"  # the attachment with what a result depends on beside its request


@dataclass(frozen=True)
class Job:
    """What cells ask for: `cells` are their indices in the sweep."""

    cells: tuple[int, ...]
    config: Any
    models: tuple[ModelKey, ...]


@dataclass(frozen=True)
class Outcome:
    """What came of a job: a run of the session, or why there is none; `where` is a worker of a cluster."""

    job: Job
    run: RunInfo | None = None
    error: str = ""
    taken: bool = False
    where: str = ""


def jobs_of(sweep: Sweep) -> list[Job]:
    """What there is to do, cells of the same models after each other, else in the order of the table."""
    same: dict[str, list[int]] = {}
    for n, cell in enumerate(sweep.cells):
        same.setdefault(cell.key, []).append(n)
    groups: dict[tuple[ModelKey, ...], list[Job]] = {}
    for cells in same.values():
        first: Cell = sweep.cells[cells[0]]
        groups.setdefault(first.models, []).append(Job(tuple(cells), first.config, first.models))
    return [job for group in groups.values() for job in group]


class Ledger:
    """The session that a sweep's runs go to: what is finished, and what is kept."""

    def __init__(self, store: Store, sweep: Sweep, session: str, fresh: bool = False) -> None:
        self.store, self.session, self._sweep = store, session, sweep
        runs: tuple[RunInfo, ...] = ()
        self._new = False
        try:
            runs = store.session(session).runs
        except UnknownSessionError:
            self._new = True
        self._done: dict[tuple[str, ...], RunInfo] = {}
        for run in () if fresh else runs:  # of several, the last
            self._done[run.request, *_devices(run.models)] = run

    @property
    def empty(self) -> bool:
        """Whether nothing is finished."""
        return not self._done

    def finished(self, job: Job, models: Sequence[ModelProtocol], depends: Sequence[str]) -> RunInfo | None:
        """The run of this very request, if the session has it."""
        run = self._done.get((run_request(self._sweep.probe, job.config, models), *_devices(models)))
        if run is None or not depends:
            return run
        noted = self.store.attachment(run.id, DEPENDS) if DEPENDS in run.attachments else b""
        return run if noted == _noted(depends) else None

    def keep(
        self, report: Report, seconds: float, depends: Sequence[str], environment: dict[str, str] | None = None
    ) -> RunInfo:
        """Save a report; the file's note and tags go to a session that is made by it, not over those of another."""
        try:
            view = front(report.probe).ASK.view(settled(report)).to_dict()
        except LabError:  # its page cannot make this request: it is shown and replayed without
            view = None
        run = self.store.save(
            report,
            self.session,
            environment=environment,
            note=self._sweep.note if self._new else None,
            tags=self._sweep.tags if self._new else None,
            seconds=seconds,
            view=view,
            attachments={DEPENDS: _noted(depends)} if depends else None,
        )
        self._new = False
        return run


def _devices(models: Sequence[ModelProtocol]) -> list[str]:
    """Kinds of device: a request by itself does not tell the GPU's numbers from the CPU's."""
    return [model.device.partition(":")[0] for model in models]


def _noted(depends: Sequence[str]) -> bytes:
    return json.dumps(list(depends)).encode()


def identity(handles: Sequence[Handle], probe: str, config: Any) -> tuple[tuple[ModelProtocol, ...], list[str]]:
    """What a request's result depends on beside the request: the models, and what else the probe reads from disk."""
    more = running.depends(probe, handles, config)
    return Protocol.of(handles, [[] for _ in handles], 0).models, more if any(more) else []


def sentence(error: BaseException) -> str:
    """Why a cell has no result."""
    return str(error) if isinstance(error, LabError) else f"{type(error).__name__}: {first_line(error)}."


def run_here(sweep: Sweep, jobs: Sequence[Job], ledger: Ledger, progress: Progress | None = None) -> Generator[Outcome]:
    """Each job's outcome as it comes; one that fails does not stop the others. `progress` is that of the job."""
    with Pool(KEPT_MODELS) as pool:
        for n, job in enumerate(jobs):
            later = None
            if n == 0 or job.models != jobs[n - 1].models:
                later = [key for after in jobs[n + 1 :] for key in after.models]
            try:
                handles = pool.get(job.models, later)
                models, depends = identity(handles, sweep.probe, job.config)
                run = ledger.finished(job, models, depends)
                if run is None:
                    report, seconds = running.compute(sweep.probe, handles, job.config, progress)
            except Exception as error:  # of the model's own code too: it is told, and the others run
                yield Outcome(job, error=sentence(error))
                continue
            taken = run is not None
            yield Outcome(job, run or ledger.keep(report, seconds, depends), taken=taken)
