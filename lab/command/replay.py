"""`engram-lab replay FILE.zip`: compute the runs of a session again and say whether they came out the same."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from engram_lab.lab.draw.durations import digits

if TYPE_CHECKING:
    from engram_lab.lab.sessions.replay import Replayed
    from engram_lab.probes.base import Progress

CHANGED = 1
SHOWN = 3  # reasons why a run is changed that the table tells; --json tells all
_HEADS = ("run", "probe", "models", "verdict", "largest difference", "seconds", "not as it was")
EPILOG = """\
verdicts:
  identical         every bit of the result, and the token ids that the models got
  within tolerance  the same shapes, texts and places of NaN; numbers within the tolerance plus as much of their own
                    size; at most 1 % of an array's integers, truth values and winning tokens turned
  changed           anything else
Measured seconds are left out of all three. A run that cannot be computed is "not run".
exit codes: 0; 1 if a run is changed or not run; 2 for a file that is no session; 130 or 143 for an interrupt
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("file", type=Path, metavar="FILE.zip", help="what engram-lab session export wrote")
    parser.add_argument("--run", type=int, action="append", metavar="N", help="only run N, from 1; may be repeated")
    parser.add_argument("--json", metavar="FILE", help="all that was found; - is stdout, instead of the table")
    parser.add_argument("--tolerance", type=float, metavar="X", help="nats, logits or probability (default 1e-4)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that a checkpoint brings")


def run(args: argparse.Namespace) -> int:
    """Replay, one line for each run as it is done; 1 if any is changed or not run."""
    from engram_lab.lab.command.console import progress, write
    from engram_lab.lab.sessions import compare
    from engram_lab.lab.sessions.archive import read_archive
    from engram_lab.lab.sessions.replay import Replayer, summary
    from engram_lab.models.errors import LabError

    tolerance = compare.TOLERANCE if args.tolerance is None else args.tolerance
    if not 0 <= tolerance < float("inf"):
        raise LabError(f"--tolerance is {tolerance}; it must be 0 or more.")
    archive = read_archive(args.file)
    chosen = args.run or range(1, len(archive.runs) + 1)
    done: list[Replayed] = []
    table = args.json != "-"
    with Replayer(archive.runs, chosen, tolerance, args.trust_remote_code) as replayer:
        widths = _widths([archive.runs[n - 1].report for n in replayer.chosen])
        if table:
            print(_line(_HEADS, widths))
        for n in replayer.chosen:
            # stdout is the table's alone, whatever a checkpoint's own code or a library prints.
            with contextlib.redirect_stdout(sys.stderr), progress() as tell:
                done.append(replayer.run(n, _told(tell, len(done), len(replayer.chosen), n)))
            if table:
                print(_line(_cells(done[-1]), widths), flush=True)
    if table:
        print(summary(done))
    if args.json:
        found = {"session": archive.name, "tolerance": tolerance, "runs": [own.to_dict() for own in done]}
        write(args.json, json.dumps(found, ensure_ascii=False, allow_nan=False, indent=1) + "\n")
    return CHANGED if any(own.failed for own in done) else 0


def _told(progress: Progress | None, done: int, of: int, n: int) -> Progress | None:
    """The progress of one run as that of all."""
    return progress and (lambda fraction, doing: progress((done + fraction) / of, f"run {n}: {doing}"))


def _cells(own: Replayed) -> list[str]:
    if own.largest is None:
        largest = ""
    else:
        largest = f"{own.largest:.2g} at {own.where}" if own.where else "0"
        largest += f"; {own.differ} entries" if own.differ else ""
    said = [*own.wrong[:SHOWN], *([f"and {len(own.wrong) - SHOWN} more"] if len(own.wrong) > SHOWN else [])]
    notes = [*own.causes, *([f"{own.verdict}: {'; '.join(said)}"] if own.failed else [])]
    if own.verdict == "changed" and not own.causes:
        notes.insert(0, "weights, token ids, versions and machine are the same")
    seconds = "" if own.seconds is None else digits(own.seconds, 2)
    return [str(own.run), own.probe, ", ".join(own.models), own.verdict, largest, seconds, "; ".join(notes)]


def _widths(reports: list) -> list[int]:
    """Of the columns, known before the first run is done: what is longer shifts its own line."""
    rows = [["999", own.probe, ", ".join(dict.fromkeys(own.config.models)), "within tolerance"] for own in reports]
    least = [max(map(len, column), default=0) for column in zip(*rows, strict=True)] or [3, 5, 6, 16]
    return [*(max(len(head), n) for head, n in zip(_HEADS, least, strict=False)), 34, len("seconds"), 0]


def _line(cells: list[str] | tuple[str, ...], widths: list[int]) -> str:
    """A row; nothing out of a file reaches the terminal as a control character."""
    plain = ["".join(char if char.isprintable() else "�" for char in cell) for cell in cells]
    return "  ".join(cell.ljust(width) for cell, width in zip(plain, widths, strict=True)).rstrip()
