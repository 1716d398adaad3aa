"""CKA: which layer of one model looks like which layer of the other, and whether the Engram is deeper for it."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from engram_lab.lab.app import page, runner, uploads
from engram_lab.lab.draw import labels
from engram_lab.lab.draw.figure import narrow
from engram_lab.lab.fronts import cka_figures, lens_figures, reference
from engram_lab.lab.fronts.cka import KINDS, shipped
from engram_lab.models.errors import LabError
from engram_lab.probes.base import Report
from engram_lab.probes.cka import CKAConfig, looks_like
from engram_lab.probes.lens import LensConfig
from engram_lab.probes.points import ENTITY, LAST, Sentence, read_sentences, take

PAGE = {
    "title": "Layer alignment (CKA)",
    "icon": "grid_on",
    "section": "Layers",
    "place": 2,
    "asks": "Which layer of the Engram looks like which layer of its twin: is it effectively deeper?",
}

FIRST = 200  # sentences that the page opens with: enough for narrow intervals, and seconds to run
HALF = 475  # pixels of a chart, of which two fit side by side on a wide window


def main() -> None:
    """The request, the map and the alignment, then the two answers to how deep the Engram is."""
    st.title("Layer alignment (CKA)")
    st.markdown(
        "Give two models the same sentences and compare what every layer holds: which layer of one looks like which "
        "layer of the other?"
    )
    names = the_pair()
    if names is None:
        return
    config = the_request(names)
    report = runner.run("cka", config)
    if report is None:
        return
    result, mode = report.result, runner.mode()
    for model, constant in zip(config.models, (result.constant_a, result.constant_b), strict=True):
        if constant:
            st.info(
                labels.markdown(
                    f"Layer {', '.join(constant)} of {model} is the same at all {result.n_points} points, so it has no "
                    "CKA and is left out: the points stand for equal tokens."
                ),
                icon=":material/info:",
            )
    for sentence in cka_figures.massive(report):
        st.warning(labels.markdown(sentence), icon=":material/warning:")
    drawn = {"map": cka_figures.cka_map(report, mode), "alignment": cka_figures.alignment_curve(report, mode)}
    the_reading(report)
    for name, figure in drawn.items():
        st.plotly_chart(figure, theme=None, key=name, config={"displayModeBar": False})
    if st.toggle(
        "Show the biased values", key="biased", bind="query-params", help="For comparison with published numbers."
    ):
        the_biased(report, drawn)
    page.how(report, *reference.shown(report.probe))
    deeper(report, drawn)
    page.exports(report, drawn)


def the_pair() -> tuple[str, str] | None:
    """The two models: those of the sidebar, or the only one with itself."""
    names = runner.chosen_models()
    if len(names) == 2:
        return names[0], names[1]
    itself = st.toggle(
        "Compare the model with itself", key="itself", bind="query-params",
        help="What the alignment of a model with itself looks like: the yardstick for that of two.",
    )  # fmt: skip
    if not itself:
        st.info("CKA compares two models: pick a second one in the sidebar, or compare the model with itself.")
        return None
    return names[0], names[0]


def uploaded(label: str, key: str) -> tuple[Sentence, ...] | None:
    """The sentences of a file that the user brought, if any."""
    file = uploads.upload(label, key, take_all if key == "cka_file" else None)
    return None if file is None else read_sentences(file.data, file.name)


def take_all() -> None:
    """For another file, use all of it; what is too many is cut down to what there is."""
    st.session_state["sentences"] = 10**9


def the_request(names: tuple[str, str]) -> CKAConfig:
    """Sentences, points and resampling."""
    left, right = st.columns([3, 2])
    with left:
        own = uploaded(
            "Your own sentences (BIO/CoNLL with entities, or plain text, one a line; .xz or .gz too); without a file, "
            "those that we wrote",
            "cka_file",
        )
    sentences = shipped() if own is None else own
    offered = [word for word, kind in KINDS.items() if kind != ENTITY or any(s.entities for s in sentences)]
    with right:
        page.keep_within("points", offered, offered[0])
        points = KINDS[st.selectbox("Points compared", offered, key="points", bind="query-params")]
        n_fit = len(take(sentences, points)[0])
        if st.session_state.get("sentences", 0) > n_fit:
            st.session_state["sentences"] = n_fit
        first = n_fit if own is not None else min(FIRST, n_fit)
        n = st.number_input(
            "Sentences", 1, n_fit, first, key="sentences", bind="query-params",
            help=f"The first so many of the {n_fit:,} that have such points.",
        )  # fmt: skip
        seed, bootstrap = page.resampling()
    texts, entities = take(sentences, points, int(n))
    other = None
    if points == LAST:
        with left:
            brought = uploaded("Other sentences for the second model, as many (optional)", "cka_file_b")
        other = None if brought is None else take(brought, points, int(n))[0]
    return CKAConfig(names, texts, entities, points, other, seed, bootstrap)


def the_reading(report: Report) -> None:
    """What one layer looks like, in a sentence; all of them in a table; how large the sample is."""
    result = report.result
    layers = list(result.layers_a)
    page.keep_within("layer_a", layers, layers[len(layers) // 2])
    left, right = st.columns([1, 4], vertical_alignment="bottom")
    layer = left.selectbox("Layer", layers, len(layers) // 2, key="layer_a", bind="query-params")
    right.markdown(f"**{labels.markdown(looks_like(report, layer))}**")
    lost = f", {result.n_dropped} entities left out because they end inside a token" if result.n_dropped else ""
    if result.n_first:
        lost += f", {result.n_first} left out at a model's first position"
    st.caption(f"{result.n_points:,} points of {result.n_sentences:,} sentences{lost}")
    with st.expander("All layers in numbers"):
        st.dataframe(pd.DataFrame(cka_figures.readings(report)), hide_index=True)


def the_biased(report: Report, drawn: dict[str, go.Figure]) -> None:
    """The map of the biased values, and how far they are off."""
    result = report.result
    drawn["biased"] = cka_figures.cka_map(report, runner.mode(), biased=True)
    st.plotly_chart(drawn["biased"], theme=None, key="biased_map", config={"displayModeBar": False})
    off = result.biased - result.cka
    st.markdown(
        f"With {result.n_points:,} points the biased values are {off.min():+.4f} to {off.max():+.4f} off, "
        f"{off.mean():+.4f} on average. The fewer the points, the more: compare published numbers with these only if "
        "they come from as many."
    )


def deeper(report: Report, drawn: dict[str, go.Figure]) -> None:
    """The logit lens of the same pair on the same sentences, beside what CKA says."""
    st.subheader("Is the Engram effectively deeper?")
    config, mode = report.config, runner.mode()
    try:
        names = tuple(dict.fromkeys(config.models))
        lens = runner.run(
            "lens",
            LensConfig(names, config.prompts, seed=config.seed, bootstrap=config.bootstrap, detail=False),
        )
    except LabError as error:  # what the lens cannot do with these models leaves CKA as it is
        st.warning(labels.markdown(str(error)), icon=":material/error:")
        lens = None
    st.markdown(f"**{labels.markdown(cka_figures.deeper(report, lens))}**")
    same = report.result.lead is not None
    drawn["lead"] = narrow((cka_figures.lead_curve if same else cka_figures.alignment_curve)(report, mode))
    with st.container(horizontal=True):
        if lens is not None:
            memory = {h.name: h.engram_layers for h in runner.handles(names)}
            drawn["lens"] = narrow(lens_figures.lens_curves(lens, mode, memory))
            st.plotly_chart(drawn["lens"], theme=None, width=HALF, key="lens_curves", config={"displayModeBar": False})
        st.plotly_chart(drawn["lead"], theme=None, width=HALF, key="lead", config={"displayModeBar": False})
    st.caption(
        "A model is effectively deeper if its early layers already hold what another has later: then its predictions "
        "settle earlier (lens, lower curve), and its layers look like later ones of the other (CKA, above 0). The lens "
        "reads a layer in the basis of the last one, so its curve can also fall because layers share a basis."
    )


main()
