"""Loss on text sets with the memory intact, changed and off."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram_lab.lab.ask import brief
from engram_lab.lab.ask.parts import RESAMPLING, Models
from engram_lab.lab.ask.request import Ask, File, Part, Repeated, flag, refuse, word_of
from engram_lab.lab.ask.texts import file_of, items_of, shipped_sets
from engram_lab.lab.draw import labels
from engram_lab.lab.draw.figure import SYMBOLS, bars, level, list_axis, titled
from engram_lab.lab.draw.tables import bounds, interval_of
from engram_lab.lab.draw.theme import PALETTES
from engram_lab.lab.fronts.entry import ENGRAM, Entry
from engram_lab.models.errors import DataError

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from engram_lab.lab.draw.theme import Mode
    from engram_lab.models.handle import Handle
    from engram_lab.probes.base import Report
    from engram_lab.probes.sensitivity import SensitivityConfig

# What a control does, in a word of the page -> its name in the request
WORDS = {"memory off": "off", "rows zeroed": "zeroed", "rows shuffled": "shuffled", "table of one row": "one_row"}
FILES = 8  # sets that the page takes, as uploads.upload_many


def _files(config: SensitivityConfig) -> list[tuple[str, str]]:
    """(name, content) of a file for each set, no two of one name, that reads back as it."""
    from engram_lab.probes.answers import behind

    found: dict[str, str] = {}
    for given in config.sets:
        stem = "".join(char if char.isalnum() or char in "-_" else "_" for char in given.name) or "set"
        name, content = file_of([item.text for item in given.items], stem)
        if name.endswith(".jsonl") or any(item.answer for item in given.items):
            name, lines = f"{stem}.jsonl", []
            for item in given.items:
                exact = {} if behind(item.text, item.answer) == item.answer else {"space": False}
                lines.append({"prompt": item.text, "answer": item.answer} | exact)
            content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        path = Path(name)
        names = (name, *(f"{path.stem}-{n}{path.suffix}" for n in range(2, len(config.sets) + 2)))
        found[next(free for free in names if free not in found)] = content
    return list(found.items())


def _named(given: str) -> tuple[str, str]:
    """(name, file) of NAME=FILE, where either may hold a =: the file is one that is there."""
    parts = given.split("=")
    splits = [("=".join(parts[:n]), "=".join(parts[n:])) for n in range(len(parts) - 1, 0, -1)]
    there = [(name, file) for name, file in splits if name and file and Path(file).is_file()]
    name, file = next(iter(there), splits[-1] if splits else ("", ""))
    if not (name and file):
        raise DataError(f'--set is "{given}"; give it as NAME=FILE.')
    return name, file


class Sets(Part):
    """The text sets, of which the page shows one first."""

    uploads = ("sets",)

    def add(self, parser: argparse.ArgumentParser) -> None:
        """--set."""
        parser.add_argument(
            "--set",
            action="append",
            metavar="NAME=FILE",
            help='a text set: whole texts, one a line, or .jsonl with "prompt", "answer" and maybe "context"; may be '
            "repeated (default: facts, reading and sentences, which ship)",
        )

    def read(self, args: argparse.Namespace) -> dict[str, Any]:
        """The sets of the files, or those that ship."""
        from engram_lab.probes.sensitivity import TextSet

        sets = []
        for given in args.set or ():
            name, file = _named(given)
            sets.append(TextSet(name, items_of(Path(file).read_bytes(), file)))
        return {"sets": tuple(sets) or shipped_sets()}

    def flags(self, config: SensitivityConfig) -> list[str]:
        """--set for each, unless they are those that ship."""
        if not self.files(config):
            return []
        return [
            flag("set", f"{given.name}={file}") for given, (file, _) in zip(config.sets, _files(config), strict=True)
        ]

    def files(self, config: SensitivityConfig) -> dict[str, str]:
        """The sets as files, unless they are those that ship."""
        if config.sets == shipped_sets():
            return {}
        return dict(_files(config))

    def view(self, config: SensitivityConfig) -> dict[str, Any]:
        """Which is first."""
        return {"first_set": config.sets[0].name}

    def brought(self, config: SensitivityConfig) -> dict[str, File]:
        """The sets as files, unless they are those that ship."""
        first, brought = config.sets[0].name, {}
        if config.sets == tuple(sorted(shipped_sets(), key=lambda known: known.name != first)):
            return {}
        for n, (given, (file, text)) in enumerate(zip(config.sets, _files(config), strict=True)):
            raw = text.encode()
            if items_of(raw, file) != given.items or n >= FILES:
                refuse(f"more than {FILES} sets" if n >= FILES else f"the set {given.name}, which no file holds")
            brought[f"sets.{n}"] = (f"{given.name}{Path(file).suffix}", raw)
        return brought


class Controls(Repeated):
    """Some changes, on the page each at all layers, at one, or at all and at each one, which only the model knows."""

    def view(self, config: SensitivityConfig) -> dict[str, Any]:
        """The changes in the page's words, and where."""
        names, ends = (list(dict.fromkeys(c.partition("@")[n] for c in config.controls)) for n in (0, 2))
        each = [name + (end and f"@{end}") for name in names for end in ends]
        words = [word_of("the control", name, WORDS) for name in names]
        if list(config.controls) != each or (len(ends) > 1 and ends[0]):
            refuse(f"the controls {', '.join(config.controls)} together")
        return {"controls": words, "at": "each" if len(ends) > 1 else ends[0] or "all"}


