"""Swap K and V of a changed field, of what is behind it, and of other positions into a stale cache."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from engram_lab.lab.ask import brief
from engram_lab.lab.ask.parts import SEED, SWAPPED, Models, Scenario
from engram_lab.lab.ask.request import Ask, Number, Numbers, Part, in_order, refuse
from engram_lab.lab.draw import cache, labels
from engram_lab.lab.draw.figure import bars, level, titled
from engram_lab.lab.draw.theme import PALETTES
from engram_lab.lab.fronts.entry import CLEAN, EFFECTS, LOGITS, NOTES, ORACLE, RATIO, RECOVERY, Entry

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from engram_lab.lab.draw.theme import Mode
    from engram_lab.models.handle import Handle
    from engram_lab.probes.base import Report
    from engram_lab.probes.kv.swap import SwapConfig


def _sizes(name: str, what: str) -> Numbers:
    return Numbers(name, f"{what} (default: 1 2 4 8)", [1, 2, 4, 8], least="*")


@dataclass(frozen=True)
class Sizes(Part):
    """Numbers of last, best and random positions: three flags, and one choice on the page."""

    KINDS: ClassVar = (
        _sizes("last", "the last N positions"),
        _sizes("best", "the best N"),
        _sizes("random", "N at random"),
    )

    offered: tuple[int, ...] = (1, 2, 4, 8, 16)  # on the page, each for last, best and random

    def add(self, parser: argparse.ArgumentParser) -> None:
        """Each by itself."""
        for kind in self.KINDS:
            kind.add(parser)

    def read(self, args: argparse.Namespace) -> dict[str, Any]:
        """Each by itself."""
        return {name: value for kind in self.KINDS for name, value in kind.read(args).items()}

    def flags(self, config: SwapConfig) -> list[str]:
        """Each by itself."""
        return [option for kind in self.KINDS for option in kind.flags(config)]

    def view(self, config: SwapConfig) -> dict[str, Any]:
        """One choice for all three."""
        if not config.last == config.best == config.random:
            refuse("different numbers of last, best and random positions")
        return {"sizes": in_order("numbers of positions", config.last, self.offered)}


LAYERS = Numbers("layers", "blocks to swap in (default: all)", None, "kv_layers", "layers", label="Layers")
SIZES = Sizes(
    "last", default=(1, 2, 4, 8), key="sizes", label="k: last, best, random",
    tip="How many positions are swapped: the last k, the k that alone recover most, and k at random behind the field.",
)  # fmt: skip
DRAWS = Number(
    "draws", "draws of each random set (default %(default)s)", 8, "draws", "a number of draws", low=1, high=100,
    label="Draws", tip="Of each random k.",
)  # fmt: skip
ASK = Ask("kv swap", "kv", (
    Models(), Scenario(experiment="Swap"), SWAPPED, LAYERS, SIZES, DRAWS,
    replace(SEED, help="seed of the draws (default %(default)s)"),
))  # fmt: skip


def rows(report: Report) -> Iterator[dict[str, Any]]:
    """One row for each variant, then one for each position by itself."""
    result = report.result
    fixed = {"scenario": report.config.scenario.id, "oracle": result.oracle.both}
    steps = zip(result.steps, result.names, result.positions, result.draw.tolist(), strict=True)
    for n, (step, name, positions, draw) in enumerate(steps):
        at = " ".join(map(str, positions))
        yield fixed | {"step": step, "name": name, "draw": draw, "positions": at} | effects_row(result.effects, n)
    for n, position in enumerate(result.position.tolist()):
        name = result.pair.token_texts_old[position]
        yield (
            fixed | {"step": "single", "name": name, "draw": -1, "positions": position} | effects_row(result.single, n)
        )


def effects_row(effects: Any, n: int) -> dict[str, Any]:
    """The figures of one variant of probes.kv.effects.Effects."""
    return {
        "recovery": float(effects.recovery[n]),
        "flip": bool(effects.flip[n]),
        "score_logits": float(effects.score[n]),
        "prob_old": float(effects.prob_old[n]),
        "prob_new": float(effects.prob_new[n]),
        "top_id": int(effects.top_id[n]),
        "cosine": float(effects.cosine[n]),
        "kl_nats": float(effects.kl[n]),
    }


STEPS = ("field", "downstream", "last", "best", "random", "all", "self")
_COLOUR = {"field": 1, "downstream": 0, "last": 2, "best": 3, "all": 4, "self": 4}  # of the series


def figure(report: Report, mode: Mode = "light", handles: Sequence[Handle] = ()) -> go.Figure:
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


def single_recovery(report: Report) -> dict[int, float]:
    """Position -> what it recovers when it alone is swapped."""
    return dict(zip(report.result.position.tolist(), report.result.single.recovery.tolist(), strict=True))


def figures(report: Report, mode: Mode, handles: Sequence[Handle]) -> list[go.Figure | None]:
    """All figures that the report has without asking the reader anything."""
    return [figure(report, mode), answers(report, mode)]


def example(engram: str, dense: str) -> SwapConfig:
    """A short request that shows most of what the probe computes."""
    from engram_lab.probes.kv.swap import SwapConfig

    # The best positions hang on near ties, which another number format may break otherwise.
    return SwapConfig((engram,), brief.scenario(), align="split", best=(), draws=2)


# The measures whose difference between two runs is shown first: paths of the result without indices
COMPARED = ("effects.recovery", "single.recovery", "effects.prob_new", "effects.kl")
DEFINITIONS = EFFECTS | {
    "kl": "KL(donor || edited) in nats over the whole vocabulary, donor being the new prompt's clean run.",
    "cosine": "Cosine of the edited run's logits with the donor's, over the whole vocabulary.",
    "best": "The k positions that alone recover most: chosen on the same run, so an upper end and no forecast.",
    "random": "k positions drawn without replacement from those behind the field, several times.",
}
ENTRY = Entry(
    page="kv",
    asks="How much of a prompt's keys and values must come from another for the answer to be the other's?",
    formula=RECOVERY,
    symbols=(RATIO, LOGITS, CLEAN, (r"s_\text{edited}", "the score on the edited cache", "logits")),
    sources=(NOTES,),
    controls=ORACLE + "Nothing swapped and everything swapped, which must give the clean runs bit for bit; as many "
    "positions at random.",
    not_shown="that a model needs what an edit replaces (see the knock-outs), or that keys and values that never "
    "occurred together mean what they meant apart: recovery may be below 0 or above 1. The best positions are "
    "chosen on the run that is shown, so they are an upper end. One scenario is an anecdote.",
    example="--model smollm2-135m --scenario home-city --align split --json -",
)
