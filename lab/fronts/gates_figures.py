"""Gates as a map and as chips, and in sum: shares of a logit, histogram, controls, n-grams; no Streamlit here.

Axes: layer (memory layers), branch, order, head, bin, pos (within the prompt shown).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from engram_lab.lab.draw import labels
from engram_lab.lab.draw.figure import bars, fit_to_blocks, layer_axis, layer_curve, level, titled
from engram_lab.lab.draw.tables import bounds, interval, interval_of
from engram_lab.lab.draw.theme import PALETTES, SEQUENTIAL, Mode, diverging, ink_on
from engram_lab.lab.draw.token_map import ROW, ticks, token_map
from engram_lab.models.errors import LabError
from engram_lab.probes.base import Report
from engram_lab.probes.gates import ControlRun

COLUMN = 54  # pixels of a position of the map


@dataclass(frozen=True)
class Shown:
    """What a map can show: its title, its unit, and whether 0 is in the middle of its colours."""

    title: str
    unit: str
    signed: bool = False


GATE, WRITTEN, RATIO, ATTRIBUTION = "gate", "written norm", "written / residual norm", "attribution"
KNOCK_OUT, KNOCK_OUT_LOG_PROB = "knock-out: logit", "knock-out: log-probability"
SHOWN = {
    GATE: Shown("How far the memory opens at each token", "gate"),
    WRITTEN: Shown("How much the memory writes at each token", "norm of what is written"),
    RATIO: Shown("What the memory writes beside what is there", "norm written / norm of the residual"),
    ATTRIBUTION: Shown("What the memory's writing gives the target at each token", "logit", True),
    KNOCK_OUT: Shown("What the target's logit changes by when one gate is shut", "logit", True),
    KNOCK_OUT_LOG_PROB: Shown("What the target's log-probability changes by when one gate is shut", "nats", True),
}
CHANGED = (GATE, WRITTEN)  # what a control changes on the map
CONTROL_NAMES = {
    "shuffled": "rows shuffled",
    "zeroed": "rows zeroed",
    "one_row": "one row",
    "off": "memory off",
}


def control_name(control: str) -> str:
    """A control of a request in words."""
    name, at, layer = control.partition("@")
    return CONTROL_NAMES[name] + (f", layer {layer}" if at else "")


def offered(report: Report) -> list[str]:
    """What of SHOWN this report has."""
    result = report.result
    return [
        what
        for what in SHOWN
        if (what != ATTRIBUTION or result.attribution) and (not what.startswith("knock") or result.knock_out)
    ]


def values_of(report: Report, what: str, control: ControlRun | None = None) -> np.ndarray:
    """[layer, branch, pos] of what is shown, of the first prompt, with a control for what it changes."""
    result, run = report.result, control or report.result
    if what == RATIO:
        # A stream of length 0 has nothing to compare with.
        with np.errstate(divide="ignore", invalid="ignore"):
            found = result.written_norm / result.residual_norm[:, None]
    elif what in CHANGED:
        found = run.gate if what == GATE else run.written_norm
    elif what == ATTRIBUTION:
        found = result.attribution.written[:, None]
    else:
        knocked = result.knock_out
        found = (knocked.logit_change if what == KNOCK_OUT else knocked.log_prob_change)[:, None]
    values: np.ndarray = found[..., result.prompt_index == 0]
    return values


def tokens_of(report: Report) -> list[labels.Token]:
    """The tokens [pos] of the first prompt."""
    return labels.tokens_at(report.result, 0, report.config.prompts)


def scale_of(report: Report, what: str, mode: Mode, difference: bool = False) -> dict[str, Any]:
    """zmin, zmax and colorscale: of gates from 0 to the ceiling, of what has a sign with 0 in the middle."""
    if SHOWN[what].signed or difference:
        if difference and what == GATE:
            top = report.result.ceiling
        else:
            intact = values_of(report, what)
            changes = [values_of(report, what, run) - intact for run in report.result.controls]
            drawn = changes if difference else [intact]
            top = max(float(np.nanmax(np.abs(values), initial=1e-6)) for values in drawn)
        return {"zmin": -top, "zmax": top, "colorscale": diverging(mode, below=1, above=0)}
    top = report.result.ceiling
    if what != GATE:
        counted = report.result.counted[report.result.prompt_index == 0]
        # A leading special token writes as no word does; what is above the largest of the others is brightest.
        top = float(np.nanmax(values_of(report, what)[..., counted], initial=1e-6))
    return {"zmin": 0, "zmax": top, "colorscale": SEQUENTIAL}


def ceiling_text(report: Report) -> str:
    """The ceiling and what learned norm weights allow, in words."""
    result = report.result
    learned = ", ".join(f"{c:.3f} at layer {n}" for n, c in zip(result.layers, result.ceiling_learned, strict=True))
    return f"ceiling {result.ceiling:.3f} at this width (with the learned norm weights: {learned})"


def gate_map(
    report: Report,
    mode: Mode = "light",
    what: str = GATE,
    window: tuple[int, int] | None = None,
    position: int | None = None,
    control: ControlRun | None = None,
    difference: bool = False,
) -> go.Figure:
    """Positions x (memory layer, branch) of the first prompt.

    With a `control` its rows come under the intact ones, or with `difference` control minus intact instead of both.
    `window` is the positions shown, [first, last); `position` one to frame. The figure is COLUMN pixels wide for each
    position: it is meant to scroll.
    """
    result, tokens, shown = report.result, tokens_of(report), SHOWN[what]
    first, last = window or (0, len(tokens))
    positions = range(first, min(last, len(tokens)))
    control = control if what in CHANGED else None
    difference = difference and control is not None
    rows = _map_rows(report, what, control, difference)
    title, unit, bar = shown.title, shown.unit, {}
    if difference and control is not None:
        title, unit = f"{control_name(control.control).capitalize()}: the change of the {what}", f"change of the {what}"
    elif control is not None:
        title = f"{title}, and with {control_name(control.control)}"
    if what == GATE and not difference:
        ceiling, below = result.ceiling, [0, 0.25, 0.5, 0.75]
        bar = {"tickvals": [*below, ceiling], "ticktext": [*map(str, below), f"{ceiling:.3f}, ceiling"]}
    drawn = np.array([values[first:last] for _, values in rows])
    return token_map(
        mode,
        f"{title}: {labels.plotly(result.name)}",
        f"colour: {unit}; {_note(report, what)}. Positions {first} to {positions[-1]} of {len(tokens)}",
        positions,
        ticks(tokens, positions, 7),
        [name for name, _ in rows],
        drawn,
        [
            [
                f"<b>{name.replace('<br>', ', ')}, position {p}</b> · {labels.plotly(tokens[p].label)} "
                f"(id {tokens[p].id})<br>{unit} {values[p]:.6g}" + _more(report, what, p)
                for p in positions
            ]
            for name, values in rows
        ],
        unit,
        column=COLUMN,
        height=190 + (ROW if control is None else max(ROW, 40)) * len(rows),
        left=120,
        text=[["" if np.isnan(v) else _brief(v) for v in row] for row in drawn],
        frame=None if position is None else (position, None),
        colorbar=bar,
        **scale_of(report, what, mode, difference),
    )


def _map_rows(report: Report, what: str, control: ControlRun | None, difference: bool) -> list[tuple[str, np.ndarray]]:
    """(name, values [pos]) of the rows of the map, from below: a control's rows under the intact ones."""
    intact, rows = values_of(report, what), []
    for run in (None, control) if control is not None else (None,):
        if difference and run is None:
            continue
        values = values_of(report, what, run) - (intact if difference else 0)
        for n, layer in enumerate(report.result.layers):
            for branch in range(values.shape[1]):
                name = f"layer {layer}" + (f", branch {branch}" if values.shape[1] > 1 else "")
                name += f"<br><i>{control_name(run.control)}</i>" if run is not None else ""
                rows.append((name, values[n, branch]))
    return rows[::-1]  # Plotly counts from below


