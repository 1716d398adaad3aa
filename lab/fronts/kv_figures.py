"""What a cache remembers, drawn: the ladder, the map, answers, knock-outs, the prompt in place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from engram_lab.lab.draw import cache, labels
from engram_lab.lab.draw.figure import bars, level, list_axis, titled
from engram_lab.lab.draw.theme import PALETTES, SEQUENTIAL, Mode
from engram_lab.lab.draw.token_map import token_map
from engram_lab.probes.base import Report

COLUMN = 27  # pixels of a position of the map
STEPS = ("field", "downstream", "last", "best", "random", "all", "self")
_COLOUR = {"field": 1, "downstream": 0, "last": 2, "best": 3, "all": 4, "self": 4}  # of the series
_HOW = {"zero": "circle", "mean": "square", "random": "diamond", "unrelated": "triangle-up"}


def ladder(report: Report, mode: Mode = "light") -> go.Figure:
    """Recovery of every step as bars; of the random ones the mean, with a line from the least to the most."""
    result, palette = report.result, PALETTES[mode]
    what = {"kv": "K and V", "k": "K alone", "v": "V alone"}[report.config.part]
    layers = "all layers" if report.config.layers is None else f"layers {', '.join(result.layer_names)}"
    figure = titled(
        mode,
        "How much of the new answer each part of the cache brings",
        cache.subtitle(report, f"{what} of {layers}", "line: least to most of the draws"),
        430,
        showlegend=False,
        bargap=0.3,
    )
    for step in STEPS:
        mine = [n for n, own in enumerate(result.steps) if own == step]
        if step == "random":
            _control(figure, report, mine, palette.quiet)
        elif mine:
            figure.add_bar(
                x=[result.names[n] for n in mine],
                y=result.effects.recovery[mine],
                marker={"color": palette.series[_COLOUR[step]]},
                hovertext=[_hover(report, n) for n in mine],
                hoverinfo="text",
                name=step,
            )
    for share in (0, 1):
        level(figure, mode, y=share)
    figure.update_yaxes(title_text="recovery, share of the change", tickformat=".0%")
    figure.update_xaxes(title_text="positions taken from the new prompt's cache", tickangle=-35)
    return figure


def _control(figure: go.Figure, report: Report, mine: Sequence[int], colour: str) -> None:
    result = report.result
    if not mine:
        return
    mean, low, high = result.random_mean, result.random_low, result.random_high
    names = [f"random {k}" for k in result.random_k.tolist()]
    figure.add_bar(
        x=names,
        y=mean,
        error_y=bars(mean, low, high, width=5),
        marker={"color": colour, "pattern": {"shape": "/"}},
        hovertext=[
            f"<b>{name}</b> behind the field, {report.config.draws} draws<br>recovery {mean[n]:.4f}, "
            f"{low[n]:.4f} to {high[n]:.4f}, sd {result.random_sd[n]:.4f}"
            for n, name in enumerate(names)
        ],
        hoverinfo="text",
        name="random",
    )


def _hover(report: Report, n: int) -> str:
    result, effects = report.result, report.result.effects
    positions = result.positions[n]
    at = (
        f"{len(positions)} positions" if len(positions) > 8 else f"positions {', '.join(map(str, positions)) or 'none'}"
    )
    tops = "changes" if effects.flip[n] else "stays"
    return (
        f"<b>{labels.plotly(result.names[n])}</b>: {at}<br>recovery {effects.recovery[n]:.4f}, the answer {tops}"
        f"<br>score {effects.score[n]:.4f} logits<br>P(old) {effects.prob_old[n]:.4f}, P(new) {effects.prob_new[n]:.4f}"
        f"<br>logit cosine {effects.cosine[n]:.6f}<br>KL(donor ‖ edited) {effects.kl[n]:.4g} nats"
    )


def ladder_table(report: Report) -> list[dict[str, str]]:
    """One row for each step, of the random ones one for each size."""
    result, rows = report.result, []
    for n, name in enumerate(result.names):
        if result.draw[n] <= 0:
            effects, recovery = result.effects, f"{result.effects.recovery[n]:.3f}"
            if result.draw[n] == 0:
                size = result.random_k.tolist().index(int(result.k[n]))
                low, high = (field[size] for field in (result.random_low, result.random_high))
                recovery = f"{result.random_mean[size]:.3f} ({low:.3f} to {high:.3f})"
            single = result.draw[n] < 0
            rows.append(
                {
                    "step": name,
                    "positions": str(int(result.k[n])),
                    "recovery": recovery,
                    "answer": ("flips" if effects.flip[n] else "stays") if single else "",
                    "logit cosine": f"{effects.cosine[n]:.4f}" if single else "",
                    "KL(donor ‖ edited), nats": f"{effects.kl[n]:.4f}" if single else "",
                }
            )
    return rows


def answers(report: Report, mode: Mode = "light") -> go.Figure:
    """Probabilities of both answers' first tokens, of the clean runs and of each step but the random ones."""
    result, palette = report.result, PALETTES[mode]
    mine = [n for n, step in enumerate(result.steps) if step not in ("random", "self")]
    names = ["clean, old prompt", *(result.names[n] for n in mine), "clean, new prompt"]
    figure = titled(
        mode,
        "What the model would answer from each cache",
        cache.subtitle(report, "probability of each answer's first token"),
        400,
        barmode="group",
        bargap=0.3,
    )
    for n, which in enumerate(("old", "new")):
        clean, edited = getattr(result.oracle, f"prob_{which}"), getattr(result.effects, f"prob_{which}")
        values = [clean[0], *edited[mine].tolist(), clean[1]]
        token = labels.plotly(labels.label(result.pair.answer_texts[n].encode()))
        figure.add_bar(
            x=names,
            y=values,
            name=f"{which} answer, {token} (id {result.pair.answer_ids[n]})",
            marker={"color": palette.series[n], "pattern": {"shape": "/" if n else ""}},
            hovertext=[
                f"<b>{labels.plotly(x)}</b><br>P({token}) = {y:.6f}" for x, y in zip(names, values, strict=True)
            ],
            hoverinfo="text",
        )
    figure.update_yaxes(title_text="probability", rangemode="tozero")
    figure.update_xaxes(title_text="cache", tickangle=-35)
    return figure


