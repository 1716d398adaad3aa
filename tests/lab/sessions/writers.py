"""What other processes do to a store in the tests; a probe of the tests' own is all they run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from engram_lab.lab.sessions import StoreError, open_store
from tests.lab.sessions import made_probe

VIEW = {"page": "lens", "widgets": {"a": 1}, "files": {}}


def know() -> None:
    """Let the lab of this process know the tests' probe."""
    sys.modules[made_probe.AT] = made_probe


def keep(url: str, folder: Path, sessions: Sequence[str], seeds: range, told: Any, go: Any = None) -> None:
    """Save a run for each seed to each session in turn, its own attachment beside it, and tell each that is kept."""
    know()
    if go is not None:
        go.wait()
    store = open_store(url, folder)
    for seed, session in zip(seeds, cycle(sessions), strict=False):
        report = made_probe.report(seed)
        store.save(report, session, note=f"up to {seed}", tags=["t"], view=VIEW, attachments={"x": b"%d" % seed})
        told.send(seed)
    store.dispose()


def in_trouble(trouble: str, url: str, said: Any) -> None:
    """What the store says to a process that cannot write, at most ten sentences; what it did not say is an error."""
    import resource  # there is none on Windows

    know()
    if trouble == "full disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    elif os.getuid() == 0:
        os.setuid(65534)
    sentences = []
    calls = [
        lambda store: store.save(made_probe.report(1), "large", attachments={"x": os.urandom(200_000)}),
        lambda store: [store.save(made_probe.report(n), "small", note="n" * 50_000) for n in range(100)],
    ]
    for call in calls:
        try:
            call(open_store(url))
        except StoreError as error:
            sentences.append(str(error))
        except Exception as error:
            sentences.append(repr(error))
    said.put(sentences)
