"""What a gates report says in sum, as Plotly figures and tables: shares of a logit, histogram, controls, n-grams.

Axes: layer (memory layers), order, head, bin; pos within the first prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from engram_lab.lab.draw import labels
from engram_lab.lab.draw.figure import bars, fit_to_blocks, layer_axis, layer_curve, level, titled
from engram_lab.lab.draw.tables import bounds, interval, interval_of
from engram_lab.lab.draw.theme import PALETTES, Mode
from engram_lab.lab.fronts.gates_figures import ceiling_text, control_name
from engram_lab.models.errors import LabError
from engram_lab.probes.base import Report
from engram_lab.probes.gates import ControlRun


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
    result = report.result
    rows = [
        {
            "": "as it is",
            "loss, nats a token": interval_of(result, "mean_loss", digits=3),
            "change of the loss": "–",
            "KL(as it is ‖ control)": "–",
            **{f"gate, layer {n}": f"{g.mean():.3f}" for n, g in zip(result.layers, result.gate_mean, strict=True)},
            **{f"rank correlation, layer {n}": "1" for n in result.layers},
        }
    ]
    for run in result.controls:
        gates = zip(result.layers, run.gate_mean, strict=True)
        kept = zip(result.layers, run.rank_correlation, strict=True)
        rows.append(
            {
                "": control_name(run.control),
                "loss, nats a token": interval_of(run, "mean_loss", digits=3),
                "change of the loss": interval_of(run, "mean_loss_change", digits=3),
                "KL(as it is ‖ control)": interval_of(run, "mean_final_kl", digits=3),
                **{f"gate, layer {n}": f"{g.mean():.3f}" for n, g in gates},
                **{f"rank correlation, layer {n}": "–" if np.isnan(r).any() else f"{r.mean():.2f}" for n, r in kept},
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