CONTROLS = Controls(
    "controls", "off, zeroed, shuffled or one_row, at all memory layers or at one; may be repeated (default: off)",
    flag="control", metavar="NAME[@LAYER]", ours=lambda: ("off",), key="controls", label="Change",
)  # fmt: skip
ASK = Ask("sensitivity", "sensitivity", (
    Models(against="optional"),
    Sets("sets"),
    CONTROLS,
    *RESAMPLING,
))  # fmt: skip


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


def figure(report: Report, mode: Mode = "light", handles: Sequence[Handle] = ()) -> go.Figure:
    """How much more a token costs under each condition than with the model as it is, by text set, with intervals."""
    result, palette = report.result, PALETTES[mode]
    conditions = list(result.conditions)[1:]
    figure = titled(
        mode,
        "What the loss rises by without the memory, and where it does not",
        f"{labels.plotly(report.config.models[0])}; bars: 95 % intervals over items; right of 0 the change hurts",
        195 + 34 * len(conditions) * len(result.sets),
        margin={"l": 40, "t": 125},  # the legend takes two lines where the window is narrow
    )
    for s, name in enumerate(result.sets):
        offset = (s - (len(result.sets) - 1) / 2) * 0.22
        mean, low, high = bounds(result, "change", (s, slice(1, None)))
        figure.add_scatter(
            x=mean,
            y=[n + offset for n in range(len(conditions))],
            error_x=bars(mean, low, high),
            mode="markers",
            marker={
                "size": 10,
                "symbol": SYMBOLS[s % len(SYMBOLS)],
                "color": palette.series[s % len(palette.series)],
            },
            name=f"{labels.plotly(name)} ({int(result.n_items[s])} items)",
            hovertext=[
                f"<b>{labels.plotly(name)}</b>, {labels.plotly(condition)}<br>"
                f"change {interval_of(result, 'change', (s, c + 1), 4)} nats a token<br>"
                f"loss {result.loss[s, c + 1]:.4f}, as it is {result.loss[s, 0]:.4f}"
                for c, condition in enumerate(conditions)
            ],
            hoverinfo="text",
        )
    level(figure, mode, x=0)
    figure.update_xaxes(title_text="change of the loss, nats a token")
    list_axis(figure, [labels.plotly(condition) for condition in conditions])
    return figure


