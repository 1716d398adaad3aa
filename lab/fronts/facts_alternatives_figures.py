"""A user's facts in rows, in LoRA, in the prompt and retrieved: recall and what happens to unrelated text, drawn."""

from __future__ import annotations

import math
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from engram_lab.lab.draw import labels
from engram_lab.lab.draw.durations import digits
from engram_lab.lab.draw.figure import BELOW, bars, list_axis, titled
from engram_lab.lab.draw.tables import bounds, interval_of
from engram_lab.lab.draw.theme import PALETTES, Mode
from engram_lab.probes.base import Report

SYMBOLS = ("circle", "diamond-open")  # of the kinds of prompt


def comparison(report: Report, mode: Mode = "light") -> go.Figure:
    """Left how many answers are said, by kind of prompt; right how much the loss of an unrelated token moves."""
    result, palette = report.result, PALETTES[mode]
    n = len(result.methods)
    figure = titled(
        mode,
        "What each way of keeping the facts remembers, and what it does to other text",
        f"{labels.plotly(report.config.models[0])}, {len(report.config.facts)} facts, "
        f"{len(report.config.unrelated)} unrelated texts; bars: 95 % intervals",
        240 + 42 * n,
        base=make_subplots(rows=1, cols=2, shared_yaxes=True, horizontal_spacing=0.04),
        legend=BELOW,
    )
    for k, kind in enumerate(result.kinds):
        if not result.n_prompts[k]:
            continue
        values, low, high = bounds(result, "top1", k)
        figure.add_scatter(
            x=values,
            y=[m + (k - 0.5) * 0.22 for m in range(n)],
            error_x=bars(values, low, high),
            mode="markers",
            marker={"size": 10, "symbol": SYMBOLS[k], "color": palette.series[k]},
            name=f"{kind} ({int(result.n_prompts[k])})",
            hovertext=[
                f"<b>{name}</b>, {kind}<br>likeliest {interval_of(result, 'top1', (k, m), 3)}<br>"
                f"among the first five {interval_of(result, 'top5', (k, m), 3)}<br>"
                f"mean probability {interval_of(result, 'mean', (k, m), 4)}"
                for m, name in enumerate(result.methods)
            ],
            hoverinfo="text",
            row=1,
            col=1,
        )
    known = [m for m in range(n) if result.size[m] > 0]  # a logarithm has no 0
    values, low, high = bounds(result, "size", known)
    figure.add_scatter(
        x=values,
        y=known,
        error_x=bars(values, low, high),
        mode="markers",
        marker={"size": 10, "symbol": "square", "color": palette.series[2]},
        name="unrelated text",
        hovertext=[
            f"<b>{result.methods[m]}</b><br>moves {interval_of(result, 'size', m, 5)} nats a token<br>"
            f"loss {interval_of(result, 'change', m, 5)} nats a token<br>KL {interval_of(result, 'kl', m, 6)} nats<br>"
            f"{int(result.changed[m])} of {result.n_positions} positions changed<br>{_times(result, m)}"
            for m in known
        ],
        hoverinfo="text",
        row=1,
        col=2,
    )
    for m in set(range(n)) - set(known):
        figure.add_annotation(
            x=0, y=m, xref="x2 domain", yref="y2", text="0 exactly", showarrow=False, xanchor="left",
            font={"color": palette.quiet},
        )  # fmt: skip
    figure.update_xaxes(title_text="share of prompts whose whole answer is likeliest", range=[-0.04, 1.04], col=1)
    figure.update_xaxes(title_text="mean |change of the loss|, nats a token", type="log", dtick=1, col=2)
    list_axis(figure, result.methods)
    return figure


def _times(result: Any, m: int, name: str = "more") -> str:
    """How much more than the rows a method moves unrelated text; the rows may move nothing."""
    if math.isnan(result.more[m]):
        return "the rows: 0 exactly" if not result.size[m] else "the rows change nothing: no ratio"
    if math.isnan(result.more_low[m]):
        return f"{result.more[m]:.1f} times the rows, without an interval: too few texts that the rows change"
    return f"{interval_of(result, name, m, 1)} times the rows"


def table(report: Report) -> list[dict[str, str]]:
    """One row for each method: recall, unrelated text, and what it costs."""
    result, found = report.result, []
    for m, method in enumerate(result.methods):
        row = {"method": method}
        for k, kind in enumerate(result.kinds):
            if result.n_prompts[k]:
                row |= {
                    f"{kind}: likeliest": interval_of(result, "top1", (k, m), 2),
                    f"{kind}: first five": interval_of(result, "top5", (k, m), 2),
                    f"{kind}: probability": interval_of(result, "mean", (k, m), 3),
                }
        exact = not result.changed[m]
        row |= {
            "unrelated: change, nats a token": "0 exactly" if exact else interval_of(result, "change", m, 4),
            "unrelated: |change|, nats a token": "0 exactly" if exact else interval_of(result, "size", m, 4),
            "times the rows": "" if math.isnan(result.more[m]) else interval_of(result, "more", m, 1),
            "KL, nats": "0 exactly" if exact else interval_of(result, "kl", m, 5),
            "KL, times the rows": "" if math.isnan(result.more_kl[m]) else interval_of(result, "more_kl", m, 1),
            "positions changed": f"{int(result.changed[m])} of {result.n_positions}",
            "bytes": f"{int(result.bytes[m]):,}",
            "tokens before a prompt": f"{float(result.extra_tokens[m]):.0f}",
        }
        if result.seconds is not None:
            seconds = float(result.seconds[m])
            row["seconds to write"] = "" if math.isnan(seconds) else digits(seconds)
        found.append(row)
    return found


def sentences(report: Report) -> list[str]:
    """The number that people quote, for every other method; and where another method remembers more than the rows."""
    result = report.result
    rows = result.methods.index(report.config.reference)
    found = []
    for m, method in enumerate(result.methods):
        if m == rows or not result.size[m] or method.startswith("rows"):
            continue
        what = f"{method}: the loss of an unrelated token moves by {interval_of(result, 'size', m, 4)} nats"
        if not result.size[rows]:
            found.append(f"{what}; with the rows by 0 exactly.")
        else:
            found.append(f"{what}, {_times(result, m)}.")
    for k, kind in enumerate(result.kinds):
        better = [m for m in range(len(result.methods)) if result.gap_low[k, m] > 0]
        for m in better:
            by = interval_of(result, "gap", (k, m))
            found.append(f"{result.methods[m]} says more answers to {kind} than the rows, by {by}.")
    return found
