"""The button under every result: keep the run in a session, with a note and tags."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path

import streamlit as st

from engram_lab.lab.app import reopened, runner
from engram_lab.lab.draw import labels
from engram_lab.models.errors import LabError
from engram_lab.probes.base import Report

SESSIONS = Path(__file__).resolve().parents[2] / "pages" / "sessions.py"


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
        "Session", options, key="keep_session", accept_new_options=True, on_change=_show_what_it_has,
        help="Pick one, or type the name of a new one.",
    )  # fmt: skip
    name = (name or "").strip()
    if "keep_note" not in st.session_state:
        _show_what_it_has()
    note = st.text_area(
        "Note (Markdown)", key="keep_note", help="What you see, and why it is worth keeping: for the whole session."
    )
    tags = st.multiselect(
        "Tags", st.session_state["keep_tags"], key="keep_tags", accept_new_options=True,
        placeholder="Type one, then Enter",
    )  # fmt: skip
    if st.button("Keep", key="keep_go", type="primary", icon=":material/bookmark:", width="stretch"):
        try:
            _save(report, name, note, tags, {} if attachments is None else attachments())
            st.session_state["keep_had"] = (note, tags)
        except LabError as error:
            st.error(labels.markdown(str(error)), icon=":material/error:")
            return
        st.rerun()


def _show_what_it_has() -> None:
    """The note and tags of the chosen session; for a new one what was typed already stays."""
    name = (st.session_state.get("keep_session") or "").strip()
    known = reopened.store().session(name) if name in reopened.store().names() else None
    has = (known.note, list(known.tags)) if known else ("", [])
    for key, before, now in zip(
        ("keep_note", "keep_tags"), st.session_state.get("keep_had", ("", [])), has, strict=True
    ):
        if known is not None or st.session_state.get(key, before) == before:
            st.session_state[key] = now
    st.session_state["keep_had"] = has


def _save(report: Report, name: str, note: str, tags: list[str], attachments: Mapping[str, bytes]) -> None:
    """Keep what the page shows: the report, and before it others that the page computed beside it.

    A note or tags that nobody touched here stay as they are by now: they may have been changed elsewhere.
    """
    view, had = reopened.capture().to_dict(), st.session_state["keep_had"]
    others = {other.to_json(): other for other in reopened.state().shown if other is not report}
    for other in others.values():
        reopened.store().save(other, name, seconds=runner.seconds(other), view=view)
    reopened.store().save(
        report,
        name,
        note=None if note == had[0] else note,
        tags=None if tags == had[1] else tags,
        seconds=runner.seconds(report),
        view=view,
        attachments=attachments,
    )
    reopened.state().kept[reopened.request(report.probe, report.config)] = name
    st.session_state["keep_last"] = name
