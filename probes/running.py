"""Running a probe by its name: what its result depends on, and its report with the time it took."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engram_lab.probes import module_of as module_of

if TYPE_CHECKING:
    from engram_lab.models.handle import Handle
    from engram_lab.probes.base import Progress, Record, Report


def depends(probe: str, handles: Sequence[Handle], config: Record) -> list[str]:
    """What the result depends on beside the request and the models' weights: files read from disk, by model.

    Empty for a probe that reads none, which is one without a function `depends(handles, config)`.
    """
    more = getattr(module_of(probe), "depends", None)
    return list(more(handles, config)) if more else []


def compute(
    probe: str, handles: Sequence[Handle], config: Any, progress: Progress | None = None
) -> tuple[Report, float]:
    """The report of a request, and the seconds that its computation took.

    `handles` are the open models of `config.models`, in that order. Raises whatever the probe raises: a LabError for
    a request that cannot be served, Cancelled where `progress` raises it.
    """
    run, began = module_of(probe).run, time.perf_counter()
    report: Report = run(list(handles), config, progress)
    return report, time.perf_counter() - began
