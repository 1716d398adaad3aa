"""The row inspector on the command line and in exports."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.fronts import arguments

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from lab.theme import Mode
    from models.handle import Handle
    from probes.base import Report
    from probes.rows import RowsConfig

HELP = "rows: what one position reads from the memory, who shares it, and how evenly a text uses it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the inspector takes."""
    arguments.add_models(parser)
    parser.add_argument("--prompt", required=True, help="the prompt")
    parser.add_argument(
        "--position", type=int, default=-1, help="token of the prompt, negative from the end (default %(default)s)"
    )
    parser.add_argument("--layer", type=int, help="a memory layer (default: the first)")
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="texts to count hits and collisions over, one a line, or .jsonl"
    )
    parser.add_argument("--top-k", type=int, default=8, help="tokens listed for each row (default %(default)s)")
    parser.add_argument(
        "--top-shared", type=int, default=10, help="n-grams listed that share a row (default %(default)s)"
    )
    parser.add_argument(
        "--counts", metavar="FILE", help="training hits, from engram-lab rows count (default: what ships)"
    )


def config(args: argparse.Namespace) -> RowsConfig:
    """The request."""
    from probes.rows import RowsConfig

    text = arguments.read_texts(args.text) if args.text else ()
    return RowsConfig(
        (args.model,), (args.prompt,), args.position, args.layer, text, args.top_k, args.top_shared, args.counts
    )


def options(config: RowsConfig) -> list[str]:
    """The flags of a request."""
    flags = [*arguments.model_flags(config.models), arguments.flag("prompt", config.prompts[0])]
    flags.append(arguments.flag("position", config.position))
    if config.layer is not None:
        flags.append(arguments.flag("layer", config.layer))
    if config.text:
        flags.append(arguments.flag("text", arguments.TEXTS_FILE))
    flags += [arguments.flag("top-k", config.top_k), arguments.flag("top-shared", config.top_shared)]
    if config.counts is not None:
        flags.append(arguments.flag("counts", config.counts))
    return flags


def files(config: RowsConfig) -> dict[str, str]:
    """The files that the flags name."""
    return arguments.texts_file(config.text, detail=not config.text)


def figure(report: Report, mode: Mode, handles: Sequence[Handle]) -> go.Figure:
    """The tokens that what came through promotes and suppresses."""
    from lab import labels
    from lab.rows_figures import came_through

    return came_through(report, lambda i: labels.label(handles[0].pieces([i], whole=False)[0]), mode)


def rows(report: Report) -> Iterator[dict[str, Any]]:
    """One row for each order and head: what is addressed, who shares it, what it says, how the head is used.

    What was not counted is None; several n-grams or tokens in one cell are apart by " │ ".
    """
    result = report.result
    for row in result.rows:
        found: dict[str, Any] = {
            "layer": result.layer,
            "position": result.position,
            "order": row.order,
            "head": row.head,
            "prime": row.prime,
            "row": row.row,
            "row_id": row.row_id,
            "row_norm": row.norm,
            "gate": result.gate,
            "training_hits": row.training_hits,
            "training_ngrams": row.training_ngrams,
            "text_hits": row.text_hits,
            "text_ngrams": row.text_ngrams,
            "shared_total": row.shared_total,
            "shared": " │ ".join(f"{' '.join(other.canonical_texts)} ({other.count})" for other in row.shared),
            "promoted": " │ ".join(row.says.promoted_texts),
            "suppressed": " │ ".join(row.says.suppressed_texts),
        }
        for name in ("training", "text"):
            usage = getattr(result, name)
            for measure in ("coverage", "collisions", "spread"):
                for end in ("", "_expected", "_sd"):
                    value = None if usage is None else float(getattr(usage, measure + end)[row.order - 2, row.head])
                    found[f"{name}_{measure}{end}"] = value
        yield found
