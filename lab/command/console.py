"""What all commands share at the terminal: a parser whose errors are one sentence, output, progress, and how they end.

It knows no command: main.py puts them together, and each command takes from here what it needs.
"""

from __future__ import annotations

import contextlib
import io
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from engram_lab.lab.ask.flags import BadUsageError as BadUsageError
from engram_lab.lab.ask.flags import StrictParser
from engram_lab.models.errors import DataError
from engram_lab.models.files import check_target, whole

Progress = Callable[[float, str], None]  # (the fraction that is done, what is being done)


class TerminatedError(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does."""


class Parser(StrictParser):
    """A StrictParser whose arguments `fill` adds once they are asked for.

    So a command whose name is not on the command line imports nothing.
    """

    def __init__(self, *args: Any, fill: Callable[[Parser], None] | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._fill = fill

    def parse_known_args(self, *args: Any, **options: Any) -> Any:
        """As argparse's own."""
        fill, self._fill = self._fill, None
        if fill is not None:
            fill(self)
        return super().parse_known_args(*args, **options)

    def group(self, title: str = "commands", metavar: str = "COMMAND") -> Any:
        """Commands below this one, of which one has to be named; its `add_parser` takes `fill` too."""
        return self.add_subparsers(title=title, required=True, metavar=metavar, parser_class=Parser)


def write(path: str, text: str) -> None:
    """To a file, or to stdout for "-", in UTF-8 as JSON has to be."""
    if path == "-":
        if sys.stdout is None:  # it was closed before this began
            raise DataError("stdout is closed: name a file to write to.")
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")
        sys.stdout.write(text)
    else:
        with whole(Path(path)) as fresh:
            fresh.write_text(text, encoding="utf-8")


def check_outputs(*paths: str | Path | None, reads: Sequence[str | Path | None] = ()) -> None:
    """DataError, before any work, for a file that cannot be written, that is read too, or for two that are one.

    "-" is stdout, which one of them may be.
    """
    named = [str(path) for path in paths if path is not None]
    inputs = [Path(path) for path in reads if path is not None]
    for n, path in enumerate(named):
        if path in named[:n] or (path != "-" and any(_same(path, other) for other in named[:n])):
            raise DataError(f"Two files are to be written to {path}: name another for one of them.")
        if path != "-":
            check_target(Path(path), *inputs)


def _same(a: str, b: str) -> bool:
    return b != "-" and Path(a).resolve() == Path(b).resolve()


def set_threads(number: int | None) -> None:
    """That many CPU threads for torch (None: as it is); DataError for fewer than one."""
    if number is None:
        return
    if not 1 <= number <= 4096:
        raise DataError(f"--threads is {number}; it must be from 1 to 4096.")
    import torch

    torch.set_num_threads(number)


@contextlib.contextmanager
def progress() -> Iterator[Progress | None]:
    """A line on stderr that is rewritten, and wiped in the end; None where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(total=1, bar_format="{percentage:3.0f}%  {desc}", leave=False, file=sys.stderr, mininterval=0) as bar:

        def show(fraction: float, doing: str) -> None:
            bar.n = fraction
            bar.set_description_str(doing)

        yield show


@contextlib.contextmanager
def ends_on_sigterm() -> Iterator[None]:
    """SIGTERM raises TerminatedError while this lasts, unless this process was started to ignore it."""
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def end(*_: Any) -> NoReturn:
        raise TerminatedError

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def ends_between_steps() -> Iterator[Callable[[], None]]:
    """Ctrl-C and SIGTERM wait until the work calls what this yields, which then raises as they do elsewhere."""
    asked: list[type[KeyboardInterrupt]] = []
    errors: dict[int, type[KeyboardInterrupt]] = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: TerminatedError}

    def check() -> None:
        if asked:
            raise asked[0]

    before = {sign: signal.signal(sign, lambda sign, _: asked.append(errors[sign])) for sign in errors}
    try:
        yield check
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)
