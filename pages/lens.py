"""The logit lens and the tuned lens: one prompt in detail, or the mean over a text set."""

from __future__ import annotations

from functools import partial

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from engram_lab.lab.app import asked, page, runner
from engram_lab.lab.ask import texts
from engram_lab.lab.draw import labels
from engram_lab.lab.fronts import lens as front
from engram_lab.lab.fronts import lens_figures, reference
from engram_lab.models.handle import Handle
from engram_lab.probes.base import Report
from engram_lab.probes.lens import LensConfig, TunedReading
from engram_lab.probes.tuned_lens import find

PAGE = {
    "title": "Logit lens",
    "icon": "stacked_line_chart",
    "section": "Layers",
    "place": 1,
    "asks": "When does each model know what it is going to say? Raw, and through a lens tuned to each layer.",
}

# What the map's colours can show, in the words of the URL.
MEASURES: dict[str, lens_figures.Measure] = {
    "KL": "kl",
    "entropy": "entropy",
    "target probability": "target_prob",
    "target rank": "target_rank",
}
LENSES = ("logit lens", "tuned lens")


def main() -> None:
    """Mode, then its page."""
    st.title("Logit lens")
    st.markdown(
        "Read every layer as if it were the last: what would the model predict if it stopped there, "
        "and how far is that from what it says in the end? The tuned lens first carries each layer over into the "
        "basis of the last."
    )
    page.one_or_set(one_prompt, text_set)


def one_prompt() -> None:
    """The request, then curves, map, cell and settle depth of one prompt."""
    prompt = page.prompt_box(beside=target_and_top)
    names = runner.chosen_models()
    opened = runner.handles(names)
    page.show_tokens(opened, prompt)
    target, top_k = st.session_state["target"], int(st.session_state["top"])
    tuned = tuned_switch(opened)
    config = LensConfig(models=names, prompts=(prompt,), target=target or None, top_k=top_k, tuned=tuned)
    report = runner.run("lens", config)
    if report is None:
        return
    curves = show_curves(report, opened)
    layer, pos, shown = the_map(report, opened)
    cell(report, opened, layer, pos)
    st.plotly_chart(lens_figures.settle_histogram(report, runner.mode()), theme=None, key="settle")
    page.exports(report, {"curves": curves, "map": shown})


def tuned_switch(opened: list[Handle]) -> bool:
    """Whether the tuned lens is shown too; on by default where all of the models have translators."""
    missing = [handle.name for handle in opened if find(handle) is None]
    page.keep_within("tuned", [False] if missing else [False, True], False)
    tuned = asked.switch(front.TUNED, value=not missing, disabled=bool(missing))
    for name in missing:
        st.caption(
            f"No tuned lens has been fitted for {labels.markdown(name)}; fit it with "
            f"`engram-lab lens fit --model {name} --text FILE`."
        )
    return tuned


def target_and_top() -> None:
    """What is followed through the layers, and how much is listed for a cell."""
    a, b = st.columns([3, 2])
    asked.text(front.TARGET, a)
    asked.number(front.TOP, b)


def show_curves(report: Report, opened: list[Handle]) -> go.Figure:
    """The curves of both modes, with how they were computed."""
    curves = lens_figures.lens_curves(report, runner.mode(), {h.name: h.engram_layers for h in opened})
    st.plotly_chart(curves, theme=None, key="curves")
    for lens in report.result.models:
        if lens.tuned is not None:
            st.caption(fitted_on(lens.name, lens.tuned))
    page.how(report, *reference.shown(report.probe))
    return curves


def fitted_on(name: str, tuned: TunedReading) -> str:
    """What the translators of a model were fitted on, and whether that text is shown here."""
    fit, n = tuned.fit, tuned.prompts_in_fit
    held_out = f"{fit.logit_kl[1:].mean():.2f} to {fit.tuned_kl[1:].mean():.2f} nats"
    told = (
        f"Tuned lens of {name}: fitted on {fit.tokens:,} tokens of {', '.join(fit.texts)} in {fit.config.steps} "
        f"steps; mean KL of its blocks on held-out documents from {held_out}."
    )
    return labels.markdown(told + (f" {n} of the texts shown are lines of that text!" if n else ""))


def clicked(layer_names: tuple[str, ...]) -> None:
    """Take the cell that was clicked on the map as the one to inspect."""
    points = st.session_state["map"].selection.points
    if points:
        st.session_state["pos"] = int(points[0]["x"])
        st.session_state["layer"] = layer_names[int(points[0]["y"])]


