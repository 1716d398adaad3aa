"""What the memory is needed for: loss on sets of texts with the memory intact, changed and off."""

from __future__ import annotations

import streamlit as st

from engram_lab.lab.app import asked, page, runner, uploads
from engram_lab.lab.ask import texts
from engram_lab.lab.draw import labels
from engram_lab.lab.fronts import reference, sensitivity
from engram_lab.lab.fronts.sensitivity import WORDS
from engram_lab.models.errors import DataError
from engram_lab.probes.sensitivity import SensitivityConfig, TextSet

PAGE = {
    "title": "What it is for",
    "icon": "query_stats",
    "section": "Memory",
    "place": 5,
    "asks": "Which texts need the memory: facts, or what can be read off the page?",
}


def main() -> None:
    """The sets and the controls, then the figure, one sentence and the table."""
    st.title("What the memory is for")
    st.markdown(
        "Take the memory away and see what breaks. The paper reports that facts do, far more than reading an answer "
        "out of the text before: does that hold for this model?"
    )
    left, right = st.columns([3, 2])
    with left:
        files = uploads.upload_many(
            'Your own sets: .jsonl with "prompt", "answer" and maybe "context", or whole texts, one on each line; '
            "without a file, the facts, reading questions and sentences that we wrote",
            "sets",
        )
    with right:
        seed, bootstrap = page.resampling()
    sets = tuple(TextSet(file.name.rpartition(".")[0], texts.items_of(file.data, file.name)) for file in files)
    sets = sets or texts.shipped_sets()
    names = tuple(own.name for own in sets)
    if len(set(names)) < len(names):
        raise DataError("Two of the files have the same name: give each set its own.")
    opened = runner.handles(runner.chosen_models())
    withs = [handle for handle in opened if handle.engram_layers]
    if not withs:
        st.info(
            f"{labels.markdown(opened[0].name)} has no memory to take away: choose one that has, such as engram-mini."
        )
        return
    words = asked.several(sensitivity.CONTROLS, list(WORDS), default=list(WORDS)[:1], as_picked=True)
    b, c = st.columns(2)
    layers = ["all", *map(str, withs[0].engram_layers), "each"]
    page.keep_within("at", layers, "all")
    at = b.selectbox("At memory layer", layers, key="at", bind="query-params")
    first = c.selectbox("Compare sets with", names, key="first_set")
    if not words:
        st.info("Pick at least one change of the memory.")
        return
    where = {"all": [""], "each": ["", *(f"@{layer}" for layer in withs[0].engram_layers)]}.get(at, [f"@{at}"])
    models = tuple(dict.fromkeys([withs[0].name, *(handle.name for handle in opened)]))
    config = SensitivityConfig(
        models=models,
        sets=tuple(sorted(sets, key=lambda own: own.name != first)),
        controls=tuple(WORDS[word] + end for word in words for end in where),
        seed=seed,
        bootstrap=bootstrap,
    )
    report = runner.run("sensitivity", config)
    if report is None:
        return
    st.markdown(f"**{labels.markdown(sensitivity.sentence(report))}**")
    drawn = sensitivity.figure(report, runner.mode())
    st.plotly_chart(drawn, theme=None, key="changes")
    page.how(report, *reference.shown(report.probe))
    st.dataframe(sensitivity.table(report), hide_index=True, height="content")
    page.exports(report, {"changes": drawn})


main()
