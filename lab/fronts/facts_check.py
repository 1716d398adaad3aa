"""A user's facts, written and checked, on the command line and in exports."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram_lab.lab.ask import facts as facts_files
from engram_lab.lab.ask import facts_widgets, flags

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from engram_lab.lab.ask.view import View
    from engram_lab.lab.draw.theme import Mode
    from engram_lab.models.handle import Handle
    from engram_lab.probes.base import Report
    from engram_lab.probes.facts.check import CheckConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the check takes."""
    flags.add_models(parser)
    facts_files.add_facts(parser)
    parser.add_argument(
        "--overlay",
        type=Path,
        metavar="FILE",
        help="an overlay, to take facts, user, method and layer from",
    )
    facts_files.add_texts(parser)
    flags.add_resampling(parser)


def config(args: argparse.Namespace) -> CheckConfig:
    """The request."""
    from engram_lab.probes.facts.check import CheckConfig

    if args.overlay is not None:
        facts, args = facts_files.of_overlay(args)
    else:
        facts = facts_files.facts_of(args)
    writing, texts = facts_files.writing_of(args), facts_files.texts_of(args)
    return CheckConfig(flags.names(args), facts, writing, texts, args.seed, args.bootstrap)


def files(config: CheckConfig) -> dict[str, str]:
    """The facts and the texts, where they are not ours."""
    return facts_files.files(config.facts, config.texts)


def options(config: CheckConfig) -> list[str]:
    """The flags of a request."""
    return [
        *flags.model_flags(config.models),
        *facts_files.flags(config.facts, config.writing),
        *facts_files.text_flags(config.texts),
        flags.flag("seed", config.seed),
        flags.flag("bootstrap", config.bootstrap),
    ]


def settled(report: Report) -> CheckConfig:
    """The request with the layer that was written at."""
    made: CheckConfig = facts_widgets.settled(report)
    return made


def view(config: CheckConfig) -> View:
    """The page of a request, but for its facts."""
    return facts_widgets.view("Write and check", config, facts_widgets.unrelated("facts_texts", config.texts))


def figure(report: Report, mode: Mode, handles: Sequence[Handle]) -> go.Figure:
    """Recall, paraphrases and neighbours, before and after."""
    from engram_lab.lab.fronts.facts_figures import recall

    return recall(report, mode)


def rows(report: Report) -> Iterator[dict[str, Any]]:
    """One row for each prompt that was asked: the facts, their paraphrases, neighbours, compositions and aliases."""
    result, facts = report.result, report.config.facts
    for kind in ("facts", "paraphrases", "neighbours", "compositions", "aliases"):
        asked = getattr(result, kind)
        for n, prompt in enumerate(asked.prompts):
            fact = int(asked.fact[n])
            yield {
                "kind": {"facts": "fact", "aliases": "alias"}.get(kind, kind.removesuffix("s")),
                "fact": facts[fact].id or fact,
                "prompt": prompt,
                "answer": asked.answers[n],
                "probability_before": float(asked.probability_before[n]),
                "probability_after": float(asked.probability_after[n]),
                "top1_before": bool(asked.top1_before[n]),
                "top1_after": bool(asked.top1_after[n]),
                "top5_before": bool(asked.top5_before[n]),
                "top5_after": bool(asked.top5_after[n]),
                "said_before": asked.said_before[n],
                "said_after": asked.said_after[n],
                "rival": asked.rival_texts[n],
                "likelier_than_rival_before": _truth(asked.wins_before[n]),
                "likelier_than_rival_after": _truth(asked.wins_after[n]),
                "kl_nats": float(asked.kl[n]),
                "same_bits": bool(asked.same_bits[n]),
                "edited_reads": int(asked.edited_reads[n]),
            }


def _truth(value: Any) -> bool | str:
    return "" if value != value else bool(value)
