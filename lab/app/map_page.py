"""What the pages with a map of tokens share: one prompt or a text set, the part of the map that is seen, its chart."""

from __future__ import annotations

from collections.abc import Callable

import plotly.graph_objects as go
import streamlit as st

from engram_lab.lab.app import page
from engram_lab.lab.ask import texts

WINDOW = 64  # positions of the map at once


def one_or_set(one_prompt: Callable[[], None], text_set: Callable[[], None]) -> None:
    """The switch between the two, and the chosen one."""
    (text_set if page.mode_switch() == texts.SET else one_prompt)()


def window(container: st.delta_generator.DeltaGenerator, n_tokens: int) -> tuple[int, int]:
    """The positions [start, end) of a prompt that the map shows; end may lie behind the prompt's."""
    starts = list(range(0, n_tokens, WINDOW))
    page.keep_within("from", starts, 0)
    start: int = container.selectbox(
        "From position", starts, key="from", bind="query-params", disabled=len(starts) == 1, width=150,
        help=f"The map shows {WINDOW} positions at a time.",
    )  # fmt: skip
    return start, start + WINDOW


def show(figure: go.Figure, clicked: Callable[[], None]) -> None:
    """The map, in a box of its own that scrolls; `clicked` runs when a cell is."""
    with st.container(key="map_scroll"):
        st.plotly_chart(
            figure,
            theme=None,
            width=int(figure.layout.width),
            key="map",
            on_select=clicked,
            selection_mode="points",
            config={"displayModeBar": False},
        )
