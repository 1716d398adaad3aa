"""A correction behind a stale cache in place of a new prefill, with controls, and a chain of them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from engram_lab.lab.ask import brief
from engram_lab.lab.ask.parts import EDITED, ERRATA, SECONDS, Models, Scenario
from engram_lab.lab.ask.request import Ask, Number, Numbers, Repeated, Text, flag, refuse
from engram_lab.lab.draw import cache, labels
from engram_lab.lab.draw.figure import line, titled
from engram_lab.lab.draw.theme import PALETTES
from engram_lab.lab.fronts.entry import CLEAN, EFFECTS, LOGITS, NOTES, ORACLE, RATIO, RECOVERY, Entry
from engram_lab.lab.fronts.kv_swap import effects_row
from engram_lab.models.errors import LabError

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from engram_lab.lab.draw.theme import Mode
    from engram_lab.models.handle import Handle
    from engram_lab.probes.base import Report
    from engram_lab.probes.kv.erratum import ErratumConfig


def chain_of(text: str) -> tuple[tuple[str, str], ...]:
    """(value, answer) of VALUE=ANSWER;VALUE=ANSWER; LabError for a part without =."""
    pairs = [part.rpartition("=") for part in text.split(";") if part.strip()]
    if bad := [value for _, sign, value in pairs if not sign]:
        raise LabError(f'"{bad[0].strip()}" is no correction of a chain: write VALUE=ANSWER, with ; between two.')
    return tuple((value.strip(), answer.strip()) for value, _, answer in pairs)


class Chain(Repeated):
    """The corrections of the chain, each a value and the answer that is due."""

    def read(self, args: argparse.Namespace) -> dict[str, Any]:
        """The pairs."""
        pairs = [text.rpartition("=") for text in args.chain]
        if bad := [text for text, (_, sign, _) in zip(args.chain, pairs, strict=True) if not sign]:
            raise LabError(f'"{bad[0]}" is no correction of a chain: give the value, =, and the answer that is due.')
        return {"chain": tuple((value, answer) for value, _, answer in pairs)}

    def flags(self, config: ErratumConfig) -> list[str]:
        """The flag for each."""
        return [flag("chain", f"{value}={answer}") for value, answer in config.chain]

    def shown(self, value: tuple[tuple[str, str], ...]) -> str:
        """All in one box."""
        chain = ";".join(f"{text}={answer}" for text, answer in value)
        if chain_of(chain) != value:
            refuse(f"the chain {chain}, with spaces at an end or a sign that it writes between corrections")
        return chain


class Wording(Text):
    """How a correction of the chain is said; empty for ours."""

    def flags(self, config: ErratumConfig) -> list[str]:
        """The flag, if it is not ours."""
        return super().flags(config) if config.wording else []


CHAIN = Chain(
    "chain", "a correction of the chain, the last = counts; may be repeated (default: from the scenario)", [], "chain",
    flag="chain", metavar="VALUE=ANSWER", label="Chain",
    tip="VALUE=ANSWER for each correction, with ; between. Without it, as many as asked for from the scenario.",
)  # fmt: skip
CORRECTIONS = Number(
    "corrections", "how many, without --chain; 0 for no chain (default %(default)s)", 4, "corrections",
    "a number of corrections", low=0, high=20, label="Corrections", tip="Of the chain; 0 for none.",
)  # fmt: skip
WORDING = Wording(
    "wording", "of the chain's corrections, with {value} and if you like {before}", "", "wording", metavar="TEXT",
    label="Wording of the chain's corrections",
    tip="With {value} for the new value and, if you like, {before} for the one that it replaces.",
)  # fmt: skip
POLICIES = Numbers(
    "thresholds", "prefill anew after every N corrections, 0 never, one policy each (default: 0 2 1)", [0, 2, 1],
    "policies", "thresholds", offered=(0, 4, 3, 2, 1), label="Prefilled anew after",
    tip="So many corrections; one line of the timeline for each.",
)  # fmt: skip
ASK = Ask("kv erratum", "kv", (
    Models(), Scenario(experiment="Erratum", fields=(*EDITED, *ERRATA)), CHAIN, CORRECTIONS, WORDING, POLICIES, SECONDS,
))  # fmt: skip


def rows(report: Report) -> Iterator[dict[str, Any]]:
    """One row for each thing said behind the prompt, then one for each policy and correction of the chain."""
    from engram_lab.probes.kv.erratum import policy

    result = report.result
    fixed = {"scenario": report.config.scenario.id, "oracle": result.oracle.both}
    nothing: dict[str, Any] = dict.fromkeys(effects_row(result.effects, 0), "")
    for n, name in enumerate(result.variants):
        yield (
            fixed
            | {
                "run": "single", "name": name, "step": 0, "text": result.texts[n],
                "computed_tokens": int(result.computed[n]), "served_tokens": int(result.served[n]),
                "full_tokens": result.full, "prefilled_anew": name == "new prompt",
                "right": bool(result.leader[n] == result.due[n]) if result.due[n] >= 0 else "",
                "margin_logits": "", "prob_due": "", "served_share": "", "prob_third": float(result.prob_third[n]),
            }
            | effects_row(result.effects, n)
        )  # fmt: skip
    if (chain := result.chain) is None:
        return
    for p, threshold in enumerate(chain.thresholds):
        for n, text in enumerate(chain.corrections):
            yield (
                fixed
                | {
                    "run": "chain", "name": policy(threshold), "step": n + 1, "text": text,
                    "computed_tokens": int(chain.computed[p, n]), "served_tokens": int(chain.served[p, n]),
                    "full_tokens": int(chain.full[n]), "prefilled_anew": bool(chain.anew[p, n]),
                    "right": bool(chain.right[p, n]), "margin_logits": float(chain.margin[p, n]),
                    "prob_due": float(chain.prob[p, n]), "served_share": float(chain.share[p, n]), "prob_third": "",
                }
                | nothing
            )  # fmt: skip


SAID = {  # variants of an erratum, as they are named to the reader
    "nothing": "asked again, no correction",
    "erratum": "the correction",
    "irrelevant": "an irrelevant correction",
    "wrong": "a wrong correction",
    "new prompt": "new prompt, asked again",
}


def figure(report: Report, mode: Mode = "light", handles: Sequence[Handle] = ()) -> go.Figure:
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
    from engram_lab.probes.kv.erratum import policy

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
            **line(mode, p % 5),
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


def figures(report: Report, mode: Mode, handles: Sequence[Handle]) -> list[go.Figure | None]:
    """All figures that the report has without asking the reader anything."""
    return [figure(report, mode), timeline(report, mode)]


def example(engram: str, dense: str) -> ErratumConfig:
    """A short request that shows most of what the probe computes."""
    from engram_lab.probes.kv.erratum import ErratumConfig

    return ErratumConfig((engram,), brief.scenario(), align="split")


# The measures whose difference between two runs is shown first: paths of the result without indices
COMPARED = ("effects.recovery", "prob_third", "chain.margin", "chain.share")
DEFINITIONS = EFFECTS | {
    "nothing": "The end of the question once more behind the old prompt, with no correction: a control.",
    "new prompt": "The same behind the new prompt's cache: what a full prefill of the corrected prompt would answer.",
    "recovery": "(score - old score) / (new score - old score), the clean runs being of the prompts as they are.",
    "kl": "KL(new prompt's clean run || this run) in nats over the whole vocabulary.",
    "cosine": "Cosine of the run's logits with those of the new prompt's clean run, over the whole vocabulary.",
    "computed": "Tokens that run. A full recompute runs all tokens of the corrected prompt.",
    "served": "Tokens that come from the cache.",
    "right": "The answer that is due has the largest probability of the answers that are compared.",
    "share": "Tokens served from the cache / (served + computed), all corrections so far together.",
}
ENTRY = Entry(
    page="kv",
    asks="Can a correction behind a stale cache stand for a new prefill, and what does that save?",
    formula=(
        RECOVERY.replace("edited", "corrected")
        + r",\qquad\mathrm{share} = \frac{\text{served}}{\text{served} + \text{computed}}"
    ),
    symbols=(
        RATIO,
        LOGITS,
        CLEAN,
        (r"s_\text{corrected}", "the score behind the correction and the question's end, said once more", "logits"),
        (r"\text{served},\ \text{computed}", "tokens from the cache, tokens that run", "tokens"),
    ),
    sources=(NOTES,),
    controls=ORACLE + "The question's end once more with no correction; an irrelevant correction; a wrong one; the "
    "new prompt with the same words behind it.",
    not_shown="that a longer conversation stays right: all wrong statements stay in the cache. The wording of the "
    "correction decides, and only one is tried at a time.",
    example="--model smollm2-135m --scenario home-city --align split --json -",
)
