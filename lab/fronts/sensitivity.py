"""What a memory is needed for, on the command line and in exports."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram_lab.lab.ask import flags as arguments
from engram_lab.lab.ask import widgets

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from engram_lab.lab.ask.view import View
    from engram_lab.lab.draw.theme import Mode
    from engram_lab.models.handle import Handle
    from engram_lab.probes.base import Report
    from engram_lab.probes.sensitivity import SensitivityConfig

# What a control does, in a word of the page -> its name in the request
WORDS = {"memory off": "off", "rows zeroed": "zeroed", "rows shuffled": "shuffled", "table of one row": "one_row"}
FILES = 8  # sets that the page takes, as uploads.upload_many


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the study takes."""
    arguments.add_models(parser, against="optional")
    parser.add_argument(
        "--set",
        action="append",
        metavar="NAME=FILE",
        help='a text set: whole texts, one a line, or .jsonl with "prompt", "answer" and maybe "context"; may be '
        "repeated (default: facts, reading and sentences, which ship)",
    )
    parser.add_argument(
        "--control",
        action="append",
        metavar="NAME[@LAYER]",
        help="off, zeroed, shuffled or one_row, at all memory layers or at one; may be repeated (default: off)",
    )
    arguments.add_resampling(parser)


def config(args: argparse.Namespace) -> SensitivityConfig:
    """The request."""
    from engram_lab.lab.ask.texts import items_of, shipped_sets
    from engram_lab.models.errors import DataError
    from engram_lab.probes.sensitivity import SensitivityConfig, TextSet

    sets = []
    for given in args.set or ():
        name, equals, file = given.partition("=")
        if not (name and equals and file):
            raise DataError(f'--set is "{given}"; give it as NAME=FILE.')
        sets.append(TextSet(name, items_of(Path(file).read_bytes(), file)))
    return SensitivityConfig(
        arguments.names(args),
        tuple(sets) or shipped_sets(),
        tuple(args.control or ("off",)),
        args.seed,
        args.bootstrap,
    )


def files(config: SensitivityConfig) -> dict[str, str]:
    """The sets as files, unless they are those that ship."""
    from engram_lab.lab.ask.texts import shipped_sets

    if config.sets == shipped_sets():
        return {}
    return dict(zip(map(_file, config.sets), _texts(config), strict=True))


def _texts(config: SensitivityConfig) -> list[str]:
    """Each set as the text of a file."""
    found = []
    for own in config.sets:
        lines = [item.text for item in own.items]
        if any(item.answer for item in own.items):
            lines = [json.dumps({"prompt": i.text, "answer": i.answer}, ensure_ascii=False) for i in own.items]
        found.append("".join(f"{line}\n" for line in lines))
    return found


def _file(own: Any) -> str:
    stem = "".join(char if char.isalnum() or char in "-_" else "_" for char in own.name)
    return stem + (".jsonl" if any(item.answer for item in own.items) else ".txt")


def options(config: SensitivityConfig) -> list[str]:
    """The flags of a request."""
    flags = arguments.model_flags(config.models)
    if files(config):
        flags += [arguments.flag("set", f"{own.name}={_file(own)}") for own in config.sets]
    flags += [arguments.flag("control", control) for control in config.controls]
    return [*flags, arguments.flag("seed", config.seed), arguments.flag("bootstrap", config.bootstrap)]


def view(config: SensitivityConfig) -> View:
    """The page of a request: its controls are some changes, each at all layers, at one, or at all and at each one.

    Which layers are "each" only the model can tell.
    """
    from engram_lab.lab.ask.texts import items_of, shipped_sets

    shown = widgets.models(config.models) | widgets.resampling(config)
    first, brought = config.sets[0].name, {}
    if config.sets != tuple(sorted(shipped_sets(), key=lambda own: own.name != first)):
        for n, (own, text) in enumerate(zip(config.sets, _texts(config), strict=True)):
            raw = text.encode()
            if items_of(raw, _file(own)) != own.items or n >= FILES:
                widgets.refuse(f"more than {FILES} sets" if n >= FILES else f"the set {own.name}, which no file holds")
            suffix = _file(own).rpartition(".")[2]
            brought[f"sets.{n}"] = (f"{own.name}.{suffix}", raw)
    names, ends = (list(dict.fromkeys(c.partition("@")[n] for c in config.controls)) for n in (0, 2))
    each = [name + (end and f"@{end}") for name in names for end in ends]
    words = [widgets.one_of("the control", name, WORDS) for name in names]
    if list(config.controls) != each or (len(ends) > 1 and ends[0]):
        widgets.refuse(f"the controls {', '.join(config.controls)} together")
    at = "each" if len(ends) > 1 else ends[0] or "all"
    return widgets.view("sensitivity", shown | {"controls": words, "at": at, "first_set": first}, brought)


def figure(report: Report, mode: Mode, handles: Sequence[Handle]) -> go.Figure:
    """The change of the loss by set and condition."""
    from engram_lab.lab.fronts.sensitivity_figures import changes

    return changes(report, mode)


def rows(report: Report) -> Iterator[dict[str, Any]]:
    """One row for each item and condition."""
    result = report.result
    items = [(own.name, item) for own in report.config.sets for item in own.items]
    for n, (name, item) in enumerate(items):
        for c, condition in enumerate(result.conditions):
            yield {
                "set": name,
                "text": item.text,
                "answer": item.answer,
                "condition": condition,
                "tokens": int(result.item_tokens[c, n]),
                "loss_nats": float(result.item_loss[c, n]),
                "first_token_is_top": bool(result.item_top[c, n]),
            }
