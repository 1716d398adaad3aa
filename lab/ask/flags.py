"""Options that probes share on the command line, and how they are written back as one."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn


class BadUsageError(Exception):
    """Options that argparse refuses."""


class Once(argparse.Action):
    """An option that is not said twice: the first would be lost without a word."""

    def __call__(
        self, parser: argparse.ArgumentParser, args: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        """Take the value; an error for a second one."""
        if getattr(args, f"_{self.dest}_given", False):
            parser.error(f"{option} is given twice, and takes one value")
        setattr(args, f"_{self.dest}_given", True)
        setattr(args, self.dest, values)


class StrictParser(argparse.ArgumentParser):
    """argparse, whose errors are one sentence, and whose options of one value are not said twice."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for name in (None, "store"):
            self.register("action", name, Once)

    def error(self, message: str) -> NoReturn:
        raise BadUsageError(f"{message[:1].upper()}{message[1:]}; see {self.prog} --help.")


class Options:
    """In a parser's place: the options that are added, by name in their order, as what argparse is told of each."""

    def __init__(self) -> None:
        self.known: dict[str, dict[str, Any]] = {}

    def add_argument(self, name: str, **kind: Any) -> None:
        """Note an option."""
        self.known[name.removeprefix("--")] = kind

    def add_argument_group(self, title: str) -> Options:
        """Options of a group are options."""
        return self

    def add_mutually_exclusive_group(self, required: bool = False) -> Options:
        """Which of them exclude each other only the parser says."""
        return self

    def set_defaults(self, **values: Any) -> None:
        """Only the parser needs what stands where an option is not given."""


def add_models(parser: argparse.ArgumentParser, against: Literal["no", "optional", "required"] = "no") -> None:
    """--model, --against if the probe compares, and how models are opened."""
    parser.add_argument("--model", required=True, help="shipped name, folder, hub id or .gguf file")
    if against != "no":
        parser.add_argument("--against", required=against == "required", help="a second model to compare with")
    parser.add_argument("--device", help="cpu or cuda (default: the best there is)")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that a checkpoint brings")


def add_prompts(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """--prompt, or a file of prompts."""
    prompts = parser.add_mutually_exclusive_group(required=required)
    prompts.add_argument("--prompt", action="append", help="a prompt; may be repeated")
    prompts.add_argument(
        "--prompts", type=Path, metavar="FILE", help='a text set: UTF-8, one prompt a line, or .jsonl with "prompt"'
    )


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Where the report goes."""
    parser.add_argument("--json", metavar="FILE", help="the report; - is stdout, and the default if no file is named")
    parser.add_argument("--csv", metavar="FILE", help="tidy rows; - is stdout")
    parser.add_argument("--png", metavar="FILE", help="the figure; needs Chrome or Chromium")
    parser.add_argument("--save", dest="session", metavar="NAME", help="keep the run in the session of this name")
    parser.add_argument("--note", metavar="MARKDOWN", help="with --save: the note of the session")
    parser.add_argument("--tag", metavar="TAG", action="append", help="with --save: a tag; may be repeated")
    add_store(parser)


def add_store(parser: argparse.ArgumentParser) -> None:
    """--store."""
    parser.add_argument("--store", metavar="URL", help="where sessions are kept (default: a file of this user)")


def names(args: argparse.Namespace) -> tuple[str, ...]:
    """The models that were asked for."""
    return tuple(name for name in (args.model, getattr(args, "against", None)) if name is not None)


def read_prompts(args: argparse.Namespace) -> tuple[tuple[str, ...], bool]:
    """(prompts, whether they are to be told one by one): a file is a text set, told in means."""
    if args.prompts is None:
        return tuple(args.prompt), True
    return read_texts(args.prompts), False


def read_texts(path: Path) -> tuple[str, ...]:
    """The texts of a file, as texts.texts_of reads them; DataError if it has none."""
    from engram_lab.lab.ask.texts import texts_of

    return texts_of(path.read_bytes(), str(path))


def flag(name: str, value: Any) -> str:
    """One option as a shell reads it back, whatever the value holds."""
    return f"--{name}={shlex.quote(str(value))}"


def model_flags(models: Sequence[str]) -> list[str]:
    """--model and --against."""
    return [flag("model", models[0]), *(flag("against", name) for name in models[1:])]


def prompt_flags(prompts: Sequence[str], detail: bool) -> list[str]:
    """--prompt for each, or the file that holds a text set."""
    from engram_lab.lab.ask.texts import file_of

    return [flag("prompt", prompt) for prompt in prompts] if detail else [flag("prompts", file_of(prompts)[0])]


def texts_file(prompts: Sequence[str], detail: bool) -> dict[str, str]:
    """The text set as the file that `prompt_flags` names; empty where the prompts are in the command itself."""
    from engram_lab.lab.ask.texts import file_of

    return {} if detail else dict([file_of(prompts)])
