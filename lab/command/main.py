"""The command line: `engram-lab app | models | probe | lens | rows | facts | graft | train | ship | card | ...`.

Exit codes: 0; 2 for a bad request, with one sentence on stderr; 130 for Ctrl-C and 143 for SIGTERM, which end a command
in the same way, with what is finished kept. A command is a module here with add_arguments(parser), and with run(args)
unless it has commands below it, which set `args.call` themselves; only the one on the command line is imported.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence

from engram_lab.lab.command.console import BadUsageError, Parser, TerminatedError, ends_on_sigterm
from engram_lab.models.errors import LabError

BAD_REQUEST, INTERRUPTED, TERMINATED = 2, 130, 143
COMMANDS = {  # name -> its line of --help
    "app": "start the app and print its address",
    "models": "list the models that can be opened without a network, or get a stronger one",
    "probe": "run a probe without a browser",
    "session": "list, export, import and report what was kept",
    "replay": "compute the runs of an exported session again and say whether they came out the same",
    "examples": "compute the example sessions that ship anew",
    "sweep": "run a probe over a grid of settings",
    "lens": "fit the tuned lens of a model",
    "rows": "count the reads of a memory's rows",
    "facts": "write a user's facts into rows, as a file",
    "graft": "give any causal model an empty memory",
    "train": "train an Engram, or its dense twin",
    "ship": "put a finished run into model folders with cards",
    "card": "print the model card of the shipped models, measured now",
    "bench": "measure the lab's own speed against its floor",
    "gpu-check": "compare every probe on the GPU with the CPU",
}
# What a disk or a pipe does, whose errors name no file.
_OUTSIDE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE, errno.EMFILE, errno.ENFILE}


def build_parser() -> Parser:
    """All commands; `args.call` is what to run."""
    parser = Parser(prog="engram-lab", description="An interpretability lab for models with an Engram memory.")
    commands = parser.group()
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, description=text, fill=lambda made, name=name: _fill(made, name))
    return parser


def _fill(parser: Parser, name: str) -> None:
    module = importlib.import_module(f"engram_lab.lab.command.{name.replace('-', '_')}")
    if hasattr(module, "run"):
        parser.set_defaults(call=module.run)
    module.add_arguments(parser)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    # Before anything of it is imported: no bars and no advice of transformers between the lines of a script.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # Threads that wait for each other must not spin for long: beside another busy process the lens took ten times as
    # long, as each waited at its barriers for one that had no processor.
    os.environ.setdefault("GOMP_SPINCOUNT", "100")
    for stream in (sys.stdout, sys.stderr):  # a terminal or a pipe of another encoding shows what it can
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        with ends_on_sigterm():
            args = build_parser().parse_args(argv)
            code: int = args.call(args)
            if sys.stdout is not None:
                sys.stdout.flush()  # a pipe that is gone, or a disk that is full, is met here
            return code
    except (BadUsageError, LabError) as error:
        sentence = str(error)
    except TerminatedError:
        return TERMINATED
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        if error.filename is None and error.errno not in _OUTSIDE:
            raise  # a fault of ours
        if error.errno == errno.EPIPE:  # whoever read has gone: nothing more goes there, at the end neither
            sys.stdout = None
        name = f" {error.filename}" if error.filename else ""
        sentence = f"Could not read or write{name}: {error.strerror or error}."
    print(sentence, file=sys.stderr)
    return BAD_REQUEST


if __name__ == "__main__":
    sys.exit(main())
