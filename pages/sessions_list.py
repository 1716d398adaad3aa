"""Pieces of the page of sessions: finding, showing, changing, sharing and comparing what was kept."""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from engram_lab.lab.app import imports, page, progress, reopened, runner
from engram_lab.lab.app.settings import settings
from engram_lab.lab.ask import texts
from engram_lab.lab.draw import labels
from engram_lab.lab.draw.durations import digits
from engram_lab.lab.fronts import FRONTS, export, front
from engram_lab.lab.sessions import RunInfo, SessionInfo, archive
from engram_lab.models.errors import LabError
from engram_lab.probes.base import Report

if TYPE_CHECKING:
    from engram_lab.models.handle import Handle

SHOWN = 12  # sessions at once
LARGEST_ARCHIVE = 64  # MB
PAGES = Path(__file__).resolve().parent.parent / "pages"
EXAMPLES = Path(__file__).resolve().parent.parent / "assets" / "sessions"
ANY = "any"


# --- Finding ---------------------------------------------------------------------------------------------------------


def search() -> list[SessionInfo]:
    """The sessions that fit what is typed and picked."""
    everything = reopened.store().sessions()
    with st.container(horizontal=True, vertical_alignment="bottom"):
        words = st.text_input(
            "Search", key="find", bind="query-params", placeholder="name, note, tag or prompt", width=320
        )
        probes = [ANY, *(name for name in FRONTS if any(run.probe == name for s in everything for run in s.runs))]
        models = [ANY, *sorted({m.name for s in everything for run in s.runs for m in run.models})]
        tags = [ANY, *sorted({tag for s in everything for tag in s.tags})]
        picked = []
        for label, key, offered in (("Probe", "probe", probes), ("With model", "by", models), ("Tag", "tag", tags)):
            page.keep_within(key, offered, ANY)
            picked.append(st.selectbox(label, offered, key=key, bind="query-params", width=180))
    probe, model, tag = (None if choice == ANY else choice for choice in picked)
    if not (words or probe or model or tag):
        return everything
    return reopened.store().sessions(words, probe=probe, model=model, tag=tag)