def _brief(value: float) -> str:
    return f"{round(value, 2) + 0.0:.2f}" if abs(value) < 10 else f"{value:.1f}"  # + 0.0: no minus before 0.00


def _note(report: Report, what: str) -> str:
    """What the reader of a map has to know."""
    if what == GATE:
        return f"it ends at the {ceiling_text(report)}"
    if what in (WRITTEN, RATIO):
        return "brightest: the most at a counted position, and more"
    if what == ATTRIBUTION:
        chosen = report.config.target
        return f"target {labels.plotly(labels.label(chosen.encode()))}" if chosen else "target: the next token"
    knocked = report.result.knock_out
    return (
        f"target {labels.plotly(labels.label(knocked.target_text.encode()))} at position {knocked.position}; "
        "below 0 the memory spoke for it"
    )


def _more(report: Report, what: str, pos: int) -> str:
    """More for the hover: which token an attribution is about."""
    if what != ATTRIBUTION:
        return ""
    result = report.result
    target = int(result.attribution.target_ids[pos])
    name = labels.plotly(labels.label(result.target_names[target].encode()))
    return f"<br>target {name} (id {target}), logit {result.attribution.logit[pos]:.6g}"


def chips(report: Report, what: str, layer: int, mode: Mode = "light", control: ControlRun | None = None) -> str:
    """HTML: the first prompt, each token on the colour of what is shown at the layer (its index), values on hover."""
    options = scale_of(report, what, mode)
    values = values_of(report, what, control if what in CHANGED else None)[layer].mean(axis=0)

    def look(position: int) -> labels.Look:
        value, style = values[position], ""
        if not np.isnan(value):
            share = (value - options["zmin"]) / (options["zmax"] - options["zmin"])
            (colour,) = sample_colorscale(options["colorscale"], [min(max(float(share), 0.0), 1.0)])
            style = f"background:{colour};color:{ink_on(colour)};border-color:transparent"
        return labels.Look(f"layer {report.result.layers[layer]} · {SHOWN[what].unit} {value:.6g}", style)

    return labels.chips(tokens_of(report), look)


