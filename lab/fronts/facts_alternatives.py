"""The same facts in rows, in LoRA, in the prompt and retrieved: recall, and what happens to unrelated text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engram_lab.lab.ask import brief
from engram_lab.lab.ask.parts import BOOTSTRAP, SEED, Facts, Models, Unrelated, unasked, with_layer
from engram_lab.lab.ask.request import Ask, Number, Repeated, Switch, flag
from engram_lab.lab.draw import labels
from engram_lab.lab.draw.durations import digits
from engram_lab.lab.draw.figure import BELOW, bars, list_axis, titled
from engram_lab.lab.draw.tables import bounds, interval_of
from engram_lab.lab.draw.theme import PALETTES
from engram_lab.lab.fronts.entry import LORA, USER_AS_ENGRAM, Entry

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from engram_lab.lab.draw.theme import Mode
    from engram_lab.models.handle import Handle
    from engram_lab.probes.base import Report
    from engram_lab.probes.facts.alternatives import AlternativesConfig
    from engram_lab.probes.facts.sets import StatedFact

N_TEXTS, N_RETRIEVED = 120, 3  # unrelated texts, facts that are retrieved


def request(
    models: tuple[str, ...],
    facts: tuple[StatedFact, ...],
    unrelated: tuple[str, ...],
    best: int = N_RETRIEVED,
    **options: Any,
) -> AlternativesConfig:
    """A request with the facts that are retrieved for each of its texts, at most `best`; `options` are its fields."""
    from engram_lab.lab.ask import retrieval
    from engram_lab.models.errors import LabError
    from engram_lab.probes.facts.alternatives import AlternativesConfig, prompts_of

    if best < 0:
        raise LabError(f"The number of facts that are retrieved is {best}; give 0 or more.")
    queries = [*(asked.prompt for _, asked in prompts_of(facts)), *unrelated]
    known = [f"{own.trigger}{own.answer}" for own in facts]
    return AlternativesConfig(models, facts, unrelated, retrieval.best(known, queries, best) if best else (), **options)


def _most(config: AlternativesConfig) -> int:
    """The most facts that any text of a request has retrieved."""
    return max(map(len, config.retrieved), default=0)


class Best(Number):
    """How many facts are retrieved; a request holds the facts themselves."""

    def flags(self, config: AlternativesConfig) -> list[str]:
        """The most that any text has."""
        return [flag("best", _most(config))]

    def view(self, config: AlternativesConfig) -> dict[str, Any]:
        """The box, as far as it goes."""
        return {str(self.key): min(_most(config), self.high)}


@dataclass(frozen=True)
class Ranks(Repeated):
    """Ranks of LoRA."""

    offered: tuple[int, ...] = (8, 64)  # on the page

    def shown(self, value: tuple[int, ...]) -> list[int]:
        """Those that the page offers."""
        return [rank for rank in self.offered if rank in value]


RANKS = Ranks(
    "ranks", "rank of a LoRA; may be repeated (default: 64 and 8)", key="facts_ranks", flag="rank", kind_of=int,
    ours=lambda: (64, 8), label="Ranks of LoRA",
)  # fmt: skip
BEST = Best(
    "best", "facts that are retrieved; 0: none (default %(default)s)", N_RETRIEVED, "facts_best", low=0, high=20,
    label="Facts retrieved",
)  # fmt: skip
UNRELATED_TEXTS = Number("unrelated", "", N_TEXTS, "facts_unrelated", low=1, label="Unrelated texts")
ASK = Ask("facts alternatives", "facts", (
    Models(),
    Facts(view_name="Alternatives"),
    Unrelated("unrelated", key="facts_unrelated", n_texts=N_TEXTS),
    RANKS,
    BEST,
    *(unasked(part) for part in (
        Number("lora_steps", "at most, for LoRA (default %(default)s)", 120),
        Number("lora_rate", "learning rate of LoRA (default %(default)s)", 3e-3, kind_of=float),
        Number("lora_stop", "mean loss at which LoRA is done, nats (default %(default)s)", 0.1, kind_of=float),
        SEED,
        BOOTSTRAP,
        Switch("time", "say how long writing took; then no two reports are equal"),
    )),
), request)  # fmt: skip
settled = with_layer


def rows(report: Report) -> Iterator[dict[str, Any]]:
    """One row for each method and prompt, then one for each method and unrelated text."""
    result = report.result
    for m, method in enumerate(result.methods):
        for p, prompt in enumerate(result.prompts):
            yield {
                "method": method,
                "kind": result.kinds[int(result.paraphrase[p])],
                "text": prompt,
                "answer": report.config.facts[result.fact_of[p]].answer,
                "probability": float(result.probability[m, p]),
                "rank": int(result.rank[m, p]),
                "tokens": "",
                "change_nats": "",
                "size_nats": "",
                "kl_nats": "",
                "positions": "",
                "positions_changed": "",
            }
        for t, text in enumerate(report.config.unrelated):
            yield {
                "method": method,
                "kind": "unrelated",
                "text": text,
                "answer": "",
                "probability": "",
                "rank": "",
                "tokens": int(result.tokens[t]),
                "change_nats": float(result.text_change[m, t]),
                "size_nats": float(result.text_size[m, t]),
                "kl_nats": float(result.text_kl[m, t]),
                "positions": int(result.positions[t]),
                "positions_changed": int(result.text_changed[m, t]),
            }


KIND_SYMBOLS = ("circle", "diamond-open")  # of the kinds of prompt


def figure(report: Report, mode: Mode = "light", handles: Sequence[Handle] = ()) -> go.Figure:
    """Left how many answers are said, by kind of prompt; right how much the loss of an unrelated token moves."""
    result, palette = report.result, PALETTES[mode]
    n = len(result.methods)
    figure = titled(
        mode,
        "What each way of keeping the facts remembers, and what it does to other text",
        f"{labels.plotly(report.config.models[0])}, {len(report.config.facts)} facts, "
        f"{len(report.config.unrelated)} unrelated texts; bars: 95 % intervals",
        240 + 42 * n,
        panels={"rows": 1, "cols": 2, "shared_yaxes": True, "horizontal_spacing": 0.04},
        legend=BELOW,
    )
    for k, kind in enumerate(result.kinds):
        if not result.n_prompts[k]:
            continue
        values, low, high = bounds(result, "top1", k)
        figure.add_scatter(
            x=values,
            y=[m + (k - 0.5) * 0.22 for m in range(n)],
            error_x=bars(values, low, high),
            mode="markers",
            marker={"size": 10, "symbol": KIND_SYMBOLS[k], "color": palette.series[k]},
            name=f"{kind} ({int(result.n_prompts[k])})",
            hovertext=[
                f"<b>{name}</b>, {kind}<br>likeliest {interval_of(result, 'top1', (k, m), 3)}<br>"
                f"among the first five {interval_of(result, 'top5', (k, m), 3)}<br>"
                f"mean probability {interval_of(result, 'mean', (k, m), 4)}"
                for m, name in enumerate(result.methods)
            ],
            hoverinfo="text",
            row=1,
            col=1,
        )
    known = [m for m in range(n) if result.size[m] > 0]  # a logarithm has no 0
    values, low, high = bounds(result, "size", known)
    figure.add_scatter(
        x=values,
        y=known,
        error_x=bars(values, low, high),
        mode="markers",
        marker={"size": 10, "symbol": "square", "color": palette.series[2]},
        name="unrelated text",
        hovertext=[
            f"<b>{result.methods[m]}</b><br>moves {interval_of(result, 'size', m, 5)} nats a token<br>"
            f"loss {interval_of(result, 'change', m, 5)} nats a token<br>KL {interval_of(result, 'kl', m, 6)} nats<br>"
            f"{int(result.changed[m])} of {result.n_positions} positions changed<br>{_times(result, m)}"
            for m in known
        ],
        hoverinfo="text",
        row=1,
        col=2,
    )
    for m in set(range(n)) - set(known):
        figure.add_annotation(
            x=0, y=m, xref="x2 domain", yref="y2", text="0 exactly", showarrow=False, xanchor="left",
            font={"color": palette.quiet},
        )  # fmt: skip
    figure.update_xaxes(title_text="share of prompts whose whole answer is likeliest", range=[-0.04, 1.04], col=1)
    figure.update_xaxes(title_text="mean |change of the loss|, nats a token", type="log", dtick=1, col=2)
    list_axis(figure, result.methods)
    return figure


def _times(result: Any, m: int, name: str = "more") -> str:
    """How much more than the rows a method moves unrelated text; the rows may move nothing."""
    if math.isnan(result.more[m]):
        return "the rows: 0 exactly" if not result.size[m] else "the rows change nothing: no ratio"
    if math.isnan(result.more_low[m]):
        return f"{result.more[m]:.1f} times the rows, without an interval: too few texts that the rows change"
    return f"{interval_of(result, name, m, 1)} times the rows"


def table(report: Report) -> list[dict[str, str]]:
    """One row for each method: recall, unrelated text, and what it costs."""
    result, found = report.result, []
    for m, method in enumerate(result.methods):
        row = {"method": method}
        for k, kind in enumerate(result.kinds):
            if result.n_prompts[k]:
                row |= {
                    f"{kind}: likeliest": interval_of(result, "top1", (k, m), 2),
                    f"{kind}: first five": interval_of(result, "top5", (k, m), 2),
                    f"{kind}: probability": interval_of(result, "mean", (k, m), 3),
                }
        exact = not result.changed[m]
        row |= {
            "unrelated: change, nats a token": "0 exactly" if exact else interval_of(result, "change", m, 4),
            "unrelated: |change|, nats a token": "0 exactly" if exact else interval_of(result, "size", m, 4),
            "times the rows": "" if math.isnan(result.more[m]) else interval_of(result, "more", m, 1),
            "KL, nats": "0 exactly" if exact else interval_of(result, "kl", m, 5),
            "KL, times the rows": "" if math.isnan(result.more_kl[m]) else interval_of(result, "more_kl", m, 1),
            "positions changed": f"{int(result.changed[m])} of {result.n_positions}",
            "bytes": f"{int(result.bytes[m]):,}",
            "tokens before a prompt": f"{float(result.extra_tokens[m]):.0f}",
        }
        if result.seconds is not None:
            seconds = float(result.seconds[m])
            row["seconds to write"] = "" if math.isnan(seconds) else digits(seconds)
        found.append(row)
    return found


def sentences(report: Report) -> list[str]:
    """The number that people quote, for every other method; and where another method remembers more than the rows."""
    result = report.result
    rows = result.methods.index(report.config.reference)
    found = []
    for m, method in enumerate(result.methods):
        if m == rows or not result.size[m] or method.startswith("rows"):
            continue
        what = f"{method}: the loss of an unrelated token moves by {interval_of(result, 'size', m, 4)} nats"
        if not result.size[rows]:
            found.append(f"{what}; with the rows by 0 exactly.")
        else:
            found.append(f"{what}, {_times(result, m)}.")
    for k, kind in enumerate(result.kinds):
        better = [m for m in range(len(result.methods)) if result.gap_low[k, m] > 0]
        for m in better:
            by = interval_of(result, "gap", (k, m))
            found.append(f"{result.methods[m]} says more answers to {kind} than the rows, by {by}.")
    return found


def example(engram: str, dense: str) -> AlternativesConfig:
    """A short request that shows most of what the probe computes."""
    return request(
        (engram,), brief.facts(), brief.SENTENCES, 1, writing=brief.writing(), ranks=(4,), lora_steps=5,
        bootstrap=brief.BOOTSTRAP,
    )  # fmt: skip


# The measures whose difference between two runs is shown first: paths of the result without indices
COMPARED = ("top1", "mean", "probability", "change", "kl")
DEFINITIONS = {
    "probability": "Of the whole answer behind the prompt: the product over its tokens.",
    "top1, top5": "Share of prompts where every token of the answer is the likeliest, or among the five likeliest.",
    "gap": "top1 minus that of the rows, on the same prompts.",
    "change": "Loss of unrelated text minus that of the model as it is, in nats a token; signs may cancel.",
    "size": "Mean over tokens of the absolute value of that change.",
    "kl": "KL of the prediction with the method from that of the model as it is, mean over positions, in nats.",
    "changed": "Positions whose logits are not bit for bit those of the model as it is.",
    "more": "size divided by that of the rows; more_kl the same of kl. NaN where the rows change nothing.",
    "bytes": "What is kept for the user: the overlay's file, the adapter's file, the facts as UTF-8 text.",
    "the rows": "Those of the method that was asked for, trained if none was.",
    "interval": "95 % percentile bootstrap over facts with all their prompts, or over unrelated texts; in pairs.",
}
ENTRY = Entry(
    page="facts",
    asks="What do rows do that LoRA, a prompt or retrieval do not, and the other way round?",
    formula=(
        r"\mathrm{size} = \frac1T\sum_t \big|\ell_t^{\text{method}} - \ell_t^{\text{model}}\big|,\qquad"
        r"\mathrm{more} = \frac{\mathrm{size}}{\mathrm{size}_\text{rows}},\qquad W' = W + 2\,BA"
    ),
    symbols=(
        (r"\ell_t", "cross-entropy of token $t$ of unrelated text", "nats"),
        ("T", "its tokens", ""),
        (r"\mathrm{size}", "how much a method changes that text, either way", "nats a token"),
        (r"\mathrm{more}", "against the rows", "times"),
        ("W,\\ W'", "a projection of queries, keys or values, and with its adapter", ""),
        ("B,\\ A", "the adapter's two matrices of low rank", ""),
    ),
    sources=(USER_AS_ENGRAM, LORA),
    controls="The model as it is; LoRA stopped at the rows' own loss; retrieval by TF-IDF with the same facts; "
    "paraphrases; intervals in pairs.",
    not_shown="the best that each could do: ranks, steps and rate of LoRA are those of the request, and prompt and "
    "retrieval depend on what a small model can read. Text behind a prompt stands at other positions, so that its "
    "bits cannot be equal.",
    example="--model engram-mini --rank 8 --n-texts 10 --json -",
)
