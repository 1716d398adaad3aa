"""What the figures of all probes are made of: the title, lines with a band, axes, error bars; Plotly, no Streamlit.

Plotly itself is imported with the first figure: a front holds its figures, and starts without it.
Every figure says in its title what is seen, names its axes with units, and has the exact values on hover.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from engram_lab.lab.draw import labels
from engram_lab.lab.draw.tables import bounds, interval_of
from engram_lab.lab.draw.theme import PALETTES, Mode, template, translucent

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from engram_lab.models.handle import Handle

# A legend under the axis and its title: above the plot, the rows of a narrow page would run into the subtitle.
BELOW = {"y": 0, "yref": "container", "yanchor": "bottom"}
LAYER_AXIS = "residual stream after block (embed: before block 0)"
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross")  # of the series of one figure
DASHES = ("solid", "dash", "dot", "dashdot")
LEAST_WIDTH, CHARACTERS = 740, 105  # pixels of a figure in a report, and the letters of a subtitle that they hold


def titled(
    mode: Mode, title: str, subtitle: str, height: int, panels: Mapping[str, Any] | None = None, **layout: Any
) -> go.Figure:
    """A figure in the lab's look, with what is seen as its title and how as its subtitle.

    `panels` are Plotly's options of subplots.
    """
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    figure = go.Figure() if panels is None else make_subplots(**panels)
    figure.update_layout(
        template=template(mode),
        height=height,
        **layout,
        title={
            "text": title,
            "subtitle": {"text": subtitle, "font": {"size": 13, "color": PALETTES[mode].quiet}},
        },
    )
    return figure


def narrow(figure: go.Figure, characters: int = 62) -> go.Figure:
    """The figure for half a page: its subtitle in as many lines as it takes."""
    subtitle = figure.layout.title.subtitle
    old = subtitle.text.split("<br>")
    lines = [part for line in old for part in textwrap.wrap(line, characters)]
    subtitle.text = "<br>".join(lines)
    top = figure.layout.margin.t or figure.layout.template.layout.margin.t
    figure.update_layout(margin_t=top + 17 * (len(lines) - len(old)))
    return figure


def fitted(figure: go.Figure) -> go.Figure:
    """The figure for a report: a subtitle that a narrow window holds, and no narrower than its title."""
    if figure.layout.width is not None:
        figure.update_layout(width=max(figure.layout.width, LEAST_WIDTH))
    before = figure.layout.margin.t or figure.layout.template.layout.margin.t
    narrow(figure, CHARACTERS)
    return figure.update_layout(height=figure.layout.height + figure.layout.margin.t - before)


def line(mode: Mode, series: int) -> dict[str, Any]:
    """How the line of a series looks, apart by colour and by dashes."""
    palette = PALETTES[mode].series
    style = {"color": palette[series % len(palette)], "width": 2.5, "dash": DASHES[series % len(DASHES)]}
    return {"mode": "lines+markers", "line": style}


def interval_lines(
    figure: go.Figure, mode: Mode, result: Any, x: Sequence[float], series: Mapping[str, str], hover: Sequence[str]
) -> None:
    """A line with error bars through each figure of a result over x: `series` says field -> name."""
    for n, (field, name) in enumerate(series.items()):
        mean, low, high = bounds(result, field)
        figure.add_scatter(
            x=list(x),
            y=list(mean),
            error_y=bars(mean, low, high),
            mode="lines+markers",
            line={"color": PALETTES[mode].series[n % 5], "width": 2},
            marker={"size": 9, "symbol": SYMBOLS[n % len(SYMBOLS)]},
            name=name,
            hovertext=[f"<b>{name}</b>, {hover[k]}<br>{interval_of(result, field, k, 4)}" for k in range(len(mean))],
            hoverinfo="text",
        )


def band_line(
    figure: go.Figure,
    colour: str,
    name: str,
    x: Sequence[float],
    values: tuple[Any, Any, Any],
    hover: Sequence[str],
    band: str = "band",
    strength: float = 0.16,
    dash: str = "solid",
    shown: str | None = None,
    **marker: Any,
) -> None:
    """A line through the means of (mean, low, high), over the band from low to high where there is one.

    `strength` is the opacity of the band, `band` what it is called, `shown` the name in the legend.
    """
    mean, low, high = values
    if low is not None and high is not None:
        figure.add_scatter(
            x=[*x, *reversed(x)],
            y=[*high, *low[::-1]],
            fill="toself",
            fillcolor=translucent(colour, strength),
            line={"width": 0},
            hoverinfo="skip",
            showlegend=False,
            legendgroup=name,
            name=f"{name} {band}",
        )
    figure.add_scatter(
        x=list(x),
        y=list(mean),
        mode="lines+markers",
        line={"color": colour, "width": 2.5, "dash": dash},
        marker={"color": colour, **marker},
        hovertext=list(hover),
        hoverinfo="text",
        legendgroup=name,
        name=name if shown is None else shown,
    )


def layer_curve(
    figure: go.Figure,
    mode: Mode,
    series: int,
    name: str,
    layer_names: Sequence[str],
    values: tuple[Any, Any, Any],
    memory: Sequence[int],
    band: str,
    tuned: bool = False,
) -> None:
    """(mean, low, high) in nats over layers; memory layers are diamonds, the tuned lens is dotted with open marks."""
    name = f"{name}, tuned lens" if tuned else name
    at_memory = [layer.isdigit() and int(layer) in memory for layer in layer_names]
    mean, low, high = values
    hover = []
    for n, layer in enumerate(layer_names):
        text = f"<b>{labels.plotly(name)}</b><br>layer {layer}<br>mean {mean[n]:.6g} nats"
        if low is not None and high is not None:
            text += f"<br>{band} {low[n]:.6g} to {high[n]:.6g}"
        hover.append(text + ("<br>this block reads the memory" if at_memory[n] else ""))
    plain, open_ = "square" if series == 1 else "circle", "-open" if tuned else ""
    band_line(
        figure,
        PALETTES[mode].series[series],
        name,
        range(len(layer_names)),
        values,
        hover,
        band,
        0.09 if tuned else 0.16,
        "dot" if tuned else "dash" if series == 1 else "solid",
        labels.plotly(name) + (" (◆ memory)" if any(at_memory) else ""),
        size=[12 if m else 7 for m in at_memory],
        symbol=[("diamond" if m else plain) + open_ for m in at_memory],
    )


def layer_axis(figure: go.Figure, names: Sequence[str]) -> None:
    """Layers along x, by their names, embed first."""
    figure.update_xaxes(
        title_text=LAYER_AXIS,
        tickvals=list(range(len(names))),
        ticktext=list(names),
        range=[-0.4, len(names) - 0.6],
    )


def fit_to_blocks(figure: go.Figure) -> None:
    """Where embed is far off all blocks, end the axis at the blocks and say under it what embed has."""
    lines = [trace for trace in figure.data if trace.mode == "lines+markers"]
    blocks = [0.0]
    for trace in figure.data:
        # A band runs along its upper edge first, and back along the lower one, to embed at the end.
        blocks += list(trace.y)[1 : -1 if trace.fill else None]
    low, high = min(blocks), max(blocks)
    if all(2 * low <= trace.y[0] <= 2 * high for trace in lines):
        return
    room = 0.08 * (high - low)
    figure.update_yaxes(range=[low - room if low < 0 else 0, high + room], rangemode="normal")
    away = "<br>".join(
        f"{'↑' if trace.y[0] > 0 else '↓'} {trace.y[0]:.3g}" for trace in lines if not 2 * low <= trace.y[0] <= 2 * high
    )
    names = list(figure.layout.xaxis.ticktext)
    figure.update_xaxes(ticktext=[f"{names[0]}<br>{away}", *names[1:]])


def list_axis(figure: go.Figure, names: Sequence[str], title: str = "") -> None:
    """The rows of a list along y, the first on top; `names` as Plotly shows them."""
    figure.update_yaxes(
        title_text=title,
        tickvals=list(range(len(names))),
        ticktext=list(names),
        range=[len(names) - 0.5, -0.5],
        showgrid=False,
    )


def bars(mean: Any, low: Any, high: Any, thickness: float = 1.6, width: float = 4) -> dict[str, Any]:
    """Error bars from low to high; none where they are NaN."""
    up, down = np.subtract(high, mean), np.subtract(mean, low)
    return {"array": up, "arrayminus": down, "thickness": thickness, "width": width}


def level(figure: go.Figure, mode: Mode, x: float | None = None, y: float | None = None, width: float = 1) -> None:
    """A quiet dotted line where x or y has a value that means something."""
    line = {"color": PALETTES[mode].quiet, "width": width, "dash": "dot"}
    if x is not None:
        figure.add_vline(x=x, line=line)
    if y is not None:
        figure.add_hline(y=y, line=line)


def colour_bar(title: str, **more: Any) -> dict[str, Any]:
    """The bar that says what the colours of a map are."""
    return {"title": {"text": title, "side": "right"}, "thickness": 10, "outlinewidth": 0, **more}


def namer(name: str, handles: Sequence[Handle]) -> Callable[[int], str]:
    """Token id -> label by the handle of that name, or "id N" where there is none."""
    handle = next((handle for handle in handles if handle.name == name), None)
    if handle is None:
        return lambda token_id: f"id {token_id}"
    return lambda token_id: labels.label(handle.pieces([token_id], whole=False)[0])
