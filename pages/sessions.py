"""Kept runs: find them, see them, put every page back as it was, compare and share them."""

from __future__ import annotations

import streamlit as st

from engram_lab.pages import sessions_compare, sessions_list

PAGE = {
    "title": "Sessions",
    "icon": "bookmarks",
    "section": "Experiments",
    "place": 9,
    "models": False,
}


def main() -> None:
    """The list, the chosen session, the comparison."""
    st.title("Sessions")
    st.markdown(
        "Runs that were kept, with all it takes to see them again and to compute them again. Opening one puts its page "
        "back as it was, widgets and results."
    )
    sessions_list.importer()
    sessions_list.the_undo()
    found = sessions_list.search()
    chosen = sessions_list.the_list(found)
    sessions_list.the_bin()
    if chosen is not None:
        sessions_list.the_session(chosen)
        sessions_compare.comparison(chosen)


main()
