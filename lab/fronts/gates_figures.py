"""Gates at each token as a map, and the prompt coloured by them; no Streamlit here.

Axes: layer (memory layers), branch, pos (within the prompt shown).
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.colors import hex_to_rgb, label_rgb, sample_colorscale

from engram_lab.lab.draw import labels
from engram_lab.lab.draw.figure import titled
from engram_lab.lab.draw.theme import MONO, PALETTES, SEQUENTIAL, Mode
from engram_lab.lab.fronts.lens_figures import ROW
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
    found: Any
    if what == GATE:
        found = run.gate
    elif what == WRITTEN:
        found = run.written_norm
    elif what == RATIO:
        # A stream of length 0 has nothing to compare with.
        with np.errstate(divide="ignore", invalid="ignore"):
            found = result.written_norm / result.residual_norm[:, None]
    elif what == ATTRIBUTION:
        found = result.attribution.written[:, None]
    elif what == KNOCK_OUT:
        found = result.knock_out.logit_change[:, None]
    else:
        found = result.knock_out.log_prob_change[:, None]
    values: np.ndarray = found[..., result.prompt_index == 0]
    return values


def tokens_of(report: Report) -> list[labels.Token]:
    """The tokens [pos] of the first prompt."""
    result = report.result
    at = np.flatnonzero(result.prompt_index == 0)
    ids, start, end = (field[at] for field in (result.token_ids, result.char_start, result.char_end))
    texts = [result.token_texts[n] for n in at]
    return labels.tokens_of(report.config.prompts[0], ids.tolist(), start.tolist(), end.tolist(), texts)


def scale_of(report: Report, what: str, mode: Mode, difference: bool = False) -> dict[str, Any]:
    """zmin, zmax and colorscale: of gates from 0 to the ceiling, of what has a sign with 0 in the middle."""
    if SHOWN[what].signed or difference:
        if difference and what == GATE:
            top = report.result.ceiling
        else:
            drawn = [values_of(report, what)]
            if difference:
                drawn += [values_of(report, what, run) - drawn[0] for run in report.result.controls]
                drawn = drawn[1:]
            top = max(float(np.nanmax(np.abs(own), initial=1e-6)) for own in drawn)
        palette = PALETTES[mode]
        ends = (palette.series[1], palette.panel, palette.series[0])
        colours = [[n / 2, label_rgb(hex_to_rgb(colour))] for n, colour in enumerate(ends)]
        return {"zmin": -top, "zmax": top, "colorscale": colours}
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
    if what not in CHANGED:
        control = None
    intact = values_of(report, what)
    rows: list[tuple[str, np.ndarray]] = []  # name, [pos]
    for run in (None, control) if control is not None else (None,):
        values = values_of(report, what, run)
        if difference and control is not None:
            if run is None:
                continue
            values = values - intact
        for n, layer in enumerate(result.layers):
            for branch in range(values.shape[1]):
                name = f"layer {layer}" + (f", branch {branch}" if values.shape[1] > 1 else "")
                name += f"<br><i>{control_name(run.control)}</i>" if run is not None else ""
                rows.append((name, values[n, branch]))
    rows = rows[::-1]  # Plotly counts from below
    title, unit = shown.title, shown.unit
    if difference and control is not None:
        title, unit = f"{control_name(control.control).capitalize()}: the change of the {what}", f"change of the {what}"
    elif control is not None:
        title = f"{title}, and with {control_name(control.control)}"
    height = max(ROW, 40) if control is not None else ROW
    figure = titled(
        mode,
        f"{title}: {labels.plotly(result.name)}",
        f"colour: {unit}; {_note(report, what)}. Positions {first} to {positions[-1]} of {len(tokens)}",
        190 + height * len(rows),
        width=230 + COLUMN * len(positions),
        margin={"l": 120, "r": 120, "t": 70, "b": 70},
        clickmode="event+select",
        dragmode=False,
    )
    drawn = np.array([values[first:last] for _, values in rows])
    plain_gate = what == GATE and not (difference and control is not None)
    ticks = [0, 0.25, 0.5, 0.75, result.ceiling] if plain_gate else []
    figure.add_heatmap(
        x=list(positions),
        y=list(range(len(rows))),
        z=drawn,
        text=[["" if np.isnan(v) else _brief(v) for v in row] for row in drawn],
        texttemplate="%{text}",
        textfont={"family": MONO, "size": 11},
        xgap=1,
        ygap=1,
        hoverinfo="skip",
        colorbar={
            "title": {"text": unit, "side": "right"},
            "thickness": 10,
            "outlinewidth": 0,
            "x": 1,
            "xpad": 8,
            **({"tickvals": ticks, "ticktext": [*map(str, ticks[:-1]), f"{ticks[-1]:.3f}, ceiling"]} if ticks else {}),
        },
        **scale_of(report, what, mode, difference and control is not None),
    )
    # Plotly reports no clicks on a heat map's cells, so each has an invisible square on it.
    figure.add_scatter(
        x=[p for _ in rows for p in positions],
        y=[n for n in range(len(rows)) for _ in positions],
        mode="markers",
        marker={"symbol": "square", "size": ROW - 4, "opacity": 0},
        selected={"marker": {"opacity": 0}},
        unselected={"marker": {"opacity": 0}},
        hovertext=[
            f"<b>{name.replace('<br>', ', ')}, position {p}</b> · {labels.plotly(tokens[p].label)} (id {tokens[p].id})"
            f"<br>{unit} {values[p]:.6g}" + _more(report, what, p)
            for name, values in rows
            for p in positions
        ],
        hoverinfo="text",
        showlegend=False,
        name="cells",
    )
    if position is not None and position in positions:
        box = {"x0": position - 0.5, "x1": position + 0.5, "y0": -0.5, "y1": len(rows) - 0.5}
        figure.add_shape(type="rect", line={"color": "#FF4FA3", "width": 2.5}, **box)
    figure.update_xaxes(
        title_text="input token and its position",
        tickvals=list(positions),
        ticktext=[f"{labels.plotly(labels.short(tokens[p].label, 7))}<br><i>{p}</i>" for p in positions],
        tickfont={"family": MONO, "size": 11},
        tickangle=0,
        range=[positions[0] - 0.5, positions[-1] + 0.5],
        showgrid=False,
    )
    figure.update_yaxes(
        tickvals=list(range(len(rows))),
        ticktext=[name for name, _ in rows],
        range=[-0.5, len(rows) - 0.5],
        showgrid=False,
    )
    return figure


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
    found = []
    for pos, (token, value) in enumerate(zip(tokens_of(report), values, strict=True)):
        hint = f"position {pos} · id {token.id} · layer {report.result.layers[layer]} · {SHOWN[what].unit} {value:.6g}"
        style = ""
        if not np.isnan(value):
            share = (value - options["zmin"]) / (options["zmax"] - options["zmin"])
            (colour,) = sample_colorscale(options["colorscale"], [min(max(float(share), 0.0), 1.0)])
            style = f"background:{colour};color:{_ink(colour)};border-color:transparent"
        found.append(
            f'<span class="chip{" special" if token.special else ""}" role="listitem" style="{style}" '
            f'title="{html.escape(hint)}">{html.escape(token.label)}</span>'
        )
    return f'<div class="chips" role="list">{"".join(found)}</div>'


def _ink(colour: str) -> str:
    """Black or white, whichever stands out more on an rgb() colour (WCAG's relative luminance)."""
    channels = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "#FFF"
