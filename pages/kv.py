"""The KV cache: what a prompt's keys and values remember, tried on the user's model and question."""

from __future__ import annotations

import streamlit as st

from engram_lab.pages import kv_edits, kv_runs, kv_scenario

PAGE = {
    "title": "KV cache",
    "icon": "layers",
    "section": "Cache",
    "place": 7,
    "asks": "What does a KV cache remember of a field: the field itself, or conclusions behind it?",
}

# With a scenario; the others have texts of their own, or take all scenarios.
ONE = {
    "Swap": kv_edits.swap,
    "Map": kv_edits.recovery_map,
    "Knock-out": kv_edits.knockout,
    "Erratum": kv_runs.erratum,
    "Reasoning": kv_runs.reasoning,
}
OTHERS = {"Compose": kv_runs.compose, "Whole library": kv_edits.library}


def main() -> None:
    """The experiment, its scenario, its settings and what it shows; only the chosen one is computed."""
    st.title("KV cache")
    st.markdown(
        "While a model reads a prompt, does it write down what follows from it? Change one field, give the stale cache "
        "only some keys and values of the new prompt, and see which of them bring the new answer. This is about one "
        "model, the first in the sidebar."
    )
    handle = kv_scenario.the_model()
    chosen: str = st.segmented_control(
        "Experiment", [*ONE, *OTHERS], default="Swap", required=True, label_visibility="collapsed", key="experiment",
        bind="query-params",
    )  # fmt: skip
    if chosen in ONE:
        ONE[chosen](kv_scenario.the_scenario(handle))
    else:
        OTHERS[chosen](handle)


main()
