"""What the pages run on: open models, results that were had before, waiting, progress and cancelling.

Models and results are shared by all sessions: whatever runs a model waits for its turn, a report is never changed.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import streamlit as st

from engram_lab.lab.app import reopened, shortage
from engram_lab.lab.app.line import Line
from engram_lab.lab.app.open_models import OpenModels
from engram_lab.lab.app.progress import Bar, is_cancelled, offer_again, wait_for_imports
from engram_lab.lab.app.settings import settings
from engram_lab.lab.ask.parts import NOTHING
from engram_lab.lab.draw import theme
from engram_lab.models.errors import LabError, UnknownModelError
from engram_lab.models.listing import list_models
from engram_lab.probes import running
from engram_lab.probes.base import Record, Report

if TYPE_CHECKING:
    from engram_lab.models.handle import Handle

KEPT_RESULTS = 24
TIDY_SECONDS, IDLE_SECONDS = 5.0, 1.0

# Of the thread that runs a script: `held`, the models that it has leased, by name; `turns`, how many it has taken.
_own = threading.local()


def mode() -> theme.Mode:
    """Whether the browser shows the app light or dark."""
    return "dark" if st.context.theme.type == "dark" else "light"


def model_names() -> list[str]:
    """The models that are here: shipped ones first."""
    return [info.name for info in list_models()]


def default_pair(names: Sequence[str]) -> tuple[str | None, str]:
    """The model and the comparison that the app opens with: the shipped Engram and, with room for two, its twin."""
    model = "engram-mini" if "engram-mini" in names else next(iter(names), None)
    two = settings().models > 1 and "dense-mini" in names and model != "dense-mini"
    return model, "dense-mini" if two else NOTHING


def chosen_models() -> tuple[str, ...]:
    """The names picked in the sidebar, one or two; LabError where that is no choice."""
    model = (st.session_state.get("model") or "").strip()
    against = (st.session_state.get("against") or NOTHING).strip()
    if not model:
        raise UnknownModelError(
            "No model is chosen, and none ships with this installation: type a local folder, a hub id or a "
            ".gguf file in the sidebar."
        )
    if against == model:
        raise LabError(f"{model} is compared with itself: pick another model in the sidebar, or {NOTHING}.")
    return (model,) if against == NOTHING else (model, against)


@st.cache_resource(on_release=OpenModels.close, show_spinner=False)
def open_models_here() -> OpenModels:
    """The open models of this process."""
    return OpenModels(line())


@st.cache_resource(show_spinner=False)
def line() -> Line:
    """The one line of this process for all that runs a model."""
    return Line()


@contextmanager
def script() -> Iterator[None]:
    """One run of the app's script: the models that it uses stay open until the block ends."""
    held: dict[str, Handle] = {}
    _own.held, _own.turns = held, 0
    _tidying.begin()
    try:
        yield
    finally:
        _own.held = None
        open_models_here().release(list(held.values()))
        _tidying.end()


