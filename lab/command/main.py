"""The command line: `engram-lab app | models | probe | lens | rows | facts | graft | train | ship | card | ...`.

Exit codes: 0; 2 for a bad request, with one sentence on stderr; 130 for an interrupt. Heavy imports wait for the
command that needs them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from engram_lab.lab.ask import flags
from engram_lab.lab.command import app as app_command
from engram_lab.lab.command import card, examples, replay, session, ship, sweep, train
from engram_lab.lab.command import facts as facts_command
from engram_lab.lab.command import lens as lens_command
from engram_lab.lab.command import models as models_command
from engram_lab.lab.command import rows as rows_command
from engram_lab.lab.fronts import FRONTS, front, settled

if TYPE_CHECKING:
    from engram_lab.probes.base import Report

BAD_REQUEST, INTERRUPTED = 2, 130
# What is measured -> the module with a function of that name.
BENCHMARKS = {
    "lens": "engram_lab.lab.command.bench",
    "trace": "engram_lab.lab.command.bench",
    "cka": "engram_lab.lab.command.bench_cka",
    "kv_map": "engram_lab.lab.command.bench_kv",
}


class BadUsageError(Exception):
    """Options that argparse refuses."""


class Parser(argparse.ArgumentParser):
    """argparse, whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        raise BadUsageError(f"{message[:1].upper()}{message[1:]}; see {self.prog} --help.")


def build_parser() -> Parser:
    """All commands; `args.call` is what to run."""
    parser = Parser(prog="engram-lab", description="An interpretability lab for models with an Engram memory.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=Parser)

    def command(name: str, text: str, run: Callable[[argparse.Namespace], int], group: Any = commands) -> Parser:
        made: Parser = group.add_parser(name, help=text, description=text)
        made.set_defaults(call=run)
        return made

    app_command.add_arguments(command("app", "start the app and print its address", app_command.run))

    about = "list the models that can be opened without a network, or get a stronger one"
    models_command.add_arguments(command("models", about, models_command.run))

    probe = commands.add_parser("probe", help="run a probe without a browser")
    probes = probe.add_subparsers(title="probes", required=True, metavar="PROBE", parser_class=Parser)
    groups = {"": probes}  # the probes of a group have a name of two words
    for name in FRONTS:
        group, _, last = name.rpartition(" ")
        if group not in groups:
            parent = probes.add_parser(group, help=front(name).GROUP_HELP)
            groups[group] = parent.add_subparsers(title="probes", required=True, metavar="PROBE", parser_class=Parser)
        made = command(last, front(name).HELP, run_probe, groups[group])
        made.set_defaults(probe=name)
        front(name).add_arguments(made)
        flags.add_outputs(made)

    session.add_arguments(commands.add_parser("session", help="list, export, import and report what was kept"))
    about = "compute the runs of an exported session again and say whether they came out the same"
    replay.add_arguments(command("replay", about, replay.run))
    about = "compute the example sessions that ship anew"
    examples.add_arguments(command("examples", about, examples.run))
    sweep.add_arguments(command("sweep", "run a probe over a grid of settings", sweep.run))

    lens = commands.add_parser("lens", help="fit the tuned lens of a model")
    fit = lens.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=Parser)
    lens_command.add_arguments(command("fit", "fit a translator for each layer on a text", lens_command.run, fit))
    rows_command.add_arguments(commands.add_parser("rows", help="count the reads of a memory's rows"))
    facts_command.add_arguments(commands.add_parser("facts", help="write a user's facts into rows, as a file"))
    facts_command.add_graft_arguments(commands.add_parser("graft", help="give any causal model an empty memory"))
    train.add_arguments(command("train", "train an Engram, or its dense twin", train.run))
    ship.add_arguments(command("ship", "put a finished run into model folders with cards", ship.run))
    card.add_arguments(command("card", "print the model card of the shipped models, measured now", card.run))

    bench = command("bench", "measure the lab's own speed against its floor", run_bench)
    bench.add_argument("what", choices=list(BENCHMARKS), help="what to measure")
    bench.add_argument("--json", metavar="FILE", default="-", help="where to write the figures (default: stdout)")

    gpu = command("gpu-check", "compare every probe on the GPU with the CPU", run_gpu_check)
    gpu.add_argument("--json", metavar="FILE", default="-", help="where to write the figures (default: stdout)")
    return parser


