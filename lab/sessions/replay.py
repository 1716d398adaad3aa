"""Runs of a session computed again, headless, and held against what was kept; whatever differs is named.

The models are opened by their names, on the device and in the dtype that are on record, torch uses as many threads as
then, and each probe gets its kept request. No code that a checkpoint brings is run unless it is asked for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engram_lab.lab.sessions import NewRun, environment
from engram_lab.lab.sessions.compare import TOLERANCE, fields, verdict
from engram_lab.models.errors import LabError, first_line
from engram_lab.models.loading import choose_device
from engram_lab.models.pool import ModelKey, Pool
from engram_lab.probes import running
from engram_lab.probes.base import Progress, Report, versions

MOST_THREADS = 256  # that a file may ask for
# What of the environment is said first.
_FIRST = ("cpu", "threads", "device", "machine", "system")
_CALLED = {"cpu": "CPU capability", "device": "processor"}


@dataclass(frozen=True)
class Replayed:
    """What became of one run.

    `run` counts from 1. verdict, largest, where, differ, wrong and left_out are those of
    lab.sessions.compare.Verdict; a run that could not be computed is "not run", with the reason in `wrong`.
    `causes`: what is not as it was, also where the result is identical.
    """

    run: int
    probe: str
    models: tuple[str, ...]
    verdict: str
    largest: float | None = None
    where: str = ""
    differ: int = 0
    wrong: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    seconds: float | None = None
    recorded_seconds: float | None = None

    @property
    def failed(self) -> bool:
        """Whether the run is changed, or could not be computed."""
        return self.verdict not in ("identical", "within tolerance")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON; an infinite difference is null."""
        found = dataclasses.asdict(self)
        if self.largest is not None and not math.isfinite(self.largest):
            found["largest"] = None
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


class Replayer:
    """Computes chosen runs again, in rising order; a context that closes its models and puts torch's threads back.

    A model is opened once and closed behind the last of the runs that needs it.
    """

    def __init__(
        self, runs: Sequence[NewRun], chosen: Sequence[int], tolerance: float = TOLERANCE, trust: bool = False
    ) -> None:
        wrong = [n for n in chosen if not 1 <= n <= len(runs)]
        if wrong:
            raise LabError(f"There is no run {wrong[0]}: the session has runs 1 to {len(runs)}.")
        self._runs, self._tolerance, self._trust = runs, tolerance, trust
        self.chosen = sorted(set(chosen))
        self._pool = Pool()

    def __enter__(self) -> Replayer:
        self._threads = torch.get_num_threads()
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()
        torch.set_num_threads(self._threads)

    def run(self, n: int, progress: Progress | None = None) -> Replayed:
        """Run n of the session again. Whatever stops it is told in the result, but for an interrupt."""
        kept = self._runs[n - 1]
        report = kept.report
        names = tuple(dict.fromkeys(report.config.models))
        told = Replayed(n, report.probe, names, "not run", recorded_seconds=kept.seconds)
        torch.set_num_threads(_threads(kept) or self._threads)
        try:
            handles = self._pool.get(self._keys(report))
            again, seconds = running.compute(report.probe, handles, report.config, progress)
            told = dataclasses.replace(told, seconds=seconds)
        except Exception as error:  # a file from elsewhere may ask for anything
            why = str(error) if isinstance(error, LabError) else f"{type(error).__name__}: {first_line(error)}"
            return dataclasses.replace(told, wrong=(why,), causes=_surroundings(kept, None))
        finally:
            later = (self._runs[after - 1].report for after in self.chosen if after > n)
            self._pool.keep(key for after in later for key in self._keys(after))
        found = verdict(report, again, self._tolerance)
        return dataclasses.replace(
            told,
            verdict=found.word,
            largest=found.largest,
            where=found.where,
            differ=found.differ,
            wrong=found.wrong,
            left_out=found.left_out,
            causes=causes(kept, again),
        )

    def _keys(self, report: Report) -> list[ModelKey]:
        """How to open the models of a run, in its order."""
        names, models = report.config.models, report.protocol.models
        if len(models) != len(names):
            return [ModelKey(name, "cpu", "float32", self._trust) for name in names]
        return [
            ModelKey(name, _device(model.device), model.dtype, self._trust)
            for name, model in zip(names, models, strict=True)
        ]


def _device(recorded: str) -> str:
    """The device on record, or the CPU where there is no such device."""
    try:
        return str(choose_device(recorded))
    except LabError:
        return "cpu"


def _threads(run: NewRun) -> int | None:
    """The number of threads on record, if it is one that can be set."""
    text = (run.environment or {}).get("threads", "")
    return int(text) if text.isdecimal() and 1 <= int(text[:9]) <= MOST_THREADS else None


def causes(kept: NewRun, again: Report) -> tuple[str, ...]:
    """What is not as it was when the run was kept, what weighs most first: it may change a result, and need not."""
    report = kept.report
    pairs = list(zip(report.protocol.models, again.protocol.models, strict=False))
    found = [f"weights of {b.name}: {a.fingerprint} -> {b.fingerprint}" for a, b in pairs
             if a.fingerprint != b.fingerprint]  # fmt: skip
    for n, (a_ids, b_ids) in enumerate(zip(report.protocol.prompt_ids, again.protocol.prompt_ids, strict=False)):
        if a_ids != b_ids:
            at = next((i for i, (x, y) in enumerate(zip(a_ids, b_ids, strict=False)) if x != y), len(a_ids)) + 1
            found.append(f"tokenizer of {again.protocol.models[n].name}: other ids for prompt {at}")
    fits = {own.path.partition(".fit.")[0] for own in fields(report, again) if ".fit." in own.path and not own.equal}
    found += [f"the tuned lens in {path}: fitted anew" for path in sorted(fits)]
    for a, b in pairs:
        found += [
            f"{name} of {b.name}: {old} -> {new}"
            for name, old, new in (("device", a.device, b.device), ("dtype", a.dtype, b.dtype))
            if old != new
        ]
    return (*dict.fromkeys(found), *_surroundings(kept, again))


def _surroundings(kept: NewRun, again: Report | None) -> tuple[str, ...]:
    """Versions and environment that differ; those of now where there is no report."""
    now = versions() if again is None else again.protocol.versions
    found = _changes(kept.report.protocol.versions, now, list(now), {"engram_lab": "engram-lab"})
    if kept.environment:
        found += _changes(kept.environment, environment(), list(_FIRST), _CALLED)
    return tuple(found)


def _changes(a: Any, b: Any, first: Sequence[str], called: dict[str, str]) -> list[str]:
    names = dict.fromkeys([*(name for name in first if name in a or name in b), *a, *b])
    return [
        f"{called.get(name, name)} {a.get(name, 'not on record')} -> {b.get(name, 'none')}"
        for name in names
        if a.get(name) != b.get(name)
    ]


def summary(done: Sequence[Replayed]) -> str:
    """How many runs came out how, in one line."""
    words = ("identical", "within tolerance", "changed", "not run")
    counts = {word: sum(own.verdict == word for own in done) for word in words}
    said = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    failed = ", ".join(str(own.run) for own in done if own.failed)
    return f"{len(done)} {'run' if len(done) == 1 else 'runs'}: {said}" + (f" (see run {failed})" if failed else "")