class _Tidying:
    """Hands back the memory that runs have left behind: now and then, and all of it once nobody is at work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._last = 0.0
        self._timer: threading.Timer | None = None

    def begin(self) -> None:
        with self._lock:
            self._running += 1
            if self._timer is not None:
                self._timer.cancel()

    def end(self) -> None:
        with self._lock:
            self._running -= 1
            if not self._running:
                self._timer = threading.Timer(IDLE_SECONDS, self._idle)
                self._timer.daemon = True
                self._timer.start()
            due = time.monotonic() - self._last > TIDY_SECONDS
            self._last = time.monotonic() if due else self._last
        if due:
            shortage.trim()

    def _idle(self) -> None:
        if not self._running:  # looking for cycles holds everybody up for a moment
            shortage.free_memory()


_tidying = _Tidying()


def handle(name: str) -> Handle:
    """The open model of a name, which stays open for this run of the script."""
    return handles([name])[0]


def handles(names: Sequence[str]) -> list[Handle]:
    """The open models of the names, with a word on the page where one has to be read, or waited for, first.

    Outside of `script` they may be closed when their place is needed. LabError where there is no place for them.
    """
    wait_for_imports()
    held: dict[str, Handle] | None = getattr(_own, "held", None)
    known: dict[str, Handle] = {} if held is None else held
    wanted = [name for name in dict.fromkeys(names) if name not in known]
    if wanted:
        told = " and ".join(wanted)
        with st.spinner(f"Opening {told} …"):
            store, bar = open_models_here(), Bar(f"open {told}", f"{told} was not opened.")
            leased = dict(zip(wanted, store.lease(wanted, len(known), bar.waiting), strict=True))
            bar.clear()
        if held is None:
            store.release(list(leased.values()))
        known |= leased
    return [known[name] for name in names]


@contextmanager
def turn(opened: Sequence[Handle], what: str = "") -> Iterator[None]:
    """Run models outside of `run`: after those who came before, with a word on the page and a way out meanwhile.

    What every run of the page computes is called `what`, once on a page: cancelled, it stays so until it is asked for.
    What follows the press of a button needs no name. OutOfMemoryError where memory runs out.
    """
    _own.turns = getattr(_own, "turns", 0) + 1
    bar = Bar(f"turn {what or _own.turns}", f"{what} was not computed." if what else "")
    with line().turn(opened, bar.waiting):
        bar.clear()
        with shortage.told(f"Running {' and '.join(handle.name for handle in opened)}", opened):
            yield


class Results:
    """The last reports by request, with the seconds that each took; safe across sessions."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[Report, float | None]] = OrderedDict()

    def get(self, key: str) -> Report | None:
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def put(self, key: str, report: Report, seconds: float | None = None) -> None:
        with self._lock:
            self._kept[key] = (report, seconds)
            while len(self._kept) > self._size:
                self._kept.popitem(last=False)

    def seconds(self, report: Report) -> float | None:
        """How long this very report took, if it is still here."""
        with self._lock:
            return next((seconds for kept, seconds in self._kept.values() if kept is report), None)


@st.cache_resource(show_spinner=False)
def results() -> Results:
    """The one store of results of this process."""
    return Results(KEPT_RESULTS)


def request_key(probe: str, config: Record, opened: Sequence[Handle]) -> str:
    """One key for one request: the probe, its configuration, the weights and the number format they run in.

    A probe that reads more than that from disk says what by `depends(handles, config)`.
    """
    models = [(h.fingerprint, str(h.dtype), str(h.device)) for h in opened]
    more = running.depends(probe, opened, config)
    request = json.dumps([probe, config.to_dict(), models, more], sort_keys=True)
    return hashlib.sha256(request.encode()).hexdigest()


def run(probe: str, config: Any) -> Report | None:
    """The report of a request: had before, kept in a session, or run now with progress; None if it was cancelled.

    OutOfMemoryError where memory runs out, and whatever the probe raises.
    """
    opened = handles(config.models)
    key = request_key(probe, config, opened)
    with st.container():  # whatever is said in it, what is below stays where it is: an open form would close
        report = reopened.report(probe, config, opened) or results().get(key) or _run(key, probe, config, opened)
    return None if report is None else reopened.used(report)


def seconds(report: Report) -> float | None:
    """How long the computation of a report took; None if it was not computed here, or long ago."""
    return results().seconds(report)


def _run(key: str, probe: str, config: Any, opened: Sequence[Handle]) -> Report | None:
    """Wait for the models' turn, run and keep; while it takes long, a bar and a button that stops it."""
    if is_cancelled(key):
        offer_again("Cancelled: nothing was computed for this request.", "Run it")
        return None
    bar = Bar(key)
    with line().turn(opened, bar.waiting):
        report = results().get(key)  # another session may have asked for the same
        if report is None:
            with shortage.told(f"The probe {probe}", opened, config):
                report, took = running.compute(probe, opened, config, bar.progress)
            results().put(key, report, took)
    bar.clear()
    return report
