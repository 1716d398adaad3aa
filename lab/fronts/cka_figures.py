"""CKA reports as Plotly figures, and what they say in words; no Streamlit here.

Axes: layer_a along x, layer_b along y, both as block numbers with embed at -1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from engram_lab.lab.draw import labels
from engram_lab.lab.draw.figure import band_line, colour_bar, level, titled
from engram_lab.lab.draw.tables import bounds, interval_of
from engram_lab.lab.draw.theme import MONO, PALETTES, SEQUENTIAL, Mode
from engram_lab.probes.base import Report
from engram_lab.probes.cka import block_number, names_of

RIDGE = "#FF4FA3"  # apart from all colours of the map
ROW = 34  # pixels of a row of the map
WRITTEN = 16  # layers up to which each cell has its value written in it


def _numbers(layers: Sequence[str]) -> list[int]:
    return [block_number(layer) for layer in layers]


def _names(report: Report) -> tuple[str, str]:
    a, b = names_of(report.config)
    return labels.plotly(a), labels.plotly(b)


def _sample(report: Report) -> str:
    result = report.result
    return f"{result.n_points:,} points of {result.n_sentences:,} sentences"


def cka_map(report: Report, mode: Mode = "light", biased: bool = False) -> go.Figure:
    """CKA of each layer of A with each of B, the soft alignment and the best match of A's layers drawn on it.

    `biased` colours the biased values; the ridge stays that of the unbiased ones.
    """
    result, (a, b) = report.result, _names(report)
    x, y = _numbers(result.layers_a), _numbers(result.layers_b)
    values = (result.biased if biased else result.cka).T  # [layer_b, layer_a]
    hover = []
    for j, layer_b in enumerate(result.layers_b):
        for i, layer_a in enumerate(result.layers_a):
            text = f"<b>layer {layer_a} of {a}</b><br>layer {layer_b} of {b}<br>CKA {result.cka[i, j]:.6f}"
            if result.cka_low is not None:
                text += f"<br>95 % interval {result.cka_low[i, j]:.6f} to {result.cka_high[i, j]:.6f}"
            hover.append(f"{text}<br>biased {result.biased[i, j]:.6f}")
    figure = titled(
        mode,
        "How alike the layers are: " + ("biased CKA" if biased else "CKA (unbiased)"),
        f"{_sample(report)}; line: soft alignment, squares: best match",
        190 + ROW * len(y),
        dragmode=False,
        margin={"l": 70, "r": 96, "t": 104, "b": 56},
    )
    figure.add_heatmap(
        x=x,
        y=y,
        z=values,
        text=[[f"{v:.2f}".replace("0.", ".", 1) for v in row] for row in values]
        if max(len(x), len(y)) <= WRITTEN
        else None,
        texttemplate="%{text}" if max(len(x), len(y)) <= WRITTEN else None,
        textfont={"family": MONO, "size": 11},
        colorscale=SEQUENTIAL,
        zmin=min(0.0, float(values.min())),
        zmax=float(values.max()),
        xgap=1,
        ygap=1,
        hovertext=np.array(hover).reshape(values.shape),
        hoverinfo="text",
        name="CKA",
        colorbar=colour_bar("CKA"),
    )
    best = result.cka.argmax(axis=1)
    figure.add_scatter(
        x=x,
        y=[y[n] for n in best],
        mode="markers",
        marker={"symbol": "square-open", "size": 26, "color": RIDGE, "line": {"width": 1.5}},
        hoverinfo="skip",
        name="best match",
    )
    figure.add_scatter(
        x=x,
        y=result.alignment_a,
        mode="lines+markers",
        line={"color": RIDGE, "width": 2.5},
        marker={"size": 6, "color": RIDGE},
        hoverinfo="skip",
        name="soft alignment",
    )
    figure.update_xaxes(title_text=f"layer of {a}", tickvals=x, ticktext=list(result.layers_a), showgrid=False)
    figure.update_yaxes(title_text=f"layer of {b}", tickvals=y, ticktext=list(result.layers_b), showgrid=False)
    figure.update_xaxes(range=[min(x) - 0.5, max(x) + 0.5])
    figure.update_yaxes(range=[min(y) - 0.5, max(y) + 0.5])
    return figure


def alignment_curve(report: Report, mode: Mode = "light") -> go.Figure:
    """Soft alignment of A's layers in B and of B's in A, against the diagonal, with the 95 % intervals."""
    result, names = report.result, _names(report)
    sides = ((result.layers_a, "alignment_a"), (result.layers_b, "alignment_b"))
    layers = max((layers for layers, _ in sides), key=len)
    figure = titled(
        mode,
        "Which layer of the other model each layer looks like",
        f"soft alignment, {_sample(report)}; band: 95 % interval; dotted: the same layer",
        420,
    )
    ends = [-1, max(_numbers(layers))]
    figure.add_scatter(
        x=ends, y=ends, mode="lines", line={"color": PALETTES[mode].quiet, "width": 1, "dash": "dot"},
        hoverinfo="skip", showlegend=False, name="diagonal",
    )  # fmt: skip
    for n, (own, field) in enumerate(sides):
        hover = [
            f"<b>layer {layer} of {names[n]}</b><br>looks like layer {_entry(report, field, i)} of {names[1 - n]}"
            for i, layer in enumerate(own)
        ]
        band_line(
            figure, PALETTES[mode].series[n], f"{names[n]} in {names[1 - n]}", _numbers(own), bounds(result, field),
            hover, strength=0.2, dash=("solid", "dash")[n], size=7, symbol=("circle", "square")[n],
        )  # fmt: skip
    x = _numbers(layers)
    figure.update_xaxes(title_text="layer", tickvals=x, ticktext=list(layers), range=[-1.3, max(x) + 0.3])
    figure.update_yaxes(title_text="block of the other model it looks like", range=[-1.3, max(x) + 0.6])
    return figure


def lead_curve(report: Report, mode: Mode = "light") -> go.Figure:
    """How many blocks deeper each layer of A looks than the same layer of B; for models with the same layers."""
    result, (a, b) = report.result, _names(report)
    over = f"{result.mean_lead:+.2f} blocks"
    if result.mean_lead_low is not None:
        over += f" ({result.mean_lead_low:+.2f} to {result.mean_lead_high:+.2f})"
    figure = titled(
        mode,
        f"How much deeper the layers of {a} look",
        f"than those of {b}; mean over blocks {over}; band: 95 % interval",
        420,
        showlegend=False,
    )
    x = _numbers(result.layers_a)
    hover = [f"<b>layer {layer}</b><br>{_entry(report, 'lead', i)} blocks" for i, layer in enumerate(result.layers_a)]
    colour = PALETTES[mode].series[2]
    band_line(figure, colour, "lead", x, bounds(result, "lead"), hover, strength=0.2, size=7, symbol="circle")
    level(figure, mode, y=0)
    figure.update_xaxes(title_text="layer of both models", tickvals=x, ticktext=list(result.layers_a))
    figure.update_yaxes(title_text=f"lead of {a}, blocks")
    return figure


def readings(report: Report) -> list[dict[str, str]]:
    """Each layer of A: what it looks like in B, its best match, its lead; 95 % intervals in brackets."""
    result, (a, b) = report.result, names_of(report.config)
    rows = []
    for i, layer in enumerate(result.layers_a):
        best = int(result.cka[i].argmax())
        row = {
            f"layer of {a}": layer,
            f"looks like layer of {b}": _entry(report, "alignment_a", i),
            "best match": result.layers_b[best],
            "its CKA": _entry(report, "cka", (i, best)),
            "biased": f"{result.biased[i, best]:.4f}",
        }
        if result.lead is not None:
            row["lead, blocks"] = _entry(report, "lead", i)
        rows.append(row)
    return rows


def _entry(report: Report, field: str, at: int | tuple[int, int]) -> str:
    return interval_of(report.result, field, at, 4)


def massive(report: Report) -> list[str]:
    """Of each model a sentence on the layers in which one point is far longer than the others, if there are any."""
    from engram_lab.probes.cka import MASSIVE

    result, told = report.result, []
    for model, layers, lengths in zip(
        report.config.models, (result.layers_a, result.layers_b), (result.massive_a, result.massive_b), strict=True
    ):
        long = [] if lengths is None else [n for n, times in enumerate(lengths.tolist()) if times > MASSIVE]
        if long:
            most = max(long, key=lambda n: lengths[n])
            told.append(
                f"In {len(long)} of the {len(layers)} layers of {model} one point is far longer than the others (in "
                f"layer {layers[most]} {lengths[most]:.0f} times the median): it decides their CKA. Choose other "
                "points."
            )
    return list(dict.fromkeys(told))


def deeper(report: Report, lens: Report | None) -> str:
    """One sentence: is A effectively deeper than B, by CKA and by the lens report of the same pair, or is it not.

    A difference counts only if its 95 % interval does not hold 0.
    """
    result, (a, b) = report.result, names_of(report.config)
    if report.config.models[0] == report.config.models[1]:
        return f"This is {report.config.models[0]} with itself, so neither is deeper: the figures show what that gives."
    difference = lens.result.difference if lens is not None else None
    signs: list[int] = []
    parts = []
    if result.mean_lead is None:
        parts.append("the models have different layers, so CKA gives no mean lead")
    elif result.mean_lead_low is None:
        parts.append("one sentence gives no interval for the lead")
    else:
        signs.append(_sign(result.mean_lead_low, result.mean_lead_high))
        within = f"(95 % interval {result.mean_lead_low:+.2f} to {result.mean_lead_high:+.2f})"
        parts.append(
            f"by CKA a layer of {a} looks {_amount(result.mean_lead, signs[-1], 'deeper', 'less deep')} than the same "
            f"layer of {b} {within}"
        )
    if difference is not None and difference.settle_depth is not None and difference.settle_depth_low is not None:
        low, high = difference.settle_depth_low, difference.settle_depth_high
        signs.append(-_sign(low, high))  # to settle earlier is to be deeper
        amount = _amount(difference.settle_depth, -signs[-1], "later", "earlier")
        parts.append(f"by the logit lens its top token settles {amount} (95 % interval {low:+.2f} to {high:+.2f})")
    if len(signs) < 2:
        verdict = "Not both measures can tell"
    elif signs == [1, 1]:
        verdict = "Yes, by both measures"
    elif 1 not in signs:
        verdict = "No" if -1 in signs else "No difference that can be told"
    else:
        verdict = "By one measure only"
    return f"{verdict}: {', and '.join(parts)}."


def _sign(low: float, high: float) -> int:
    """1 or -1 for an interval on one side of 0, else 0."""
    return int(low > 0) - int(high < 0)


def _amount(value: float, sign: int, more: str, less: str) -> str:
    if sign == 0:
        return f"neither {more} nor {less}"
    return f"{abs(value):.2f} blocks {more if sign > 0 else less}"
