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
from engram_lab.lab.draw.theme import MONO, SEQUENTIAL, Mode
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
COLUMN, ROW = 62, 30  # pixels of a cell of the map
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
    lens = report.result.models[index]
    at = np.flatnonzero(lens.prompt_index == prompt)
    ids, start, end = (field[at] for field in (lens.token_ids, lens.char_start, lens.char_end))
    texts = [lens.token_texts[n] for n in at]
    return labels.tokens_of(report.config.prompts[prompt], ids.tolist(), start.tolist(), end.tolist(), texts)


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
    n_layers = len(lens.layer_names)
    best, probability = reading.top_ids, reading.top_probs
    title, unit = MEASURES[what]
    text = [[labels.plotly(labels.short(name_of(int(best[n, p, 0])), 7)) for p in positions] for n in range(n_layers)]
    hover = [
        f"<b>layer {lens.layer_names[n]}, position {p}</b> · {labels.plotly(tokens[p].label)} (id {tokens[p].id})"
        f"<br>{labels.plotly(title)}: {values[n, p]:.6g}<br>"
        + "<br>".join(
            f"{probability[n, p, k]:7.4f}  {labels.plotly(name_of(int(best[n, p, k])))} (id {best[n, p, k]})"
            for k in range(best.shape[2])
        )
        for n in range(n_layers)
        for p in positions
    ]
    note = f"; cells hold the layer's top token. Positions {first} to {positions[-1]} of {len(tokens)}"
    if what in ("kl", "entropy") and shown.max() > options["zmax"]:
        note += f". Brightest: {options['zmax']:.3g} and more"
    figure = titled(
        mode,
        f"{title} at each layer and position: {labels.plotly(lens.name)}{', tuned lens' if tuned else ''}",
        f"colour: {unit}{note}",
        160 + ROW * n_layers,
        width=190 + COLUMN * len(positions),
        margin={"l": 70, "r": 120, "t": 70, "b": 70},
        clickmode="event+select",
        dragmode=False,
    )
    bar = {"title": {"text": unit, "side": "right"}, "thickness": 10, "outlinewidth": 0, "x": 1, "xpad": 8}
    options["colorbar"] = bar | options["colorbar"]
    figure.add_heatmap(
        x=list(positions),
        y=list(range(n_layers)),
        z=shown,
        text=text,
        texttemplate="%{text}",
        textfont={"family": MONO, "size": 11},
        colorscale=SEQUENTIAL,
        xgap=1,
        ygap=1,
        hoverinfo="skip",
        **options,
    )
    # Plotly reports no clicks on a heat map's cells, so each has an invisible square on it.
    figure.add_scatter(
        x=[p for _ in range(n_layers) for p in positions],
        y=[n for n in range(n_layers) for _ in positions],
        mode="markers",
        marker={"symbol": "square", "size": ROW - 4, "opacity": 0},
        selected={"marker": {"opacity": 0}},
        unselected={"marker": {"opacity": 0}},
        hovertext=hover,
        hoverinfo="text",
        showlegend=False,
        name="cells",
    )
    if selected is not None and selected[1] in positions:
        layer, pos = selected
        box = {"x0": pos - 0.5, "x1": pos + 0.5, "y0": layer - 0.5, "y1": layer + 0.5}
        figure.add_shape(type="rect", line={"color": "#FF4FA3", "width": 2.5}, **box)
    figure.update_xaxes(
        title_text="input token and its position",
        tickvals=list(positions),
        ticktext=[f"{labels.plotly(labels.short(tokens[p].label, 8))}<br><i>{p}</i>" for p in positions],
        tickfont={"family": MONO, "size": 11},
        tickangle=0,
        range=[positions[0] - 0.5, positions[-1] + 0.5],
        showgrid=False,
    )
    figure.update_yaxes(
        title_text="layer",
        tickvals=list(range(n_layers)),
        ticktext=list(lens.layer_names),
        range=[-0.5, n_layers - 0.5],
        showgrid=False,
    )
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
