"""A map over the tokens of a prompt: positions along x, layers or the like along y, a colour in each cell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engram_lab.lab.draw import labels
from engram_lab.lab.draw.figure import colour_bar, titled
from engram_lab.lab.draw.theme import MONO, Mode

if TYPE_CHECKING:
    import numpy as np
    import plotly.graph_objects as go

ROW = 30  # pixels of a row, unless it says more
RIGHT = 120  # of the colour bar
FRAME = "#FF4FA3"  # apart from all colours of the maps


def ticks(tokens: Sequence[labels.Token], positions: Sequence[int], characters: int) -> list[str]:
    """What stands under the columns: the token, and its position below it."""
    return [f"{labels.plotly(labels.short(tokens[p].label, characters))}<br><i>{p}</i>" for p in positions]


def token_map(
    mode: Mode,
    title: str,
    subtitle: str,
    positions: Sequence[int],
    under: Sequence[str],
    rows: Sequence[str],
    values: np.ndarray,
    hover: Sequence[Sequence[str]],
    unit: str,
    *,
    column: int,
    height: int,
    left: int = 70,
    square: int = ROW - 4,
    text: Sequence[Sequence[str]] | None = None,
    frame: tuple[int, int | None] | None = None,
    colorbar: dict[str, Any] | None = None,
    **colours: Any,
) -> go.Figure:
    """Cells [row, position], the first row at the bottom, named `rows` and, under the axis, `under`.

    `hover` and `text` are [row][position], `text` in the cells; `colours` zmin, zmax and colorscale; `frame` is
    (position, row) to frame, or all rows of the position. Each position is `column` pixels wide: the map is meant to
    scroll, and a click on a cell selects a point of x = position, y = row, drawn over it as an invisible square.
    """
    figure = titled(
        mode,
        title,
        subtitle,
        height,
        width=left + RIGHT + column * len(positions),
        margin={"l": left, "r": RIGHT, "t": 70, "b": 70},
        clickmode="event+select",
        dragmode=False,
    )
    across, up = list(positions), list(range(len(rows)))
    figure.add_heatmap(
        x=across,
        y=up,
        z=values,
        text=text,
        texttemplate="%{text}" if text else None,
        textfont={"family": MONO, "size": 11},
        xgap=1,
        ygap=1,
        hoverinfo="skip",
        colorbar=colour_bar(unit, x=1, xpad=8) | (colorbar or {}),
        **colours,
    )
    # Plotly reports no clicks on a heat map's cells, so each has an invisible square on it.
    figure.add_scatter(
        x=across * len(up),
        y=[n for n in up for _ in across],
        mode="markers",
        marker={"symbol": "square", "size": square, "opacity": 0},
        selected={"marker": {"opacity": 0}},
        unselected={"marker": {"opacity": 0}},
        hovertext=[cell for row in hover for cell in row],
        hoverinfo="text",
        showlegend=False,
        name="cells",
    )
    if frame is not None and frame[0] in positions:
        position, row = frame
        y0, y1 = (0, len(up) - 1) if row is None else (row, row)
        box = {"x0": position - 0.5, "x1": position + 0.5, "y0": y0 - 0.5, "y1": y1 + 0.5}
        figure.add_shape(type="rect", line={"color": FRAME, "width": 2.5}, **box)
    figure.update_xaxes(
        title_text="input token and its position",
        tickvals=across,
        ticktext=list(under),
        tickfont={"family": MONO, "size": 11},
        tickangle=0,
        range=[positions[0] - 0.5, positions[-1] + 0.5],
        showgrid=False,
    )
    figure.update_yaxes(tickvals=up, ticktext=list(rows), range=[-0.5, len(up) - 0.5], showgrid=False)
    return figure
