"""One module for each probe: how it is asked for on the command line, and its report as rows and as a figure.

A front has ASK (lab.ask.request.Ask: flags, request, flags again, files, and the view that opens its page),
rows(report), figure(report, mode, handles), DEFINITIONS and ENTRY for the reference, and COMPARED, the measures whose
difference between two runs is shown first. With several figures that need no choice of the reader's it has
figures(report, mode, handles); where a request may leave something to the model (the last position, the deepest layer),
settled(report), the request as its page makes it.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from engram_lab import probes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import plotly.graph_objects as go

    from engram_lab.lab.draw.theme import Mode
    from engram_lab.models.handle import Handle
    from engram_lab.probes.base import Report

_PROBES = Path(probes.__path__[0])
FIRST = ("lens", "cka", "gates", "rows", "sensitivity")  # in lists; the others follow by name


def _line_of(file: Path) -> str:
    """The first line of a module's docstring, as a help text: without its capital and its full stop."""
    with file.open(encoding="utf-8") as text:
        line = text.readline().strip().strip('"').removesuffix(".")
    return line if line[1:2].isupper() else line[0].lower() + line[1:]


def _discovered() -> dict[str, str]:
    """Every front that has a probe of its name, "kv swap" in probes/kv/swap.py: name -> the front's first line."""
    found: dict[str, str] = {}
    for file in Path(__file__).parent.glob("*.py"):
        words = file.stem.split("_")
        if _PROBES.joinpath(*words).with_suffix(".py").is_file():
            found[" ".join(words)] = _line_of(file)
    order = (*FIRST, *sorted(found))
    return {name: found[name] for name in dict.fromkeys(order) if name in found}


FRONTS = _discovered()  # all probes, in the order of --help, each with its line there


def group_line(group: str) -> str:
    """What the probes whose names begin with one word have in common: the first line of their folder."""
    return _line_of(_PROBES / group / "__init__.py")


def front(probe: str) -> ModuleType:
    """The front of a probe."""
    return importlib.import_module(f"engram_lab.lab.fronts.{probe.replace(' ', '_')}")


def settled(report: Report) -> Any:
    """The request of a report in the words of its page: `front.view` takes it, and its result is the report's own."""
    settle = getattr(front(report.probe), "settled", None)
    return report.config if settle is None else settle(report)


def figures(report: Report, mode: Mode, handles: Sequence[Handle]) -> list[go.Figure]:
    """All figures of a report, its front's `figures` or its one; `handles` name tokens and layers, and may be none."""
    from engram_lab.lab.draw.figure import fitted

    of = front(report.probe)
    drawn = of.figures(report, mode, handles) if hasattr(of, "figures") else [of.figure(report, mode, handles)]
    return [fitted(figure) for figure in drawn if figure is not None]
