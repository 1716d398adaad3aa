"""The logit lens: one prompt in detail, or the mean over a text set."""

from __future__ import annotations

from functools import partial
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from lab import export, figures, labels, runner, texts
from models.handle import Handle
from probes.base import Report
from probes.logit_lens import LensConfig

WINDOW = 64  # positions of the map at once
OWN = "your own"
MANY = 10**9
# What the map's colours can show, in the words of the URL.
MEASURES: dict[str, figures.Measure] = {
    "KL": "kl",
    "entropy": "entropy",
    "target probability": "target_prob",
    "target rank": "target_rank",
}
FORMULA = (
    r"\mathrm{KL}(p_\text{final} \,\|\, p_\text{layer}) = \sum_{v} p_\text{final}(v)\,"
    r"\ln\frac{p_\text{final}(v)}{p_\text{layer}(v)}\ \text{nats},"
    r"\qquad p_\text{layer} = \mathrm{softmax}\big(W_U\,\mathrm{norm}(h_\text{layer})\big)"
)
MEANING = r"""
$h_\text{layer}$ is the residual stream after the block (`embed`: before block 0), read through the model's own final
norm and output matrix $W_U$, in float32. The last layer is the model's own prediction, so its KL is exactly 0.
**Entropy** is that of $p_\text{layer}$. **Settle depth** is the first layer from which on the top token stays the
final one, counted from embed = 0. **Rank** counts the tokens with a larger logit, so 0 is the top. Means are over all
positions but a leading special token, which stands for no text. 95 % intervals are percentiles of a bootstrap over
texts, drawn whole; for a difference in pairs.
"""


def main() -> None:
    """Mode, then its page."""
    st.title("Logit lens")
    st.markdown(
        "Read every layer as if it were the last: what would the model predict if it stopped there, "
        "and how far is that from what it says in the end?"
    )
    mode = st.segmented_control(
        "Mode",
        [texts.ONE, texts.SET],
        default=texts.ONE,
        required=True,
        label_visibility="collapsed",
        key="mode",
        bind="query-params",
    )
    if mode == texts.SET:
        text_set()
    else:
        one_prompt()


def use_example() -> None:
    """Put the example that was picked into the prompt box."""
    for example in texts.examples():
        if example["title"] == st.session_state["example"]:
            st.session_state["prompt"] = example["prompt"]
            look_at_the_end()


def look_at_the_end() -> None:
    """For another prompt, inspect its last position again and show the map from its start."""
    st.session_state.update({"pos": -1, "from": 0})


def one_prompt() -> None:
    """The request, then curves, map, cell and settle depth of one prompt."""
    examples = texts.examples()
    titles = {example["prompt"]: example["title"] for example in examples}
    current = st.session_state.get("prompt", st.query_params.get("prompt", examples[0]["prompt"]))
    st.session_state["example"] = titles.get(current, OWN)
    left, right = st.columns([3, 2])
    with right:
        st.selectbox("Example", [*titles.values(), OWN], key="example", on_change=use_example)
        a, b = st.columns([3, 2])
        target = a.text_input(
            "Target token",
            key="target",
            bind="query-params",
            help="May be left empty. A text that is one token; most words begin with a space. Its rank and "
            "probability are then followed through the layers.",
        )
        top_k = b.number_input(
            "Top tokens", 1, 20, 5, key="top", bind="query-params", help="How many are listed for a cell."
        )
    with left:
        prompt = st.text_area(
            "Prompt", examples[0]["prompt"], height=124, key="prompt", bind="query-params",
            on_change=look_at_the_end, help="Ctrl+Enter runs it, and so does leaving the box.",
        )  # fmt: skip
    why = next((example["why"] for example in examples if example["prompt"] == prompt), None)
    if why:
        st.caption(labels.markdown(why))

    names = runner.chosen_models()
    opened = runner.handles(names)
    for tokens, handles in tokenizations(opened, prompt):
        st.html(labels.chips(tokens))
        whose = " and ".join(labels.markdown(h.name) for h in handles)
        exact = "" if labels.gives_back(tokens, prompt) else "; this tokenizer changes the text"
        st.caption(f"{len(tokens)} tokens for {whose}, each with its id (hover for its bytes){exact}")
    config = LensConfig(models=names, prompts=(prompt,), target=target or None, top_k=int(top_k))
    report = runner.lens(config)
    if report is None:
        return
    mode = runner.mode()
    memory = {h.name: h.engram_layers for h in opened}
    curves = figures.lens_curves(report, mode, memory)
    st.plotly_chart(curves, theme=None, key="curves")
    how(report)
    layer, pos, shown = the_map(report, opened)
    cell(report, opened, layer, pos)
    st.plotly_chart(figures.settle_histogram(report, mode), theme=None, key="settle")
    exports(report, {"curves": curves, "map": shown})


