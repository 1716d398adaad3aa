"""The swap ladder of a cache, on the command line and in exports."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from engram_lab.lab.ask import flags as arguments
from engram_lab.lab.ask import kv_widgets, scenarios, widgets

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from engram_lab.lab.ask.view import View
    from engram_lab.lab.draw.theme import Mode
    from engram_lab.models.handle import Handle
    from engram_lab.probes.base import Report
    from engram_lab.probes.kv.swap import SwapConfig

SIZES = (1, 2, 4, 8, 16)  # numbers of positions that the page offers, each for last, best and random


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the ladder takes."""
    arguments.add_models(parser)
    scenarios.add_scenario(parser)
    parser.add_argument("--part", choices=("kv", "k", "v"), default="kv", help="what to swap (default %(default)s)")
    parser.add_argument("--layers", type=int, nargs="+", metavar="N", help="blocks to swap in (default: all)")
    for name, what in (("last", "the last N positions"), ("best", "the best N"), ("random", "N at random")):
        parser.add_argument(
            f"--{name}", type=int, nargs="*", metavar="N", default=[1, 2, 4, 8], help=f"{what} (default: 1 2 4 8)"
        )
    parser.add_argument("--draws", type=int, default=8, help="draws of each random set (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws (default %(default)s)")


def config(args: argparse.Namespace) -> SwapConfig:
    """The request."""
    from engram_lab.probes.kv.swap import SwapConfig

    return SwapConfig(
        arguments.names(args),
        scenarios.scenario_of(args),
        args.part,
        None if args.layers is None else tuple(args.layers),
        tuple(args.last),
        tuple(args.best),
        tuple(args.random),
        args.draws,
        args.align,
        args.seed,
    )


def files(config: SwapConfig) -> dict[str, str]:
    """None: the command holds the scenario itself."""
    return {}


def options(config: SwapConfig) -> list[str]:
    """The flags of a request."""
    flags = arguments.model_flags(config.models) + scenarios.scenario_flags(config.scenario, config.align)
    flags.append(arguments.flag("part", config.part))
    for name in ("layers", "last", "best", "random"):
        if (numbers := getattr(config, name)) is not None:
            flags.append(" ".join([f"--{name}", *map(str, numbers)]))
    return [*flags, arguments.flag("draws", config.draws), arguments.flag("seed", config.seed)]


def view(config: SwapConfig) -> View:
    """The page of a request that takes the same numbers of last, best and random positions."""
    if not config.last == config.best == config.random:
        widgets.refuse("different numbers of last, best and random positions")
    layers = config.layers or ()
    shown = {
        **kv_widgets.part(config),
        **kv_widgets.seed(config),
        "sizes": widgets.some_of("numbers of positions", config.last, SIZES),
        "draws": widgets.within("a number of draws", config.draws, 1, 100),
        "kv_layers": widgets.some_of("layers", layers, sorted(layers)),
    }
    return kv_widgets.view("Swap", config, shown)


def figure(report: Report, mode: Mode, handles: Sequence[Handle]) -> go.Figure:
    """The ladder as bars."""
    from engram_lab.lab.fronts.kv_figures import ladder

    return ladder(report, mode)


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
