"""The same facts at each memory layer, on the command line and in exports."""

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
    from engram_lab.probes.facts.layers import LayersConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the study takes."""
    flags.add_models(parser)
    facts_files.add_facts(parser, layer=False)
    parser.add_argument(
        "--layer", type=int, action="append", metavar="N", help="may be repeated (default: all memory layers)"
    )
    flags.add_resampling(parser)


def config(args: argparse.Namespace) -> LayersConfig:
    """The request."""
    from engram_lab.probes.facts.layers import LayersConfig

    return LayersConfig(
        flags.names(args),
        facts_files.facts_of(args),
        facts_files.writing_of(args),
        tuple(args.layer or ()),
        args.seed,
        args.bootstrap,
    )


def files(config: LayersConfig) -> dict[str, str]:
    """The facts, where they are not ours."""
    return facts_files.files(config.facts)


def options(config: LayersConfig) -> list[str]:
    """The flags of a request."""
    return [
        *flags.model_flags(config.models),
        *facts_files.flags(config.facts, config.writing),
        *(flags.flag("layer", layer) for layer in config.layers),
        flags.flag("seed", config.seed),
        flags.flag("bootstrap", config.bootstrap),
    ]


def view(config: LayersConfig) -> View:
    """The page of a request, but for its facts."""
    return facts_widgets.view("Layers", config, {})


def figure(report: Report, mode: Mode, handles: Sequence[Handle]) -> go.Figure:
    """Recall by layer."""
    from engram_lab.lab.fronts.facts_figures import layers

    return layers(report, mode)


def rows(report: Report) -> Iterator[dict[str, Any]]:
    """One row for each layer and figure."""
    from engram_lab.probes.facts.layers import FIGURES

    result = report.result
    for n, layer in enumerate(result.layers):
        for name in FIGURES:
            low, mean, high = (float(getattr(result, name + end)[n]) for end in ("_low", "", "_high"))
            yield {"layer": layer, "figure": name, "value": mean, "low": low, "high": high}
