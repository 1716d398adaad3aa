"""A sweep's cells computed by the workers of a Dask cluster, and kept here as they come.

Each worker process opens the models itself and keeps a few of them open until the sweep ends; its cells run one after
the other, with as many threads as a cell has here, so that the bits are the same. A report travels as its JSON, which
gives every bit back. Dask computes the cells of a lost worker again.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engram_lab.lab.sessions import environment
from engram_lab.lab.sweep.grid import Sweep
from engram_lab.lab.sweep.run import KEPT_MODELS, Job, Ledger, Outcome, identity, sentence
from engram_lab.models.errors import Cancelled, LabError, first_line
from engram_lab.models.pool import ModelKey, Pool
from engram_lab.probes import running
from engram_lab.probes.base import Report

if TYPE_CHECKING:
    from distributed import Client

WAIT = 10.0  # seconds for the scheduler's answer, and for the first worker
_CHECK = 2.0  # seconds between two looks of a cell at whether it is still wanted


@contextlib.contextmanager
def connected(address: str) -> Iterator[Client]:
    """The cluster at an address; LabError where there is none, or none that works."""
    try:
        from distributed import Client
    except ImportError as error:
        raise LabError('--dask needs the package distributed: pip install "engram-lab[dask]".') from error
    try:
        client = Client(address, timeout=WAIT, set_as_default=False)
    except (OSError, ValueError, ImportError) as error:
        raise LabError(
            f"No Dask scheduler answers at {address} ({first_line(error)}): start one with `dask scheduler`, and give "
            "its address as tcp://host:8786."
        ) from error
    with client:
        try:
            client.wait_for_workers(1, timeout=WAIT)
        except TimeoutError as error:
            raise LabError(f"The Dask scheduler at {address} has no worker: start some with `dask worker`.") from error
        yield client


# --- In the workers ------------------------------------------------------------------------------------------------

_lock = threading.Lock()  # a worker's cells run one after the other, however many threads it has
_opened: dict[str, Pool] = {}  # by the ticket of the sweep, so that a later one finds changed weights


@dataclass(frozen=True)
class Answer:
    """What a worker found: the report as JSON, or the error in a sentence."""

    text: str = ""
    seconds: float = 0.0
    depends: tuple[str, ...] = ()
    environment: dict[str, str] | None = None
    error: str = ""
    where: str = ""


def _handles(ticket: str, keys: Sequence[ModelKey]) -> list[Any]:
    for other in [other for other in _opened if other != ticket]:
        _opened.pop(other).close()
    return _opened.setdefault(ticket, Pool(KEPT_MODELS)).get(keys)


def identify(ticket: str, probe: str, keys: Sequence[ModelKey], configs: Sequence[Any]) -> list[Any]:
    """For each request (models, what else it depends on), or None where its models cannot be opened."""
    with _lock:
        try:
            handles = _handles(ticket, keys)
            return [identity(handles, probe, config) for config in configs]
        except Exception:  # the cell itself will say why
            return [None for _ in configs]


def answer(ticket: str, probe: str, keys: Sequence[ModelKey], config: Any, threads: int) -> Answer:
    """Compute one cell in a worker."""
    import torch
    from distributed import Event, get_worker

    stop, looked, where = Event(ticket), time.monotonic(), get_worker().address

    def progress(fraction: float, doing: str) -> None:
        nonlocal looked
        if time.monotonic() - looked > _CHECK:
            if stop.is_set():
                raise Cancelled
            looked = time.monotonic()

    with _lock:
        try:
            torch.set_num_threads(threads)
            handles = _handles(ticket, keys)
            _, depends = identity(handles, probe, config)
            report, seconds = running.compute(probe, handles, config, progress)
            return Answer(report.to_json(), seconds, tuple(depends), environment(), where=where)
        except Exception as error:  # of the model's own code too: it is told, and the others run
            return Answer(error=sentence(error), where=where)
        finally:
            if stop.is_set():
                _close(ticket)


def release(ticket: str) -> None:
    """Close what the sweep opened in this worker; it must not wait for a cell that still runs, which does it itself."""
    if _lock.acquire(blocking=False):
        try:
            _close(ticket)
        finally:
            _lock.release()


def _close(ticket: str) -> None:
    if ticket in _opened:
        _opened.pop(ticket).close()


# --- Here ----------------------------------------------------------------------------------------------------------


def run_there(sweep: Sweep, jobs: Sequence[Job], ledger: Ledger, client: Client) -> Generator[Outcome]:
    """Each job's outcome as it comes, whatever the order; what is not done is cancelled when this ends early."""
    import torch
    from distributed import Event, as_completed

    ticket = f"engram-lab-sweep-{uuid.uuid4().hex}"
    stop = Event(ticket, client=client)
    futures: dict[Any, Job] = {}
    try:
        taken = set()
        if not ledger.empty:
            for outcome in _taken(sweep, jobs, ledger, client, ticket):
                taken.add(outcome.job.cells)
                yield outcome
        for n, job in enumerate(jobs):
            if job.cells not in taken:
                given = (answer, ticket, sweep.probe, job.models, job.config, torch.get_num_threads())
                # The sooner ones first, so that the cells of one model follow each other in a worker.
                futures[client.submit(*given, key=f"{ticket}-{n}", pure=False, priority=-n)] = job
        for future in as_completed(list(futures), loop=client.loop):
            outcome = _outcome(future, futures.pop(future), ledger)
            future.release()  # the report is not to stay on the cluster
            yield outcome
    except BaseException:
        stop.set()
        client.cancel(list(futures))
        raise
    finally:
        client.run(release, ticket)
        if not futures:
            stop.clear()


def _taken(sweep: Sweep, jobs: Sequence[Job], ledger: Ledger, client: Client, ticket: str) -> Generator[Outcome]:
    """The jobs that the session has already, by the weights that the workers see."""
    groups: dict[tuple[ModelKey, ...], list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.models, []).append(job)
    asked = [
        client.submit(
            identify, ticket, sweep.probe, keys, [job.config for job in own], key=f"{ticket}-models-{n}", pure=False
        )
        for n, (keys, own) in enumerate(groups.items())
    ]
    for found, own in zip(asked, groups.values(), strict=True):
        for known, job in zip(found.result(), own, strict=True):
            run = None if known is None else ledger.finished(job, *known)
            if run is not None:
                yield Outcome(job, run, taken=True)


def _outcome(future: Any, job: Job, ledger: Ledger) -> Outcome:
    try:
        found: Answer = future.result()
        if found.error:
            return Outcome(job, error=found.error, where=found.where)
        report: Report = Report.from_dict(json.loads(found.text))
    except Exception as error:  # a worker that was lost too often, or without the lab
        return Outcome(job, error=sentence(error))
    return Outcome(job, ledger.keep(report, found.seconds, found.depends, found.environment), where=found.where)
