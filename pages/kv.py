"""The KV cache: what a prompt's keys and values remember, tried on the user's model and question."""

from __future__ import annotations

import streamlit as st

from engram_lab.lab import kv_experiments, kv_page, kv_run_experiments

# With a scenario; the others have texts of their own, or take all scenarios.
ONE = {
    "Swap": kv_experiments.swap,
    "Map": kv_experiments.recovery_map,
    "Knock-out": kv_experiments.knockout,
    "Erratum": kv_run_experiments.erratum,
    "Reasoning": kv_run_experiments.reasoning,
}
OTHERS = {"Compose": kv_run_experiments.compose, "Whole library": kv_experiments.library}


def main() -> None:
    """The experiment, its scenario, its settings and what it shows; only the chosen one is computed."""
    st.title("KV cache")
    st.markdown(
        "While a model reads a prompt, does it write down what follows from it? Change one field, give the stale cache "
        "only some keys and values of the new prompt, and see which of them bring the new answer. This is about one "
        "model, the first in the sidebar."
    )
    handle = kv_page.the_model()
    chosen: str = st.segmented_control(
        "Experiment", [*ONE, *OTHERS], default="Swap", required=True, label_visibility="collapsed", key="experiment",
        bind="query-params",
    )  # fmt: skip
    if chosen in ONE:
        ONE[chosen](kv_page.the_scenario(handle))
    else:
        OTHERS[chosen](handle)


main()
