"""The command line: `engram-lab app | models | probe | train | ship | card | bench | gpu-check`.

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
from typing import Any, NoReturn

from lab import card, ship, train_command

BAD_REQUEST, INTERRUPTED = 2, 130


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

    app = command("app", "start the app and print its address", run_app)
    app.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    app.add_argument("--port", type=int, default=8501, help="port (default %(default)s)")

    models = command("models", "list the models that can be opened without a network", run_models)
    models.add_argument("--json", action="store_true", help="as JSON")

    probe = commands.add_parser("probe", help="run a probe without a browser")
    probes = probe.add_subparsers(title="probes", required=True, metavar="PROBE", parser_class=Parser)
    lens = command("lens", "logit lens: what each layer would predict", run_lens, probes)
    add_probe_arguments(lens)
    lens.add_argument("--target", help="a text that is one token, whose rank and probability are reported")
    lens.add_argument("--top-k", type=int, default=5, help="tokens listed for each cell (default %(default)s)")
    lens.add_argument("--bootstrap", type=int, default=1000, help="resamples for the intervals (default %(default)s)")

    train_command.add_arguments(command("train", "train an Engram, or its dense twin", train_command.run))
    ship.add_arguments(command("ship", "put a finished run into model folders with cards", ship.run))
    card.add_arguments(command("card", "print the model card of the shipped models, measured now", card.run))

    bench = command("bench", "measure the lab's own speed against its floor", run_bench)
    bench.add_argument("what", choices=["lens", "trace"], help="what to measure")
    bench.add_argument("--json", metavar="FILE", default="-", help="where to write the figures (default: stdout)")

    gpu = command("gpu-check", "compare every probe on the GPU with the CPU", run_gpu_check)
    gpu.add_argument("--json", metavar="FILE", default="-", help="where to write the figures (default: stdout)")
    return parser


def add_probe_arguments(parser: argparse.ArgumentParser) -> None:
    """What every probe takes: models, prompts, where to write."""
    parser.add_argument("--model", required=True, help="shipped name, folder, hub id or .gguf file")
    parser.add_argument("--against", help="a second model to compare with")
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", action="append", help="a prompt; may be repeated")
    prompts.add_argument(
        "--prompts", type=Path, metavar="FILE", help='a text set: UTF-8, one prompt a line, or .jsonl with "prompt"'
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the resamples (default %(default)s)")
    parser.add_argument("--device", help="cpu or cuda (default: the best there is)")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that a checkpoint brings")
    parser.add_argument("--json", metavar="FILE", help="the report; - is stdout, and the default if no file is named")
    parser.add_argument("--csv", metavar="FILE", help="tidy rows")
    parser.add_argument("--png", metavar="FILE", help="the figure; needs Chrome or Chromium")


def run_app(args: argparse.Namespace) -> int:
    """Serve the app until it is stopped."""
    from lab import server

    server.main(args.host, args.port)
    return 0


def run_models(args: argparse.Namespace) -> int:
    """The models that can be opened offline."""
    from models.loading import list_models

    found = list_models()
    if args.json:
        keys = ("name", "where", "model_type", "weight_bytes")
        print(json.dumps([{key: getattr(model, key) for key in keys} for model in found], indent=1))
    for model in () if args.json else found:
        print(f"{model.name:32} {model.where:8} {model.model_type:14} {model.weight_bytes / 1e6:8.1f} MB")
    return 0


def run_lens(args: argparse.Namespace) -> int:
    """The logit lens of one model or two, written where it was asked for."""
    from lab.export import lens_csv, png
    from models.handle import open_model
    from probes.logit_lens import LensConfig, run

    prompts, detail = read_prompts(args)
    names = tuple(name for name in (args.model, args.against) if name is not None)
    config = LensConfig(names, prompts, args.target, args.top_k, args.seed, args.bootstrap, detail)
    options = {"device": args.device, "dtype": args.dtype, "trust_remote_code": args.trust_remote_code}
    # stdout is the report's alone, whatever a checkpoint's own code or a library prints.
    with contextlib.redirect_stdout(sys.stderr), progress_line() as progress:
        handles = [open_model(name, **options) for name in names]
        report = run(handles, config, progress)
    if args.csv:
        Path(args.csv).write_text(lens_csv(report), encoding="utf-8")
    if args.png:
        from lab.figures import lens_curves

        memory = {handle.name: handle.engram_layers for handle in handles}
        Path(args.png).write_bytes(png(lens_curves(report, "light", memory)))
    if args.json or not (args.csv or args.png):
        write(args.json or "-", report.to_json() + "\n")
    return 0


def run_bench(args: argparse.Namespace) -> int:
    """Measure, and write the figures."""
    benchmarks = importlib.import_module("lab.benchmarks")
    write(args.json, json.dumps(getattr(benchmarks, args.what)(), indent=1) + "\n")
    return 0


def run_gpu_check(args: argparse.Namespace) -> int:
    """The GPU against the CPU."""
    from lab import gpu_check

    return gpu_check.run(args.json)


def read_prompts(args: argparse.Namespace) -> tuple[tuple[str, ...], bool]:
    """(prompts, whether to report each position's top tokens): a file is a text set, told in means."""
    if args.prompts is None:
        return tuple(args.prompt), True
    from lab.texts import lines_of
    from models.errors import DataError

    lines = lines_of(args.prompts.read_bytes(), str(args.prompts))
    if args.prompts.suffix != ".jsonl":
        return lines, False
    prompts = []
    for n, line in enumerate(lines, 1):
        try:
            prompts.append(json.loads(line)["prompt"])
        except (ValueError, TypeError, KeyError):
            raise DataError(f'{args.prompts} has no JSON object with a "prompt" as its text {n}.') from None
        if not isinstance(prompts[-1], str):
            raise DataError(f"{args.prompts} has a prompt that is no text as its text {n}.")
    return tuple(prompts), False


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
        from models.errors import LabError

        if not isinstance(error, LabError):
            raise
        sentence = str(error)
    print(sentence, file=sys.stderr)
    return BAD_REQUEST


if __name__ == "__main__":
    sys.exit(main())