def the_map(report: Report, opened: list[Handle]) -> tuple[int, int, go.Figure]:
    """The layer x position map with its controls; returns the chosen cell (layer, position) and the figure."""
    st.subheader("Layer by layer, position by position")
    names = [lens.name for lens in report.result.models]
    has_target = report.result.models[0].target_id is not None
    offered = [word for word, measure in MEASURES.items() if has_target or not measure.startswith("target")]
    controls = st.container(horizontal=True)  # wraps where the window is narrow
    page.keep_within("colour", offered, offered[0])
    word = controls.selectbox(
        "Colour", offered, key="colour", bind="query-params", width=190,
        help=None if has_target else "With a target token there are also its rank and its probability.",
    )  # fmt: skip
    measure = MEASURES[word]
    page.keep_within("of", names, names[0])
    shown = controls.selectbox("Model shown", names, key="of", bind="query-params", width=230)
    index = names.index(shown)
    lens = report.result.models[index]
    tuned = False
    if lens.tuned is not None:
        tuned = controls.selectbox("Lens", LENSES, key="lens", bind="query-params", width=130) == LENSES[1]
    tokens = lens_figures.prompt_tokens(report, index)
    seen = page.map_window(controls, len(tokens))
    layers = list(lens.layer_names)
    page.keep_within("layer", layers, layers[-1])
    layer = controls.selectbox("Layer", layers, len(layers) - 1, key="layer", bind="query-params", width=110)
    places = list(range(len(tokens)))
    page.keep_within("pos", places, places[-1])
    last = places[-1]
    pos = controls.number_input("Position", 0, last, last, key="pos", bind="query-params", width=150)
    figure = lens_figures.lens_map(
        report,
        index,
        page.namer(opened[index]),
        runner.mode(),
        measure,
        seen,
        (layers.index(layer), pos),
        tuned,
    )
    page.show_map(figure, partial(clicked, lens.layer_names))
    st.caption("Click a cell to inspect it below.")
    return layers.index(layer), pos, figure


def cell(report: Report, opened: list[Handle], layer: int, pos: int) -> None:
    """The chosen cell of each model, side by side where their positions match."""
    shown = st.session_state["of"]
    tuned = report.config.tuned and st.session_state["lens"] == LENSES[1]
    columns = st.columns(len(opened))
    for index, (column, lens, handle) in enumerate(zip(columns, report.result.models, opened, strict=True)):
        with column.container(border=True):
            at = pos if lens.name == shown else aligned(report, index, pos)
            if at is None:
                st.markdown(f"**{labels.markdown(lens.name)}**")
                st.caption("It has no position that ends at the same place in the text.")
                continue
            depth = min(layer, len(lens.layer_names) - 1)
            reading = lens.tuned if tuned else lens
            token = lens_figures.prompt_tokens(report, index)[at]
            st.markdown(
                f"**{labels.markdown(lens.name)}**, layer {lens.layer_names[depth]}, position {at} "
                f"({labels.markdown(token.label)}, id {token.id})"
            )
            line = f"{LENSES[tuned].capitalize()}: KL to the final **{reading.kl[depth][at]:.4f}** nats, "
            line += f"entropy **{reading.entropy[depth][at]:.4f}** nats; settles at layer "
            line += f"**{lens.layer_names[int(reading.settle_depth[at])]}**"
            if lens.target_id is not None:
                line += (
                    f"; the target (id {lens.target_id}) has rank **{int(reading.target_rank[depth][at])}**, "
                    f"probability **{reading.target_prob[depth][at]:.4f}**"
                )
            st.markdown(line)
            name_of = page.namer(handle)
            ids, probabilities = reading.top_ids[depth][at], reading.top_probs[depth][at]
            st.dataframe(
                pd.DataFrame(
                    {
                        "next token": [name_of(int(i)) for i in ids],
                        "probability": [float(p) for p in probabilities],
                        "bar": [float(p) for p in probabilities],
                        "id": [int(i) for i in ids],
                    }
                ),
                hide_index=True,
                column_config={
                    "probability": st.column_config.NumberColumn(format="%.4f", width=90),
                    # By itself: beside its number, a narrow column has no room for a bar.
                    "bar": st.column_config.ProgressColumn(
                        "", format=" ", min_value=0.0, max_value=1.0, width=90, color="primary"
                    ),
                },
            )


def aligned(report: Report, index: int, pos: int) -> int | None:
    """The position of model `index` that ends where `pos` of the other one does."""
    a, b = report.result.aligned.pos_a, report.result.aligned.pos_b
    here, there = (b, a) if index == 0 else (a, b)
    found = [int(t) for h, t in zip(here, there, strict=True) if int(h) == pos]
    return found[0] if found else None


def text_set() -> None:
    """Means with confidence bands over many texts: does one model settle earlier than the other?"""
    lines = page.text_set(texts.held_out())
    seed, bootstrap = page.resampling()
    names = runner.chosen_models()
    opened = runner.handles(names)
    config = LensConfig(
        models=names, prompts=lines, seed=seed, bootstrap=bootstrap, detail=False, tuned=tuned_switch(opened)
    )
    report = runner.run("lens", config)
    if report is None:
        return
    drawn = {"curves": show_curves(report, opened)}
    difference = report.result.difference
    if difference is not None and difference.mean_kl is not None:
        drawn["difference"] = lens_figures.difference_curve(report, runner.mode())
        st.plotly_chart(drawn["difference"], theme=None, key="difference")
    st.dataframe(lens_figures.summary(report), hide_index=True)
    st.plotly_chart(lens_figures.settle_histogram(report, runner.mode()), theme=None, key="settle")
    page.exports(report, drawn)


main()
