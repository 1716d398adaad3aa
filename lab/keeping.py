"""The button under every result: keep the run in a session, with a note and tags."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path

import streamlit as st

from lab import labels, reopened, runner
from models.errors import LabError
from probes.base import Report

SESSIONS = Path(__file__).resolve().parent.parent / "pages" / "sessions.py"


def keep(report: Report, attachments: Callable[[], Mapping[str, bytes]] | None = None) -> None:
    """A button that opens the form, and a word on where this very request was kept before."""
    kept = reopened.state().kept.get(reopened.request(report.probe, report.config))
    with st.container(horizontal=True, vertical_alignment="center"):
        with st.popover("Keep this run", icon=":material/bookmark_add:", width=220):
            _form(report, attachments)
        if kept is not None:
            st.caption(f":material/check: Kept in {labels.markdown(kept)}.")
            st.page_link(SESSIONS, label="Open sessions")


def _form(report: Report, attachments: Callable[[], Mapping[str, bytes]] | None) -> None:
    """Name, note and tags of the session that the run goes to."""
    names = reopened.store().names()
    suggested = st.session_state.get("keep_last") or f"Session of {date.today():%d %B %Y}"
    typed = st.session_state.get("keep_session") or suggested
    options = list(dict.fromkeys([suggested, typed, *names]))
    name = st.selectbox(
        "Session", options, key="keep_session", accept_new_options=True,
        help="Pick one, or type the name of a new one.",
    )  # fmt: skip
    name = (name or "").strip()
    known = reopened.store().session(name) if name in names else None
    note = st.text_area(
        "Note (Markdown)", known.note if known else "", key=f"keep_note.{name}",
        help="What you see, and why it is worth keeping: for the whole session.",
    )  # fmt: skip
    given = list(known.tags) if known else []
    offered = list(dict.fromkeys([*given, *st.session_state.get(f"keep_tags.{name}", [])]))
    tags = st.multiselect(
        "Tags", offered, given, key=f"keep_tags.{name}", accept_new_options=True, placeholder="Type one, then Enter"
    )
    if st.button("Keep", key="keep_go", type="primary", icon=":material/bookmark:", width="stretch"):
        try:
            _save(report, name, note, tags, {} if attachments is None else attachments())
        except LabError as error:
            st.error(labels.markdown(str(error)), icon=":material/error:")
            return
        st.rerun()


def _save(report: Report, name: str, note: str, tags: list[str], attachments: Mapping[str, bytes]) -> None:
    """Keep what the page shows: the report, and before it others that the page computed beside it."""
    view = reopened.capture().to_dict()
    others = {other.to_json(): other for other in reopened.state().shown if other is not report}
    for other in others.values():
        reopened.store().save(other, name, seconds=runner.seconds(other), view=view)
    reopened.store().save(
        report, name, note=note, tags=tags, seconds=runner.seconds(report), view=view, attachments=attachments
    )
    reopened.state().kept[reopened.request(report.probe, report.config)] = name
    st.session_state["keep_last"] = name
