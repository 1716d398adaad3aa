"""`engram-lab examples --out DIR`: compute the example sessions that ship in assets/sessions, anew.

On the CPU in float32 with one thread, so that the bits do not hang on the number of cores.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engram_lab.lab.sessions import NewRun
    from engram_lab.models.handle import Handle
    from engram_lab.probes.base import Progress, Record

SESSIONS = Path(__file__).resolve().parents[2] / "assets" / "sessions"
ENGRAM, DENSE = "engram-mini", "dense-mini"
N_TEXTS, N_SENTENCES = 24, 60


@dataclass(frozen=True)
class Example:
    """A session: its file without the ending (its note is the .md of that name), and (probe, request) of its runs."""

    file: str
    name: str
    tags: tuple[str, ...]
    requests: Callable[[], list[tuple[str, Record]]]


def _know() -> list[tuple[str, Any]]:
    from engram_lab.lab.ask.texts import held_out
    from engram_lab.lab.fronts import cka
    from engram_lab.probes.cka import CKAConfig
    from engram_lab.probes.lens import LensConfig
    from engram_lab.probes.points import ENTITY, take

    both = (ENGRAM, DENSE)
    prompt = "Washington, D.C., is the capital of the United"
    return [
        ("lens", LensConfig(both, (prompt,), target=" States", tuned=True)),
        ("lens", LensConfig(both, held_out()[:N_TEXTS], detail=False, tuned=True)),
        ("cka", CKAConfig(both, *take(cka.shipped(), ENTITY, N_SENTENCES))),
    ]


def _memory() -> list[tuple[str, Any]]:
    from engram_lab.lab.ask.texts import held_out, shipped_sets
    from engram_lab.probes.gates import GatesConfig
    from engram_lab.probes.rows import RowsConfig
    from engram_lab.probes.sensitivity import SensitivityConfig, TextSet

    prompt = "The president of the United"
    sets = tuple(TextSet(own.name, own.items[:N_TEXTS]) for own in shipped_sets())
    return [
        ("gates", GatesConfig((ENGRAM,), (prompt,), target=" States", position=5, knock_out=True)),
        ("gates", GatesConfig((ENGRAM,), (prompt,), target=" States", controls=("shuffled",))),
        ("rows", RowsConfig((ENGRAM,), (prompt,), position=5, layer=6, text=held_out())),
        ("sensitivity", SensitivityConfig((ENGRAM, DENSE), sets, ("off", "shuffled"))),
    ]


def _facts() -> list[tuple[str, Any]]:
    from engram_lab.lab.ask import scenarios
    from engram_lab.lab.ask.facts import USER, persona
    from engram_lab.lab.ask.texts import held_out
    from engram_lab.probes.facts.check import CheckConfig
    from engram_lab.probes.facts.sets import Writing
    from engram_lab.probes.kv.map import MapConfig
    from engram_lab.probes.kv.swap import SwapConfig

    scenario = scenarios.find("pet-kind", scenarios.library())
    facts = persona()[:2] + persona()[10:18]  # two that share an address, and eight that do not
    return [
        ("facts check", CheckConfig((ENGRAM,), facts, Writing(USER), held_out()[:N_TEXTS])),
        ("kv swap", SwapConfig((ENGRAM,), scenario)),
        ("kv map", MapConfig((ENGRAM,), scenario)),
    ]


EXAMPLES = (
    Example("when-does-it-know", "When does it know?", ("example", "lens", "cka"), _know),
    Example("what-the-memory-says", "What the memory says", ("example", "gates", "rows"), _memory),
    Example("facts-and-a-stale-cache", "A user's facts and a stale cache", ("example", "facts", "kv"), _facts),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to write the .zip files")


def run(args: argparse.Namespace) -> int:
    """Compute and write all of them."""
    import torch

    from engram_lab.lab.command.console import progress
    from engram_lab.models.errors import DataError
    from engram_lab.models.handle import open_model

    if not args.out.is_dir():
        raise DataError(f"There is no folder {args.out}: make it first.")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        handles = {name: open_model(name, device="cpu", dtype="float32") for name in (ENGRAM, DENSE)}
        for example in EXAMPLES:
            with progress() as tell:
                runs = [_computed(handles, probe, config, tell) for probe, config in example.requests()]
            file = args.out / f"{example.file}.zip"
            _write(example, runs, file)
            print(f'{file}: "{example.name}" with {len(runs)} runs, {file.stat().st_size / 1e3:.0f} KB')
    finally:
        torch.set_num_threads(threads)
    return 0


def _computed(handles: dict[str, Handle], probe: str, config: Any, progress: Progress | None) -> NewRun:
    """A run with what is kept beside it."""
    from engram_lab.lab.fronts import front
    from engram_lab.lab.sessions import NewRun, environment
    from engram_lab.probes.running import compute

    shown = front(probe)
    report, seconds = compute(probe, [handles[name] for name in config.models], config, progress)
    settled = getattr(shown, "settled", lambda report: report.config)  # with what the probe chose by itself
    return NewRun(report, datetime.now(UTC), seconds, shown.ASK.view(settled(report)).to_dict(), {}, environment())


def _write(example: Example, runs: list[NewRun], file: Path) -> None:
    """By way of a store of its own, as everybody's sessions are."""
    from engram_lab.lab.sessions import open_store
    from engram_lab.lab.sessions.archive import export_session

    note = (SESSIONS / f"{example.file}.md").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(f"sqlite:///{folder}/store.db", Path(folder))
        try:
            session = store.add(example.name, note, example.tags, datetime.now(UTC), runs)
            export_session(store, session.id, file)
        finally:
            store.dispose()
