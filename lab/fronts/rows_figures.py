"""Reports of the row inspector as Plotly figures and tables; no Streamlit here.

Axes: order (n = 2..N), head; a head is one bar, the heads of an order stand together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np
import plotly.graph_objects as go

from engram_lab.lab.draw import labels
from engram_lab.lab.draw.figure import list_axis, titled
from engram_lab.lab.draw.theme import MONO, PALETTES, Mode, translucent
from engram_lab.models.errors import LabError
from engram_lab.probes.base import Report
from engram_lab.probes.row_usage import Usage
from engram_lab.probes.rows import Gram, Row, Said

Measure = Literal["coverage", "collisions", "load"]
MEASURES: tuple[Measure, ...] = get_args(Measure)
TITLES: dict[Measure, tuple[str, str]] = {
    "coverage": ("How much of each head's table the n-grams reach", "share of rows"),
    "collisions": ("How many n-grams share their row with another", "share of n-grams"),
    "load": ("How many distinct n-grams a row holds (mean, 5 to 95 %)", "n-grams a row"),
}
NAMED = 3  # n-grams at the same row that a cell names
SEPARATOR = " │ "  # between the pieces of a canonical n-gram, which may themselves hold spaces


def came_through(report: Report, name_of: Callable[[int], str], mode: Mode = "light") -> go.Figure:
    """What all rows of the position together, times the gate, promote and suppress."""
    result = report.result
    return said_bars(
        result.came_through,
        "What came through",
        f"position {result.position}, layer {result.layer}: {len(result.rows)} rows × gate {result.gate:.3f}",
        name_of,
        mode,
    )


def row_says(report: Report, row: Row, name_of: Callable[[int], str], mode: Mode = "light") -> go.Figure:
    """What one row promotes and suppresses."""
    return said_bars(
        row.says,
        f"What row {row.row} says",
        f"layer {report.result.layer}, {row.order}-grams, head {row.head}; with the gate fully open",
        name_of,
        mode,
    )


def said_bars(said: Said, title: str, subtitle: str, name_of: Callable[[int], str], mode: Mode) -> go.Figure:
    """Bars for the tokens that are promoted most, above those that are suppressed most."""
    ids = [*said.promoted_ids, *reversed(said.suppressed_ids)]
    values = [*said.promoted.tolist(), *reversed(said.suppressed.tolist())]
    names = [labels.plotly(name_of(i)) for i in ids]
    figure = titled(mode, title, subtitle, 110 + 20 * len(ids), margin={"l": 60, "r": 16, "t": 76, "b": 52})
    colours = PALETTES[mode].series
    y = list(range(len(ids)))
    figure.add_bar(
        x=values,
        y=y,
        orientation="h",
        marker={"color": [colours[0]] * len(said.promoted_ids) + [colours[1]] * len(said.suppressed_ids)},
        hovertext=[f"{name}  id {i}<br>{value:+.6g} logits" for name, i, value in zip(names, ids, values, strict=True)],
        hoverinfo="text",
        showlegend=False,
    )
    figure.update_xaxes(title_text="added to the logit, less its mean", zeroline=True)
    list_axis(figure, [labels.plotly(labels.short(name_of(i), 16)) for i in ids])
    figure.update_yaxes(tickfont={"family": MONO, "size": 12})
    return figure


def deviation(usage: Usage, measure: Measure) -> np.ndarray:
    """By how many standard deviations [order, head] a figure differs from even hashing; the spread for the load.

    0 where it is as expected within float64, whatever the deviation; else NaN where that is no number.
    """
    name = "spread" if measure == "load" else measure
    gap = getattr(usage, name) - getattr(usage, f"{name}_expected")
    sd = getattr(usage, f"{name}_sd")
    with np.errstate(divide="ignore", invalid="ignore"):
        z = np.where(np.abs(gap) < 1e-12, 0.0, gap / sd)
    return np.where(np.isfinite(z), z, np.nan)


def usage_bars(report: Report, which: str, measure: Measure, mode: Mode = "light") -> go.Figure:
    """A measure for each head beside what even hashing gives, and the deviation in standard deviations below.

    `which` is "text" or "training", as in the result.
    LabError where that text was not counted.
    """
    usage = getattr(report.result, which)
    if usage is None:
        raise LabError("Nothing was counted over this text: bring a text.")
    what, unit = TITLES[measure]
    about = "the training text" if which == "training" else "the text given"
    figure = titled(
        mode,
        f"{what}: layer {report.result.layer}",
        f"over {about}, {usage.tokens:,} tokens",
        500,
        {"rows": 2, "shared_xaxes": True, "row_heights": [0.66, 0.34], "vertical_spacing": 0.08},
        bargap=0.25,
        margin={"l": 64, "r": 16, "t": 124, "b": 52},  # room for a legend in two lines
    )
    n_orders, n_heads = usage.rows.shape
    x = np.array([[k * (n_heads + 1) + head for head in range(n_heads)] for k in range(n_orders)])
    palette, z = PALETTES[mode], deviation(usage, measure)
    values = usage.load_mean if measure == "load" else getattr(usage, measure)
    hover = np.array([[_usage_hover(usage, measure, k, h, z[k, h]) for h in range(n_heads)] for k in range(n_orders)])
    for k in range(n_orders):
        bars: dict[str, Any] = {}
        colour = palette.series[k % len(palette.series)]
        if measure == "load":
            low, high = usage.load[k, :, usage.quantiles.index(0.05)], usage.load[k, :, usage.quantiles.index(0.95)]
            bars["error_y"] = {
                "type": "data", "symmetric": False, "array": high - values[k], "arrayminus": values[k] - low,
                "color": palette.quiet, "thickness": 1.5, "width": 4,
            }  # fmt: skip
        figure.add_bar(
            x=x[k], y=values[k], name=f"{k + 2}-grams ({usage.distinct[k]:,} distinct)", marker={"color": colour},
            hovertext=hover[k], hoverinfo="text", row=1, col=1, **bars,
        )  # fmt: skip
        figure.add_scatter(
            x=x[k], y=z[k], mode="markers", marker={"color": colour, "size": 9},
            hovertext=hover[k], hoverinfo="text", showlegend=False, name=f"{k + 2}-grams, deviation", row=2, col=1,
        )  # fmt: skip
    if measure == "load":
        figure.add_scatter(
            x=x.ravel(), y=usage.load[..., -1].ravel(), mode="markers", name="fullest row",
            marker={"symbol": "diamond", "size": 8, "color": palette.ink}, hovertext=hover.ravel(), hoverinfo="text",
            row=1, col=1,
        )  # fmt: skip
    else:
        expected, sd = (getattr(usage, f"{measure}_{end}") for end in ("expected", "sd"))
        figure.add_scatter(
            x=x.ravel(), y=expected.ravel(), mode="markers", name="even hashing, ±2 sd",
            error_y={"type": "data", "array": 2 * sd.ravel(), "color": palette.ink, "thickness": 1.5, "width": 5},
            marker={"symbol": "line-ew-open", "size": 18, "color": palette.ink, "line": {"width": 2}},
            hovertext=hover.ravel(), hoverinfo="text", row=1, col=1,
        )  # fmt: skip
    figure.add_hrect(y0=-2, y1=2, fillcolor=translucent(palette.quiet, 0.15), line_width=0, row=2, col=1)
    figure.update_yaxes(title_text=unit, rangemode="tozero", row=1, col=1)
    reach = max(3.0, float(np.nanmax(np.abs(z), initial=0)) * 1.15)
    below = "spread, sd off<br>even hashing" if measure == "load" else "sd off<br>even hashing"
    figure.update_yaxes(title_text=below, range=[-reach, reach], row=2, col=1)
    heads = list(range(n_heads)) * n_orders
    figure.update_xaxes(tickvals=x.ravel().tolist(), ticktext=list(map(str, heads)), showgrid=False)
    figure.update_xaxes(title_text="hash head of each order", row=2, col=1)
    return figure


def _usage_hover(usage: Usage, measure: Measure, k: int, head: int, z: float) -> str:
    lines = [f"<b>{k + 2}-grams, head {head}</b>: {usage.rows[k, head]:,} rows"]
    if measure == "load":
        quantiles = ", ".join(
            f"{q:.0%} {value:.4g}" for q, value in zip(usage.quantiles, usage.load[k, head], strict=True)
        )
        lines += [f"mean {usage.load_mean[k, head]:.6g} n-grams a row", quantiles]
        lines.append(
            f"variance / mean {usage.spread[k, head]:.5f}, even hashing 1 ± {2 * usage.spread_sd[k, head]:.5f} (2 sd)"
        )
        lines.append(f"busiest row: {usage.hits_max[k, head]:,} reads")
    else:
        value, expected, sd = (getattr(usage, measure + end)[k, head] for end in ("", "_expected", "_sd"))
        lines += [f"{measure} {value:.6f}", f"even hashing {expected:.6f} ± {2 * sd:.6f} (2 sd)"]
    lines.append(f"{z:+.2f} sd off" if np.isfinite(z) else "no deviation can be told")
    return "<br>".join(lines)


def canonical(texts: Sequence[str]) -> str:
    """A canonical n-gram in one line, every character visible."""
    return SEPARATOR.join(labels.label(text.encode()) for text in texts)


def gram_chips(grams: Sequence[Gram], pad: int, name_of: Callable[[int], str]) -> list[tuple[str, str, str]]:
    """(title, HTML of the raw tokens, HTML of the canonical ones) of each n-gram; padding is dashed."""
    found = []
    for gram in grams:
        raw = [labels.Token(i, labels.spell(name_of(i))) for i in gram.raw_ids]
        missing = gram.order - len(gram.raw_ids)
        tokens = [
            labels.Token(i, text.encode(), special=n < missing)
            for n, (i, text) in enumerate(zip(gram.canonical_ids, gram.canonical_texts, strict=True))
        ]
        title = f"{gram.order}-gram"
        if missing:
            title += f", {missing} before the start as padding (id {pad})"
        found.append((title, labels.chips(raw), labels.chips(tokens)))
    return found


def rows_table(report: Report) -> list[dict[str, Any]]:
    """The rows that the position reads, as rows of a table; what was not counted is None."""
    return [
        {
            "n-gram": row.order,
            "head": row.head,
            "prime": row.prime,
            "row": row.row,
            "row norm": row.norm,
            "hits in training": row.training_hits,
            "n-grams in training": row.training_ngrams,
            "hits in text": row.text_hits,
            "shared in text": row.shared_total,
            "shares it with": sharers(row),
        }
        for row in report.result.rows
    ]


def sharers(row: Row) -> str | None:
    """The most frequent others at a row, in one cell; None if no text was counted."""
    if row.shared_total is None:
        return None
    named = [canonical(other.canonical_texts) for other in row.shared[:NAMED]]
    more = row.shared_total - len(named)
    return ", ".join(named) + (f" and {more} more" if more and named else f"{more} others" if more else "")


def usage_table(usage: Usage) -> list[dict[str, Any]]:
    """The usage of each head, as rows of a table."""
    return [
        {
            "n-gram": k + 2,
            "head": head,
            "rows": int(usage.rows[k, head]),
            "n-grams a row": float(usage.load_mean[k, head]),
            "fullest row": int(usage.load[k, head, -1]),
            "busiest row, reads": int(usage.hits_max[k, head]),
            **{
                f"{name}{told}": float(getattr(usage, name + end)[k, head])
                for name in ("coverage", "collisions", "spread")
                for told, end in (("", ""), (", even", "_expected"), (", sd", "_sd"))
            },
        }
        for k in range(usage.rows.shape[0])
        for head in range(usage.rows.shape[1])
    ]
