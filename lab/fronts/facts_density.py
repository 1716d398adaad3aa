"""Recall over the number of facts, aliases apart from interference; two users on top of each other."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from engram_lab.lab.ask import brief
from engram_lab.lab.ask.parts import RESAMPLED, Facts, Models, with_layer
from engram_lab.lab.ask.request import Ask, Repeated, Switch
from engram_lab.lab.draw import labels
from engram_lab.lab.draw.figure import interval_lines, titled
from engram_lab.lab.draw.tables import interval_of
from engram_lab.lab.fronts.entry import USER_AS_ENGRAM, Entry

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from engram_lab.lab.draw.theme import Mode
    from engram_lab.models.handle import Handle
    from engram_lab.probes.base import Report
    from engram_lab.probes.facts.density import DensityConfig


def _sizes() -> tuple[int, ...]:
    from engram_lab.probes.facts.density import SIZES

    return SIZES


class Sizes(Repeated):
    """Numbers of facts that are written together."""

    def view(self, config: DensityConfig) -> dict[str, Any]:
        """Those that the page offers for so many facts."""
        n = len(config.facts)
        return {f"facts_sizes.{n}": [size for size in _sizes() if size <= n and size in config.sizes]}


class Stacks(Switch):
    """Two users on top of each other, unless they are left out."""

    @property
    def name(self) -> str:
        """Of the flag, which says the opposite."""
        return "no-stacks"

    def kind(self) -> dict[str, Any]:
        """No value, and the opposite default."""
        return {"action": "store_true", "default": False}

    def read(self, args: argparse.Namespace) -> dict[str, Any]:
        """The opposite of the flag."""
        return {"stacks": not args.no_stacks}

    def flags(self, config: DensityConfig) -> list[str]:
        """The flag where they are left out."""
        return [] if config.stacks else ["--no-stacks"]


SIZES = Sizes(
    "sizes", "facts written together; may be repeated, ascending (default: 1, 2, 5, 10, 20 and 50, as far as there are "
    "facts)", flag="size", kind_of=int, metavar="N", ours=_sizes, label="Facts written together",
)  # fmt: skip
STACKS = Stacks("stacks", "leave out the two users on top of each other", True, "facts_stacks",
                label="Two users on top of each other")  # fmt: skip
ASK = Ask("facts density", "facts", (
    Models(),
    Facts(view_name="Density"),
    SIZES,
    STACKS,
    *RESAMPLED,
))  # fmt: skip


def settled(report: Report) -> DensityConfig:
    """The request with the layer that was written at, and as many facts together as there are."""
    made: DensityConfig = dataclasses.replace(with_layer(report), sizes=report.result.sizes)
    return made


def rows(report: Report) -> Iterator[dict[str, Any]]:
    """One row for each fact and number of facts that it was written with."""
    result = report.result
    for s, size in enumerate(result.sizes):
        for n, own in enumerate(report.config.facts):
            if result.fact_top1[s, n] == result.fact_top1[s, n]:
                yield {
                    "written_together": size,
                    "fact": own.id or n,
                    "trigger": own.trigger,
                    "answer": own.answer,
                    "probability": float(result.fact_probability[s, n]),
                    "top1": bool(result.fact_top1[s, n]),
                    "alias": bool(result.fact_aliased[s, n]),
                }


def figure(report: Report, mode: Mode = "light", handles: Sequence[Handle] = ()) -> go.Figure:
    """Recall over the number of facts written together, with those left out that share an address, and probability."""
    result = report.result
    figure = titled(
        mode,
        "How many facts the memory holds",
        labels.plotly(f"{result.name}, layer {result.layer}; bars: 95 % intervals over facts"),
        430,
    )
    series = {"top1": "top-1", "free": "top-1, no other answer at the address", "probability": "probability"}
    interval_lines(figure, mode, result, list(result.sizes), series, [f"{size} together" for size in result.sizes])
    ticks = list(map(str, result.sizes))
    figure.update_xaxes(title_text="facts written together", type="log", tickvals=list(result.sizes), ticktext=ticks)
    figure.update_yaxes(title_text="share of facts, or mean probability", range=[-0.03, 1.03])
    return figure


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


def example(engram: str, dense: str) -> DensityConfig:
    """A short request that shows most of what the probe computes."""
    from engram_lab.probes.facts.density import DensityConfig

    return DensityConfig((engram,), brief.facts(), brief.writing(), sizes=(1, 2), bootstrap=brief.BOOTSTRAP)


# The measures whose difference between two runs is shown first: paths of the result without indices
COMPARED = ("top1", "probability", "fact_probability", "free")
DEFINITIONS = {
    "top1": "Share of facts whose answer the model says, written with so many others.",
    "free": "The same over facts that share their address with no other answer of their group.",
    "lost_alias": "Facts not said that have an alias: one vector for two answers, not always told apart.",
    "lost_other": "Facts not said that have none.",
    "disjoint": "Two users with half of the facts each, on top of each other.",
    "overlapping": "The second user has the first one's triggers with other answers.",
    "conflicts": "Rows that the two give different vectors; the upper one's is read.",
    "own": "Both in one batch, each prompt with its own user's rows only.",
    "interval": "95 % percentile bootstrap over facts. None for a single one.",
}
ENTRY = Entry(
    page="facts",
    asks="How many facts does a memory take before they get in each other's way, and what do two users do?",
    formula=(
        r"\text{top-1}(n) = \frac1F\sum_{f=1}^{F}\Big[\forall t:\ y_{f,t} = "
        r"\arg\max_v\, p\big(v \mid \text{trigger}_f,\, y_{f,<t};\, E_{n}(f)\big)\Big]"
    ),
    symbols=(
        ("n", "facts that are written together", ""),
        ("F", "facts that are asked, each in the one group of $n$ that has it", ""),
        ("y_{f,t}", "token $t$ of the answer of fact $f$", ""),
        ("E_n(f)", "the rows that the group of fact $f$ was written into", ""),
        (r"\text{top-1}", "share of facts that the model says", "0 to 1"),
    ),
    sources=(USER_AS_ENGRAM,),
    controls="Facts with an alias in their group (one address, two answers) apart from the rest; two users with "
    "other facts, with the same triggers, in either order, and each with own rows in one batch.",
    not_shown="a capacity: which facts meet depends on the draw of groups, on how alike the triggers are, and on "
    "the size of the tables.",
    example="--model engram-mini --size 1 --size 10 --json -",
)