def recovery_map(report: Report, mode: Mode = "light") -> go.Figure:
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
    """Position -> recovery alone, of a swap or a map report (there the most of any layers)."""
    result = report.result
    if report.probe == "kv map":
        best = result.recovery.max(axis=0)
        return {p: float(best[p]) for p in np.flatnonzero(result.differs).tolist()}
    return dict(zip(result.position.tolist(), result.single.recovery.tolist(), strict=True))


def knockouts(report: Report, mode: Mode = "light") -> go.Figure:
    """The right answer's margin that is left by each knock-out."""
    result, palette = report.result, PALETTES[mode]
    targets = list(dict.fromkeys(result.targets))
    figure = titled(
        mode,
        "What the answer cannot do without",
        cache.subtitle(
            report,
            "old prompt's cache; left of 0 the other answer leads; hollow: the answer is lost; "
            "line: nothing knocked out",
        ),
        190 + 70 * len(targets),
    )
    hows = list(dict.fromkeys(result.hows))
    for h, how in enumerate(hows):
        mine = [n for n, own in enumerate(result.hows) if own == how]
        symbols = [_HOW[how] + ("" if result.kept[n] else "-open") for n in mine]
        figure.add_scatter(
            x=result.margin[mine],
            y=[targets.index(result.targets[n]) + (h - (len(hows) - 1) / 2) * 0.16 for n in mine],
            mode="markers",
            marker={"size": 11, "symbol": symbols, "color": palette.series[h], "line": {"width": 2}},
            name=how,
            hovertext=[
                f"<b>{result.targets[n]}: {how}</b>, {len(result.positions[n])} positions<br>"
                f"margin {result.margin[n]:.4f} logits, clean {result.margin_clean:.4f}<br>"
                f"the answer {'stays' if result.kept[n] else 'is lost'}; top token "
                f"{labels.plotly(labels.label(result.top_texts[n].encode()))}<br>"
                f"KL(clean ‖ knocked out) {result.effects.kl[n]:.4g} nats"
                for n in mine
            ],
            hoverinfo="text",
        )
    level(figure, mode, x=0)
    figure.add_vline(x=result.margin_clean, line={"color": palette.accent, "width": 2})
    figure.update_xaxes(title_text="margin of the right answer, logits")
    list_axis(figure, targets, "knocked out")
    return figure
