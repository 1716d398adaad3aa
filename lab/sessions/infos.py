"""What a store says of its sessions and runs, and what is computed of a run when it is kept."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from engram_lab.probes.base import ModelProtocol, Record, Report


@dataclass(frozen=True)
class RunInfo:
    """A kept run, without its report.

    Times are aware, in UTC; `seconds` is how long it took; `blob` and `attachments` (name -> hash) are SHA-256;
    `request` is that of `run_request`.
    """

    id: str
    session_id: str
    probe: str
    models: tuple[ModelProtocol, ...]
    seed: int
    versions: dict[str, str]
    environment: dict[str, str]
    created: datetime
    seconds: float | None
    blob: str
    attachments: dict[str, str]
    request: str
    read_view: Callable[[], dict[str, Any] | None] = field(repr=False, compare=False)

    @cached_property
    def view(self) -> dict[str, Any] | None:
        """How its page stood, or None; read when it is asked for, as it may hold files. StoreError if it is damaged."""
        return self.read_view()


@dataclass(frozen=True)
class SessionInfo:
    """A session and its runs in order; the note is Markdown; `deleted` is when it went to the bin, or None."""

    id: str
    name: str
    note: str
    tags: tuple[str, ...]
    created: datetime
    updated: datetime
    deleted: datetime | None
    runs: tuple[RunInfo, ...]


@dataclass(frozen=True)
class NewRun:
    """A run to be kept; without `created` it is now, without `environment` that of this process."""

    report: Report
    created: datetime | None = None
    seconds: float | None = None
    view: Mapping[str, Any] | None = None
    attachments: Mapping[str, bytes] = field(default_factory=dict)
    environment: Mapping[str, str] | None = None


def run_request(probe: str, config: Record, models: Iterable[ModelProtocol]) -> str:
    """SHA-256 of what decides a run's numbers: probe, request, the models' weights and dtypes."""
    asked = [probe, config.to_dict(), [[model.fingerprint, model.dtype] for model in models]]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def environment() -> dict[str, str]:
    """What may change the bits of a result beside the versions: the machine, and how torch uses it."""
    import torch

    gpu = torch.cuda.is_available()
    return {
        "machine": platform.machine(),
        "system": platform.platform(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "device": torch.cuda.get_device_name() if gpu else _processor(),
    }


def _processor() -> str:
    """The processor's name; Python knows it on some systems, Linux says it in a file."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "cpu"
