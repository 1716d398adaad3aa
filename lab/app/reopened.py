"""Kept runs in a browser session: the view of a page that is kept, and pages that stand as they were kept.

A reopened run is shown from the store: nothing is computed, until the user changes the request or asks for it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import streamlit as st

from engram_lab.lab.app import progress, streamlit_internals
from engram_lab.lab.ask.view import View, may_be_set
from engram_lab.lab.draw import labels
from engram_lab.lab.fronts import FRONTS, front, settled
from engram_lab.models.errors import LabError
from engram_lab.probes.base import Record, Report

if TYPE_CHECKING:
    from engram_lab.lab.sessions import RunInfo, Store
    from engram_lab.models.handle import Handle

_STATE = "_reopened"
OVERLAY = "overlay"  # the attachment of a check of facts: see facts_users.attachments
_OURS = "keep_"  # keys of the widgets that keep a run, which are no part of the page's view


@dataclass
class Pinned:
    """A kept report that stands in for a computation."""

    session: str
    run: RunInfo
    report: Report


@dataclass
class State:
    """What this browser session has reopened, and what the present run of the script has shown."""

    page: str = ""
    views: dict[str, View] = field(default_factory=dict)  # page -> what is to be put back when it is entered
    pinned: dict[str, Pinned] = field(default_factory=dict)  # request -> report
    facts: list[tuple[Any, bytes | None]] = field(default_factory=list)  # (request, overlay): fact_users.take_up
    shown: list[Report] = field(default_factory=list)
    files: dict[str, tuple[str, bytes]] = field(default_factory=dict)  # that the page reads, by uploader
    kept: dict[str, str] = field(default_factory=dict)  # request -> the session that it went to
    put_back: list[str] = field(default_factory=list)  # keys that this run of the script began with
    said: str = ""


@st.cache_resource(show_spinner=False)
def store() -> Store:
    """The one store of this process."""
    from engram_lab.lab.sessions import open_store  # only what keeps or reopens a run waits for the database's library

    return open_store()


def state() -> State:
    """Of this browser session."""
    found: State = st.session_state.setdefault(_STATE, State())
    return found


def request(probe: str, config: Record) -> str:
    """One text for one request, whatever the model behind a name is."""
    return json.dumps([probe, config.to_dict()], sort_keys=True)


def begin(page: str) -> None:
    """At the start of the script: put back the view of a page that is entered for the first time since."""
    own = state()
    own.page, own.shown, own.files, own.put_back = page, [], {}, []
    view = own.views.pop(page, None)
    if view is not None:
        own.put_back = [*view.widgets, *(f"kept.{key}" for key in view.files)]
        asks = (front(probe).ASK for probe in FRONTS)
        uploaders = {f"kept.{key}." for ask in asks if ask.page == page for part in ask.parts for key in part.uploads}
        for key in [key for key in st.session_state if f"{key}.".startswith(tuple(uploaders))]:
            del st.session_state[key]  # the page has the files of its view and no others
        st.session_state.update({f"kept.{key}": file for key, file in view.files.items()})  # see uploads.upload
        st.session_state.update(view.widgets)


def take_back() -> bool:
    """After a failure: whether this run of the script began with a view, which is dropped then."""
    own = state()
    for key in own.put_back:
        st.session_state.pop(key, None)
    if own.put_back:
        own.said = "The page could not be put back as it was kept, so that it stands as it opens."
    return bool(own.put_back)


def used(report: Report) -> Report:
    """Note that the page shows this report."""
    state().shown.append(report)
    return report


def capture() -> View:
    """The page as it stands: the values of all its widgets that can be set again, and its files."""
    widgets: dict[str, Any] = {}
    for key, value in streamlit_internals.settable_values().items():
        value = list(value) if isinstance(value, tuple) else value
        if not key.startswith(_OURS) and may_be_set(key, value):
            widgets[key] = value
    return View(state().page, widgets, dict(state().files))


def open_runs(session: str, runs: Sequence[RunInfo], first: RunInfo) -> str:
    """Make every page stand as its last run was kept, that of `first` as it was; returns the page to go to.

    Raises LabError where no run has a page, or one cannot be read.
    """
    own = state()
    chosen: dict[str, RunInfo] = {}
    for run in [*runs, first]:
        view = view_of(run)
        if view is not None:
            chosen[view.page] = run
    page = view_of(first)
    if page is None:
        raise LabError(
            f"The run {first.probe} of {session} was kept without a page: it can be shown and replayed here."
        )
    for name, run in chosen.items():
        view = view_of(run)
        assert view is not None
        own.views[name] = view
        for other in runs:  # what was shown beside it on the same page
            if other.id == run.id or (other.view is not None and other.view == run.view):
                _pin(session, other)
    return page.page


def _pin(session: str, run: RunInfo) -> None:
    """Let the report of a run stand for its request, also in the words of its page."""
    report = kept_report(run)
    own, asked = state(), settled(report)
    pinned = Pinned(session, run, report)
    own.pinned |= {request(run.probe, config): pinned for config in (report.config, asked)}
    if run.probe.startswith("facts "):
        overlay = store().attachment(run.id, OVERLAY) if OVERLAY in run.attachments else None
        own.facts.append((asked, overlay))


def kept_report(run: RunInfo) -> Report:
    """The report of a kept run, whose classes are those of its probe."""
    progress.wait_for_imports()
    return store().report(run.id)


def view_of(run: RunInfo) -> View | None:
    """The page of a kept run, if it has one."""
    return None if run.view is None else View.from_dict(run.view)


def report(probe: str, config: Record, opened: Sequence[Handle]) -> Report | None:
    """The kept report of a request, with a word on where it comes from; None if there is none.

    `opened` are the models of the request as they are here, which may have changed since.
    """
    key = request(probe, config)
    found = state().pinned.get(key)
    if found is None:
        return None
    when = f"{found.run.created:%d %b %Y, %H:%M} UTC"
    told = f"Shown as it was kept in “{found.session}” on {when}; nothing was computed."
    changed = [
        handle.name
        for handle, then in zip(opened, found.report.protocol.models, strict=False)
        if handle.fingerprint != then.fingerprint
    ]
    if changed:
        told += f" The weights of {' and '.join(dict.fromkeys(changed))} have changed since."
    with st.container(horizontal=True, vertical_alignment="center"):
        (st.warning if changed else st.info)(labels.markdown(told), icon=":material/bookmark:", width="stretch")
        st.button("Compute anew", key=f"anew_{found.run.id}", on_click=forget, args=(key,), width=150)
    return found.report


def forget(key: str) -> None:
    """Compute this request anew from now on."""
    state().pinned.pop(key, None)
