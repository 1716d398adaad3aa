"""`engram-lab sweep FILE.yaml`: a grid of models, prompts and settings over any probe, kept as a session."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram_lab.lab.ask import flags
from engram_lab.lab.draw.durations import digits

if TYPE_CHECKING:
    from engram_lab.lab.sessions import Store
    from engram_lab.lab.sweep.grid import Sweep
    from engram_lab.lab.sweep.run import Job, Ledger, Outcome
    from engram_lab.probes.base import Progress

FAILED = 1
SHOWN = 24  # cells listed in the summary
EXAMPLE = """\
a sweep file, for instance:
  probe: lens                          # any of engram-lab probe --help
  name: depth of two models            # the session that keeps the runs (default: the file's name)
  out: depth.parquet                   # or .csv; relative to this file
  options:                             # those of engram-lab probe lens --help, without the dashes
    model: [engram-mini, dense-mini]   # a list is an axis of the grid: every value with every other
    prompt: ["The river runs", "Paris is the capital of"]
    target: [null, " the"]             # null leaves the option out
    top-k: 5                           # a scalar is the same in every cell
    tuned: false                       # a switch
An option that takes several values has them in a list inside the list: control: [["off"], ["off", "zeroed"]] are two
cells. Write text in quotes where YAML reads something else: 1.50, 2026-01-01, off, on, yes, no.
Run it again after an interrupt: finished cells are taken from the session, a changed model is computed again.
Exit codes: 0; 1 if a cell failed; 2 for a bad file, before anything runs; 130 or 143 for an interrupt.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLE
    parser.add_argument("file", type=Path, metavar="FILE.yaml", help="the sweep, see below")
    parser.add_argument("--out", type=Path, metavar="TABLE", help="one tidy table of all rows: .parquet or .csv")
    parser.add_argument(  # nnsight gives every object a method `save`, which argparse would take for the value
        "--save", dest="session", metavar="NAME", help="the session that keeps the runs (default: that of the file)"
    )
    flags.add_store(parser)
    parser.add_argument("--fresh", action="store_true", help="compute cells that the session has already, too")
    parser.add_argument(
        "--dask", metavar="ADDRESS", help="compute on a Dask cluster, by its scheduler's address, as tcp://host:8786"
    )


def run(args: argparse.Namespace) -> int:
    """Run the sweep, keep its runs, write its table and say what came of it."""
    from engram_lab.lab.sessions import naming, open_store
    from engram_lab.lab.sweep import grid as sweeps
    from engram_lab.lab.sweep import table

    sweep = sweeps.read(args.file)
    out, session = args.out or sweep.out, naming.clean_name(sweep.name if args.session is None else args.session)
    naming.clean_note(sweep.note or "")  # refused now, not when the first cell is to be kept
    naming.clean_tags(sweep.tags or ())
    if out is not None:
        table.check(out)
    store = open_store(args.store)
    try:
        return _run(args, sweep, store, session, out)
    finally:
        store.dispose()


def _run(args: argparse.Namespace, sweep: Sweep, store: Store, session: str, out: Path | None) -> int:
    from engram_lab.lab.sweep import table
    from engram_lab.lab.sweep.run import Ledger, jobs_of

    jobs, ledger = jobs_of(sweep), Ledger(store, sweep, session, args.fresh)
    outcomes: list[Outcome] = []
    try:
        # stdout is the summary's alone, whatever a checkpoint's own code or a library prints.
        with contextlib.redirect_stdout(sys.stderr):
            for outcome in _outcomes(sweep, jobs, ledger, args.dask):
                outcomes.append(outcome)
    except KeyboardInterrupt:
        kept = sum(len(own.job.cells) for own in outcomes if own.run)
        again = f"run the same command again to go on{', without --fresh' if args.fresh else ''}"
        print(f'Interrupted: {kept} of {len(sweep.cells)} cells are kept in the session "{session}"; {again}.',
              file=sys.stderr)  # fmt: skip
        raise
    found = {cell: outcome for outcome in outcomes for cell in outcome.job.cells}
    runs = {cell: own.run.id for cell, own in sorted(found.items()) if own.run is not None}
    if out is not None and runs:
        data = table.table(sweep, ((cell, store.report(run)) for cell, run in runs.items()))
        table.write(data, out)
    _tell(sweep, found)
    if runs:
        option = f" --store {shlex.quote(args.store)}" if args.store else ""
        print(f'Session "{session}" in {store.name}: engram-lab session show {shlex.quote(session)}{option}')
    if out is not None:
        print(f"Table: {out}, {len(data)} rows." if runs else f"No table was written to {out}: no cell was computed.")
    return FAILED if len(runs) < len(sweep.cells) else 0


