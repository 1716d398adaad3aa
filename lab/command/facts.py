"""`engram-lab facts write | remove | list | check`, overlays of a user's facts as files."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from engram_lab.lab.ask import facts as facts_files
from engram_lab.lab.command.probe import add_probe
from engram_lab.lab.fronts import FRONTS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommands of `engram-lab facts`; each sets `args.call`."""
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=type(parser))

    def command(name: str, text: str, run: Any) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
        made.set_defaults(call=run)
        return made

    write = command("write", "write facts into an overlay, a file of rows for one model", run_write)
    write.add_argument("--model", required=True, help="shipped name, folder or hub id of a model with a memory")
    write.add_argument("--device", help="cpu or cuda (default: the best there is)")
    facts_files.add_facts(write, required=True)
    write.add_argument("--out", type=Path, required=True, metavar="FILE", help="the safetensors file to write")

    remove = command("remove", "take facts out of an overlay; rows that other facts share stay", run_remove)
    remove.add_argument("file", type=Path, metavar="FILE", help="an overlay")
    remove.add_argument(
        "--fact", action="append", required=True, metavar="TEXT", help='"trigger => answer"; may be repeated'
    )
    remove.add_argument("--out", type=Path, metavar="FILE", help="where to write the rest (default: the same file)")

    show = command("list", "what an overlay holds", run_list)
    show.add_argument("file", type=Path, metavar="FILE", help="an overlay")

    text = FRONTS["facts check"]  # the probe by a shorter name
    add_probe(commands.add_parser("check", help=text, description=text), "facts check")


def _check_out(file: Path) -> None:
    """LabError where the file cannot be written, before the work that would be lost."""
    from engram_lab.models.errors import DataError

    if file.is_dir():
        raise DataError(f"--out is {file}, a folder: name a file.")
    if not file.parent.is_dir():
        raise DataError(f"There is no folder {file.parent} for --out: make it first.")


def run_write(args: argparse.Namespace) -> int:
    """Write the overlay, whole or not at all, and say on stdout what was learned."""
    from engram_lab.lab.command.console import progress
    from engram_lab.models.handle import open_model
    from engram_lab.probes.facts.sets import write

    _check_out(args.out)
    facts, writing = facts_files.facts_of(args), facts_files.writing_of(args)
    handle = open_model(args.model, device=args.device)
    with progress() as tell:
        overlay, report = write(handle, facts, writing, tell)
    overlay.save(args.out)
    size = args.out.stat().st_size
    print(f"{args.out}: {len(overlay.facts)} facts of {overlay.user}, {overlay.n_rows} rows at layer {report.layer}, "
          f"{size} bytes")  # fmt: skip
    for n, fact in enumerate(overlay.facts):
        before, after = report.probability_before[n], report.probability_after[n]
        print(f"{before:8.4f} -> {after:.4f}  {fact}")
    for group in report.aliases:
        named = " and ".join(str(overlay.facts[n]) for n in group)
        what = "one vector for both, so one" if len(group) == 2 else f"one vector for all {len(group)}, so some"
        print(f"{named} address the same rows: {what} of them may not be said.", file=sys.stderr)
    return 0


def run_remove(args: argparse.Namespace) -> int:
    """The overlay without the facts; nothing is written if one of them is not there."""
    from engram_lab.models.overlay import load_overlay

    out = args.out or args.file
    _check_out(out)
    overlay = load_overlay(args.file)
    for line in args.fact:
        overlay = overlay.without(facts_files.of_line(line).fact)
    overlay.save(out)
    print(f"{out}: {len(overlay.facts)} facts of {overlay.user}, {overlay.n_rows} rows")
    return 0


def run_list(args: argparse.Namespace) -> int:
    """Whose facts an overlay holds, for which model, and how many rows each has to itself."""
    from engram_lab.models.overlay import load_overlay

    overlay = load_overlay(args.file)
    layers = ", ".join(map(str, overlay.layers)) or "none"
    print(f"{overlay.user}: {len(overlay.facts)} facts, {overlay.n_rows} rows; layers {layers}; {overlay.method}; "
          f"for the model {overlay.fingerprint}")  # fmt: skip
    for fact in overlay.facts:
        alone = overlay.n_rows - overlay.without(fact).n_rows
        print(f"{alone:5} rows of its own  {fact.trigger} =>{fact.answer}")
    return 0
