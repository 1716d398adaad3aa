"""The programs that tests start: where, with what environment, and which signals they hear."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
# One thread each: so do the tests themselves run, and sums of floats then have the same order on both sides.
QUIET = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def hear_signals() -> None:
    """Let every child of this process hear Ctrl-C, also where a shell started the tests with SIGINT ignored.

    A shell does that to background jobs, and what is ignored stays so in all children. A handler does not: after an
    exec a signal that was handled has its default again. So the tests themselves go on, as they were told to.
    """
    for which in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(which) is signal.SIG_IGN:
            signal.signal(which, _unheard)


def _unheard(which: int, frame: FrameType | None) -> None:
    pass


def start(command: list[str], **options: Any) -> subprocess.Popen[str]:
    """A program in the root of the checkout, one thread, no network; text from its stdout."""
    environment = {**os.environ, **QUIET, **options.pop("env", {})}
    given = {"cwd": ROOT, "stdout": subprocess.PIPE, "text": True, "encoding": "utf-8"} | options
    return subprocess.Popen(command, env=environment, **given)


def end(process: subprocess.Popen[str], patience: float = 30) -> int:
    """Ask a program to end, and make it after `patience` seconds; its exit status."""
    process.terminate()
    try:
        return process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


@contextmanager
def serving(*options: str, **environment: str) -> Iterator[tuple[str, int]]:
    """(host:port, process id) of a lab of its own, by its own command, once it says where it runs."""
    command = [sys.executable, "-m", "engram_lab.lab", "app", "--port", "0", *options]
    server = start(command, env=environment)
    try:
        assert server.stdout is not None
        line = next((line for line in server.stdout if "http://" in line), "")
        assert line, f"the app ended with {server.wait()}"
        yield line.split()[4].partition("//")[2], server.pid
    finally:
        end(server)
