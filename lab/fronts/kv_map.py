"""The position x layer map of a cache, on the command line and in exports."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from engram_lab.lab.ask import flags, kv_widgets, scenarios, widgets

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from engram_lab.lab.ask.view import View
    from engram_lab.lab.draw.theme import Mode
    from engram_lab.models.handle import Handle
    from engram_lab.probes.base import Report
    from engram_lab.probes.kv.map import MapConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the map takes."""
    flags.add_models(parser)
    scenarios.add_scenario(parser)
    parser.add_argument(
        "--groups", type=int, default=0, help="groups of neighbouring layers (default 0: each layer by itself)"
    )
    parser.add_argument("--part", choices=("kv", "k", "v"), default="kv", help="what to swap (default %(default)s)")


def config(args: argparse.Namespace) -> MapConfig:
    """The request."""
    from engram_lab.probes.kv.map import MapConfig

    return MapConfig(flags.names(args), scenarios.scenario_of(args), args.groups, args.part, args.align)


def files(config: MapConfig) -> dict[str, str]:
    """None: the command holds the scenario itself."""
    return {}


def options(config: MapConfig) -> list[str]:
    """The flags of a request."""
    return [
        *flags.model_flags(config.models),
        *scenarios.scenario_flags(config.scenario, config.align),
        flags.flag("groups", config.groups),
        flags.flag("part", config.part),
    ]


def view(config: MapConfig) -> View:
    """The page of a request."""
    widgets.without(config, seed=0)
    return kv_widgets.view("Map", config, {**kv_widgets.part(config), "groups": config.groups})


def figure(report: Report, mode: Mode, handles: Sequence[Handle]) -> go.Figure:
    """The map."""
    from engram_lab.lab.fronts.kv_figures import recovery_map

    return recovery_map(report, mode)


def rows(report: Report) -> Iterator[dict[str, Any]]:
    """One row for each cell."""
    result = report.result
    for g, group in enumerate(result.group_names):
        for position in range(result.recovery.shape[1]):
            yield {
                "scenario": report.config.scenario.id,
                "oracle": result.oracle.both,
                "layers": group,
                "position": position,
                "token": result.pair.token_texts_old[position],
                "in_field": position in result.pair.field,
                "recovery": float(result.recovery[g, position]),
                "flip": bool(result.flip[g, position]),
                "kl_nats": float(result.kl[g, position]),
            }
