"""What each position and layer of a cache recovers, swapped alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from engram_lab.lab.ask import brief
from engram_lab.lab.ask.parts import SWAPPED, Models, Scenario
from engram_lab.lab.ask.request import Ask, Number, Part
from engram_lab.lab.draw import cache, labels
from engram_lab.lab.draw.theme import PALETTES, SEQUENTIAL
from engram_lab.lab.draw.token_map import token_map
from engram_lab.lab.fronts.entry import CLEAN, EFFECTS, LOGITS, NOTES, ORACLE, RATIO, SCORE, Entry

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from engram_lab.lab.draw.theme import Mode
    from engram_lab.models.handle import Handle
    from engram_lab.probes.base import Report
    from engram_lab.probes.kv.map import MapConfig


LAYER_GROUPS = Number("groups", "groups of neighbouring layers (default 0: each layer by itself)", 0, "groups",
                      label="Layer groups")  # fmt: skip
ASK = Ask("kv map", "kv", (Models(), Scenario(experiment="Map"), LAYER_GROUPS, SWAPPED, Part("seed", default=0)))


def rows(report: Report) -> Iterator[dict[str, Any]]:
    """One row for each cell."""
    result = report.result
    for g, group in enumerate(result.group_names):
        for position in range(result.recovery.shape[1]):
            yield {
                "scenario": report.config.scenario.id,
                "oracle": result.oracle.both,
                "layers": group,
                "position": position,
                "token": result.pair.token_texts_old[position],
                "in_field": position in result.pair.field,
                "recovery": float(result.recovery[g, position]),
                "flip": bool(result.flip[g, position]),
                "kl_nats": float(result.kl[g, position]),
            }


COLUMN = 27  # pixels of a position of the map


def figure(report: Report, mode: Mode = "light", handles: Sequence[Handle] = ()) -> go.Figure:
    """Position x layers: what each cell recovers when it alone is swapped; the field is framed."""
    result = report.result
    pair, values = result.pair, result.recovery
    tokens, n_groups = cache.tokens_of(pair), len(result.groups)
    positions = range(pair.n_editable)
    figure = token_map(
        mode,
        "Where the cache holds the answer",
        cache.subtitle(report, "recovery of each cell swapped alone"),
        positions,
        [f"{labels.plotly(labels.short(tokens[p].label, 10))} {p}" for p in positions],
        result.group_names,
        values,
        [
            [
                f"<b>layer {name}, position {p}</b> · {labels.plotly(tokens[p].label)} (id {tokens[p].id})<br>"
                + (
                    f"recovery {values[g, p]:.5f}, the answer {'changes' if result.flip[g, p] else 'stays'}<br>"
                    f"KL(donor ‖ edited) {result.kl[g, p]:.4g} nats"
                    if result.differs[p]
                    else "the two caches are the same here"
                )
                for p in positions
            ]
            for g, name in enumerate(result.group_names)
        ],
        "recovery",
        column=COLUMN,
        height=250 + max(14 * n_groups, 60),
        square=min(COLUMN - 4, max(12, 60 // n_groups)),
        colorscale=SEQUENTIAL,
        zmin=min(0.0, float(np.nanmin(values, initial=0.0))),
        zmax=max(0.01, float(np.nanmax(values, initial=0.0))),
    )
    figure.update_layout(margin={"t": 90, "b": 110}, hovermode="closest")
    figure.update_xaxes(title_text="token of the old prompt and its position", tickangle=-90)
    shown = range(0, n_groups, max(1, n_groups // 15))
    figure.update_yaxes(title_text="layers", tickvals=list(shown), ticktext=[result.group_names[g] for g in shown])
    figure.add_vrect(
        x0=pair.field_start - 0.5,
        x1=pair.field_stop - 0.5,
        line={"color": PALETTES[mode].series[1], "width": 2},
        annotation={"text": "field", "font": {"size": 11}, "yanchor": "bottom", "y": 1},
    )
    return figure


def single_recovery(report: Report) -> dict[int, float]:
    """Position -> the most that it recovers in any layers when it alone is swapped."""
    best = report.result.recovery.max(axis=0)
    return {p: float(best[p]) for p in np.flatnonzero(report.result.differs).tolist()}


def example(engram: str, dense: str) -> MapConfig:
    """A short request that shows most of what the probe computes."""
    from engram_lab.probes.kv.map import MapConfig

    return MapConfig((engram,), brief.scenario(), align="split")


# The measures whose difference between two runs is shown first: paths of the result without indices
COMPARED = ("recovery", "kl", "flip")
DEFINITIONS = EFFECTS | {
    "kl": "KL(donor || edited) in nats over the whole vocabulary, donor being the new prompt's clean run.",
    "groups": "Neighbouring layers swapped together, in groups as equal as can be; each layer by itself if 0.",
}
ENTRY = Entry(
    page="kv",
    asks="At which position, in which layer, does a cache hold the answer?",
    formula=(r"\mathrm{recovery}_{G,p} = \frac{s_{G,p} - s_\text{old}}{s_\text{new} - s_\text{old}},\qquad" + SCORE),
    symbols=(
        RATIO,
        (
            "s_{G,p}",
            "the score with keys and values at position $p$ in the layers $G$ alone from the new",
            "logits",
        ),
        LOGITS,
        CLEAN,
    ),
    sources=(NOTES,),
    controls=ORACLE + "Positions at which both caches are equal, as before the field, change nothing.",
    not_shown="what several cells do together: each is swapped alone, and a map of small values may hide an answer "
    "that is held in many places at once.",
    example="--model smollm2-135m --scenario home-city --align split --groups 6 --json -",
)
