"""Gates at each token as a map, and the prompt coloured by them; no Streamlit here.

Axes: layer (memory layers), branch, pos (within the prompt shown).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.colors import hex_to_rgb, label_rgb, sample_colorscale

from engram_lab.lab.draw import labels
from engram_lab.lab.draw.theme import PALETTES, SEQUENTIAL, Mode
from engram_lab.lab.draw.token_map import ROW, ticks, token_map
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
            style = f"background:{colour};color:{_ink(colour)};border-color:transparent"
        return labels.Look(f"layer {report.result.layers[layer]} · {SHOWN[what].unit} {value:.6g}", style)

    return labels.chips(tokens_of(report), look)


def _ink(colour: str) -> str:
    """Black or white, whichever stands out more on an rgb() colour (WCAG's relative luminance)."""
    channels = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "#FFF"
