"""The gates of a memory: one prompt in detail with its controls, or the mean over a text set."""

from __future__ import annotations

import math

import plotly.graph_objects as go
import streamlit as st

from engram_lab.lab.app import asked, page, runner
from engram_lab.lab.ask import texts
from engram_lab.lab.fronts import gates as front
from engram_lab.lab.fronts import gates_figures, reference
from engram_lab.lab.fronts.gates import ALL_LAYERS, AS_IT_IS
from engram_lab.lab.fronts.gates_figures import CHANGED, CONTROL_NAMES, KNOCK_OUT
from engram_lab.models.errors import LabError
from engram_lab.models.handle import Handle
from engram_lab.probes.base import Report
from engram_lab.probes.gates import ControlRun, GatesConfig

PAGE = {
    "title": "Gates",
    "icon": "door_open",
    "section": "Memory",
    "place": 3,
    "asks": "At which tokens does the memory open, what comes through, and is anything lost without it?",
}


def main() -> None:
    """Mode, then its page."""
    st.title("Gates")
    st.markdown(
        "At which tokens does the memory open, how much comes through, what does it say, and is anything lost "
        "without it? An open gate on the wrong rows says nothing, so every chart has its controls."
    )
    page.one_or_set(one_prompt, text_set)


def with_memory() -> list[Handle]:
    """The chosen models that have a memory; LabError, with the way out, if none has."""
    opened = runner.handles(runner.chosen_models())
    found = [handle for handle in opened if handle.engram_layers]
    if not found:
        names = " nor ".join(handle.name for handle in opened)
        without = f"{names} has no" if len(opened) == 1 else f"Neither {names} has an"
        raise LabError(
            f"{without} Engram memory, so there are no gates: choose a model that has one in the sidebar, such as "
            "engram-mini."
        )
    return found


def which(found: list[Handle], container: st.delta_generator.DeltaGenerator) -> Handle:
    """The model shown: a choice where both have a memory."""
    names = [handle.name for handle in found]
    if len(names) == 1:
        return found[0]
    page.keep_within("of", names, names[0])
    return found[names.index(container.selectbox("Model shown", names, key="of", bind="query-params", width=230))]


def one_prompt() -> None:
    """The request, then the map, the coloured prompt, the controls, the attribution."""
    prompt = page.prompt_box(beside=lambda: asked.text(front.TARGET))
    found = with_memory()
    first = st.container(horizontal=True, vertical_alignment="bottom")
    handle = which(found, first)
    last = len(handle.encode(prompt)) - 1
    page.keep_within("pos", range(last + 1), last)
    position = first.number_input(
        "Position", 0, last, last, key="pos", bind="query-params", width=150, help="Where the target is read."
    )
    knock_out = asked.switch(front.KNOCK_OUTS, first, on_change=look_at_knock_outs)
    control = control_choice(handle)
    config = GatesConfig(
        models=(handle.name,),
        prompts=(prompt,),
        target=st.session_state["target"] or None,
        position=int(position) if knock_out else None,
        controls=(control,) if control else (),
        knock_out=knock_out,
        seed=int(st.session_state.get("seed", 0)) if control.startswith("shuffled") else 0,
    )
    report = runner.run("gates", config)
    if report is None:
        return
    run = report.result.controls[0] if control else None
    drawn = {"map": the_map(report, int(position), run)}
    if run is not None:
        drawn["lens"] = control_effects(report, run)
    drawn["attribution"] = gates_figures.attribution_bars(report, int(position), runner.mode())
    st.subheader("What came through, and what it says")
    st.plotly_chart(drawn["attribution"], theme=None, key="bars")
    page.how(report, *reference.shown(report.probe))
    page.exports(report, drawn)


def look_at_knock_outs() -> None:
    """Show the knock-outs that were just asked for."""
    st.session_state["shown"] = KNOCK_OUT if st.session_state["knock_out"] else gates_figures.GATE


def control_choice(handle: Handle) -> str:
    """The chosen control as the request has it, "" for none; its layer, and the seed of a shuffle."""
    row = st.container(horizontal=True, vertical_alignment="bottom")
    words = {AS_IT_IS: "", **{word: name for name, word in CONTROL_NAMES.items()}}
    chosen = row.segmented_control(
        "Control", list(words), default=AS_IT_IS, required=True, key="control", bind="query-params",
        help="The same prompt with the memory changed, beside the memory as it is.",
    )  # fmt: skip
    name = words[chosen]
    if not name:
        return ""
    layers = {ALL_LAYERS: "", **{f"layer {n}": f"@{n}" for n in handle.engram_layers}}
    page.keep_within("at", list(layers), ALL_LAYERS)
    at = row.segmented_control(
        "Acts at", list(layers), default=ALL_LAYERS, required=True, key="at", bind="query-params"
    )
    if name == "shuffled":
        asked.number(front.SHUFFLE_SEED, row, width=130, help="Of the shuffle.")
    return name + layers[at]


def clicked() -> None:
    """Take the position that was clicked on the map as the one to look at."""
    points = st.session_state["map"].selection.points
    if points:
        st.session_state["pos"] = int(points[0]["x"])


