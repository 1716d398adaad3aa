"""Reports about facts as Plotly figures, tables and sentences; no Streamlit here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from engram_lab.lab.draw import labels
from engram_lab.lab.draw.figure import bars, list_axis, titled
from engram_lab.lab.draw.tables import bounds, interval_of
from engram_lab.lab.draw.theme import PALETTES, Mode
from engram_lab.probes.base import Report
from engram_lab.probes.facts.check import CheckResult
from engram_lab.probes.facts.locality import BitCheck

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross")
# What a check is called where it is shown, in the order of the design's list.
CHECKS = {
    "unaddressed": "1 · texts that read no edited row",
    "before": "2 · positions before an edited read",
    "undo table": "6 · the tables after undoing",
    "undo logits": "6 · sentences after undoing everything",
    "undo one fact": "6 · the trigger after undoing its fact",
    "others stay": "6 · another fact's trigger after that",
    "other users": "6 · users beside each other in a batch",
}
LAYER_FIGURES = {
    "top1": "top-1",
    "probability": "probability",
    "paraphrase_top1": "paraphrases, top-1",
    "specificity": "specificity",
    "same_answer": "neighbours that say the same",
}


# --- facts check -----------------------------------------------------------------------------------------------------


def recall(report: Report, mode: Mode = "light") -> go.Figure:
    """Every score before and after writing, with the interval of what is after."""
    result, palette = report.result, PALETTES[mode]
    scores = [own for own in result.scores if own.n]
    figure = titled(
        mode,
        "What the model says before the facts are written, and after",
        labels.plotly(
            f"{result.name}, layer {result.layer}, {len(report.config.facts)} facts; bars: 95 % intervals over facts"
        ),
        190 + 30 * len(scores),
        margin={"l": 40},
    )  # fmt: skip
    places = list(range(len(scores)))
    hover = [
        f"<b>{own.name}</b>, {own.n} prompts<br>before {interval_of(own, 'before', digits=4)}"
        f"<br>after {interval_of(own, 'after', digits=4)}"
        for own in scores
    ]
    for own, place in zip(scores, places, strict=True):
        line = {"color": palette.line, "width": 3}
        figure.add_scatter(x=[own.before, own.after], y=[place] * 2, mode="lines", line=line, hoverinfo="skip",
                           showlegend=False)  # fmt: skip
    for when, symbol, colour in (("before", "circle-open", palette.quiet), ("after", "circle", palette.series[0])):
        mean, low, high = ([getattr(own, when + end) for own in scores] for end in ("", "_low", "_high"))
        figure.add_scatter(
            x=mean,
            y=places,
            error_x=bars(mean, low, high) if when == "after" else None,
            mode="markers",
            marker={"size": 11, "symbol": symbol, "color": colour},
            name=f"{when} writing",
            hovertext=hover,
            hoverinfo="text",
        )
    figure.update_xaxes(title_text="share of prompts, or mean probability", range=[-0.03, 1.03])
    list_axis(figure, [own.name for own in scores])
    return figure


def locality(report: Report, mode: Mode = "light") -> go.Figure:
    """KL to the model as it was, by distance behind the trigger; what is 0 in every fact has no point."""
    own, palette = report.result.locality, PALETTES[mode]
    at = [n for n in range(len(own.after_n)) if own.after_n[n]]
    figure = titled(
        mode,
        "Behind the trigger the text changes too, by attention and convolution",
        labels.plotly(f"{report.result.name}; mean over facts of KL(before ‖ after), each fact as a sentence with an "
                      "unrelated text behind it"),
        360,
        showlegend=False,
    )  # fmt: skip
    figure.add_scatter(
        x=at,
        y=[float(own.after_kl[n]) if own.after_kl[n] > 0 else None for n in at],
        mode="lines+markers",
        line={"color": palette.series[0], "width": 2.5},
        marker={"size": 8},
        hovertext=[
            f"<b>{n} positions behind</b><br>mean KL {own.after_kl[n]:.6g} nats<br>differs in "
            f"{own.after_differs[n]:.0%} of {int(own.after_n[n])} facts"
            for n in at
        ],
        hoverinfo="text",
    )
    figure.update_xaxes(title_text="positions behind the trigger's last token (0: that token, which says the answer)")
    figure.update_yaxes(title_text="KL(before ‖ after), nats", type="log", dtick=1)
    return figure


def score_table(report: Report) -> list[dict[str, str]]:
    """One row for each score that there are prompts for."""
    return [
        {
            "score": own.name,
            "prompts": str(own.n),
            "before": interval_of(own, "before"),
            "after": interval_of(own, "after"),
        }
        for own in report.result.scores
        if own.n
    ]


def check_table(report: Report) -> list[dict[str, str]]:
    """One row for each comparison of bits."""
    return [
        {
            "check": CHECKS[own.name],
            "verdict": verdict(own),
            "equal": f"{own.equal} of {own.compared} {own.unit}",
            "left out": f"{own.left_out}, of which {own.left_out_equal} are equal: {own.why_left_out}"
            if own.left_out
            else "",
            "exceptions": "; ".join(f"{found.text} ({found.why})" for found in own.exceptions),
        }
        for own in report.result.locality.checks
    ]


def verdict(check: BitCheck) -> str:
    """In two words whether bits are equal."""
    return "bits equal" if check.holds else "nothing to compare" if not check.compared else "bits differ"


def fact_table(report: Report) -> list[dict[str, str]]:
    """One row for each fact: what is said, how sure, the gate, and how it was written."""
    result, asked = report.result, report.result.facts
    return [
        {
            "fact": f"{own.trigger}{own.answer}",
            "learned": "yes" if asked.top1_after[n] else "in the top 5" if asked.top5_after[n] else "no",
            "said before": labels.label(asked.said_before[n].encode()),
            "said after": labels.label(asked.said_after[n].encode()),
            "probability before": f"{asked.probability_before[n]:.4f}",
            "probability after": f"{asked.probability_after[n]:.4f}",
            "gate": f"{result.gate_before[n]:.2f} → {result.gate_after[n]:.2f}",
            "cos with W_V e": f"{result.cos_value[n]:.3f}",
            "cos with the output row": f"{result.cos_output[n]:.3f}",
            "written / residual": f"{result.written_norm[n] / result.residual_norm[n]:.2f}",
        }
        for n, own in enumerate(report.config.facts)
    ]


def asked_table(report: Report, kind: str) -> list[dict[str, str]]:
    """One row for each prompt of a kind: paraphrases, neighbours, compositions or aliases."""
    asked, facts = getattr(report.result, kind), report.config.facts
    return [
        {
            "prompt": prompt,
            "answer": asked.answers[n],
            "of the fact": f"{facts[asked.fact[n]].trigger}{facts[asked.fact[n]].answer}",
            "said before": labels.label(asked.said_before[n].encode()),
            "said after": labels.label(asked.said_after[n].encode()),
            "probability": f"{asked.probability_before[n]:.4f} → {asked.probability_after[n]:.4f}",
            "KL, nats": f"{asked.kl[n]:.3g}",
            "bits": "equal" if asked.same_bits[n] else "differ",
            "edited rows read": str(int(asked.edited_reads[n])),
        }
        for n, prompt in enumerate(asked.prompts)
    ]


def partial_table(report: Report) -> list[dict[str, str]]:
    """One row for each text that reads edited rows without being a trigger, the most first."""
    return [
        {
            "text": own.text,
            "kind": "unrelated" if own.unrelated else "about the facts",
            "edited rows read": str(own.reads),
            "most at one position": str(own.most),
            "by a shared n-gram": str(own.by_ngram),
            "by a collision": str(own.by_collision),
            "positions that differ": str(own.differs),
            "largest KL, nats": f"{own.kl:.3g}",
        }
        for own in sorted(report.result.locality.partial, key=lambda own: (-own.most, -own.reads))
    ]


def addresses_sentence(report: Report) -> str:
    """How many addresses the facts really have, and who shares one."""
    own, facts = report.result.locality, report.config.facts
    said = f"{own.n_facts} facts have {own.n_addresses} distinct addresses"
    groups = [" and ".join(f'"{facts[n].trigger}"' for n in group) for group in own.address_groups]
    return f"{said}; one is shared by {', one by '.join(groups)}." if groups else f"{said}."


def locality_sentence(report: Report) -> str:
    """Where bits are equal, and what changed all the same."""
    result: CheckResult = report.result
    own, checks = result.locality, result.locality.checks
    differ = [CHECKS[check.name] for check in checks if check.compared and not check.holds]
    touched = sum(part.unrelated for part in own.partial)
    kept = f"Bits differ where they must not: {', '.join(differ)}." if differ else "Every comparison of bits holds."
    aliases = result.aliases
    said = (
        f" Of {len(aliases.prompts)} other prompts at the facts' addresses {int(aliases.top1_after.sum())} now say the "
        "fact's answer."
        if aliases.prompts
        else ""
    )
    texts = f" {touched} of {own.n_unrelated} unrelated texts read an edited row." if own.n_unrelated else ""
    return kept + texts + said


# --- facts density ---------------------------------------------------------------------------------------------------


def density(report: Report, mode: Mode = "light") -> go.Figure:
    """Recall over the number of facts written together, with those left out that share an address, and probability."""
    result = report.result
    figure = titled(
        mode,
        "How many facts the memory holds",
        labels.plotly(f"{result.name}, layer {result.layer}; bars: 95 % intervals over facts"),
        430,
    )
    series = (("top1", "top-1"), ("free", "top-1, no other answer at the address"), ("probability", "probability"))
    _curves(figure, mode, result, list(result.sizes), series, [f"{size} together" for size in result.sizes])
    ticks = list(map(str, result.sizes))
    figure.update_xaxes(title_text="facts written together", type="log", tickvals=list(result.sizes), ticktext=ticks)
    figure.update_yaxes(title_text="share of facts, or mean probability", range=[-0.03, 1.03])
    return figure


def _curves(
    figure: go.Figure, mode: Mode, result: Any, x: Sequence[float], series: Sequence[tuple[str, str]],
    hover: Sequence[str],
) -> None:  # fmt: skip
    for n, (field, name) in enumerate(series):
        mean, low, high = bounds(result, field)
        figure.add_scatter(
            x=list(x),
            y=list(mean),
            error_y=bars(mean, low, high),
            mode="lines+markers",
            line={"color": PALETTES[mode].series[n % 5], "width": 2},
            marker={"size": 9, "symbol": SYMBOLS[n % len(SYMBOLS)]},
            name=name,
            hovertext=[f"<b>{name}</b>, {hover[k]}<br>{interval_of(result, field, k, 4)}" for k in range(len(mean))],
            hoverinfo="text",
        )


def density_table(report: Report) -> list[dict[str, str]]:
    """One row for each number of facts."""
    result = report.result
    return [
        {
            "written together": str(size),
            "groups": str(result.groups[n]),
            "top-1": interval_of(result, "top1", n),
            "top-1, no other answer at the address": interval_of(result, "free", n),
            "top-5": interval_of(result, "top5", n),
            "probability": interval_of(result, "probability", n),
            "not said, of facts with an alias": f"{result.lost_alias[n]} of {result.n_aliased[n]}",
            "not said, of the others": f"{result.lost_other[n]} of {result.n_facts[n] - result.n_aliased[n]}",
            "addresses": str(result.addresses[n]),
            "rows, shared": f"{result.rows[n]}, {result.shared_rows[n]}",
        }
        for n, size in enumerate(result.sizes)
    ]


def stack_table(report: Report) -> list[dict[str, str]]:
    """One row for each user of each pair: top-1 alone, in both orders, and beside the other in a batch."""
    return [
        {
            "case": case.name,
            "user": user,
            "facts": str(case.n_facts[n]),
            "top-1 alone": f"{case.alone_top1[n]:.2f}",
            f"{case.users[1]} on top": f"{case.stacked_top1[n]:.2f}",
            f"{case.users[0]} on top": f"{case.other_order_top1[n]:.2f}",
            "each their own, in one batch": f"{case.own_top1[n]:.2f}",
            "rows in conflict": str(case.conflicts),
            "facts in conflict": str(case.conflicting_facts),
        }
        for case in report.result.stacks
        for n, user in enumerate(case.users)
    ]


# --- facts layers ----------------------------------------------------------------------------------------------------


def layers(report: Report, mode: Mode = "light") -> go.Figure:
    """What each memory layer learns and keeps, with intervals."""
    result = report.result
    figure = titled(
        mode,
        "The same facts, written at each memory layer by itself",
        labels.plotly(f"{result.name}, {len(report.config.facts)} facts; bars: 95 % intervals over facts"),
        430,
    )
    places = list(range(len(result.layers)))
    _curves(figure, mode, result, places, list(LAYER_FIGURES.items()), [f"layer {own}" for own in result.layers])
    figure.update_xaxes(title_text="memory layer (block that reads it)", tickvals=places,
                        ticktext=list(map(str, result.layers)), range=[-0.5, len(places) - 0.5])  # fmt: skip
    figure.update_yaxes(title_text="share of prompts, or mean probability", range=[-0.03, 1.03])
    return figure


def layer_table(report: Report) -> list[dict[str, str]]:
    """One row for each layer."""
    result = report.result
    return [
        {
            "layer": str(layer),
            **{name: interval_of(result, field, n) for field, name in LAYER_FIGURES.items()},
            "gate": f"{result.gate_before[n]:.2f} → {result.gate_after[n]:.2f}",
            "written / residual": f"{result.written_share[n]:.2f}",
        }
        for n, layer in enumerate(result.layers)
    ]
