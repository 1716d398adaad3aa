"""Runs that go on from a cache, drawn: errata and their chain, answers after writing, composition."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from engram_lab.lab.draw import cache, labels
from engram_lab.lab.draw.durations import digits
from engram_lab.lab.draw.figure import BELOW, level, titled
from engram_lab.lab.draw.theme import PALETTES, Mode
from engram_lab.probes.base import Report
from engram_lab.probes.kv.compose import ComposeResult
from engram_lab.probes.kv.erratum import policy

SAID = {  # variants of an erratum, as they are named to the reader
    "nothing": "asked again, no correction",
    "erratum": "the correction",
    "irrelevant": "an irrelevant correction",
    "wrong": "a wrong correction",
    "new prompt": "new prompt, asked again",
}
SOURCES = {"old": "old prompt's cache", "field": "old, field from the new", "new": "new prompt's cache"}
_DASH = ("solid", "dash", "dot", "dashdot")
_SYMBOL = ("circle", "square", "diamond", "triangle-up", "cross")


def _line(series: int, mode: Mode) -> dict[str, Any]:
    return {
        "mode": "lines+markers",
        "line": {"color": PALETTES[mode].series[series], "width": 2.5, "dash": _DASH[series % len(_DASH)]},
    }


# --- Errata --------------------------------------------------------------------------------------------------------


def errata(report: Report, mode: Mode = "light") -> go.Figure:
    """Probabilities of the old, new and third answer for each thing said behind the cache, from clean to clean."""
    result, palette = report.result, PALETTES[mode]
    pair, found = result.pair, result.oracle
    names = ["clean, old prompt", *(SAID[own] for own in result.variants), "clean, new prompt"]
    figure = titled(
        mode,
        "What the model answers once it is corrected",
        cache.subtitle(report, "probability of each answer's first token"),
        420,
        barmode="group",
        bargap=0.3,
    )
    drawn = [
        ("old", [found.prob_old[0], *result.effects.prob_old, found.prob_old[1]], pair.answer_ids[0]),
        ("new", [found.prob_new[0], *result.effects.prob_new, found.prob_new[1]], pair.answer_ids[1]),
    ]
    if result.third_id >= 0:
        drawn.append(("third", [np.nan, *result.prob_third, np.nan], result.third_id))
    hover = ["", *(_erratum_hover(report, n) for n in range(len(result.variants))), ""]
    for n, (which, values, token) in enumerate(drawn):
        text = pair.answer_texts[n] if n < 2 else f" {report.config.scenario.third.strip()}"
        shown = labels.plotly(labels.label(text.encode()))
        figure.add_bar(
            x=names,
            y=values,
            name=f"{which} answer, {shown} (id {token})",
            marker={"color": palette.series[n], "pattern": {"shape": ("", "/", ".")[n]}},
            hovertext=[
                f"<b>{labels.plotly(x)}</b><br>P({shown}) = {y:.6f}{more}"
                for x, y, more in zip(names, values, hover, strict=True)
            ],
            hoverinfo="text",
        )
    figure.update_yaxes(title_text="probability", rangemode="tozero")
    figure.update_xaxes(title_text="said behind the stale cache", tickangle=-25)
    return figure


def _erratum_hover(report: Report, n: int) -> str:
    result, effects = report.result, report.result.effects
    text = f"<br>{labels.plotly(labels.short(result.texts[n], 90))}" if result.texts[n] else ""
    return (
        f"{text}<br>recovery {effects.recovery[n]:.4f}, the answer {'changes' if effects.flip[n] else 'stays'}"
        f"<br>{result.computed[n]} tokens computed, {result.served[n]} from the cache; full recompute {result.full}"
    )


def errata_table(report: Report) -> list[dict[str, str]]:
    """One row for each thing said."""
    result, names = report.result, ("old", "new", "third")
    rows = []
    for n, variant in enumerate(result.variants):
        due, leads = int(result.due[n]), names[result.leader[n]]
        rows.append(
            {
                "said": SAID[variant],
                "text": result.texts[n],
                "leads": leads,
                "due": names[due] if due >= 0 else "another one",
                "recovery": f"{result.effects.recovery[n]:.3f}",
                "margin new - old, logits": f"{result.effects.score[n]:.3f}",
                "tokens computed": str(result.computed[n]),
                "from cache": str(result.served[n]),
                "full recompute": str(result.full),
            }
        )
    return rows


def timeline(report: Report, mode: Mode = "light") -> go.Figure | None:
    """Tokens computed up to each correction of the chain, one line for each policy; None without a chain."""
    chain = report.result.chain
    if chain is None:
        return None
    steps = len(chain.values)
    figure = titled(
        mode,
        "What a chain of corrections costs, and whether the answer is right",
        cache.subtitle(report, "hollow: the answer is wrong; square: prefilled anew"),
        430,
    )
    for p, threshold in enumerate(chain.thresholds):
        total = chain.computed[p].cumsum()
        symbols = [
            ("square" if chain.anew[p, n] else "circle") + ("" if chain.right[p, n] else "-open") for n in range(steps)
        ]
        figure.add_scatter(
            x=list(range(1, steps + 1)),
            y=total,
            name=policy(threshold),
            marker={"size": 12, "symbol": symbols, "color": PALETTES[mode].series[p % 5], "line": {"width": 2}},
            hovertext=[
                f"<b>{policy(threshold)}, correction {n + 1}</b><br>"
                f"{labels.plotly(labels.short(chain.corrections[n], 80))}<br>due "
                f"{labels.plotly(chain.answers[n].strip())}: {'right' if chain.right[p, n] else 'wrong'}, margin "
                f"{chain.margin[p, n]:.4f} logits, P {chain.prob[p, n]:.4f}<br>{chain.computed[p, n]} tokens computed "
                f"({total[n]} so far), {chain.served[p, n]} from the cache ({chain.share[p, n]:.1%} so far)<br>"
                f"the prompt with this value: {chain.full[n]} tokens"
                for n in range(steps)
            ],
            hoverinfo="text",
            **_line(p % 5, mode),
        )
    figure.update_xaxes(
        title_text="correction, and its value",
        tickvals=list(range(1, steps + 1)),
        ticktext=[
            f"{n + 1}<br>{labels.plotly(labels.short(value.strip(), 12))}" for n, value in enumerate(chain.values)
        ],
    )
    figure.update_yaxes(title_text="tokens computed so far", rangemode="tozero")
    return figure


# --- Writing before the answer -------------------------------------------------------------------------------------


def reasoning(report: Report, mode: Mode = "light") -> go.Figure:
    """Margin of the new answer over the old by tokens written, one line for each source."""
    result = report.result
    figure = titled(
        mode,
        "Does writing first bring the swapped field to light?",
        cache.subtitle(report, "above 0 the new answer leads; hollow: a clean cache answers wrongly there, no claim"),
        430,
    )
    for series, (source, name) in enumerate(SOURCES.items()):
        mine = [n for n, own in enumerate(result.sources) if own == source]
        figure.add_scatter(
            x=[str(result.tokens[n]) for n in mine],
            y=result.effects.score[mine],
            name=name,
            marker={
                "size": 10,
                "symbol": [_SYMBOL[series] + ("" if result.holds[n] else "-open") for n in mine],
                "line": {"width": 2},
            },
            hovertext=[
                f"<b>{name}, {result.written[n]} tokens written</b><br>margin {result.effects.score[n]:.4f} logits, "
                f"recovery {result.effects.recovery[n]:.4f}<br>P(old) {result.effects.prob_old[n]:.4f}, "
                f"P(new) {result.effects.prob_new[n]:.4f}<br>"
                f"{labels.plotly(labels.short(labels.label(result.texts[n].encode()), 90))}"
                for n in mine
            ],
            hoverinfo="text",
            **_line(series, mode),
        )
    level(figure, mode, y=0)
    figure.update_xaxes(title_text="tokens that the model writes before it answers", type="category")
    figure.update_yaxes(title_text="new answer minus old, logits")
    return figure


def reasoning_table(report: Report) -> list[dict[str, str]]:
    """One row for each source and number of tokens, with what was written."""
    result = report.result
    return [
        {
            "tokens": str(result.tokens[n]),
            "cache": SOURCES[source],
            "recovery": f"{result.effects.recovery[n]:.3f}",
            "margin new - old, logits": f"{result.effects.score[n]:.3f}",
            "answer": "new" if result.effects.score[n] > 0 else "old",
            "written": result.texts[n],
        }
        for n, source in enumerate(result.sources)
    ]


# --- Composition ---------------------------------------------------------------------------------------------------


def _at(result: ComposeResult, length: int) -> list[int]:
    """The variants of a block length that are no controls."""
    return [
        n for n, own in enumerate(result.block_length.tolist()) if own == length and result.kinds[n] in ("moved", "all")
    ]


def compose(report: Report, mode: Mode = "light") -> go.Figure:
    """Logit cosine with the full prefill by the tokens of the block that run again, a line for each block length."""
    result, palette = report.result, PALETTES[mode]
    figure = titled(
        mode,
        "How near a moved block comes to a full prefill",
        labels.plotly(
            f"cosine over the whole vocabulary; hollow: another answer; K = all is the full prefill; {result.name}"
        ),
        450,
        legend=BELOW,
        margin={"b": 110},
    )
    for series, length in enumerate(result.lengths.tolist()):
        mine = _at(result, length)
        figure.add_scatter(
            x=[result.names[n] for n in mine],
            y=result.cosine[mine],
            name=f"block of {length} tokens" + (", as given" if series == 0 else ""),
            marker={
                "size": 10,
                "symbol": [_SYMBOL[series % 5] + ("" if _same(report, n) else "-open") for n in mine],
                "line": {"width": 2},
            },
            hovertext=[_compose_hover(report, n) for n in mine],
            hoverinfo="text",
            **_line(series % 5, mode),
        )
    controls = [n for n, kind in enumerate(result.kinds) if kind in ("unrotated", "left out")]
    figure.add_scatter(
        x=[result.names[n] for n in controls],
        y=result.cosine[controls],
        name="control, block as given",
        mode="markers",
        marker={
            "size": 11,
            "color": palette.quiet,
            "symbol": ["x-thin" if _same(report, n) else "x-thin-open" for n in controls],
            "line": {"width": 2, "color": palette.quiet},
        },
        hovertext=[_compose_hover(report, n) for n in controls],
        hoverinfo="text",
    )
    figure.update_xaxes(title_text="tokens of the block that run again behind the prefix", type="category")
    figure.update_yaxes(title_text="cosine with the full prefill's logits")
    return figure


def _same(report: Report, n: int) -> bool:
    """Whether a variant answers as the full prefill does."""
    result = report.result
    return bool(result.same_decision[n] if report.config.answers else result.same_top[n])


def _compose_hover(report: Report, n: int) -> str:
    result = report.result
    decision = f"; decides for {labels.plotly(result.decisions[n].strip())}" if report.config.answers else ""
    return (
        f"<b>{result.names[n]}, block of {result.block_length[n]} tokens</b><br>cosine {result.cosine[n]:.6f}"
        f"<br>KL(full ‖ composed) {result.kl[n]:.4g} nats<br>top token "
        f"{labels.plotly(labels.label(result.top_texts[n].encode()))} "
        f"({'the same' if result.same_top[n] else 'another'}){decision}<br>{result.computed[n]} tokens computed"
    )


def compose_times(report: Report, mode: Mode = "light") -> go.Figure | None:
    """Seconds by block length, composed and prefilled; None where no time was measured."""
    result, timing = report.result, report.result.timing
    if timing is None:
        return None
    order = np.argsort(result.lengths)
    lengths = result.lengths[order]
    figure = titled(
        mode,
        "Whether composing pays",
        labels.plotly(
            f"shortest of {timing.rounds} runs, {timing.threads} threads, both caches at hand; {result.name}"
        ),
        450,
        legend=BELOW,
        margin={"b": 110},
    )
    drawn = [("full prefill", timing.full[order]), ("block and suffix after the prefix", timing.continued[order])]
    for k in timing.k:
        at = {
            int(result.block_length[n]): timing.seconds[n]
            for n in range(len(result.names))
            if result.kinds[n] == "moved" and result.k[n] == k
        }
        drawn.append((f"composed, K = {k}", np.array([at.get(int(length), np.nan) for length in lengths])))
    for series, (name, values) in enumerate(drawn):
        figure.add_scatter(
            x=lengths,
            y=values * 1000,
            name=name,
            marker={"size": 9, "symbol": _SYMBOL[series % 5]},
            hovertext=[
                f"<b>{name}</b><br>block of {length} tokens: {digits(value * 1000)} ms"
                for length, value in zip(lengths, values, strict=True)
            ],
            hoverinfo="text",
            **_line(series % 5, mode),
        )
    figure.update_xaxes(
        title_text="tokens of the block", type="log", tickvals=lengths, ticktext=list(map(str, lengths))
    )
    figure.update_yaxes(title_text="time, ms", rangemode="tozero")
    return figure


def compose_table(report: Report) -> list[dict[str, str]]:
    """One row for each block length and way of making it."""
    result = report.result
    return [
        {
            "block, tokens": str(result.block_length[n]),
            "made": result.names[n],
            "logit cosine": f"{result.cosine[n]:.4f}",
            "KL(full ‖ composed), nats": f"{result.kl[n]:.3g}",
            "top token": "same" if result.same_top[n] else "another",
            "decision": ("same" if result.same_decision[n] else "another") if report.config.answers else "",
            "tokens computed": str(result.computed[n]),
        }
        for n in range(len(result.names))
    ]