def table(report: Report) -> list[dict[str, str]]:
    """One row for each set and condition: loss, change, contrast to the first set, and how often it is right."""
    result, rows = report.result, []
    for s, name in enumerate(result.sets):
        for c, condition in enumerate(result.conditions):
            at = (s, c)
            rows.append(
                {
                    "set": name,
                    "condition": condition,
                    "loss, nats a token": interval_of(result, "loss", at, 3),
                    "change": interval_of(result, "change", at, 3) if c else "",
                    f"{result.sets[0]} minus this": interval_of(result, "contrast", at, 3) if c and s else "",
                    "first token right": "" if result.top[s, c] != result.top[s, c] else f"{result.top[s, c]:.1%}",
                }
            )
    return rows


def sentence(report: Report) -> str:
    """What the first control says, in one sentence for each set after the first."""
    result = report.result
    first, condition = result.sets[0], result.conditions[1]
    said = [f"With the memory {condition}, a token of {first} costs {result.change[0, 1]:+.2f} nats"]
    for s in range(1, len(result.sets)):
        low, high = result.contrast_low[s, 1], result.contrast_high[s, 1]
        verdict = "more than" if low > 0 else "less than" if high < 0 else "about as much as"
        said.append(f"{verdict} one of {result.sets[s]} ({result.change[s, 1]:+.2f})")
    return ", ".join(said) + "."


def example(engram: str, dense: str) -> SensitivityConfig:
    """A short request that shows most of what the probe computes."""
    from engram_lab.probes.sensitivity import Item, SensitivityConfig, TextSet

    return SensitivityConfig((engram, dense), (TextSet("prompt", (Item(brief.PROMPT),)),))


# The measures whose difference between two runs is shown first: paths of the result without indices
COMPARED = ("change", "loss", "contrast", "top")
DEFINITIONS = {
    "loss": "Cross-entropy in nats a token, over the tokens of the answers (of the whole text where there is none).",
    "change": "Loss with the change minus loss as it is, on the same tokens; above 0 the memory is needed.",
    "contrast": "Change on the first set minus change on this one; above 0 the first set needs the memory more.",
    "top": "Share of items whose answer's first token is the model's most likely one.",
    "interval": "95 % percentile bootstrap over items, drawn whole, each set by itself; for changes in pairs.",
}
ENTRY = Entry(
    page="sensitivity",
    asks="Which texts need the memory: facts, or what can be read off the page?",
    formula=(
        r"\mathrm{change} = \ell_\text{changed} - \ell_\text{as it is},"
        r"\qquad \ell = -\tfrac1T\sum_t \ln p(x_t\mid x_{<t})"
    ),
    symbols=(
        (r"\ell", "loss over the tokens that are scored", "nats a token"),
        ("T", "their number: those of the answers, or all where a text has no answer", ""),
        ("x_t", "a token of the text", ""),
        (r"\mathrm{change}", "what the change of the memory costs; above 0 the memory is needed", "nats a token"),
    ),
    meaning=r"""
$\ell$ runs over the tokens of the answers (over all tokens where a text has none), in nats a token. **Off** forces the
gate to 0; **zeroed** rows give a value of 0 whatever the gate says, so the two have the same loss by construction.
**Shuffled**: each head reads another row of its own table. **One row**: every n-gram reads the first row of its head.
The **contrast** is the change on the first set minus that on another. 95 % intervals are percentiles of a bootstrap
over items, each set by itself; for changes in pairs. With few items of one answer token each the intervals are wide.
""",
    sources=(ENGRAM,),
    controls="Rows zeroed, which must cost what memory off does; rows shuffled and tables of one row; each memory "
    "layer by itself; the dense twin on the same tokens.",
    not_shown="how good a model without memory would be: this one was trained with it, and is deprived of it. A "
    "set stands for its kind of text only as far as its items do, and nothing here says where in the tables a "
    "fact is.",
    example="--model engram-mini --against dense-mini --control off --control shuffled --json -",
)