def tokenizations(opened: list[Handle], prompt: str) -> list[tuple[list[labels.Token], list[Handle]]]:
    """The tokens of the prompt and the models that get them: one entry where two models agree."""
    found: list[tuple[list[labels.Token], list[Handle]]] = []
    for handle in opened:
        ids = handle.encode(prompt)
        pieces = handle.pieces(ids)
        tokens = [labels.Token(i, piece, handle.is_special(i)) for i, piece in zip(ids, pieces, strict=True)]
        for known, handles in found:
            if known == tokens:
                handles.append(handle)
                break
        else:
            found.append((tokens, [handle]))
    return found


def namer(handle: Handle) -> Any:
    """Token id -> visible label, for one model."""
    return lambda token_id: labels.label(handle.pieces([token_id], whole=False)[0])


def clicked(layer_names: tuple[str, ...]) -> None:
    """Take the cell that was clicked on the map as the one to inspect."""
    points = st.session_state["map"].selection.points
    if points:
        st.session_state["pos"] = int(points[0]["x"])
        st.session_state["layer"] = layer_names[int(points[0]["y"])]


def keep_within(key: str, options: list[Any], otherwise: Any) -> None:
    """Replace a choice that the present request does not offer any more."""
    if key in st.session_state and st.session_state[key] not in options:
        st.session_state[key] = otherwise


def the_map(report: Report, opened: list[Handle]) -> tuple[int, int, go.Figure]:
    """The layer x position map with its controls; returns the chosen cell (layer, position) and the figure."""
    st.subheader("Layer by layer, position by position")
    names = [lens.name for lens in report.result.models]
    has_target = report.result.models[0].target_id is not None
    offered = [word for word, measure in MEASURES.items() if has_target or not measure.startswith("target")]
    controls = st.container(horizontal=True)  # wraps where the window is narrow
    keep_within("colour", offered, offered[0])
    word = controls.selectbox(
        "Colour", offered, key="colour", bind="query-params", width=190,
        help=None if has_target else "With a target token there are also its rank and its probability.",
    )  # fmt: skip
    measure = MEASURES[word]
    keep_within("of", names, names[0])
    shown = controls.selectbox("Model shown", names, key="of", bind="query-params", width=230)
    index = names.index(shown)
    lens = report.result.models[index]
    tokens = figures.prompt_tokens(report, index)
    starts = list(range(0, len(tokens), WINDOW))
    keep_within("from", starts, 0)
    start = controls.selectbox(
        "From position", starts, key="from", bind="query-params", disabled=len(starts) == 1, width=150,
        help=f"The map shows {WINDOW} positions at a time.",
    )  # fmt: skip
    layers = list(lens.layer_names)
    keep_within("layer", layers, layers[-1])
    layer = controls.selectbox("Layer", layers, len(layers) - 1, key="layer", bind="query-params", width=110)
    places = list(range(len(tokens)))
    keep_within("pos", places, places[-1])
    last = places[-1]
    pos = controls.number_input("Position", 0, last, last, key="pos", bind="query-params", width=150)
    figure = figures.lens_map(
        report,
        index,
        namer(opened[index]),
        runner.mode(),
        measure,
        (start, start + WINDOW),
        (layers.index(layer), pos),
    )
    with st.container(key="map_scroll"):
        st.plotly_chart(
            figure,
            theme=None,
            width=int(figure.layout.width),
            key="map",
            on_select=partial(clicked, lens.layer_names),
            selection_mode="points",
            config={"displayModeBar": False},
        )
    st.caption("Click a cell to inspect it below.")
    return layers.index(layer), pos, figure


def cell(report: Report, opened: list[Handle], layer: int, pos: int) -> None:
    """The chosen cell of each model, side by side where their positions match."""
    shown = st.session_state["of"]
    columns = st.columns(len(opened))
    for index, (column, lens, handle) in enumerate(zip(columns, report.result.models, opened, strict=True)):
        with column.container(border=True):
            at = pos if lens.name == shown else aligned(report, index, pos)
            if at is None:
                st.markdown(f"**{labels.markdown(lens.name)}**")
                st.caption("It has no position that ends at the same place in the text.")
                continue
            depth = min(layer, len(lens.layer_names) - 1)
            token = figures.prompt_tokens(report, index)[at]
            st.markdown(
                f"**{labels.markdown(lens.name)}**, layer {lens.layer_names[depth]}, position {at} "
                f"({labels.markdown(token.label)}, id {token.id})"
            )
            line = f"KL to the final **{lens.kl[depth][at]:.4f}** nats, entropy **{lens.entropy[depth][at]:.4f}** nats"
            line += f"; settles at layer **{lens.layer_names[int(lens.settle_depth[at])]}**"
            if lens.target_id is not None:
                line += (
                    f"; the target (id {lens.target_id}) has rank **{int(lens.target_rank[depth][at])}**, "
                    f"probability **{lens.target_prob[depth][at]:.4f}**"
                )
            st.markdown(line)
            name_of = namer(handle)
            ids, probabilities = lens.top_ids[depth][at], lens.top_probs[depth][at]
            st.dataframe(
                pd.DataFrame(
                    {
                        "next token": [name_of(int(i)) for i in ids],
                        "id": [int(i) for i in ids],
                        "probability": [float(p) for p in probabilities],
                    }
                ),
                hide_index=True,
                column_config={
                    "probability": st.column_config.ProgressColumn(
                        format="%.4f", min_value=0.0, max_value=1.0, color="primary"
                    )
                },
            )


