"""A library of scenarios as one table, on the command line and in exports."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram_lab.lab.ask import flags, kv_widgets, widgets
from engram_lab.lab.ask import scenarios as kv_scenarios

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from engram_lab.lab.ask.view import View
    from engram_lab.lab.draw.theme import Mode
    from engram_lab.models.handle import Handle
    from engram_lab.probes.base import Report
    from engram_lab.probes.kv.set import SetConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the set takes."""
    flags.add_models(parser)
    parser.add_argument(
        "--scenarios", type=Path, metavar="FILE", help="a .jsonl with your own scenarios (default: those that ship)"
    )
    parser.add_argument("--chat", action="store_true", help="all as a user's message in the model's chat template")
    kv_scenarios.add_align(parser)
    flags.add_resampling(parser)


def config(args: argparse.Namespace) -> SetConfig:
    """The request."""
    from engram_lab.probes.kv.set import SetConfig

    file = args.scenarios
    scenarios = kv_scenarios.library() if file is None else kv_scenarios.read(file.read_bytes(), str(file))
    if args.chat:
        scenarios = tuple(dataclasses.replace(scenario, chat=True) for scenario in scenarios)
    return SetConfig(flags.names(args), scenarios, args.align, args.seed, args.bootstrap)


def _shipped(config: SetConfig) -> list[str] | None:
    """The flags that make the scenarios of what ships; None if they are others."""
    chat = tuple(dataclasses.replace(scenario, chat=True) for scenario in kv_scenarios.library())
    return [] if config.scenarios == kv_scenarios.library() else ["--chat"] if config.scenarios == chat else None


def files(config: SetConfig) -> dict[str, str]:
    """The scenarios as a file, unless they are those that ship."""
    return {} if _shipped(config) is not None else {kv_scenarios.FILE: kv_scenarios.written(config.scenarios)}


def options(config: SetConfig) -> list[str]:
    """The flags of a request."""
    shipped = _shipped(config)
    return [
        *flags.model_flags(config.models),
        *([flags.flag("scenarios", kv_scenarios.FILE)] if shipped is None else shipped),
        flags.flag("align", config.align),
        flags.flag("seed", config.seed),
        flags.flag("bootstrap", config.bootstrap),
    ]


def view(config: SetConfig) -> View:
    """The page of a request."""
    shipped = _shipped(config)
    shown = {
        **widgets.models(config.models),
        **widgets.resampling(config),
        "experiment": "Whole library",
        "chat_all": shipped == ["--chat"],
        "split_all": config.align == "split",
    }
    return widgets.view("kv", shown, {} if shipped is not None else kv_widgets.library(config.scenarios))


def figure(report: Report, mode: Mode, handles: Sequence[Handle]) -> go.Figure:
    """Recovery by kind of question."""
    from engram_lab.lab.fronts.kv_set_figures import by_kind

    return by_kind(report, mode)


def rows(report: Report) -> Iterator[dict[str, Any]]:
    """One row for each scenario, those left out with the reason."""
    result = report.result
    for n, scenario in enumerate(report.config.scenarios):
        row: dict[str, Any] = {
            "scenario": scenario.id,
            "kind": scenario.kind,
            "distractors": scenario.distractors,
            "chat": scenario.chat,
            "served": bool(result.served[n]),
            "oracle": bool(result.right[n]),
            "reason": result.reasons[n],
            "tokens": int(result.n_tokens[n]),
            "field_tokens": int(result.field_tokens[n]),
            "note_tokens": int(result.note_tokens[n]),
            "score_old_logits": float(result.score_old[n]),
            "score_new_logits": float(result.score_new[n]),
        }
        for e, edit in enumerate(result.edits):
            swap = not edit.endswith(("zero", "mean"))
            if swap:
                row[f"recovery_{edit}"] = float(result.recovery[n, e])
            flip = float(result.flip[n, e])
            row[f"{'flip' if swap else 'lost'}_{edit.replace(' ', '_')}"] = "" if flip != flip else bool(flip)
        yield row
