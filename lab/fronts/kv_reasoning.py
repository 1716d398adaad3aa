"""The field alone swapped, and the model writes some tokens before it answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from engram_lab.lab.ask import brief
from engram_lab.lab.ask.parts import Models, Scenario
from engram_lab.lab.ask.request import Ask, Numbers, Ours
from engram_lab.lab.draw import cache, labels
from engram_lab.lab.draw.figure import SYMBOLS, level, line, titled
from engram_lab.lab.fronts.entry import EFFECTS, NOTES, ORACLE, RATIO, SCORE, Entry
from engram_lab.lab.fronts.kv_swap import effects_row

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from engram_lab.lab.draw.theme import Mode
    from engram_lab.models.handle import Handle
    from engram_lab.probes.base import Report
    from engram_lab.probes.kv.reasoning import ReasoningConfig


def _cue() -> str:
    from engram_lab.probes.kv.reasoning import CUE

    return CUE


TOKENS = Numbers(
    "tokens", "tokens written before the answer (default: 0 4 16 32)", [0, 4, 16, 32], "written", "numbers of tokens",
    offered=(0, 1, 2, 4, 8, 16, 32, 64, 128), label="Tokens written",
    tip="The model writes so many by itself, from each cache, and is then asked once more.",
)  # fmt: skip
CUE = Ours("cue", "what the writing follows (default: one of ours)", key="cue", metavar="TEXT", ours=_cue, label="Cue",
           tip="The writing follows it; may be empty.")  # fmt: skip
ASK = Ask("kv reasoning", "kv", (Models(), Scenario(experiment="Reasoning"), TOKENS, CUE))


def rows(report: Report) -> Iterator[dict[str, Any]]:
    """One row for each source read at once (tokens -1), then for each source and number of tokens."""
    result = report.result
    fixed = {"scenario": report.config.scenario.id, "oracle": result.oracle.both}
    for n, source in enumerate(("old", "field", "new")):
        yield (
            fixed
            | {"source": source, "tokens": -1, "written": 0, "holds": result.oracle.both, "text": ""}
            | effects_row(result.direct, n)
        )
    for n, source in enumerate(result.sources):
        yield (
            fixed
            | {
                "source": source,
                "tokens": int(result.tokens[n]),
                "written": int(result.written[n]),
                "holds": bool(result.holds[n]),
                "text": result.texts[n],
            }
            | effects_row(result.effects, n)
        )


SOURCES = {"old": "old prompt's cache", "field": "old, field from the new", "new": "new prompt's cache"}


def figure(report: Report, mode: Mode = "light", handles: Sequence[Handle] = ()) -> go.Figure:
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
                "symbol": [SYMBOLS[series % len(SYMBOLS)] + ("" if result.holds[n] else "-open") for n in mine],
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
            **line(mode, series),
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


def example(engram: str, dense: str) -> ReasoningConfig:
    """A short request that shows most of what the probe computes."""
    from engram_lab.probes.kv.reasoning import ReasoningConfig

    return ReasoningConfig((engram,), brief.scenario(), (0, 4), align="split")


# The measures whose difference between two runs is shown first: paths of the result without indices
COMPARED = ("effects.recovery", "direct.recovery", "effects.prob_new", "tokens")
DEFINITIONS = EFFECTS | {
    "recovery": (
        "(score - old score) / (new score - old score), all after as many written tokens, each source having written "
        "its own: 0 is the old prompt's cache after k tokens, 1 the new prompt's. 'direct' is without cue and question."
    ),
    "flip": "Whether the leader of the two answers is another one than from the old cache after as many tokens.",
    "kl": "KL(new || this source) in nats over the whole vocabulary, after as many written tokens.",
    "cosine": "Cosine of the source's logits with those of the new cache after as many tokens.",
    "holds": "After k tokens the old cache still gives the old answer, and the new cache the new one.",
}
ENTRY = Entry(
    page="kv",
    asks="With the field alone swapped, does a model that writes before it answers find the new answer?",
    formula=(
        r"\mathrm{recovery}_k = \frac{s_k - s_{\text{old},k}}{s_{\text{new},k} - s_{\text{old},k}},\qquad" + SCORE
    ),
    symbols=(
        ("k", "tokens that the model writes, greedily, before it is asked again", "tokens"),
        (r"\mathrm{recovery}_k", "how much of the new answer is there after them", RATIO[2]),
        ("s_k", "the score from the cache with the field swapped, after its own $k$ tokens", "logits"),
        (r"s_{\text{old},k},\ s_{\text{new},k}", "the same from the old and the new prompt's cache", "logits"),
    ),
    sources=(NOTES,),
    controls=ORACLE + "The old and the new prompt's cache write as many tokens under the same cue; no tokens at all.",
    not_shown="why an answer turns: each cache writes a text of its own, and what is read may be that text and not "
    "the cache. Greedy writing is one of many.",
    example="--model smollm2-135m --scenario home-city --align split --tokens 0 8 --json -",
)
