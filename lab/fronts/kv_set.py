"""A whole library of scenarios: kind of question by recovery, with intervals."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram_lab.lab.ask import brief, scenarios
from engram_lab.lab.ask.parts import RESAMPLING, Experiment, Models, file_of_scenarios
from engram_lab.lab.ask.request import Ask, File, Part, flag
from engram_lab.lab.draw import labels
from engram_lab.lab.draw.figure import bars, level, list_axis, titled
from engram_lab.lab.draw.tables import bounds, interval_of
from engram_lab.lab.draw.theme import PALETTES
from engram_lab.lab.fronts import kv_knockout
from engram_lab.lab.fronts.entry import CLEAN, EFFECTS, LOGITS, NOTES, RATIO, RECOVERY, Entry

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from engram_lab.lab.draw.theme import Mode
    from engram_lab.models.handle import Handle
    from engram_lab.probes.base import Report
    from engram_lab.probes.kv.scenario import Scenario
    from engram_lab.probes.kv.set import SetConfig


def _ships(given: Sequence[Scenario]) -> list[str] | None:
    """The flags that make the scenarios of what ships; None if they are others."""
    library = scenarios.library()
    if given == library:
        return []
    return ["--chat"] if given == tuple(dataclasses.replace(known, chat=True) for known in library) else None


class Library(Part):
    """All scenarios of a file, or those that ship, and how values of different length are aligned."""

    uploads = ("kv_file",)

    def add(self, parser: argparse.ArgumentParser) -> None:
        """--scenarios, --chat and --align."""
        parser.add_argument(
            "--scenarios", type=Path, metavar="FILE", help="a .jsonl with your own scenarios (default: those that ship)"
        )
        parser.add_argument("--chat", action="store_true", help="all as a user's message in the model's chat template")
        scenarios.add_align(parser)

    def read(self, args: argparse.Namespace) -> dict[str, Any]:
        """The scenarios."""
        file = args.scenarios
        given = scenarios.library() if file is None else scenarios.read(file.read_bytes(), str(file))
        if args.chat:
            given = tuple(dataclasses.replace(scenario, chat=True) for scenario in given)
        return {"scenarios": given, "align": args.align}

    def flags(self, config: SetConfig) -> list[str]:
        """Those that make them again."""
        ours = _ships(config.scenarios)
        return [*([flag("scenarios", scenarios.FILE)] if ours is None else ours), flag("align", config.align)]

    def files(self, config: SetConfig) -> dict[str, str]:
        """The scenarios, unless they are those that ship."""
        return {} if _ships(config.scenarios) is not None else {scenarios.FILE: scenarios.written(config.scenarios)}

    def view(self, config: SetConfig) -> dict[str, Any]:
        """Two switches."""
        return {"chat_all": _ships(config.scenarios) == ["--chat"], "split_all": config.align == "split"}

    def brought(self, config: SetConfig) -> dict[str, File]:
        """The scenarios, unless they are those that ship."""
        return {} if _ships(config.scenarios) is not None else file_of_scenarios(config.scenarios)


ASK = Ask("kv set", "kv", (Models(), Experiment("Whole library"), Library("scenarios"), *RESAMPLING))


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


def figure(report: Report, mode: Mode = "light", handles: Sequence[Handle] = ()) -> go.Figure:
    """Recovery by the field alone and by everything behind it, for each kind of question, with intervals."""
    result, palette = report.result, PALETTES[mode]
    names = list(result.kind_names)
    n_out = int((~result.right).sum())
    figure = titled(
        mode,
        "For which questions the answer is read from the field",
        labels.plotly(
            f"{result.name}; bars: 95 % intervals over scenarios; {n_out} of {len(result.ids)} left out, as refused or "
            "not answered right"
        ),
        190 + 62 * len(names),
        margin={"l": 40},
    )
    for e, (edit, name, symbol) in enumerate(
        (("field", "field alone", "circle"), ("downstream", "all behind it", "square"), ("notes", "notes", "diamond"))
    ):
        column = result.edits.index(edit)
        mean, low, high = bounds(result, "mean", (slice(None), column))
        figure.add_scatter(
            x=mean,
            y=[n + (e - 1) * 0.2 for n in range(len(names))],
            error_x=bars(mean, low, high),
            mode="markers",
            marker={"size": 10, "symbol": symbol, "color": palette.series[(1, 0, 2)[e]]},
            name=name,
            hovertext=[
                f"<b>{labels.plotly(kind)}</b>, {name}<br>recovery {interval_of(result, 'mean', (n, column))}<br>"
                f"the answer flips in {result.flips[n, column]:.0%} of {int(result.n_right[n])}"
                for n, kind in enumerate(names)
            ],
            hoverinfo="text",
        )
    for share in (0, 1):
        level(figure, mode, x=share)
    figure.update_xaxes(title_text="recovery, share of the change", tickformat=".0%")
    list_axis(figure, [f"{labels.plotly(kind)} ({int(result.n_right[n])})" for n, kind in enumerate(names)])
    return figure


def kind_table(report: Report) -> list[dict[str, str]]:
    """One row for each kind of question: how many count, recovery with intervals, how often the notes matter."""
    result, rows = report.result, []
    at = {edit: n for n, edit in enumerate(result.edits)}
    for k, kind in enumerate(result.kind_names):

        def recovery(edit: str, k: int = k) -> str:
            return interval_of(result, "mean", (k, at[edit]))

        def share(edit: str, k: int = k) -> str:
            value = result.flips[k, at[edit]]
            return "–" if value != value else f"{value:.0%}"

        rows.append(
            {
                "kind": kind,
                "scenarios": str(int(result.n_scenarios[k])),
                "aligned": str(int(result.n_served[k])),
                "answered right": str(int(result.n_right[k])),
                "field alone": recovery("field"),
                "flips": share("field"),
                "all behind it": recovery("downstream"),
                "flips ": share("downstream"),
                "field minus behind": interval_of(result, "contrast", k),
                "lost without notes": share("notes zero"),
                "lost without all behind": share("downstream zero"),
                "reads": result.said[k],
            }
        )
    return rows


def scenario_table(report: Report) -> list[dict[str, str]]:
    """One row for each scenario, with the reason where it is left out."""
    result = report.result
    at = {edit: n for n, edit in enumerate(result.edits)}

    def recovery(n: int, edit: str) -> str:
        value = result.recovery[n, at[edit]]
        return "–" if value != value else f"{value:.2f}"

    return [
        {
            "scenario": name,
            "kind": result.kinds[n],
            "counts": "yes" if result.right[n] else "no",
            "field alone": recovery(n, "field"),
            "all behind it": recovery(n, "downstream"),
            "notes": recovery(n, "notes"),
            "why not": result.reasons[n],
        }
        for n, name in enumerate(result.ids)
    ]


def example(engram: str, dense: str) -> SetConfig:
    """A short request that shows most of what the probe computes."""
    from engram_lab.probes.kv.set import SetConfig

    return SetConfig((engram,), (brief.scenario(),), "split", bootstrap=brief.BOOTSTRAP)


# The measures whose difference between two runs is shown first: paths of the result without indices
COMPARED = ("mean", "recovery", "contrast")
DEFINITIONS = EFFECTS | {
    "recovery": EFFECTS["recovery"] + " Of swaps.",
    "flip": "Of a swap, whether the new answer takes the lead; of a knock-out, whether the right answer is lost.",
    "lost": "Not kept: " + kv_knockout.DEFINITIONS["kept"],
    "notes": kv_knockout.DEFINITIONS["notes"],
    "contrast": "Recovery of the field alone minus that of everything behind it; below 0 the claim holds.",
    "interval": "95 % percentile bootstrap over scenarios, drawn whole; for contrasts in pairs. None for a single one.",
}
ENTRY = Entry(
    page="kv",
    asks="For which kind of question is the answer read from the field, and for which behind it?",
    formula=(
        r"\mathrm{contrast} = \frac1{|S|}\sum_{i\in S}"
        r"\big(\mathrm{recovery}^{\text{field}}_i - \mathrm{recovery}^{\text{behind}}_i\big),\qquad" + RECOVERY
    ),
    symbols=(
        (r"\mathrm{contrast}", "above 0: read from the field; below: behind it", "share"),
        ("S", "the scenarios of a kind that the model gets right in both clean prompts", ""),
        RATIO,
        LOGITS,
        CLEAN,
    ),
    sources=(NOTES,),
    controls="Scenarios that the model gets wrong, or whose values cannot be aligned, are left out with a reason; "
    "notes knocked out beside notes swapped; intervals over scenarios.",
    not_shown="a rate over questions at large: our scenarios were worded until one small model got most of them "
    "right. A kind with few usable scenarios decides nothing.",
    example="--model smollm2-135m --align split --json -",
)
