"""One module for each probe: how it is asked for on the command line, and its report as rows and as a figure.

A front has HELP (and GROUP_HELP, where its name has two words), add_arguments(parser), config(args), options(config),
files(config), view(config), rows(report) and figure(report, mode, handles). `view` gives the widgets and files with
which its page makes the request again, or LabError where no setting does; a front whose request may leave something to
the model (the last position, the deepest layer) has settled(report), the request as its page makes it. Heavy imports
wait inside the functions, as `engram-lab --help` imports all of them.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engram_lab.probes.base import Report

FRONTS = (
    "lens",
    "cka",
    "gates",
    "rows",
    "sensitivity",
    "kv swap",
    "kv map",
    "kv knockout",
    "kv erratum",
    "kv reasoning",
    "kv compose",
    "kv set",
    "facts check",
    "facts layers",
    "facts density",
    "facts alternatives",
)  # the probes of probes.PROBES, in the order of --help


def front(probe: str) -> ModuleType:
    """The front of a probe."""
    return importlib.import_module(f"engram_lab.lab.fronts.{probe.replace(' ', '_')}")


def settled(report: Report) -> Any:
    """The request of a report in the words of its page: `front.view` takes it, and its result is the report's own."""
    settle = getattr(front(report.probe), "settled", None)
    return report.config if settle is None else settle(report)
