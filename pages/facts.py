"""Facts of users written into single rows: whether the model learns them, what else changes, and undoing by bits."""

from __future__ import annotations

from functools import partial

import streamlit as st

from engram_lab.lab.app import fact_users
from engram_lab.pages import facts_shown, facts_writing

PAGE = {
    "title": "Facts",
    "icon": "edit_note",
    "section": "Users",
    "place": 8,
    "asks": "Can a user's facts be written into single rows, and what else changes?",
}

CHECK = "Write and check"
SETS = {"Density": facts_shown.density, "Layers": facts_shown.layers, "Alternatives": facts_shown.alternatives}


def main() -> None:
    """Users, their table and how it is written; then the check of what is written, or a set."""
    st.title("Facts")
    st.markdown(
        "Write a user's facts into the few rows of the memory that each trigger addresses. Did the model learn them, "
        "what else changed, and does undoing give every bit back? The weights are never touched: rows are replaced as "
        "they are read."
    )
    handle = facts_writing.the_model()
    if handle is None:
        return
    user = facts_writing.the_user(handle)
    facts = facts_writing.the_table(user)
    writing = facts_writing.the_writing(handle, user)
    view: str = st.segmented_control(
        "View", [CHECK, *SETS], default=CHECK, required=True, label_visibility="collapsed", key="facts_view",
        bind="query-params",
    )  # fmt: skip
    if view in SETS:
        SETS[view](handle, facts, writing)
        return
    with st.container(horizontal=True, vertical_alignment="bottom"):
        config = facts_writing.check_request(handle, facts, writing)
        if st.button(f"Write {len(facts)} facts", key="write", type="primary", icon=":material/edit_note:"):
            facts_writing.begin(handle, user, config)
    facts_writing.what_was_undone()
    found = facts_writing.check(handle, user)
    if found is None:
        return
    report, own = found
    facts_writing.the_undo(handle, user, own)
    facts_writing.what_it_shows(own, config)
    drawn = facts_shown.learned(report) | facts_shown.changed(report)
    facts_shown.addresses(report)
    facts_shown.a_prompt(handle, user, own)
    facts_shown.finish(report, drawn, partial(fact_users.attachments, handle, user))


main()
