"""`engram-lab card`: the model card of the shipped models in Markdown, measured anew on the default text set."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.texts import HELD_OUT, TEXTS, lines_of

if TYPE_CHECKING:
    from probes.base import Report

NAMES = ("engram-mini", "engram-mini-early", "dense-mini")
MODELS = TEXTS.parent / "models"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the lens is measured; the shipped sentences by default."""
    parser.add_argument(
        "--prompts", type=Path, default=TEXTS / HELD_OUT, help="text set, one prompt a line (default: the shipped)"
    )


def cards() -> dict[str, dict[str, Any]]:
    """card.json of each shipped model that has one, by name."""
    files = {name: MODELS / name / "card.json" for name in NAMES}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def interval(value: float | None, low: float | None, high: float | None, digits: int = 2) -> str:
    """A mean with its 95 % interval, as it stands in the tables."""
    if value is None:
        return ""
    if low is None or high is None:
        return f"{value:.{digits}f}"
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def training_table(found: dict[str, dict[str, Any]]) -> str:
    """Parameters, tokens and held-out loss of the models."""
    figures = {
        "parameters, all": lambda c: f"{c['parameters']['all'] / 1e6:.2f} M",
        "of these table rows": lambda c: f"{c['parameters']['table'] / 1e6:.2f} M",
        "active for a token": lambda c: f"{c['parameters']['active_per_token'] / 1e6:.2f} M",
        "training tokens": lambda c: f"{c['tokens'] / 1e6:.2f} M",
        "held-out loss, nats a token": lambda c: f"{c['held_out_loss_nats']:.3f}",
        "held-out tokens": lambda c: f"{c['held_out_tokens']:,}",
    }
    rows = [[title, *(show(card) for card in found.values())] for title, show in figures.items()]
    return table(["", *found], rows)


def lens_table(report: Report) -> str:
    """Mean KL by layer under both lenses, settle depth, final entropy and loss of two models, with their difference."""
    a, b = report.result.models
    d = report.result.difference

    def row(title: str, field: str, tuned: bool = False, i: int | None = None) -> list[str]:
        sources = [(lens.tuned if tuned else lens, f"mean_{field}") for lens in (a, b)]
        sources.append((d, ("tuned_" if tuned else "") + ("mean_kl" if field == "kl" else field)))
        cells = []
        for source, name in sources:
            parts = [getattr(source, name + end) for end in ("", "_low", "_high")]
            value, low, high = (part if i is None or part is None else float(part[i]) for part in parts)
            cells.append(interval(value, low, high))
        return [title, *cells]

    rows = []
    for lens, tuned in (("logit lens", False), ("tuned lens", True)):
        rows += [row(f"{lens}, KL(final, {layer}), nats", "kl", tuned, i) for i, layer in enumerate(a.layer_names)]
        rows.append(row(f"{lens}, settle depth, layers", "settle_depth", tuned))
    rows += [row("final entropy, nats", "final_entropy"), row("loss, nats a token", "loss")]
    return table(["", a.name, b.name, "difference"], rows)


def measure(first: str, second: str, prompts: tuple[str, ...]) -> Report:
    """Both lenses of two shipped models on a text set."""
    from models.handle import open_model
    from probes import logit_lens

    handles = [open_model(first), open_model(second)]
    try:
        config = logit_lens.LensConfig(models=(first, second), prompts=prompts, detail=False, tuned=True)
        return logit_lens.run(handles, config)
    finally:
        for handle in handles:
            handle.close()


def run(args: argparse.Namespace) -> int:
    """Print the card."""
    found, prompts = cards(), lines_of(args.prompts.read_bytes(), args.prompts.name)
    print(training_table(found))
    for title, first in (("At equal tokens", "engram-mini"), ("At equal held-out loss", "engram-mini-early")):
        report = measure(first, "dense-mini", prompts)
        counted = int(report.result.models[0].counted.sum())
        print(f"\n{title}, on {len(prompts)} texts ({counted} positions), mean [95 % interval]:\n")
        print(lens_table(report))
    return 0
