"""How many facts a memory takes, on the command line and in exports."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from engram_lab.lab.ask import facts as facts_files
from engram_lab.lab.ask import facts_widgets, flags

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from engram_lab.lab.ask.view import View
    from engram_lab.lab.draw.theme import Mode
    from engram_lab.models.handle import Handle
    from engram_lab.probes.base import Report
    from engram_lab.probes.facts.density import DensityConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the study takes."""
    flags.add_models(parser)
    facts_files.add_facts(parser)
    parser.add_argument(
        "--size", type=int, action="append", metavar="N", help="facts written together; may be repeated, ascending "
        "(default: 1, 2, 5, 10, 20 and 50, as far as there are facts)",
    )  # fmt: skip
    parser.add_argument("--no-stacks", action="store_true", help="leave out the two users on top of each other")
    flags.add_resampling(parser)


def config(args: argparse.Namespace) -> DensityConfig:
    """The request."""
    from engram_lab.probes.facts.density import SIZES, DensityConfig

    return DensityConfig(
        flags.names(args),
        facts_files.facts_of(args),
        facts_files.writing_of(args),
        tuple(args.size or SIZES),
        not args.no_stacks,
        args.seed,
        args.bootstrap,
    )


def files(config: DensityConfig) -> dict[str, str]:
    """The facts, where they are not ours."""
    return facts_files.files(config.facts)


def options(config: DensityConfig) -> list[str]:
    """The flags of a request."""
    return [
        *flags.model_flags(config.models),
        *facts_files.flags(config.facts, config.writing),
        *(flags.flag("size", size) for size in config.sizes),
        *([] if config.stacks else ["--no-stacks"]),
        flags.flag("seed", config.seed),
        flags.flag("bootstrap", config.bootstrap),
    ]


def settled(report: Report) -> DensityConfig:
    """The request with the layer that was written at, and as many facts together as there are."""
    from dataclasses import replace

    return replace(facts_widgets.settled(report), sizes=report.result.sizes)


def view(config: DensityConfig) -> View:
    """The page of a request, but for its facts."""
    from engram_lab.probes.facts.density import SIZES

    n = len(config.facts)
    sizes = [size for size in SIZES if size <= n and size in config.sizes]
    return facts_widgets.view("Density", config, {f"facts_sizes.{n}": sizes, "facts_stacks": config.stacks})


def figure(report: Report, mode: Mode, handles: Sequence[Handle]) -> go.Figure:
    """Recall over the number of facts."""
    from engram_lab.lab.fronts.facts_figures import density

    return density(report, mode)


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
