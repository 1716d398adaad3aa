"""Knock-outs in a cache, on the command line and in exports."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from engram_lab.lab.ask import flags as arguments
from engram_lab.lab.ask import kv_widgets, scenarios, widgets
from engram_lab.lab.draw import cache, labels
from engram_lab.lab.draw.figure import level, list_axis, titled
from engram_lab.lab.draw.theme import PALETTES
from engram_lab.lab.fronts.entry import NOTES, ORACLE, Entry
from engram_lab.lab.fronts.kv_swap import effects_row

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from engram_lab.lab.ask.view import View
    from engram_lab.lab.draw.theme import Mode
    from engram_lab.models.handle import Handle
    from engram_lab.probes.base import Report
    from engram_lab.probes.kv.knockout import KnockoutConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the knock-outs take."""
    arguments.add_models(parser)
    scenarios.add_scenario(parser)
    parser.add_argument(
        "--target", action="append", help="field, notes or downstream; may be repeated (default: all three)"
    )
    parser.add_argument(
        "--how", action="append", help="zero, mean, random or unrelated; may be repeated (default: all four)"
    )
    parser.add_argument(
        "--positions", type=int, nargs="+", metavar="N", default=[], help="positions as one more target"
    )
    parser.add_argument("--unrelated", metavar="TEXT", help="the other text (default: one of ours)")
    parser.add_argument("--draws", type=int, default=4, help="draws of the noise (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the noise (default %(default)s)")


def config(args: argparse.Namespace) -> KnockoutConfig:
    """The request."""
    from engram_lab.probes.kv.knockout import HOWS, TARGETS, UNRELATED, KnockoutConfig

    chosen = ["positions"] if args.positions else []
    return KnockoutConfig(
        arguments.names(args),
        scenarios.scenario_of(args),
        (*(args.target or TARGETS[:3]), *chosen),
        tuple(args.how or HOWS),
        tuple(args.positions),
        UNRELATED if args.unrelated is None else args.unrelated,
        args.draws,
        args.align,
        args.seed,
    )


def files(config: KnockoutConfig) -> dict[str, str]:
    """None: the command holds the scenario itself."""
    return {}


def options(config: KnockoutConfig) -> list[str]:
    """The flags of a request."""
    from engram_lab.probes.kv.knockout import UNRELATED

    flags = arguments.model_flags(config.models) + scenarios.scenario_flags(config.scenario, config.align)
    flags += [arguments.flag("target", target) for target in config.targets if target != "positions"]
    flags += [arguments.flag("how", how) for how in config.hows]
    if config.positions:
        flags.append(" ".join(["--positions", *map(str, config.positions)]))
    if config.unrelated != UNRELATED:
        flags.append(arguments.flag("unrelated", config.unrelated))
    return [*flags, arguments.flag("draws", config.draws), arguments.flag("seed", config.seed)]


def view(config: KnockoutConfig) -> View:
    """The page of a request."""
    from engram_lab.probes.kv.knockout import HOWS, TARGETS, UNRELATED

    targets = widgets.some_of("targets", config.targets, TARGETS)
    shown = {
        **kv_widgets.seed(config),
        "targets": [own for own in targets if own != "positions"],
        "hows": widgets.some_of("ways", config.hows, HOWS),
        "kv_positions": widgets.some_of("positions", config.positions, sorted(config.positions)),
        "noise": widgets.within("a number of draws", config.draws, 1, 50),
    }
    if "unrelated" in config.hows:
        shown["unrelated"] = config.unrelated
    else:
        widgets.without(config, unrelated=UNRELATED)
    return kv_widgets.view("Knock-out", config, shown)


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


# The measures whose difference between two runs is shown first: paths of the result without indices
COMPARED = ("margin", "effects.recovery", "effects.prob_old", "effects.kl")
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