def _outcomes(sweep: Sweep, jobs: Sequence[Job], ledger: Ledger, address: str | None) -> Generator[Outcome]:
    """The outcomes as they come, with a line of progress on a terminal."""
    from engram_lab.lab.command.console import progress
    from engram_lab.lab.sweep.run import run_here

    with progress() as show, contextlib.ExitStack() as stack:
        line = None if show is None else Line(show, jobs)
        if address is None:
            found = run_here(sweep, jobs, ledger, None if line is None else line.within)
        else:
            from engram_lab.lab.sweep.cluster import connected, run_there

            found = run_there(sweep, jobs, ledger, stack.enter_context(connected(address)))
        stack.enter_context(contextlib.closing(found))
        for outcome in found:
            if line is not None:
                line.done(outcome)
            yield outcome


class Line:
    """The line of progress: which cell, what its probe does, and how long the rest will take."""

    def __init__(self, show: Progress, jobs: Sequence[Job]) -> None:
        self._show = show
        self._n = sum(len(job.cells) for job in jobs)
        self._jobs, self._left = len(jobs), len(jobs)
        self._cells = self._computed = 0
        self._began: float | None = None
        self._spent = 0.0  # seconds of the jobs that were computed
        self._since = time.monotonic()
        self.within(0.0, "opening models")

    def within(self, fraction: float, doing: str) -> None:
        """What the probe of the cell in progress says."""
        whole = (self._jobs - self._left + fraction) / self._jobs
        computed = self._computed + fraction
        seconds = self._spent + time.monotonic() - self._since
        left = f" · about {duration(seconds * (self._left - fraction) / computed)} left" if computed > 0.1 else ""
        self._show(whole, f"cell {min(self._cells + 1, self._n)} of {self._n}: {doing}{left}")

    def done(self, outcome: Outcome) -> None:
        """A job has ended."""
        now = time.monotonic()
        if not outcome.taken:  # what is taken from the session says nothing of the others
            self._spent += now - self._since
            self._computed += 1
        self._since = now
        self._left -= 1
        self._cells += len(outcome.job.cells)
        if self._left:
            self.within(0.0, "next" if outcome.run else "failed, next")


def duration(seconds: float) -> str:
    """A time to wait, as a person says it."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _tell(sweep: Sweep, found: dict[int, Outcome]) -> None:
    """A short table of the cells, and what failed."""
    from engram_lab.lab.sweep.grid import shown

    rows: list[list[Any]] = [["cell", *sweep.axes, "outcome"]]
    for cell, outcome in sorted(found.items())[:SHOWN]:
        rows.append([str(cell + 1), *(shown(sweep.cells[cell].values[axis]) for axis in sweep.axes), _state(outcome)])
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    if len(found) > SHOWN:
        print(f"... and {len(found) - SHOWN} more")
    failed = [cell for cell in sorted(found) if found[cell].run is None]
    taken = sum(outcome.taken for outcome in found.values())
    workers = {outcome.where for outcome in found.values() if outcome.run and outcome.where}
    where = f" by {len(workers)} worker{'s' * (len(workers) > 1)}" if workers else ""
    print(f"{len(found)} cells: {len(found) - taken - len(failed)} computed{where}, {taken} taken from the session, "
          f"{len(failed)} failed.")  # fmt: skip
    for cell in failed:
        print(f"Cell {cell + 1} failed: {found[cell].error}", file=sys.stderr)
    _warn(found)


def _state(outcome: Outcome) -> str:
    if outcome.run is None:
        return "failed"
    if outcome.taken:
        return "taken from the session"
    return "computed" if outcome.run.seconds is None else f"computed in {digits(outcome.run.seconds, 2)} s"


def _warn(found: dict[int, Outcome]) -> None:
    """One line if runs of other versions stand in the table."""
    from engram_lab.probes.base import versions

    old = [outcome.run for outcome in found.values() if outcome.run and outcome.run.versions != versions()]
    if old:
        now = versions()
        names = sorted({name for run in old for name in now if run.versions.get(name) != now[name]})
        print(f"{len(old)} cells were computed with other versions of {', '.join(names)}: --fresh computes them again.",
              file=sys.stderr)  # fmt: skip
