"""A set of scenarios, drawn: recovery by kind of question, and its tables."""

from __future__ import annotations

import plotly.graph_objects as go

from engram_lab.lab.draw import labels
from engram_lab.lab.draw.figure import bars, level, list_axis, titled
from engram_lab.lab.draw.tables import bounds, interval_of
from engram_lab.lab.draw.theme import PALETTES, Mode
from engram_lab.probes.base import Report


def by_kind(report: Report, mode: Mode = "light") -> go.Figure:
    """Recovery by the field alone and by everything behind it, for each kind of question, with intervals."""
    result, palette = report.result, PALETTES[mode]
    names = list(result.kind_names)
    n_out = int((~result.right).sum())
    figure = titled(
        mode,
        "For which questions the answer is read from the field",
        labels.plotly(
            f"{result.name}; bars: 95 % intervals over scenarios; {n_out} of {len(result.ids)} left out, as refused or "
            "not answered right"
        ),
        190 + 62 * len(names),
        margin={"l": 40},
    )
    for e, (edit, name, symbol) in enumerate(
        (("field", "field alone", "circle"), ("downstream", "all behind it", "square"), ("notes", "notes", "diamond"))
    ):
        column = result.edits.index(edit)
        mean, low, high = bounds(result, "mean", (slice(None), column))
        figure.add_scatter(
            x=mean,
            y=[n + (e - 1) * 0.2 for n in range(len(names))],
            error_x=bars(mean, low, high),
            mode="markers",
            marker={"size": 10, "symbol": symbol, "color": palette.series[(1, 0, 2)[e]]},
            name=name,
            hovertext=[
                f"<b>{labels.plotly(kind)}</b>, {name}<br>recovery {interval_of(result, 'mean', (n, column))}<br>"
                f"the answer flips in {result.flips[n, column]:.0%} of {int(result.n_right[n])}"
                for n, kind in enumerate(names)
            ],
            hoverinfo="text",
        )
    for share in (0, 1):
        level(figure, mode, x=share)
    figure.update_xaxes(title_text="recovery, share of the change", tickformat=".0%")
    list_axis(figure, [f"{labels.plotly(kind)} ({int(result.n_right[n])})" for n, kind in enumerate(names)])
    return figure


def kind_table(report: Report) -> list[dict[str, str]]:
    """One row for each kind of question: how many count, recovery with intervals, how often the notes matter."""
    result, rows = report.result, []
    at = {edit: n for n, edit in enumerate(result.edits)}
    for k, kind in enumerate(result.kind_names):

        def recovery(edit: str, k: int = k) -> str:
            return interval_of(result, "mean", (k, at[edit]))

        def share(edit: str, k: int = k) -> str:
            value = result.flips[k, at[edit]]
            return "–" if value != value else f"{value:.0%}"

        rows.append(
            {
                "kind": kind,
                "scenarios": str(int(result.n_scenarios[k])),
                "aligned": str(int(result.n_served[k])),
                "answered right": str(int(result.n_right[k])),
                "field alone": recovery("field"),
                "flips": share("field"),
                "all behind it": recovery("downstream"),
                "flips ": share("downstream"),
                "field minus behind": interval_of(result, "contrast", k),
                "lost without notes": share("notes zero"),
                "lost without all behind": share("downstream zero"),
                "reads": result.said[k],
            }
        )
    return rows


def scenario_table(report: Report) -> list[dict[str, str]]:
    """One row for each scenario, with the reason where it is left out."""
    result = report.result
    at = {edit: n for n, edit in enumerate(result.edits)}

    def recovery(n: int, edit: str) -> str:
        value = result.recovery[n, at[edit]]
        return "–" if value != value else f"{value:.2f}"

    return [
        {
            "scenario": name,
            "kind": result.kinds[n],
            "counts": "yes" if result.right[n] else "no",
            "field alone": recovery(n, "field"),
            "all behind it": recovery(n, "downstream"),
            "notes": recovery(n, "notes"),
            "why not": result.reasons[n],
        }
        for n, name in enumerate(result.ids)
    ]