def the_map(report: Report, position: int, control: ControlRun | None) -> go.Figure:
    """Positions x (layer, branch), and the prompt on the same colours."""
    st.subheader("Token by token")
    result, mode = report.result, runner.mode()
    options = gates_figures.offered(report)
    row = st.container(horizontal=True, vertical_alignment="bottom")
    page.keep_within("shown", options, options[0])
    what = row.selectbox(
        "Shown", options, key="shown", bind="query-params", width=240,
        help="With knock-outs there are also the changes of the target's logit and log-probability.",
    )  # fmt: skip
    seen = page.map_window(row, len(gates_figures.tokens_of(report)))
    changed = control if what in CHANGED else None
    difference = changed is not None and row.toggle(
        "Difference", key="difference", bind="query-params", help="Control minus as it is, in place of both."
    )
    figure = gates_figures.gate_map(report, mode, what, seen, position, changed, difference)
    page.show_map(figure, clicked)
    note = "Click a cell to read the target there."
    if control is not changed:
        note += f" The control changes the {' and the '.join(CHANGED)}; this is the memory as it is."
    st.caption(note)
    layers = list(result.layers)
    page.keep_within("memory", layers, layers[0])
    layer = st.segmented_control(
        "The prompt, coloured by memory layer", layers, default=layers[0], required=True, key="memory",
        bind="query-params",
    )  # fmt: skip
    st.html(gates_figures.chips(report, what, layers.index(layer), mode))
    if changed is not None:
        st.caption(f"and with {gates_figures.control_name(changed.control)}:")
        st.html(gates_figures.chips(report, what, layers.index(layer), mode, changed))
    return figure


def control_effects(report: Report, control: ControlRun) -> go.Figure:
    """What the control does to the loss, the prediction, the order of the gates and the lens."""
    result, name = report.result, gates_figures.control_name(control.control)
    st.subheader(f"With {name}")
    row = st.container(horizontal=True)
    if control.mean_loss is not None:
        row.metric("Loss as it is, nats", f"{result.mean_loss:.3f}", width=165)
        row.metric(
            f"Loss, {name}", f"{control.mean_loss:.3f}", f"{control.mean_loss_change:+.3f}", "inverse", width=165
        )
    row.metric(
        "KL of the prediction, nats", f"{control.mean_final_kl:.3f}", width=165,
        help="KL(as it is ‖ control) of the next-token distributions, mean over positions.",
    )  # fmt: skip
    for layer, kept in zip(result.layers, control.rank_correlation.mean(axis=1), strict=True):
        row.metric(
            f"Gate's rank corr., layer {layer}", "constant" if math.isnan(kept) else f"{kept:.2f}", width=190,
            help="Spearman's, of the gate over positions with the control and without; 1 is the same order.",
        )  # fmt: skip
    curves = gates_figures.lens_curves(report, control, runner.mode())
    st.plotly_chart(curves, theme=None, key="curves")
    return curves


def text_set() -> None:
    """Gates over many texts: histogram, controls, n-grams with the highest and lowest gates."""
    lines = page.text_set(texts.held_out())
    seed, bootstrap = page.resampling()
    found = with_memory()
    row = st.container(horizontal=True, vertical_alignment="bottom")
    handle = which(found, row)
    places = ["", *(f"@{n}" for n in handle.engram_layers)]
    words = {gates_figures.control_name(name + at): name + at for at in places for name in CONTROL_NAMES}
    chosen = asked.listed(front.CONTROLS, list(words), row, as_picked=True, default=list(words)[:1], width=440)
    min_count = asked.number(front.MIN_COUNT, row, width=150)
    config = GatesConfig(
        models=(handle.name,),
        prompts=lines,
        controls=tuple(words[word] for word in chosen),
        seed=seed,
        bootstrap=bootstrap,
        min_count=min_count,
        detail=False,
    )
    report = runner.run("gates", config)
    if report is None:
        return
    figure = gates_figures.histogram(report, runner.mode())
    st.plotly_chart(figure, theme=None, key="histogram")
    st.subheader("With the memory changed")
    st.dataframe(gates_figures.control_rows(report), hide_index=True, key="control_rows")
    ranking(report, handle)
    page.how(report, *reference.shown(report.probe))
    page.exports(report, {"histogram": figure})


def ranking(report: Report, handle: Handle) -> None:
    """The n-grams at which a layer opens most and least."""
    st.subheader("Where it opens most, and least")
    row = st.container(horizontal=True)
    layers = list(report.result.layers)
    page.keep_within("memory", layers, layers[0])
    layer = row.segmented_control(
        "Memory layer", layers, default=layers[0], required=True, key="memory", bind="query-params"
    )
    orders = list(range(2, handle.model.config.engram_max_ngram_size + 1))
    page.keep_within("order", orders, orders[0])
    order = row.segmented_control(
        "N-grams of", orders, default=orders[0], required=True, key="order", bind="query-params",
        help="How many canonical tokens; the gate is one for all orders together.",
    )  # fmt: skip
    for column, title, highest in zip(
        st.columns(2), ("Highest mean gate", "Lowest mean gate"), (True, False), strict=True
    ):
        with column:
            st.markdown(f"**{title}**")
            rows = gates_figures.ngram_rows(report, layer, order, highest)
            if rows:
                st.dataframe(rows, hide_index=True, key=f"ngrams_{title[:4]}", column_config=NUMBERS)
            else:
                st.caption("No n-gram was found so often: lower the smallest count, or take more texts.")


NUMBERS = {
    "mean gate": st.column_config.NumberColumn(format="%.3f"),
    "mean written norm": st.column_config.NumberColumn(format="%.2f"),
}
main()
