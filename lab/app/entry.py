"""The entry of the app: navigation, the models that all pages share, and one clear sentence for what fails."""

from __future__ import annotations

import traceback
from typing import Any

import streamlit as st

from engram_lab.lab.app import catalogue, progress, reopened, runner
from engram_lab.lab.draw import labels, theme
from engram_lab.models.errors import LabError

# Drawn here: an icon by name would be fetched from another server.
ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" rx="7" fill="#0B6377"/>'
    '<g fill="none" stroke="#FBFAF7" stroke-width="2.6"><path d="M7 9h18M7 16h18M7 23h18"/></g>'
    '<circle cx="21" cy="16" r="4.4" fill="#E69F00"/></svg>'
)
START = "start"  # the page at the root


def pick_models() -> None:
    """The model and what it is compared with; both are in the URL and the same on all pages."""
    names = runner.model_names()
    default, against = runner.default_pair(names)
    model = st.selectbox(
        "Model",
        names,
        index=names.index(default) if default else None,
        accept_new_options=True,
        placeholder="Pick or type one",
        help="Pick one, or type the path of a local folder or .gguf file, or the id of a model on the hub.",
        key="model",
        bind="query-params",
    )
    if model == against:  # a link that names the model alone is about it alone
        against = runner.NOTHING
    st.selectbox(
        "Compared with",
        [runner.NOTHING, *names],
        index=[runner.NOTHING, *names].index(against),
        accept_new_options=True,
        help="A second model that gets the same prompt. Its tokens may differ: positions are matched by text.",
        key="against",
        bind="query-params",
    )
    st.caption("Or type a local folder, a hub id or a .gguf file.")


sections: dict[str, list[Any]] = {}
for page in catalogue.pages():
    sections.setdefault(page.section, []).append(
        st.Page(
            page.file, title=page.title, icon=f":material/{page.icon}:", url_path=page.name, default=page.name == START
        )
    )
navigation = st.navigation(sections)
shown = next(page for page in catalogue.pages() if page.name == (navigation.url_path or START))
title = "Engram Lab" if shown.name == START else f"{shown.title} · Engram Lab"
st.set_page_config(page_title=title, page_icon=ICON, layout="wide")
reopened.begin(shown.name)  # before any widget
st.html(theme.css(runner.mode()))
with st.sidebar:
    pick_models()
if reopened.state().said:
    st.warning(reopened.state().said, icon=":material/bookmark:")
    reopened.state().said = ""
try:
    if shown.models:
        progress.wait_for_imports()
    with runner.script():
        navigation.run()
except LabError as error:
    st.error(labels.markdown(str(error)), icon=":material/error:")
except Exception as error:
    if reopened.take_back():
        st.rerun()
    st.error(
        "The lab itself failed here, which it should not: change the request, or report what is below.",
        icon=":material/bug_report:",
    )
    with st.expander(f"Details: {type(error).__name__}"):
        st.code(traceback.format_exc(), language="text")
