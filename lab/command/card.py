"""`engram-lab card`: the model card of the shipped models in Markdown, measured anew on the default text set."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram_lab.lab.ask.texts import HELD_OUT, TEXTS, lines_of
from engram_lab.lab.draw.tables import interval_of, markdown

if TYPE_CHECKING:
    from engram_lab.probes.base import Report

PARTS = ("lens", "memory", "alignment")
NAMES = ("engram-mini", "engram-mini-early", "dense-mini")
MODELS = TEXTS.parent / "models"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is measured, and the text of the lens; all of it, and the shipped sentences, by default."""
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument(
        "--prompts", type=Path, default=TEXTS / HELD_OUT, help="text set, one prompt a line (default: the shipped)"
    )


def cards() -> dict[str, dict[str, Any]]:
    """card.json of each shipped model that has one, by name."""
    files = {name: MODELS / name / "card.json" for name in NAMES}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


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
    return markdown(["", *found], rows)


def lens_table(report: Report) -> str:
    """Mean KL by layer under both lenses, settle depth, final entropy and loss of two models, with their difference."""
    a, b = report.result.models
    d = report.result.difference

    def row(title: str, field: str, tuned: bool = False, i: int | None = None) -> list[str]:
        sources = [(lens.tuned if tuned else lens, f"mean_{field}") for lens in (a, b)]
        sources.append((d, ("tuned_" if tuned else "") + ("mean_kl" if field == "kl" else field)))
        cells = []
        for source, name in sources:
            cells.append(interval_of(source, name, i, missing=""))
        return [title, *cells]

    rows = []
    for lens, tuned in (("logit lens", False), ("tuned lens", True)):
        rows += [row(f"{lens}, KL(final, {layer}), nats", "kl", tuned, i) for i, layer in enumerate(a.layer_names)]
        rows.append(row(f"{lens}, settle depth, layers", "settle_depth", tuned))
    rows += [row("final entropy, nats", "final_entropy"), row("loss, nats a token", "loss")]
    return markdown(["", a.name, b.name, "difference"], rows)


def measure(first: str, second: str, prompts: tuple[str, ...]) -> Report:
    """Both lenses of two shipped models on a text set."""
    from engram_lab.models.handle import open_model
    from engram_lab.probes import lens as lens_probe

    handles = [open_model(first), open_model(second)]
    try:
        config = lens_probe.LensConfig(models=(first, second), prompts=prompts, detail=False, tuned=True)
        return lens_probe.run(handles, config)
    finally:
        for handle in handles:
            handle.close()


def memory_table(report: Report) -> str:
    """What a token costs with the memory changed, by text set, with the change in nats."""
    result = report.result
    rows = []
    for c, condition in enumerate(result.conditions):
        cells = [f"{condition}"]
        for s in range(len(result.sets)):
            cells += [f"{result.loss[s, c]:.2f}", interval_of(result, "change", (s, c)) if c else ""]
        rows.append(cells)
    head = [column for name in result.sets for column in (f"{name}: loss", "change")]
    return markdown(["", *head], rows)


def alignment_table(report: Report) -> str:
    """Which block of the other model each layer looks like, and the lead of the first."""
    result, (a, b) = report.result, report.config.models
    names = ("alignment_a", "alignment_b", "lead")
    rows = [[layer, *(interval_of(result, name, n) for name in names)] for n, layer in enumerate(result.layers_a)]
    head = ["layer", f"of {a} looks like block of {b}", f"of {b} looks like block of {a}", f"lead of {a}, blocks"]
    return markdown(head, [*rows, ["mean of blocks", "", "", interval_of(result, "mean_lead")]])


def run(args: argparse.Namespace) -> int:
    """Print the card."""
    unknown = [part for part in args.parts if part not in PARTS]
    if unknown:
        from engram_lab.models.errors import LabError

        raise LabError(f'The card has no part "{unknown[0]}": it has {", ".join(PARTS)}.')
    found = cards()
    print(training_table(found))
    for part in args.parts or PARTS:
        {"lens": print_lens, "memory": print_memory, "alignment": print_alignment}[part](args)
    return 0


def print_memory(args: argparse.Namespace) -> None:
    """The loss on what ships, with the memory as it is, off, at one layer off, and shuffled."""
    from engram_lab.lab.ask.texts import shipped_sets
    from engram_lab.models.handle import open_model
    from engram_lab.probes import sensitivity

    names = ("engram-mini", "dense-mini")
    controls = ("off", "off@1", "off@6", "shuffled", "one_row")
    report = sensitivity.run(
        [open_model(name) for name in names], sensitivity.SensitivityConfig(names, shipped_sets(), controls)
    )
    counts = zip(report.result.sets, report.result.n_items, report.result.n_tokens, strict=True)
    sizes = ", ".join(f"{name} ({items} items, {tokens} tokens scored)" for name, items, tokens in counts)
    print(f"\nLoss of engram-mini in nats a token, and its change [95 % interval]: {sizes}.\n")
    print(memory_table(report))


def print_alignment(args: argparse.Namespace) -> None:
    """CKA at the ends of the entities in our sentences."""
    from engram_lab.lab.fronts import cka as front
    from engram_lab.models.handle import open_model
    from engram_lab.probes import cka
    from engram_lab.probes.points import ENTITY, take

    names = ("engram-mini", "dense-mini")
    texts, entities = take(front.shipped(), ENTITY, None)
    report = cka.run([open_model(name) for name in names], cka.CKAConfig(names, texts, entities))
    result = report.result
    print(
        f"\nCKA (unbiased), {result.n_points} ends of entities in {result.n_sentences} sentences, soft alignment "
        "[95 % interval]:\n"
    )
    print(alignment_table(report))


def print_lens(args: argparse.Namespace) -> None:
    """Both lenses, at equal tokens and at equal held-out loss."""
    prompts = lines_of(args.prompts.read_bytes(), args.prompts.name)
    for title, first in (("At equal tokens", "engram-mini"), ("At equal held-out loss", "engram-mini-early")):
        report = measure(first, "dense-mini", prompts)
        counted = int(report.result.models[0].counted.sum())
        print(f"\n{title}, on {len(prompts)} texts ({counted} positions), mean [95 % interval]:\n")
        print(lens_table(report))
