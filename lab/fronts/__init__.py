"""One module for each probe: how it is asked for on the command line, and its report as rows and as a figure.

A front has HELP (and GROUP_HELP, where its name has two words), add_arguments(parser), config(args), options(config),
files(config), rows(report) and figure(report, mode, handles). Heavy imports wait inside the functions, as
`engram-lab --help` imports all of them.
"""

from __future__ import annotations

import importlib
from types import ModuleType

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
    return importlib.import_module(f"lab.fronts.{probe.replace(' ', '_')}")
