"""`engram-lab probe NAME`: any probe without a browser, its report written or kept."""

from __future__ import annotations

import argparse
import contextlib
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from engram_lab.lab.ask import flags
from engram_lab.lab.command.console import BadUsageError, Parser, check_outputs, progress, write
from engram_lab.lab.fronts import FRONTS, front, group_line, settled
from engram_lab.models.files import whole

if TYPE_CHECKING:
    from engram_lab.probes.base import Report


def add_arguments(parser: Parser) -> None:
    """The probes, those whose name has two words below the first of them."""
    groups = {"": parser.group("probes", "PROBE")}
    for name, text in FRONTS.items():
        group, _, last = name.rpartition(" ")
        if group not in groups:
            groups[group] = groups[""].add_parser(group, help=group_line(group)).group("probes", "PROBE")
        groups[group].add_parser(last, help=text, description=text, fill=partial(add_probe, name=name))


def add_probe(parser: argparse.ArgumentParser, name: str) -> None:
    """What one probe takes, and where its report goes."""
    front(name).ASK.add_arguments(parser)
    flags.add_outputs(parser)
    parser.set_defaults(probe=name, call=run_probe)


def run_probe(args: argparse.Namespace) -> int:
    """Any probe, its report written where it was asked for."""
    from engram_lab.models.handle import open_model
    from engram_lab.probes import running

    shown = front(args.probe)
    config = shown.ASK.config(args)
    check_outputs(args.json, args.csv, args.png, reads=[v for v in vars(args).values() if isinstance(v, Path)])
    if args.session is None and (args.note or args.tag):
        raise BadUsageError("--note and --tag are of the session that --save names: add --save NAME.")
    options = {"device": args.device, "dtype": args.dtype, "trust_remote_code": args.trust_remote_code}
    if args.session is not None:
        check_save(args)  # before anything is computed
    # stdout is the report's alone, whatever a checkpoint's own code or a library prints.
    with contextlib.redirect_stdout(sys.stderr), progress() as tell:
        opened = {name: open_model(name, **options) for name in dict.fromkeys(config.models)}
        handles = [opened[name] for name in config.models]
        report, seconds = running.compute(args.probe, handles, config, tell)
    if args.session is not None:
        save(args, report, seconds)
    if args.csv or args.png:
        from engram_lab.lab.fronts import export

        if args.csv:
            write(args.csv, export.csv_text(report))
        if args.png:
            with whole(Path(args.png)) as fresh:
                fresh.write_bytes(export.png(shown.figure(report, "light", handles)))
    if args.json or not (args.csv or args.png or args.session):
        write(args.json or "-", report.to_json() + "\n")
    return 0


def check_save(args: argparse.Namespace) -> None:
    """Raise LabError where the run could not be kept."""
    from engram_lab.lab.sessions import naming, open_store

    naming.clean_name(args.session)
    naming.clean_note(args.note or "")
    naming.clean_tags(args.tag or ())
    open_store(args.store).dispose()


def save(args: argparse.Namespace, report: Report, seconds: float) -> None:
    """Keep the run in a session, with the view that opens its page; says so on stderr."""
    from engram_lab.lab.sessions import open_store
    from engram_lab.models.errors import LabError

    try:
        view = front(args.probe).ASK.view(settled(report)).to_dict()
    except LabError:  # its page cannot make this request: it is shown and replayed without
        view = None
    store = open_store(args.store)
    try:
        store.save(report, args.session, note=args.note, tags=args.tag, seconds=seconds, view=view)
    finally:
        store.dispose()
    print(f'Kept in the session "{args.session}": engram-lab session show, or the page Sessions.', file=sys.stderr)