def attribution_bars(report: Report, position: int, mode: Mode = "light") -> go.Figure:
    """The parts of the target's logit at a position of the first prompt: layer x order x head, convolutions, rest."""
    result, palette = report.result, PALETTES[mode]
    said = result.attribution
    target = int(said.target_ids[position])
    said_of = labels.plotly(labels.label(result.target_names[target].encode()))
    _, n_orders, n_heads, _ = said.memory.shape
    whole = float(said.logit[position])
    written = float(said.written[:, position].sum())
    figure = titled(
        mode,
        f"Which parts give {said_of} its logit at position {position}: {labels.plotly(result.name)}",
        f"all bars add up to its logit {whole:.3f}, the memories' to {written:.3f}; "
        f"its log-probability is {said.log_prob[position]:.3f} nats",
        430,
        showlegend=False,
        margin={"b": 110},
    )
    # What is written under a group of bars and on hover, the name of each bar, the bars, their colour. What stands
    # under a single bar is wider than the bar: it goes a line below its neighbours' names.
    groups: list[tuple[str, str, list[str], np.ndarray, str]] = []
    for n, layer in enumerate(result.layers):
        colour, heads = palette.series[n % 2], [str(h) for h in range(n_heads)]
        for order in range(n_orders):
            name, parts = f"{order + 2}-grams", said.memory[n, order, :, position]
            groups.append((f"layer {layer}<br>{name}", f"layer {layer}, {name}, head", heads, parts, colour))
        parts, colour = said.conv[n : n + 1, position], palette.series[3]
        groups.append(("conv.", f"layer {layer}, convolution", ["c"], parts, colour))
    blocks = [str(b) for b in range(len(said.block))]
    parts = said.block[:, position]
    groups.append(("attention<br>and MLP", "attention and MLP of block", blocks, parts, palette.quiet))
    groups.append(("embedding", "embedding", ["e"], said.embed[position : position + 1], palette.quiet))
    at, ticks = 0.0, []
    for under, name, names, parts, colour in groups:
        x = [at + n for n in range(len(names))]
        ticks += list(zip(x, names, strict=True))
        figure.add_bar(
            x=x,
            y=parts,
            marker={"color": colour},
            name=name,
            hovertext=[
                f"<b>{name}{f' {own}' if len(names) > 1 else ''}</b><br>{part:.6g} of {whole:.6g}"
                for own, part in zip(names, parts, strict=True)
            ],
            hoverinfo="text",
        )
        figure.add_annotation(
            x=(x[0] + x[-1]) / 2, y=-0.1, yref="paper", yanchor="top", text=under, showarrow=False,
            yshift=0 if len(names) > 1 else -30, font={"size": 11, "color": palette.quiet},
        )  # fmt: skip
        at = x[-1] + 2.2
    figure.update_xaxes(tickvals=[x for x, _ in ticks], ticktext=[own for _, own in ticks], tickfont={"size": 9})
    figure.update_xaxes(tickangle=0, showgrid=False)
    figure.update_yaxes(title_text="share of the logit", zeroline=True, zerolinecolor=palette.quiet)
    return figure


