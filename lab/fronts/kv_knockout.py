"""The answer with a part of the cache zeroed, averaged, made noise or taken from another text."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engram_lab.lab.ask import brief
from engram_lab.lab.ask.parts import SEED, Models, Scenario
from engram_lab.lab.ask.request import Ask, Number, Numbers, Ours, Part, Repeated, flag, in_order
from engram_lab.lab.draw import cache, labels
from engram_lab.lab.draw.figure import level, list_axis, titled
from engram_lab.lab.draw.theme import PALETTES
from engram_lab.lab.fronts.entry import EFFECTS, NOTES, ORACLE, Entry
from engram_lab.lab.fronts.kv_swap import effects_row

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from engram_lab.lab.draw.theme import Mode
    from engram_lab.models.handle import Handle
    from engram_lab.probes.base import Report
    from engram_lab.probes.kv.knockout import KnockoutConfig


def _targets() -> tuple[str, ...]:
    from engram_lab.probes.kv.knockout import TARGETS

    return TARGETS


def _hows() -> tuple[str, ...]:
    from engram_lab.probes.kv.knockout import HOWS

    return HOWS


def _unrelated() -> str:
    from engram_lab.probes.kv.knockout import UNRELATED

    return UNRELATED


class Targets(Repeated):
    """What is knocked out: some of three by name, and the positions where they are given."""

    def read(self, args: argparse.Namespace) -> dict[str, Any]:
        """The names, and the positions as one more."""
        return {"targets": (*(args.target or _targets()[:3]), *(["positions"] if args.positions else []))}

    def flags(self, config: KnockoutConfig) -> list[str]:
        """The names; --positions says the rest."""
        return [flag("target", target) for target in config.targets if target != "positions"]

    def shown(self, value: tuple[str, ...]) -> list[str]:
        """The names."""
        return [target for target in in_order("targets", value, _targets()) if target != "positions"]


class Hows(Repeated):
    """The ways of knocking out."""

    def shown(self, value: tuple[str, ...]) -> list[str]:
        """The choice of several."""
        return in_order("ways", value, _hows())


class Unrelated(Ours):
    """The text that a knock-out takes entries from, whose box is there with its way alone."""

    def view(self, config: KnockoutConfig) -> dict[str, Any]:
        """The box, or nothing."""
        return (
            super().view(config) if "unrelated" in config.hows else Part(self.field, default=self.ours()).view(config)
        )


TARGETS = Targets(
    "targets", "field, notes or downstream; may be repeated (default: all three)", key="targets", flag="target",
    label="Knock out",
    tip="The field; the notes: punctuation, line ends and special tokens behind it; all that is behind it.",
)  # fmt: skip
HOWS = Hows("hows", "zero, mean, random or unrelated; may be repeated (default: all four)", key="hows", flag="how",
            ours=_hows, label="How")  # fmt: skip
POSITIONS = Numbers("positions", "positions as one more target", [], "kv_positions", "positions", label="Positions too")
UNRELATED = Unrelated("unrelated", "the other text (default: one of ours)", key="unrelated", metavar="TEXT",
                      ours=_unrelated, label="The unrelated text")  # fmt: skip
DRAWS = Number("draws", "draws of the noise (default %(default)s)", 4, "noise", "a number of draws", low=1, high=50,
               label="Draws", tip="Of random K and V.")  # fmt: skip
ASK = Ask("kv knockout", "kv", (
    Models(), Scenario(experiment="Knock-out"), TARGETS, HOWS, POSITIONS, UNRELATED, DRAWS,
    replace(SEED, help="seed of the noise (default %(default)s)"),
))  # fmt: skip


def rows(report: Report) -> Iterator[dict[str, Any]]:
    """One row for each knock-out."""
    result = report.result
    for n, (target, how) in enumerate(zip(result.targets, result.hows, strict=True)):
        yield {
            "scenario": report.config.scenario.id,
            "oracle": result.oracle.both,
            "target": target,
            "how": how,
            "draw": int(result.draw[n]),
            "positions": " ".join(map(str, result.positions[n])),
            "margin_logits": float(result.margin[n]),
            "margin_clean_logits": result.margin_clean,
            "answer_kept": bool(result.kept[n]),
        } | effects_row(result.effects, n)


_HOW = {"zero": "circle", "mean": "square", "random": "diamond", "unrelated": "triangle-up"}


def figure(report: Report, mode: Mode = "light", handles: Sequence[Handle] = ()) -> go.Figure:
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


def example(engram: str, dense: str) -> KnockoutConfig:
    """A short request that shows most of what the probe computes."""
    from engram_lab.probes.kv.knockout import KnockoutConfig

    return KnockoutConfig((engram,), brief.scenario(), draws=2, align="split")


# The measures whose difference between two runs is shown first: paths of the result without indices
COMPARED = ("margin", "effects.recovery", "effects.prob_old", "effects.kl")
DEFINITIONS = EFFECTS | {
    "margin": "Logit of the right answer's first token minus that of the other answer's; below 0 the answer is wrong.",
    "kl": "KL(clean || knocked out) in nats over the whole vocabulary.",
    "cosine": "Cosine of the knocked-out run's logits with the clean run's, over the whole vocabulary.",
    "kept": "The right answer still leads the other, and is still the most likely token if it was in the clean run.",
    "notes": "Tokens behind the field that are punctuation or a line end and nothing else, or special.",
    "zero": "K and V are 0: the position gets attention as a key of no direction would, and gives nothing.",
    "mean": "K and V are their means over all positions of the cache, keys as cached.",
    "random": "K and V are drawn from normal distributions with the mean and spread of each entry over positions.",
    "unrelated": "K and V of another text at the same positions.",
}
ENTRY = Entry(
    page="kv",
    asks="Which part of a prompt's cache can the answer not do without?",
    formula=(
        r"\mathrm{margin} = \mathrm{logit}(\text{right answer}) - \mathrm{logit}(\text{other answer}),\qquad"
        r"\text{kept} \iff \mathrm{margin} > 0\ \text{and still the top token, if it was}"
    ),
    symbols=(
        (r"\mathrm{margin}", "by how much the right answer leads, by first tokens", "logits; below 0 it is wrong"),
        (r"\text{kept}", "whether the answer survives the knock-out", "yes or no"),
    ),
    sources=(NOTES,),
    controls=ORACLE + "Four ways to knock out: zero, the mean over positions, noise of the same mean and spread, "
    "another text's. Where they disagree, it is the way and not the part that broke the answer.",
    not_shown="that what survives is unused: a model may fall back on another place. A zeroed key still draws "
    "attention, so that knocking out many positions also dilutes the others.",
    example="--model smollm2-135m --scenario home-city --align split --json -",
)
