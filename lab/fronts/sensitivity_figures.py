"""What a memory is needed for, drawn: the change of the loss on each text set."""

from __future__ import annotations

import plotly.graph_objects as go

from engram_lab.lab.draw import labels
from engram_lab.lab.draw.figure import bars, level, list_axis, titled
from engram_lab.lab.draw.tables import bounds, interval_of
from engram_lab.lab.draw.theme import PALETTES, Mode
from engram_lab.probes.base import Report

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x")


def changes(report: Report, mode: Mode = "light") -> go.Figure:
    """How much more a token costs under each condition than with the model as it is, by text set, with intervals."""
    result, palette = report.result, PALETTES[mode]
    conditions = list(result.conditions)[1:]
    figure = titled(
        mode,
        "What the loss rises by without the memory, and where it does not",
        f"{labels.plotly(report.config.models[0])}; bars: 95 % intervals over items; right of 0 the change hurts",
        195 + 34 * len(conditions) * len(result.sets),
        margin={"l": 40, "t": 125},  # the legend takes two lines where the window is narrow
    )
    for s, name in enumerate(result.sets):
        offset = (s - (len(result.sets) - 1) / 2) * 0.22
        mean, low, high = bounds(result, "change", (s, slice(1, None)))
        figure.add_scatter(
            x=mean,
            y=[n + offset for n in range(len(conditions))],
            error_x=bars(mean, low, high),
            mode="markers",
            marker={
                "size": 10,
                "symbol": SYMBOLS[s % len(SYMBOLS)],
                "color": palette.series[s % len(palette.series)],
            },
            name=f"{labels.plotly(name)} ({int(result.n_items[s])} items)",
            hovertext=[
                f"<b>{labels.plotly(name)}</b>, {labels.plotly(condition)}<br>"
                f"change {interval_of(result, 'change', (s, c + 1), 4)} nats a token<br>"
                f"loss {result.loss[s, c + 1]:.4f}, as it is {result.loss[s, 0]:.4f}"
                for c, condition in enumerate(conditions)
            ],
            hoverinfo="text",
        )
    level(figure, mode, x=0)
    figure.update_xaxes(title_text="change of the loss, nats a token")
    list_axis(figure, [labels.plotly(condition) for condition in conditions])
    return figure


def table(report: Report) -> list[dict[str, str]]:
    """One row for each set and condition: loss, change, contrast to the first set, and how often it is right."""
    result, rows = report.result, []
    for s, name in enumerate(result.sets):
        for c, condition in enumerate(result.conditions):
            at = (s, c)
            rows.append(
                {
                    "set": name,
                    "condition": condition,
                    "loss, nats a token": interval_of(result, "loss", at, 3),
                    "change": interval_of(result, "change", at, 3) if c else "",
                    f"{result.sets[0]} minus this": interval_of(result, "contrast", at, 3) if c and s else "",
                    "first token right": "" if result.top[s, c] != result.top[s, c] else f"{result.top[s, c]:.1%}",
                }
            )
    return rows


def sentence(report: Report) -> str:
    """What the first control says, in one sentence for each set after the first."""
    result = report.result
    first, condition = result.sets[0], result.conditions[1]
    said = [f"With the memory {condition}, a token of {first} costs {result.change[0, 1]:+.2f} nats"]
    for s in range(1, len(result.sets)):
        low, high = result.contrast_low[s, 1], result.contrast_high[s, 1]
        verdict = "more than" if low > 0 else "less than" if high < 0 else "about as much as"
        said.append(f"{verdict} one of {result.sets[s]} ({result.change[s, 1]:+.2f})")
    return ", ".join(said) + "."
