"""How a model came to be, from the training.json beside its weights, as Plotly figures.

`cards` maps a model's name to the content of its training.json; a point on the way has tokens, held_out_loss,
mean_kl [layer] with layer_names, and gate_histogram {memory layer: counts [bin] of gates from 0 to 1}.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from engram_lab.lab.draw import labels
from engram_lab.lab.draw.figure import LAYER_AXIS, titled
from engram_lab.lab.draw.theme import PALETTES, SEQUENTIAL, Mode

Card = Mapping[str, Any]


def _tokens(point: Mapping[str, Any]) -> float:
    return point["tokens"] / 1e6


def loss_over_training(cards: Mapping[str, Card], mode: Mode = "light") -> go.Figure:
    """Held-out loss against tokens, one line for each model."""
    figure = titled(mode, "Held-out loss while training", "the same text in the same order for both", 340)
    for n, (name, card) in enumerate(cards.items()):
        # The loss of the untrained model, log(vocabulary), would flatten all the rest.
        points = [point for point in card["points"] if point["step"] > 0]
        figure.add_scatter(
            x=[_tokens(point) for point in points],
            y=[point["held_out_loss"] for point in points],
            mode="lines+markers",
            line={"color": PALETTES[mode].series[n], "width": 2.5, "dash": "solid" if n == 0 else "dash"},
            marker={"size": 7, "symbol": "circle" if n == 0 else "square"},
            hovertext=[
                f"<b>{labels.plotly(name)}</b><br>after {_tokens(point):.3f} M tokens"
                f"<br>held-out loss {point['held_out_loss']:.6g} nats a token"
                for point in points
            ],
            hoverinfo="text",
            name=labels.plotly(name),
        )
    figure.update_xaxes(title_text="training tokens, millions", rangemode="tozero")
    figure.update_yaxes(title_text="held-out loss, nats a token")
    return figure


def lens_over_training(name: str, card: Card, mode: Mode = "light") -> go.Figure:
    """Mean KL by layer at each recorded point: the colour says how far the training was."""
    points = [point for point in card["points"] if point.get("mean_kl") and point["step"] > 0]
    most = max((_tokens(point) for point in points), default=1.0)
    figure = titled(
        mode,
        f"The lens curve while training: {labels.plotly(name)}",
        f"mean over held-out positions; dark: early, bright: after {most:.1f} M tokens",
        340,
        showlegend=False,
    )
    for point in points:
        figure.add_scatter(
            x=list(range(len(point["mean_kl"]))),
            y=point["mean_kl"],
            mode="lines",
            line={"color": sample_colorscale(SEQUENTIAL, _tokens(point) / most)[0], "width": 2},
            hovertext=[
                f"after {_tokens(point):.3f} M tokens<br>layer {layer}<br>{value:.6g} nats"
                for layer, value in zip(point["layer_names"], point["mean_kl"], strict=True)
            ],
            hoverinfo="text",
            name=f"{_tokens(point):.2f} M",
        )
    if points:
        names = list(points[-1]["layer_names"])
        blocks = max(max(point["mean_kl"][1:]) for point in points)
        embed = [point["mean_kl"][0] for point in points]
        if max(embed) > 2 * blocks:  # else nothing would be seen of the blocks
            figure.update_yaxes(range=[0, 1.08 * blocks])
            names[0] += f"<br>↑ {min(embed):.3g} to {max(embed):.3g}"
        figure.update_xaxes(tickvals=list(range(len(names))), ticktext=names)
    figure.update_xaxes(title_text=LAYER_AXIS)
    figure.update_yaxes(title_text="KL(final ‖ layer), nats", rangemode="tozero")
    return figure


def gates_over_training(name: str, card: Card, mode: Mode = "light") -> go.Figure:
    """How open the gates were at each recorded point: one panel for each memory layer, columns sum to 100 %."""
    points = [point for point in card["points"] if point.get("gate_histogram")]
    layers = sorted(points[-1]["gate_histogram"], key=int) if points else []
    panels = {
        "cols": max(1, len(layers)),
        "shared_yaxes": True,
        "horizontal_spacing": 0.04,
        "subplot_titles": [f"memory in block {layer}" for layer in layers],
    }
    figure = titled(
        mode,
        f"How the gates opened while training: {labels.plotly(name)}",
        "share of held-out positions with a gate of that size, % (each column sums to 100)",
        360,
        panels,
    )
    shares = {}
    for layer in layers:
        counts = np.array([point["gate_histogram"][layer] for point in points], dtype=float)
        shares[layer] = 100 * counts / counts.sum(axis=1, keepdims=True).clip(1)
    top = max((float(np.percentile(share, 99)) for share in shares.values()), default=1.0)
    for column, layer in enumerate(layers, start=1):
        bins = shares[layer].shape[1]
        figure.add_heatmap(
            x=[f"{_tokens(point):.1f}" for point in points],
            y=[(n + 0.5) / bins for n in range(bins)],
            z=shares[layer].T,
            zmin=0,
            zmax=top,
            colorscale=SEQUENTIAL,
            hovertemplate="after %{x} M tokens<br>gate around %{y:.3f}<br>%{z:.4g} % of positions<extra></extra>",
            colorbar={"title": {"text": "%"}, "thickness": 10, "outlinewidth": 0},
            showscale=column == len(layers),
            row=1,
            col=column,
        )
    figure.update_xaxes(title_text="training tokens, millions", type="category", showgrid=False)
    figure.update_yaxes(range=[0, 1], showgrid=False)
    figure.update_yaxes(title_text="gate (0 shut, 1 open)", col=1)
    return figure
