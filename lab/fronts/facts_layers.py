"""The same facts written at each memory layer by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from engram_lab.lab.ask import brief
from engram_lab.lab.ask.parts import RESAMPLED, Facts, Models, unasked
from engram_lab.lab.ask.request import Ask, Repeated
from engram_lab.lab.draw import labels
from engram_lab.lab.draw.figure import interval_lines, titled
from engram_lab.lab.draw.tables import interval_of
from engram_lab.lab.fronts.entry import FACTS, ROME, USER_AS_ENGRAM, WRITING, WRITTEN, Entry

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from engram_lab.lab.draw.theme import Mode
    from engram_lab.models.handle import Handle
    from engram_lab.probes.base import Report
    from engram_lab.probes.facts.layers import LayersConfig


ASK = Ask("facts layers", "facts", (
    Models(),
    Facts(view_name="Layers", layer=False),
    unasked(Repeated("layers", "may be repeated (default: all memory layers)", flag="layer", kind_of=int, metavar="N")),
    *RESAMPLED,
))  # fmt: skip


def rows(report: Report) -> Iterator[dict[str, Any]]:
    """One row for each layer and figure."""
    from engram_lab.probes.facts.layers import FIGURES

    result = report.result
    for n, layer in enumerate(result.layers):
        for name in FIGURES:
            low, mean, high = (float(getattr(result, name + end)[n]) for end in ("_low", "", "_high"))
            yield {"layer": layer, "figure": name, "value": mean, "low": low, "high": high}


LAYER_FIGURES = {
    "top1": "top-1",
    "probability": "probability",
    "paraphrase_top1": "paraphrases, top-1",
    "specificity": "specificity",
    "same_answer": "neighbours that say the same",
}


def figure(report: Report, mode: Mode = "light", handles: Sequence[Handle] = ()) -> go.Figure:
    """What each memory layer learns and keeps, with intervals."""
    result = report.result
    figure = titled(
        mode,
        "The same facts, written at each memory layer by itself",
        labels.plotly(f"{result.name}, {len(report.config.facts)} facts; bars: 95 % intervals over facts"),
        430,
    )
    places = list(range(len(result.layers)))
    interval_lines(figure, mode, result, places, LAYER_FIGURES, [f"layer {own}" for own in result.layers])
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


def example(engram: str, dense: str) -> LayersConfig:
    """A short request that shows most of what the probe computes."""
    from engram_lab.probes.facts.layers import LayersConfig

    return LayersConfig((engram,), brief.facts(), brief.writing(), bootstrap=brief.BOOTSTRAP)


# The measures whose difference between two runs is shown first: paths of the result without indices
COMPARED = ("top1", "probability", "specificity", "gate_after", "loss")
DEFINITIONS = FACTS
ENTRY = Entry(
    page="facts",
    asks="In which memory layer do facts have to stand to be read?",
    formula=WRITING,
    symbols=WRITTEN,
    sources=(USER_AS_ENGRAM, ROME),
    controls="The same facts, written the same way, one memory layer after the other; the loss before each step.",
    not_shown="what a layer is for: rows are trained anew for each, so that a layer may look as good as another "
    "with a quite different vector.",
    example="--model engram-mini --json -",
)
