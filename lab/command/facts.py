"""`engram-lab facts write | remove | list | check`, overlays of a user's facts as files, and `engram-lab graft`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from engram_lab.lab.ask import facts as facts_files
from engram_lab.lab.ask import flags
from engram_lab.lab.fronts import front

CHECK = front("facts check")


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

    check = command("check", CHECK.HELP, run_check)  # the probe by a shorter name
    check.set_defaults(probe="facts check")
    CHECK.add_arguments(check)
    flags.add_outputs(check)


def add_graft_arguments(parser: argparse.ArgumentParser) -> None:
    """What `engram-lab graft` takes; sets `args.call`."""
    parser.set_defaults(call=run_graft)
    parser.add_argument("--base", required=True, help="shipped name, folder or hub id of a model without a memory")
    parser.add_argument(
        "--layer", type=int, action="append", required=True, metavar="N", help="the block before which a memory goes; "
        "may be repeated",
    )  # fmt: skip
    parser.add_argument("--rows", type=int, default=10_000, help="rows of a head, about (default %(default)s)")
    parser.add_argument("--heads", type=int, default=8, help="heads of an order (default %(default)s)")
    parser.add_argument("--max-ngram", type=int, default=3, help="tokens that address a row (default %(default)s)")
    parser.add_argument("--gate", default="demo", help="demo or paper, which scales the score (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the projections and the hash (default %(default)s)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to write")


def _check_out(file: Path) -> None:
    """LabError where the file cannot be written, before the work that would be lost."""
    from engram_lab.models.errors import DataError

    if file.is_dir():
        raise DataError(f"--out is {file}, a folder: name a file.")
    if not file.parent.is_dir():
        raise DataError(f"There is no folder {file.parent} for --out: make it first.")


def run_write(args: argparse.Namespace) -> int:
    """Write the overlay, whole or not at all, and say on stdout what was learned."""
    from engram_lab.lab.command.main import progress_line
    from engram_lab.models.handle import open_model
    from engram_lab.probes.facts.sets import write

    _check_out(args.out)
    facts, writing = facts_files.facts_of(args), facts_files.writing_of(args)
    handle = open_model(args.model, device=args.device)
    with progress_line() as progress:
        overlay, report = write(handle, facts, writing, progress)
    overlay.save(args.out)
    size = args.out.stat().st_size
    print(f"{args.out}: {len(overlay.facts)} facts of {overlay.user}, {overlay.n_rows} rows at layer {report.layer}, "
          f"{size} bytes")  # fmt: skip
    for n, fact in enumerate(overlay.facts):
        before, after = report.probability_before[n], report.probability_after[n]
        print(f"{before:8.4f} -> {after:.4f}  {fact}")
    for group in report.aliases:
        named = " and ".join(str(overlay.facts[n]) for n in group)
        print(f"{named} address the same rows: one vector for both, so one of them may not be said.", file=sys.stderr)
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


def run_check(args: argparse.Namespace) -> int:
    """As `engram-lab probe facts check`."""
    from engram_lab.lab.command.main import run_probe

    return run_probe(args)


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


def run_graft(args: argparse.Namespace) -> int:
    """Put an empty memory onto a model and save it as a folder beside its base."""
    from engram_lab.models.errors import DataError
    from engram_lab.models.graft import graft, save_graft
    from engram_lab.models.handle import open_model

    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise DataError(f"{args.out} exists already: name a new folder for --out.")
    handle = open_model(args.base, device="cpu")
    made = graft(
        handle, args.layer, rows_per_head=args.rows, heads=args.heads, max_ngram=args.max_ngram, gate=args.gate,
        seed=args.seed,
    )  # fmt: skip
    save_graft(made, args.out)
    layers = ", ".join(map(str, made.engram_layers))
    print(f"{args.out}: an empty memory before layers {layers} of {handle.name}; open it as --model {args.out}")
    return 0
