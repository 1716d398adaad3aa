"""Facts of users written into single rows: whether the model learns them, what else changes, and undoing by bits."""

from __future__ import annotations

from functools import partial

import streamlit as st

from engram_lab.lab import facts_page, facts_users, facts_views

CHECK = "Write and check"
SETS = {"Density": facts_views.density, "Layers": facts_views.layers, "Alternatives": facts_views.alternatives}


def main() -> None:
    """Users, their table and how it is written; then the check of what is written, or a set."""
    st.title("Facts")
    st.markdown(
        "Write a user's facts into the few rows of the memory that each trigger addresses. Did the model learn them, "
        "what else changed, and does undoing give every bit back? The weights are never touched: rows are replaced as "
        "they are read."
    )
    handle = facts_page.the_model()
    if handle is None:
        return
    user = facts_page.the_user(handle)
    facts = facts_page.the_table(user)
    writing = facts_page.the_writing(handle, user)
    view: str = st.segmented_control(
        "View", [CHECK, *SETS], default=CHECK, required=True, label_visibility="collapsed", key="facts_view",
        bind="query-params",
    )  # fmt: skip
    if view in SETS:
        SETS[view](handle, facts, writing)
        return
    with st.container(horizontal=True, vertical_alignment="bottom"):
        config = facts_page.check_request(handle, facts, writing)
        if st.button(f"Write {len(facts)} facts", key="write", type="primary", icon=":material/edit_note:"):
            facts_page.begin(handle, user, config)
    facts_page.what_was_undone()
    found = facts_page.check(handle, user)
    if found is None:
        return
    report, own = found
    facts_page.the_undo(handle, user, own)
    facts_page.what_it_shows(own, config)
    drawn = facts_views.learned(report) | facts_views.changed(report)
    facts_views.addresses(report)
    facts_views.a_prompt(handle, user, own)
    facts_views.finish(report, drawn, partial(facts_users.attachments, handle, user))


main()