def run_probe(args: argparse.Namespace) -> int:
    """Any probe, its report written where it was asked for."""
    from engram_lab.lab.fronts import export
    from engram_lab.models.handle import open_model
    from engram_lab.probes import running

    shown = front(args.probe)
    config = shown.config(args)
    options = {"device": args.device, "dtype": args.dtype, "trust_remote_code": args.trust_remote_code}
    if args.session is not None:
        check_save(args)  # before anything is computed
    # stdout is the report's alone, whatever a checkpoint's own code or a library prints.
    with contextlib.redirect_stdout(sys.stderr), progress_line() as progress:
        opened = {name: open_model(name, **options) for name in dict.fromkeys(config.models)}
        handles = [opened[name] for name in config.models]
        report, seconds = running.compute(args.probe, handles, config, progress)
    if args.session is not None:
        save(args, report, seconds)
    if args.csv:
        write(args.csv, export.csv_text(report))
    if args.png:
        Path(args.png).write_bytes(export.png(shown.figure(report, "light", handles)))
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
        view = front(args.probe).view(settled(report)).to_dict()
    except LabError:  # its page cannot make this request: it is shown and replayed without
        view = None
    store = open_store(args.store)
    try:
        store.save(report, args.session, note=args.note, tags=args.tag, seconds=seconds, view=view)
    finally:
        store.dispose()
    print(f'Kept in the session "{args.session}": engram-lab session show, or the page Sessions.', file=sys.stderr)


def run_bench(args: argparse.Namespace) -> int:
    """Measure, and write the figures."""
    measure = getattr(importlib.import_module(BENCHMARKS[args.what]), args.what)
    write(args.json, json.dumps(measure(), indent=1) + "\n")
    return 0


def run_gpu_check(args: argparse.Namespace) -> int:
    """The GPU against the CPU."""
    from engram_lab.lab.command import gpu_check

    return gpu_check.run(args.json)


def write(path: str, text: str) -> None:
    """To a file, or to stdout for "-", in UTF-8 as JSON has to be."""
    if path == "-":
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")
        sys.stdout.write(text)
    else:
        Path(path).write_text(text, encoding="utf-8")


@contextlib.contextmanager
def progress_line() -> Iterator[Callable[[float, str], None] | None]:
    """A line on stderr that is rewritten; None where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return

    def show(fraction: float, doing: str) -> None:
        sys.stderr.write(f"\r\x1b[K{fraction:4.0%}  {doing}")
        sys.stderr.flush()

    try:
        yield show
    finally:
        sys.stderr.write("\r\x1b[K")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    # Before anything of it is imported: no bars and no advice of transformers between the lines of a script.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # Threads that wait for each other must not spin for long: beside another busy process the lens took ten times as
    # long, as each waited at its barriers for one that had no processor.
    os.environ.setdefault("GOMP_SPINCOUNT", "100")
    try:
        args = build_parser().parse_args(argv)
        code: int = args.call(args)
        return code
    except BadUsageError as error:
        sentence = str(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        name = f" {error.filename}" if error.filename else ""
        sentence = f"Could not read or write{name}: {error.strerror or error}."
    except ValueError as error:
        from engram_lab.models.errors import LabError

        if not isinstance(error, LabError):
            raise
        sentence = str(error)
    print(sentence, file=sys.stderr)
    return BAD_REQUEST


if __name__ == "__main__":
    sys.exit(main())
