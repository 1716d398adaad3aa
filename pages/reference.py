"""What each probe asks, how it is computed, from which paper, and what it does not show."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from engram_lab.lab.app import page
from engram_lab.lab.fronts import FRONTS, reference
from engram_lab.lab.fronts import entry as reference_entry

PAGE = {
    "title": "Reference",
    "icon": "menu_book",
    "section": "Help",
    "place": 10,
    "models": False,
}


def main() -> None:
    """A probe, and all that is to be known of it."""
    st.title("Reference")
    st.markdown(
        "Every probe with its formula, its sources, its controls, and what it does not show. The same formula stands "
        "under its charts."
    )
    page.keep_within("about", list(FRONTS), next(iter(FRONTS)))
    probe = st.selectbox("Probe", list(FRONTS), key="about", bind="query-params", width=320)
    entry = reference.entry(probe)
    st.header(entry.asks)
    st.page_link(Path(__file__).with_name(f"{entry.page}.py"), label="Ask it", icon=":material/arrow_forward:")
    the_formula(probe)
    st.subheader("Controls")
    st.markdown(entry.controls)
    st.subheader("What it does not show")
    st.markdown(f"It does not show {entry.not_shown}")
    st.subheader("Sources")
    st.markdown("\n".join(f"- {source}" for source in entry.sources))
    st.subheader("On the command line")
    st.code(reference.command(probe), language="bash", wrap_lines=True)
    with st.expander("All options"):
        st.code(reference.usage(probe), language="text")


def the_formula(probe: str) -> None:
    """The formula as under the charts, its symbols, and what each figure of a result is."""
    entry = reference.entry(probe)
    st.subheader("Formula")
    st.latex(reference_entry.rows(entry.formula))
    rows = [f"| ${symbol}$ | {what} | {unit} |" for symbol, what, unit in entry.symbols]
    st.markdown("\n".join(["| symbol | what it is | unit or range |", "| --- | --- | --- |", *rows]))
    if entry.meaning:
        st.markdown(entry.meaning)
    with st.expander("Every figure of a result", expanded=not entry.meaning):
        st.markdown(reference.defined(probe))


main()
