"""The lens told in sums: where the final top token takes the lead, and the table of loss, entropy and depth."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from engram_lab.lab.draw import labels
from engram_lab.lab.draw.figure import BELOW, layer_axis, titled
from engram_lab.lab.draw.tables import interval_of
from engram_lab.lab.draw.theme import PALETTES, Mode, translucent
from engram_lab.lab.fronts.lens_figures import readings
from engram_lab.probes.base import Report


def settle_histogram(report: Report, mode: Mode = "light") -> go.Figure:
    """At which layer the final top token takes the lead for good: share of positions by layer."""
    models = report.result.models
    shown = [
        (n, lens, reading, tuned, labels.plotly(lens.name) + (", tuned lens" if tuned else ""))
        for n, lens in enumerate(models)
        for reading, tuned in readings(lens)
    ]
    means = ",<br>".join(
        f"{labels.plotly(lens.name)} {lens.mean_settle_depth:.2f}"
        + (f", tuned lens {lens.tuned.mean_settle_depth:.2f}" if lens.tuned else "")
        for lens in models
    )
    figure = titled(
        mode,
        "Where the final top token takes the lead and keeps it",
        f"mean settle depth, counted from embed = 0: {means}",
        380,
        legend=BELOW,
        barmode="group",
        bargap=0.25,
    )
    for n, lens, reading, tuned, whose in shown:
        depths = reading.settle_depth[lens.counted]
        counts = np.bincount(depths, minlength=len(lens.layer_names))
        share = 100 * counts / max(len(depths), 1)
        colour = PALETTES[mode].series[n]
        figure.add_bar(
            x=list(range(len(counts))),
            y=share,
            name=whose,
            marker={"color": translucent(colour, 0.35) if tuned else colour, "line": {"color": colour, "width": 1}},
            marker_pattern_shape="" if n == 0 else "/",
            hovertext=[
                f"<b>{whose}</b><br>settles at layer {name}<br>{count} of {len(depths)} positions, {part:.4g} %"
                for name, count, part in zip(lens.layer_names, counts, share, strict=True)
            ],
            hoverinfo="text",
        )
    layer_axis(figure, max((lens.layer_names for lens in models), key=len))
    figure.update_yaxes(title_text="share of positions, %", rangemode="tozero")
    return figure


def summary(report: Report) -> list[dict[str, str]]:
    """Loss, final entropy and settle depth of each model and their difference; 95 % intervals in brackets."""
    n_prompts = str(len(report.config.prompts))

    def row(name: str, positions: str, source: Any, prefix: str, tuned: tuple[Any, str] | None) -> dict[str, str]:
        found = {
            "": name,
            "texts": n_prompts,
            "positions": positions,
            "loss, nats a token": interval_of(source, f"{prefix}loss", digits=3),
            "final entropy, nats": interval_of(source, f"{prefix}final_entropy", digits=3),
            "settle depth, layers from embed": interval_of(source, f"{prefix}settle_depth", digits=3),
        }
        return found if tuned is None else found | {"settle depth, tuned lens": interval_of(*tuned, digits=3)}

    rows = []
    for lens in report.result.models:
        tuned = None if lens.tuned is None else (lens.tuned, "mean_settle_depth")
        rows.append(row(lens.name, str(int(lens.counted.sum())), lens, "mean_", tuned))
    difference = report.result.difference
    if difference is not None:
        (a, b), at = report.result.models, report.result.aligned
        pairs = int((a.counted[at.pos_a] & b.counted[at.pos_b]).sum())
        tuned = None if a.tuned is None else (difference, "tuned_settle_depth")
        rows.append(row("difference (paired)", f"{pairs} matched", difference, "", tuned))
    return rows
