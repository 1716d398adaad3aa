"""Programs of the tests hear Ctrl-C, also below a shell that ignores it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.children import ROOT

CHILD = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
PARENT = f"import subprocess, sys; {{}}; subprocess.run([sys.executable, '-c', {CHILD!r}])"


@pytest.mark.parametrize(
    ("told", "hears"), [("from tests.children import hear_signals; hear_signals()", "True"), ("pass", "False")]
)
def test_a_child_hears_what_the_shell_ignores(told: str, hears: str) -> None:
    done = subprocess.run(
        ["sh", "-c", 'trap "" INT; "$0" -c "$1"', sys.executable, PARENT.format(told)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == hears