def ago(when: datetime, now: datetime | None = None) -> str:
    """How long ago, in a word or two; the date where it is more than a month."""
    seconds = ((now or datetime.now(UTC)) - when).total_seconds()
    for size, word in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= 31 * 86400:
            return f"{when:%d %b %Y}"
        if seconds >= size:
            n = int(seconds // size)
            return f"{n} {word}{'s' if n > 1 else ''} ago"
    return "just now"


def summary(session: SessionInfo) -> str:
    """A session in a line."""
    probes = ", ".join(dict.fromkeys(run.probe for run in session.runs))
    models = ", ".join(dict.fromkeys(model.name for run in session.runs for model in run.models))
    many = f"{len(session.runs)} run{'' if len(session.runs) == 1 else 's'}"
    parts = [many, probes, models, ago(session.updated)]
    tags = "".join(f" :gray-badge[{labels.markdown(tag)}]" for tag in session.tags)
    return " · ".join(labels.markdown(part) for part in parts if part) + tags


def choose(id: str) -> None:
    """Show this session."""
    st.session_state["session"] = id


def the_list(found: Sequence[SessionInfo]) -> SessionInfo | None:
    """The sessions, one in a row; the chosen one."""
    if not found:
        st.info(
            "No session fits. Every result has a button “Keep this run”; `--save NAME` keeps one from the command "
            "line, and below you can import what a colleague sent.",
            icon=":material/bookmarks:",
        )
        return None
    chosen = st.session_state.get("session", st.query_params.get("session"))
    many = int(st.session_state.get("many", SHOWN))
    for session in found[:many]:
        with st.container(horizontal=True, vertical_alignment="center", key=f"row_{session.id}"):
            st.button(
                labels.markdown(session.name), key=f"choose_{session.id}", on_click=choose, args=(session.id,),
                type="primary" if session.id == chosen else "secondary", width=320,
            )  # fmt: skip
            st.markdown(f":small[{summary(session)}]")
    if len(found) > many:
        more = min(SHOWN, len(found) - many)
        st.button(f"Show {more} more of {len(found)}", key="more", on_click=_more, args=("many", many))
    return next((session for session in found if session.id == chosen), None)


def _more(what: str, many: int) -> None:
    st.session_state[what] = many + SHOWN


# --- One session -----------------------------------------------------------------------------------------------------


def safe_note(note: str) -> str:
    """A note as Markdown that asks no other server for anything: pictures become links."""
    return re.sub(r"!(?=\[)", r"\!", note)


def the_session(session: SessionInfo) -> None:
    """Name, note, what can be done with it, and its runs."""
    st.header(labels.markdown(session.name), anchor=False)
    if session.tags:
        st.markdown(" ".join(f":gray-badge[{labels.markdown(tag)}]" for tag in session.tags))
    if session.note:
        st.markdown(safe_note(session.note))
    with st.container(horizontal=True, vertical_alignment="bottom"):
        last = next((run for run in reversed(session.runs) if run.view is not None), None)
        if st.button(
            "Open its pages", key="open_session", type="primary", icon=":material/open_in_new:", disabled=last is None,
            help="Puts the pages of all its runs back as they were, and goes to the last one; nothing is computed.",
        ) and last is not None:  # fmt: skip
            go_to(session, last)
        with st.popover("Edit", icon=":material/edit:"):
            edit(session)
        st.button(
            "Duplicate", key="duplicate", icon=":material/content_copy:", on_click=_duplicate, args=(session,),
            help="A session of its own with the same runs.",
        )  # fmt: skip
        st.download_button(
            "Export", partial(exported, session.id), f"{file_name(session.name)}.zip",
            "application/zip", key="export", on_click="ignore", icon=":material/download:",
            help="All runs in one file, for import here or `engram-lab replay FILE`.",
        )  # fmt: skip
        st.download_button(
            "HTML report", partial(html_of, session.id),
            f"{file_name(session.name)}.html", "text/html", key="html", on_click="ignore",
            icon=":material/html:", help="One page with the interactive figures, which opens without a server.",
        )  # fmt: skip
        st.button("Delete", key="delete", icon=":material/delete:", on_click=_delete, args=(session,))
    many = int(st.session_state.get("many_runs", SHOWN))
    for n, run in enumerate(session.runs[:many], 1):
        the_run(session, n, run)
    if len(session.runs) > many:
        left = len(session.runs) - many
        st.button(f"Show {min(SHOWN, left)} more of {len(session.runs)} runs", key="more_runs", on_click=_more,
                  args=("many_runs", many))  # fmt: skip
    if not session.runs:
        st.info("It has no runs left.")


def exported(id: str) -> bytes:
    """A session as a .zip."""
    out = io.BytesIO()
    archive.export_session(reopened.store(), id, out)
    return out.getvalue()


def html_of(id: str) -> str:
    """A session as one page; tokens are named by those of its models that are here. Called outside of the script."""
    imports.wait()
    from engram_lab.lab.sessions import report as report_html

    session, models = reopened.store().session(id), runner.open_models_here()
    names = {model.name for run in session.runs for model in run.models} & set(runner.model_names())
    try:
        leased = models.lease(sorted(names)[: settings().models])
    except LabError:  # all places are taken: then tokens are shown by their ids
        leased = []
    try:
        return report_html.html_report(reopened.store(), id, leased)
    finally:
        models.release(leased)


def file_name(name: str) -> str:
    """A session's name as one of a file."""
    return re.sub(r"[^\w-]+", "-", name).strip("-").lower() or "session"


def edit(session: SessionInfo) -> None:
    """Name, note and tags."""
    name = st.text_input("Name", session.name, key=f"edit_name.{session.id}")
    note = st.text_area("Note (Markdown)", session.note, key=f"edit_note.{session.id}", height=180)
    offered = list(dict.fromkeys([*session.tags, *st.session_state.get(f"edit_tags.{session.id}", [])]))
    tags = st.multiselect(
        "Tags",
        offered,
        list(session.tags),
        key=f"edit_tags.{session.id}",
        accept_new_options=True,
        placeholder="Type one, then Enter",
    )
    if st.button("Save", key="edit_go", type="primary", width="stretch"):
        try:
            if name.strip() != session.name:
                reopened.store().rename(session.id, name)
            reopened.store().annotate(session.id, note=note, tags=tags)
        except LabError as error:
            st.error(labels.markdown(str(error)), icon=":material/error:")
            return
        st.rerun()


def _duplicate(session: SessionInfo) -> None:
    taken = set(reopened.store().names())
    name = next(name for n in range(2, 10**6) if (name := f"{session.name[:110]} ({n})") not in taken)
    choose(reopened.store().duplicate(session.id, name).id)


def _delete(session: SessionInfo) -> None:
    reopened.store().delete(session.id)
    st.session_state["deleted"] = (session.id, session.name)


def _undelete(id: str) -> None:
    reopened.store().undelete(id)
    st.session_state.pop("deleted", None)
    choose(id)


def _delete_run(run: RunInfo) -> None:
    reopened.store().delete_run(run.id)
    st.session_state["deleted_run"] = (run.id, run.probe)


def _undelete_run(id: str) -> None:
    reopened.store().undelete_run(id)
    st.session_state.pop("deleted_run", None)


def _purge() -> None:
    purged = reopened.store().purge()
    for key in ("deleted", "deleted_run"):
        st.session_state.pop(key, None)
    st.toast(f"{purged.freed / 1e6:.3g} MB are free again.")


def the_undo() -> None:
    """What was deleted last, with the way back."""
    for key, what, call in (
        ("deleted", "The session {} was deleted.", _undelete),
        ("deleted_run", "The run of {} was deleted.", _undelete_run),
    ):
        gone = st.session_state.get(key)
        if gone is not None:
            with st.container(horizontal=True, vertical_alignment="center"):
                st.info(labels.markdown(what.format(gone[1])), icon=":material/delete:", width=480)
                st.button("Undo", key=f"undo_{key}", icon=":material/undo:", on_click=call, args=(gone[0],))


def the_bin() -> None:
    """All deleted sessions, with the way back."""
    gone = reopened.store().sessions(deleted=True)
    if not gone:
        return
    with st.expander(f"Deleted sessions ({len(gone)})"):
        for session in gone[:SHOWN]:
            with st.container(horizontal=True, vertical_alignment="center"):
                st.button("Restore", key=f"restore_{session.id}", on_click=_undelete, args=(session.id,))
                st.markdown(f"{labels.markdown(session.name)} :small[{summary(session)}]")
        st.caption(
            "They keep their space on the disk until they are removed for good, deleted runs of other sessions too."
        )
        with st.popover("Remove for good", icon=":material/delete_forever:"):
            st.markdown("They cannot be brought back then.")
            st.button("Remove them", key="purge", on_click=_purge)


def go_to(session: SessionInfo, run: RunInfo) -> None:
    """Put the pages back and leave for that of `run`."""
    name = reopened.open_runs(session.name, session.runs, run)
    st.switch_page(PAGES / f"{name}.py")


def the_run(session: SessionInfo, n: int, run: RunInfo) -> None:
    """One run in a row; its figure if it is asked for."""
    models = " and ".join(model.name for model in run.models)
    took = "" if run.seconds is None else f" · {digits(run.seconds)} s"
    with st.container(border=True):
        with st.container(horizontal=True, vertical_alignment="center"):
            told = f"{models} · {run.created:%d %b %Y, %H:%M} UTC{took}"
            head = f"**{n} · {labels.markdown(run.probe)}** {labels.markdown(about(run))}"
            st.markdown(f"{head}  \n:small[{labels.markdown(told)}]", width="stretch")
            shown = st.toggle("Show", key=f"show_{run.id}")
            if st.button(
                "Open", key=f"open_{run.id}", icon=":material/open_in_new:", disabled=run.view is None,
                help="On its page, as it was." if run.view else "It was kept without a page: show it here.",
            ):  # fmt: skip
                go_to(session, run)
            st.button("", key=f"delete_{run.id}", icon=":material/delete:", help="Delete this run",
                      on_click=_delete_run, args=(run,))  # fmt: skip
        if shown:
            report = reopened.kept_report(run)
            st.plotly_chart(figure(report), theme=None, key=f"figure_{run.id}", config={"displayModeBar": False})
            protocol(run)
            st.code(export.command_line(report.probe, report.config), language="bash")


def about(run: RunInfo) -> str:
    """What a run was asked, as far as its page tells in a few words."""
    view = reopened.view_of(run)
    widgets = {} if view is None else view.widgets
    words = widgets.get("scenario") or widgets.get("prompt") or widgets.get("facts_user") or ""
    if widgets.get("mode") == texts.SET:
        words = f"{widgets.get('texts', '')} texts".strip()
    return short(str(words), 60)


def short(value: object, most: int = 200) -> str:
    """A value of a request in one line."""
    text = str(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def protocol(run: RunInfo) -> None:
    """With what the run was made."""
    st.dataframe(pd.DataFrame([model.to_dict() for model in run.models]), hide_index=True)
    told = {**run.versions, **run.environment}
    st.caption(labels.markdown(f"seed {run.seed}; " + ", ".join(f"{key} {value}" for key, value in told.items())))


def figure(report: Report) -> go.Figure:
    """The main figure of a kept report, with what its models add if they are here."""
    drawn: go.Figure = front(report.probe).figure(report, runner.mode(), handles_of(report))
    return drawn


def handles_of(report: Report) -> list[Handle]:
    """The models of a report, or none if one of them is not here: a session from elsewhere may name anything."""
    names = [model.name for model in report.protocol.models]
    if not set(names) <= set(runner.model_names()):
        return []
    try:
        return runner.handles(names)
    except LabError:
        return []


# --- Bringing in -----------------------------------------------------------------------------------------------------


def importer() -> None:
    """The upload of a session that somebody sent, and the examples that ship."""
    with st.expander("Import a session, or open an example"):
        file = st.file_uploader(
            "A .zip that the lab exported", type="zip", key="archive", max_upload_size=LARGEST_ARCHIVE
        )
        if file is not None and st.session_state.get("imported") != file.file_id:
            session = bring_in(file.getvalue())
            st.session_state["imported"] = file.file_id
            choose(session.id)
            st.rerun()
        for path in examples():
            st.button(
                f"Example: {example(path)[0]}", key=f"example_{path.stem}", icon=":material/school:",
                on_click=take_example, args=(path,),
            )  # fmt: skip


def bring_in(data: bytes) -> SessionInfo:
    """Import a session, whose reports are checked by the classes of their probes."""
    progress.wait_for_imports()
    return archive.import_session(reopened.store(), data)


def examples() -> list[Path]:
    """The sessions that ship, the one to begin with first."""
    return sorted(EXAMPLES.glob("*.zip"), reverse=True)


@st.cache_data(show_spinner=False)
def example(path: Path) -> tuple[str, str]:
    """(name, first sentence of the note) of a shipped session."""
    with zipfile.ZipFile(path) as file:  # one of ours: its reports are checked when it is opened
        manifest = json.loads(file.read(archive.MANIFEST))
    note = re.sub(r"[*_`#]", "", manifest["note"]).strip()
    return manifest["name"], re.split(r"(?<=[.?!])\s", note, maxsplit=1)[0]


def take_example(path: Path) -> None:
    """Choose a shipped session, which is imported if it is not here yet."""
    name = example(path)[0]
    known = next((session for session in reopened.store().sessions() if session.name == name), None)
    choose((known or bring_in(path.read_bytes())).id)