def aligned(report: Report, index: int, pos: int) -> int | None:
    """The position of model `index` that ends where `pos` of the other one does."""
    a, b = report.result.aligned.pos_a, report.result.aligned.pos_b
    here, there = (b, a) if index == 0 else (a, b)
    found = [int(t) for h, t in zip(here, there, strict=True) if int(h) == pos]
    return found[0] if found else None


def how(report: Report) -> None:
    """The formula and the protocol, folded away under the chart."""
    with st.expander("How this is computed, and with what"):
        st.latex(FORMULA)
        st.markdown(MEANING)
        protocol = report.protocol.to_dict()
        st.dataframe(pd.DataFrame(protocol["models"]), hide_index=True)
        versions = ", ".join(f"{name} {version}" for name, version in protocol["versions"].items())
        st.caption(labels.markdown(f"seed {protocol['seed']}; {versions}"))


def take_all_texts() -> None:
    """For another file, use all of it; what is too many is cut down to what there is."""
    st.session_state["texts"] = MANY


def text_set() -> None:
    """Means with confidence bands over many texts: does one model settle earlier than the other?"""
    left, right = st.columns([3, 2])
    with left:
        file = st.file_uploader(
            "Your own texts (UTF-8, one on each line); without a file, the sentences that we wrote",
            key="file",
            on_change=take_all_texts,
        )
    lines = texts.held_out() if file is None else texts.lines_of(file.getvalue(), file.name)
    with right:
        a, b, c = st.columns(3)
        if st.session_state.get("texts", 0) > len(lines):
            st.session_state["texts"] = len(lines)
        n = a.number_input(
            "Texts", 1, len(lines), len(lines), key="texts", bind="query-params", help="The first so many."
        )
        bootstrap = b.number_input(
            "Resamples", 100, 10_000, 1000, 100, key="bootstrap", bind="query-params",
            help="Of the texts, with replacement, for the 95 % intervals.",
        )  # fmt: skip
        seed = c.number_input("Seed", 0, 2**31 - 1, 0, key="seed", bind="query-params", help="Of the resampling.")
    names = runner.chosen_models()
    opened = runner.handles(names)
    config = LensConfig(models=names, prompts=lines[: int(n)], seed=int(seed), bootstrap=int(bootstrap), detail=False)
    report = runner.lens(config)
    if report is None:
        return
    mode = runner.mode()
    memory = {h.name: h.engram_layers for h in opened}
    curves = figures.lens_curves(report, mode, memory)
    st.plotly_chart(curves, theme=None, key="curves")
    how(report)
    drawn = {"curves": curves}
    difference = report.result.difference
    if difference is not None and difference.mean_kl is not None:
        drawn["difference"] = figures.difference_curve(report, mode)
        st.plotly_chart(drawn["difference"], theme=None, key="difference")
    st.dataframe(figures.summary(report), hide_index=True)
    st.plotly_chart(figures.settle_histogram(report, mode), theme=None, key="settle")
    exports(report, drawn)


def exports(report: Report, drawn: dict[str, Any]) -> None:
    """Files made when they are asked for, and the request to run elsewhere."""
    st.subheader("Take it with you")
    config = report.config
    reason = export.no_png()
    with st.container(horizontal=True):
        # A function as data: made at the click, so that an unchanged page stays fast.
        st.download_button(
            "CSV", partial(export.lens_csv, report), "lens.csv", "text/csv", key="csv", on_click="ignore",
            icon=":material/table:",
        )  # fmt: skip
        st.download_button(
            "JSON", report.to_json, "lens.json", "application/json", key="json",
            on_click="ignore", icon=":material/data_object:",
        )  # fmt: skip
        for name, figure in drawn.items():
            st.download_button(
                f"PNG, {name}", partial(export.png, figure), f"lens-{name}.png", "image/png", key=f"png_{name}",
                on_click="ignore", icon=":material/image:", disabled=reason is not None, help=reason,
            )  # fmt: skip
        if not config.detail:
            st.download_button(
                "Texts", "\n".join(config.prompts) + "\n", "texts.txt", "text/plain", key="texts_file",
                on_click="ignore", icon=":material/description:",
                help="The texts of this request, as the command below reads them.",
            )  # fmt: skip
    command, program = st.tabs(["Command line", "Python"])
    command.code(export.command_line(config), language="bash")
    program.code(export.python(config), language="python")


main()
