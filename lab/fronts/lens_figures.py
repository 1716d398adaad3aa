"""Lens reports as Plotly figures; no Streamlit here.

Every figure says in its title what is seen, names its axes with units, and has the exact values on hover.
Axes: layer (index into layer_names, 0 is "embed"), pos (within the prompt shown).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import plotly.graph_objects as go

from engram_lab.lab.draw import labels
from engram_lab.lab.draw.figure import BELOW, fit_to_blocks, layer_axis, layer_curve, level, titled
from engram_lab.lab.draw.tables import bounds, interval_of
from engram_lab.lab.draw.theme import PALETTES, SEQUENTIAL, Mode, translucent
from engram_lab.lab.draw.token_map import ROW, ticks, token_map
from engram_lab.models.errors import LabError
from engram_lab.probes.base import Report
from engram_lab.probes.lens_result import ModelLens, Reading

Measure = Literal["kl", "entropy", "target_prob", "target_rank"]
# What is shown -> (name in the title, its unit at the colour bar)
MEASURES: dict[Measure, tuple[str, str]] = {
    "kl": ("KL(final ‖ layer)", "nats"),
    "entropy": ("Entropy of the layer's prediction", "nats"),
    "target_prob": ("Probability of the target", "probability"),
    "target_rank": ("Rank of the target", "rank (0 = top)"),
}
COLUMN = 62  # pixels of a position of the map
Memory = Mapping[str, Sequence[int]]  # model name -> its memory layers


def lens_curves(report: Report, mode: Mode = "light", memory: Memory | None = None) -> go.Figure:
    """Mean KL by layer for each model.

    The band is the 10th to 90th percentile of positions for one prompt, the 95 % bootstrap interval of the mean over
    prompts for several. `memory` names the blocks to mark. The tuned lens is drawn beside the logit lens if the report
    has it.
    """
    models = report.result.models
    n_prompts = len(report.config.prompts)
    counts = " and ".join(dict.fromkeys(str(int(lens.counted.sum())) for lens in models))
    if n_prompts == 1:
        band, of = "10th to 90th percentile", f"mean over {counts} positions"
    else:
        band, of = "95 % interval of the mean", f"mean over {counts} positions of {n_prompts} texts"
    final = ",<br>".join(
        f"{labels.plotly(lens.name)} {interval_of(lens, 'mean_final_entropy', digits=3)}" for lens in models
    )
    figure = titled(
        mode,
        "How far each layer's prediction is from the final one",
        f"{of}; band: {band}<br>entropy of the final prediction, nats: {final}",
        510,
        legend=BELOW,
        margin={"t": 112},
    )
    for n, lens in enumerate(models):
        for reading, tuned in readings(lens):
            values = bounds(reading, "mean_kl")
            if n_prompts == 1:
                values = reading.mean_kl, reading.kl_p10, reading.kl_p90
            marked = (memory or {}).get(lens.name, ())
            layer_curve(figure, mode, n, lens.name, lens.layer_names, values, marked, band, tuned)
    layer_axis(figure, max((lens.layer_names for lens in models), key=len))
    figure.update_yaxes(title_text="KL(final ‖ layer), nats", rangemode="tozero")
    fit_to_blocks(figure)
    return figure


def readings(lens: ModelLens) -> list[tuple[Reading, bool]]:
    """(reading, whether it is the tuned lens) of a model: the logit lens, then the tuned one if it was asked for."""
    return [(lens, False), *([(lens.tuned, True)] if lens.tuned is not None else [])]


def prompt_tokens(report: Report, index: int, prompt: int = 0) -> list[labels.Token]:
    """The tokens [pos] that model `index` got for one prompt."""
    return labels.tokens_at(report.result.models[index], prompt, report.config.prompts)


def _colours(report: Report, what: Measure, values: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
    """(values to colour, options of the heat map), the same scale for both models and both lenses.

    Ranks are on a log scale, probabilities from 0 to 1. The scale of nats ends at the largest value that a block
    has at a counted position: those of embed, ten times as large, would leave no difference between blocks.
    """
    if what == "target_prob":
        return values, {"zmin": 0, "zmax": 1, "colorbar": {}}
    if what == "target_rank":
        ranks = [own.target_rank for lens in report.result.models for own, _ in readings(lens)]
        most = max(9.0, *(float(own.max()) for own in ranks if own is not None))
        marks = [r for r in (0, 1, 10, 100, 1000, 10_000, 100_000) if r <= most]
        ticks = {"tickvals": [float(np.log10(1 + r)) for r in marks], "ticktext": [f"{r:,}" for r in marks]}
        return np.log10(1 + values), {"zmin": 0, "zmax": float(np.log10(1 + most)), "colorbar": ticks}
    top = max(float(getattr(lens, what)[1:, lens.counted].max(initial=1e-3)) for lens in report.result.models)
    return values, {"zmin": 0, "zmax": top, "colorbar": {}}


def lens_map(
    report: Report,
    index: int,
    name_of: Callable[[int], str],
    mode: Mode = "light",
    what: Measure = "kl",
    window: tuple[int, int] | None = None,
    selected: tuple[int, int] | None = None,
    tuned: bool = False,
) -> go.Figure:
    """Layer x position map of model `index` for the first prompt, the layer's top token in each cell.

    `name_of` gives a token's label from its id; `window` the positions shown, [first, last); `selected` a cell
    (layer, pos) to frame; `tuned` shows the tuned lens. COLUMN pixels wide for each position: it is meant to scroll.
    """
    lens = report.result.models[index]
    reading = lens.tuned if tuned else lens
    tokens = prompt_tokens(report, index)
    first, last = window or (0, len(tokens))
    positions = range(first, min(last, len(tokens)))
    values = getattr(reading, what).astype(float)[:, : len(tokens)]
    coloured, options = _colours(report, what, values)
    shown = coloured[:, first:last]
    layers = range(len(lens.layer_names))
    best, probability = reading.top_ids, reading.top_probs
    title, unit = MEASURES[what]
    hover = [
        [
            f"<b>layer {lens.layer_names[n]}, position {p}</b> · {labels.plotly(tokens[p].label)} (id {tokens[p].id})"
            f"<br>{labels.plotly(title)}: {values[n, p]:.6g}<br>"
            + "<br>".join(
                f"{probability[n, p, k]:7.4f}  {labels.plotly(name_of(int(best[n, p, k])))} (id {best[n, p, k]})"
                for k in range(best.shape[2])
            )
            for p in positions
        ]
        for n in layers
    ]
    note = f"; cells hold the layer's top token. Positions {first} to {positions[-1]} of {len(tokens)}"
    if what in ("kl", "entropy") and shown.max() > options["zmax"]:
        note += f". Brightest: {options['zmax']:.3g} and more"
    figure = token_map(
        mode,
        f"{title} at each layer and position: {labels.plotly(lens.name)}{', tuned lens' if tuned else ''}",
        f"colour: {unit}{note}",
        positions,
        ticks(tokens, positions, 8),
        lens.layer_names,
        shown,
        hover,
        unit,
        column=COLUMN,
        height=160 + ROW * len(layers),
        text=[[labels.plotly(labels.short(name_of(int(best[n, p, 0])), 7)) for p in positions] for n in layers],
        frame=selected and selected[::-1],
        colorscale=SEQUENTIAL,
        **options,
    )
    figure.update_yaxes(title_text="layer")
    return figure


def difference_curve(report: Report, mode: Mode = "light") -> go.Figure:
    """Mean KL of the first model minus the second by layer, with the paired 95 % interval over texts.

    LabError where the models have different numbers of layers.
    """
    first, second = report.result.models
    difference = report.result.difference
    if difference is None or difference.mean_kl is None:
        raise LabError(
            f"{first.name} has {len(first.layer_names) - 1} layers and {second.name} "
            f"{len(second.layer_names) - 1}, so there is no difference layer by layer."
        )
    figure = titled(
        mode,
        "Which of the two is nearer to its own final prediction",
        f"{labels.plotly(first.name)} minus {labels.plotly(second.name)}, {len(report.config.prompts)} texts; "
        f"below 0 {labels.plotly(first.name)} is nearer; band: paired 95 % interval",
        360,
        showlegend=difference.tuned_mean_kl is not None,
    )
    names, band = first.layer_names, "95 % interval"
    for tuned, prefix in ((False, ""), (True, "tuned_")):
        values = bounds(difference, f"{prefix}mean_kl")
        if values[0] is not None:
            layer_curve(figure, mode, 2, "difference", names, values, (), band, tuned)
    level(figure, mode, y=0)
    layer_axis(figure, names)
    figure.update_yaxes(title_text="difference of mean KL, nats")
    fit_to_blocks(figure)
    return figure


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
