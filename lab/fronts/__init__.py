"""One module for each probe: how it is asked for on the command line, and its report as rows and as a figure.

A front has ASK (lab.ask.request.Ask: flags, request, flags again, files, and the view that opens its page),
rows(report), figure(report, mode, handles), DEFINITIONS and ENTRY for the reference, and COMPARED, the measures whose
difference between two runs is shown first. With several figures that need no choice of the reader's it has
figures(report, mode, handles); where a request may leave something to the model (the last position, the deepest layer),
settled(report), the request as its page makes it.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import plotly.graph_objects as go

    from engram_lab.lab.draw.theme import Mode
    from engram_lab.models.handle import Handle
    from engram_lab.probes.base import Report

FRONTS = {  # all probes, in the order of --help, each with its line there; a probe's files are named after it
    "lens": "logit lens and tuned lens: what each layer would predict",
    "cka": "CKA: which layer of one model looks like which layer of another",
    "gates": "gates of a memory: what opens, what is written, what it says and whether it matters",
    "rows": "rows: what one position reads from the memory, who shares it, and how evenly a text uses it",
    "sensitivity": "loss on text sets with the memory intact, changed and off",
    "kv swap": "swap K and V of a changed field, of what is behind it, and of other positions into a stale cache",
    "kv map": "what each position and layer of a cache recovers, swapped alone",
    "kv knockout": "the answer with a part of the cache zeroed, averaged, made noise or taken from another text",
    "kv erratum": "a correction behind a stale cache in place of a new prefill, with controls, and a chain of them",
    "kv reasoning": "the field alone swapped, and the model writes some tokens before it answers",
    "kv compose": "a block prefilled alone, moved behind a prefix by rotating its keys, against a full prefill",
    "kv set": "a whole library of scenarios: kind of question by recovery, with intervals",
    "facts check": "write facts, then: did the model learn them, what else changed, does undoing give every bit back",
    "facts layers": "the same facts written at each memory layer by itself",
    "facts density": "recall over the number of facts, aliases apart from interference; two users on top of each other",
    "facts alternatives": "the same facts in rows, in LoRA, in the prompt and retrieved: recall, and what happens to "
    "unrelated text",
}
GROUPS = {  # the first words of the names that have two
    "kv": "what a KV cache remembers of a prompt: swap, map, knock out, correct, move",
    "facts": "what writing a user's facts into rows does: check, layers, density, alternatives",
}


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