def lens_curves(report: Report, control: ControlRun, mode: Mode = "light") -> go.Figure:
    """Mean KL by layer, as the model is and with the control; each against its own final prediction.

    LabError for a report without them, as those of text sets are.
    """
    result = report.result
    if result.mean_kl is None or control.mean_kl is None:
        raise LabError("This report has no lens curves: ask for a prompt, not for a text set.")
    figure = titled(
        mode,
        f"The lens with and without: {control_name(control.control)}",
        f"mean over {int(result.counted.sum())} positions of how far each layer is from its own model's final "
        "prediction",
        400,
    )
    for n, (name, run) in enumerate((("as it is", result), (control_name(control.control), control))):
        values = bounds(run, "mean_kl")
        layer_curve(figure, mode, n, name, result.layer_names, values, result.layers, "95 % interval")
    layer_axis(figure, result.layer_names)
    figure.update_yaxes(title_text="KL(final ‖ layer), nats", rangemode="tozero")
    fit_to_blocks(figure)
    return figure


def histogram(report: Report, mode: Mode = "light") -> go.Figure:
    """How often a gate of each layer is how far open, with 95 % intervals over texts, and the ceiling."""
    result, palette = report.result, PALETTES[mode]
    n_bins = result.histogram.shape[1]
    texts = len(report.config.prompts)
    figure = titled(
        mode,
        f"How far the gates open: {labels.plotly(result.name)}",
        f"{int(result.counted.sum())} positions of {texts} text{'s' * (texts > 1)}"
        + ("; bars: 95 % intervals over texts" if texts > 1 else "")
        + f"; {ceiling_text(report)}",
        400,
        barmode="group",
        bargap=0.15,
    )
    for n, layer in enumerate(result.layers):
        share = 100 * result.histogram[n]
        error: dict[str, Any] | None = None
        of = [""] * n_bins
        if result.histogram_low is not None:
            low, high = 100 * result.histogram_low[n], 100 * result.histogram_high[n]
            error = bars(share, low, high, 1.2, 2)
            of = [f"<br>95 % interval {a:.4g} to {b:.4g}" for a, b in zip(low, high, strict=True)]
        mean, least, most = (None if part is None else part.mean() for part in bounds(result, "gate_mean", n))
        figure.add_bar(
            x=(np.arange(n_bins) + 0.5) / n_bins,
            y=share,
            error_y=error,
            name=f"layer {layer}, mean {interval(mean, least, most)}",
            marker={"color": palette.series[n % len(palette.series)]},
            hovertext=[
                f"<b>layer {layer}</b>, gate {b / n_bins:.2f} to {(b + 1) / n_bins:.2f}<br>{share[b]:.4g} %{of[b]}"
                for b in range(n_bins)
            ],
            hoverinfo="text",
        )
    level(figure, mode, x=result.ceiling, width=1.5)
    figure.update_xaxes(title_text="gate", range=[0, 1], dtick=0.1)
    figure.update_yaxes(title_text="share of positions, %", rangemode="tozero")
    return figure


def control_rows(report: Report) -> list[dict[str, str]]:
    """The loss as it is and with each control, as rows of a table; 95 % intervals over texts in brackets."""
    result, rows = report.result, []
    for run in (None, *result.controls):
        gates = zip(result.layers, (run or result).gate_mean, strict=True)
        kept = [1.0 if run is None else run.rank_correlation[n].mean() for n in range(len(result.layers))]
        rows.append(
            {
                "": "as it is" if run is None else control_name(run.control),
                "loss, nats a token": interval_of(run or result, "mean_loss", digits=3),
                "change of the loss": "–" if run is None else interval_of(run, "mean_loss_change", digits=3),
                "KL(as it is ‖ control)": "–" if run is None else interval_of(run, "mean_final_kl", digits=3),
                **{f"gate, layer {n}": f"{g.mean():.3f}" for n, g in gates},
                **{
                    f"rank correlation, layer {n}": "1" if run is None else interval(r)
                    for n, r in zip(result.layers, kept, strict=True)
                },
            }
        )
    return rows


def ngram_rows(report: Report, layer: int, order: int, highest: bool) -> list[dict[str, Any]]:
    """The ranked n-grams of one order at a memory layer (its block number), as rows of a table."""
    ranked: Sequence[Any] = report.result.highest if highest else report.result.lowest
    return [
        {
            "n-gram": " ".join(labels.label(text.encode()) for text in own.texts),
            "as found": labels.label(own.example.encode()),
            "count": own.count,
            "mean gate": own.mean_gate,
            "mean written norm": own.mean_written_norm,
        }
        for own in ranked
        if own.layer == layer and own.order == order
    ]
