"""Writing before the answer from a cache with the field swapped, on the command line and in exports."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from engram_lab.lab.ask import flags as arguments
from engram_lab.lab.ask import kv_widgets, scenarios, widgets
from engram_lab.lab.fronts.kv_swap import effects_row

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from engram_lab.lab.ask.view import View
    from engram_lab.lab.draw.theme import Mode
    from engram_lab.models.handle import Handle
    from engram_lab.probes.base import Report
    from engram_lab.probes.kv.reasoning import ReasoningConfig

TOKENS = (0, 1, 2, 4, 8, 16, 32, 64, 128)  # that the page offers to write


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the writing takes."""
    arguments.add_models(parser)
    scenarios.add_scenario(parser)
    parser.add_argument(
        "--tokens", type=int, nargs="+", metavar="N", default=[0, 4, 16, 32],
        help="tokens written before the answer (default: 0 4 16 32)",
    )  # fmt: skip
    parser.add_argument("--cue", metavar="TEXT", help="what the writing follows (default: one of ours)")


def config(args: argparse.Namespace) -> ReasoningConfig:
    """The request."""
    from engram_lab.probes.kv.reasoning import CUE, ReasoningConfig

    return ReasoningConfig(
        arguments.names(args),
        scenarios.scenario_of(args),
        tuple(args.tokens),
        CUE if args.cue is None else args.cue,
        args.align,
    )


def files(config: ReasoningConfig) -> dict[str, str]:
    """None: the command holds the scenario itself."""
    return {}


def options(config: ReasoningConfig) -> list[str]:
    """The flags of a request."""
    from engram_lab.probes.kv.reasoning import CUE

    flags = arguments.model_flags(config.models) + scenarios.scenario_flags(config.scenario, config.align)
    flags.append(" ".join(["--tokens", *map(str, config.tokens)]))
    return [*flags, *([arguments.flag("cue", config.cue)] if config.cue != CUE else [])]


def view(config: ReasoningConfig) -> View:
    """The page of a request."""
    shown = {"written": widgets.some_of("numbers of tokens", config.tokens, TOKENS), "cue": config.cue}
    return kv_widgets.view("Reasoning", config, shown)


def figure(report: Report, mode: Mode, handles: Sequence[Handle]) -> go.Figure:
    """The margin by tokens written."""
    from engram_lab.lab.fronts.kv_run_figures import reasoning

    return reasoning(report, mode)


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
