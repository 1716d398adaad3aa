"""What the pages run on: open models, results that were had before, progress and cancelling.

Models and results are shared by all sessions: a handle holds its own lock, a report is never changed.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import streamlit as st

from lab import theme
from models import loading
from models.errors import LabError, UnknownModelError
from models.handle import Handle, list_models, open_model
from probes import PROBES, logit_lens
from probes.base import Record, Report
from probes.logit_lens import LensConfig

NOTHING = "nothing"  # the choice of no comparison model
KEPT_MODELS, KEPT_RESULTS = 3, 24
QUIET_SECONDS = 0.4  # what is done sooner shows no progress bar


def mode() -> theme.Mode:
    """Whether the browser shows the app light or dark."""
    return "dark" if st.context.theme.type == "dark" else "light"


def model_names() -> list[str]:
    """The models that are here: shipped ones first."""
    return [info.name for info in list_models()]


def default_pair(names: Sequence[str]) -> tuple[str | None, str]:
    """The model and the comparison that the app opens with: the shipped Engram and its dense twin."""
    model = "engram-mini" if "engram-mini" in names else next(iter(names), None)
    return model, "dense-mini" if "dense-mini" in names and model != "dense-mini" else NOTHING


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


@st.cache_resource(max_entries=KEPT_MODELS, on_release=Handle.close, show_spinner=False)
def _open(name: str, stamp: float) -> Handle:
    return open_model(name)


def stamp(name: str) -> float:
    """When the newest file of a local checkpoint was written, so that one trained further is opened anew."""
    for path in (loading.SHIPPED / name, Path(name).expanduser()):
        if path.is_file():
            return path.stat().st_mtime
        if path.is_dir():
            return max((file.stat().st_mtime for file in path.iterdir()), default=0.0)
    return 0.0


def handle(name: str) -> Handle:
    """The open model of a name; at most KEPT_MODELS stay open, the least recently used is closed."""
    return _open(name, stamp(name))


def handles(names: Sequence[str]) -> list[Handle]:
    """The open models of the names, with a word on the page where one has to be read first."""
    with st.spinner(f"Opening {' and '.join(dict.fromkeys(names))} …"):
        opened = {name: handle(name) for name in dict.fromkeys(names)}
        return [opened[name] for name in names]


class Results:
    """The last reports by request; safe across sessions."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Report] = OrderedDict()

    def get(self, key: str) -> Report | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def put(self, key: str, report: Report) -> None:
        with self._lock:
            self._kept[key] = report
            while len(self._kept) > self._size:
                self._kept.popitem(last=False)


@st.cache_resource(show_spinner=False)
def results() -> Results:
    """The one store of results of this process."""
    return Results(KEPT_RESULTS)


def request_key(probe: str, config: Record, opened: Sequence[Handle]) -> str:
    """One key for one request: the probe, its configuration, the weights and the number format they run in.

    A probe that reads more than that from disk says what by `depends(handles, config)`.
    """
    models = [(h.fingerprint, str(h.dtype), str(h.device)) for h in opened]
    depends = getattr(importlib.import_module(PROBES[probe]), "depends", None)
    more = depends(opened, config) if depends else []
    request = json.dumps([probe, config.to_dict(), models, more], sort_keys=True)
    return hashlib.sha256(request.encode()).hexdigest()


def run(probe: str, config: Any) -> Report | None:
    """The report of a request: from the store, or run now with progress; None if the user cancelled it."""
    opened = handles(config.models)
    key = request_key(probe, config, opened)
    report = results().get(key)
    if report is None:
        module = importlib.import_module(PROBES[probe])
        report = _run(key, lambda progress: module.run(opened, config, progress))
    return report


def _run(key: str, work: Callable[[Callable[[float, str], None]], Report]) -> Report | None:
    """Run and keep; while it takes long, a bar and a button that stops it.

    A click reruns the page, and Streamlit then ends this script at its next call, inside `progress`.
    """
    if st.session_state.get("cancelled") == key:
        st.info("Cancelled: nothing was computed for this request.", icon=":material/cancel:")
        st.button("Run it", key="run_again", on_click=_set_cancelled, args=(None,))
        return None
    slot = st.empty()
    began = time.monotonic()
    bar = None

    def progress(fraction: float, doing: str) -> None:
        nonlocal bar
        if bar is None and time.monotonic() - began > QUIET_SECONDS:
            left, right = slot.container().columns([6, 1], vertical_alignment="center")
            bar = left.progress(0.0)
            right.button("Cancel", key=f"cancel_{key}", on_click=_set_cancelled, args=(key,))
        if bar is not None:
            bar.progress(min(max(fraction, 0.0), 1.0), text=f"{doing} · {fraction:.0%}")

    report = work(progress)
    slot.empty()
    results().put(key, report)
    return report


def _set_cancelled(key: str | None) -> None:
    st.session_state["cancelled"] = key


def warm_up() -> None:
    """Import and open what the first page needs; a shipped model that cannot be opened is left to its page."""
    import lab.export
    import lab.figures  # noqa: F401

    names = model_names()
    for name in dict.fromkeys(default_pair(names)):
        if name in names:
            try:
                opened = handle(name)
                logit_lens.run([opened], LensConfig(models=(name,), prompts=("Good morning",)))
            except LabError:
                continue
