"""The row inspector: the rows that one position reads, who else reads them, what they say; how evenly they are used."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from engram_lab.lab.app import asked, page, runner
from engram_lab.lab.draw import labels
from engram_lab.lab.fronts import reference, rows_figures
from engram_lab.lab.fronts.rows import SHARERS, TOP, our_sentences
from engram_lab.models.engram import gate_ceiling
from engram_lab.models.ngrams import engram_model
from engram_lab.probes.base import Report
from engram_lab.probes.rows import RowsConfig

PAGE = {
    "title": "Rows",
    "icon": "table_rows",
    "section": "Memory",
    "place": 4,
    "asks": "Which rows does an n-gram read, who shares them, and which tokens do they promote?",
}


def main() -> None:
    """The request, then n-grams, rows, what they say, and usage."""
    st.title("Rows")
    st.markdown(
        "At every position the memory hashes the last tokens and reads a row for each n-gram and head. Which rows, "
        "how often were they read, who else reads them, and what do they say?"
    )
    prompt = page.prompt_box(beside=amounts)
    place = page.choose_place(prompt)
    with st.expander("The text that hits and sharing are counted over"):
        text = page.text_set(our_sentences())
    config = RowsConfig(
        models=(place.handle.name,),
        prompts=(prompt,),
        position=place.position,
        layer=place.layer,
        text=text,
        top_k=int(st.session_state["top"]),
        top_shared=int(st.session_state["sharers"]),
    )
    report = runner.run("rows", config)
    if report is None:
        return
    summary(report, place)
    the_rows(report, place)
    drawn = what_they_say(report, place)
    drawn["usage"] = usage(report)
    page.how(report, *reference.shown(report.probe))
    page.exports(report, drawn)


def amounts() -> None:
    """How much is listed."""
    a, b = st.columns(2)
    asked.number(TOP, a)
    asked.number(SHARERS, b)


def summary(report: Report, place: page.Place) -> None:
    """The position, its gate, and its n-grams as chips."""
    result = report.result
    config = place.handle.model.config
    ceiling = gate_ceiling(place.handle.d_model, config.engram_gate)
    token = page.namer(place.handle)(result.token_id)
    st.markdown(
        f"Position **{result.position}** ({labels.markdown(token)}, id {result.token_id}), layer **{result.layer}**: "
        f"gate **{result.gate:.3f}** of at most {ceiling:.3f} at unit norm weights; it writes "
        f"**{result.written_norm:.2f}** into a residual of norm {result.residual_norm:.2f} (before the convolution "
        f"{result.gated_norm:.2f})."
    )
    pad = int(engram_model(place.handle).canonical_ids[config.engram_pad_token_id])
    chips = rows_figures.gram_chips(result.ngrams, pad, page.namer(place.handle))
    for gram, (title, raw, canonical) in zip(result.ngrams, chips, strict=True):
        name, left, right = st.columns([1, 2, 2])
        name.markdown(f"**{title}**, {gram.text_count} x in the text")
        left.html(raw)
        right.html(canonical)
    st.caption("Left the tokens as the prompt has them, right what they are hashed as: canonical text and id.")


def the_rows(report: Report, place: page.Place) -> None:
    """All rows that the position reads."""
    st.subheader("The rows it reads")
    result = report.result
    st.dataframe(
        pd.DataFrame(rows_figures.rows_table(report)),
        hide_index=True,
        height="content",
        column_config={
            "row norm": st.column_config.NumberColumn(format="%.3f"),
            "shares it with": st.column_config.TextColumn(width="large"),
        },
    )
    if result.training is None:
        st.info(
            f"No counts over its training text ship for {labels.markdown(place.handle.name)}: hits are those of the "
            "text below. `engram-lab rows count` counts them over any text.",
            icon=":material/info:",
        )
    else:
        about = f"Training: {result.training.tokens:,} tokens of {', '.join(result.training.sources)}."
        st.caption(labels.markdown(f"{about} Text: {result.text.tokens:,} tokens."))


def what_they_say(report: Report, place: page.Place) -> dict[str, go.Figure]:
    """One chosen row, who shares it, and beside it what came through of all of them."""
    st.subheader("What they say")
    rows = {f"{row.order}-gram, head {row.head}": row for row in report.result.rows}
    page.keep_within("row", list(rows), next(iter(rows)))
    chosen = rows[st.selectbox("Row", list(rows), key="row", bind="query-params", width=230)]
    name_of, mode = page.namer(place.handle), runner.mode()
    drawn = {
        "row": rows_figures.row_says(report, chosen, name_of, mode),
        "came-through": rows_figures.came_through(report, name_of, mode),
    }
    beside = st.container(horizontal=True)  # one below the other where the window is narrow
    for name, figure in drawn.items():
        beside.plotly_chart(figure, theme=None, width=470, key=f"says_{name}")
    if chosen.shared_total:
        st.markdown(
            f"**{chosen.shared_total}** other {chosen.order}-grams of the text read this row"
            + (f", the {len(chosen.shared)} most frequent:" if chosen.shared else ".")
        )
        if chosen.shared:
            st.dataframe(
                pd.DataFrame(
                    {
                        "n-gram": [rows_figures.canonical(other.canonical_texts) for other in chosen.shared],
                        "times in the text": [other.count for other in chosen.shared],
                    }
                ),
                hide_index=True,
            )
    elif chosen.shared_total == 0:
        st.caption("No other n-gram of the text reads this row.")
    return drawn


def usage(report: Report) -> go.Figure:
    """How evenly the n-grams of a text fall on the rows of the layer."""
    st.subheader("How evenly the rows are used")
    result = report.result
    over = {"the text": "text"} | ({"training": "training"} if result.training is not None else {})
    left, right = st.columns(2)
    measure = left.segmented_control(
        "Measure", rows_figures.MEASURES, default=rows_figures.MEASURES[0], required=True, key="measure",
        bind="query-params",
    )  # fmt: skip
    page.keep_within("over", list(over), next(iter(over)))
    which = over[
        right.segmented_control(
            "Counted over", list(over), default=next(iter(over)), required=True, key="over", bind="query-params"
        )
    ]
    figure = rows_figures.usage_bars(report, which, measure, runner.mode())
    st.plotly_chart(figure, theme=None, key="usage")
    with st.expander("All figures of each head"):
        st.dataframe(pd.DataFrame(rows_figures.usage_table(getattr(result, which))), hide_index=True)
    return figure


main()
