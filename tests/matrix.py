"""The tests of `make test` in one surrounding after the other, and a table of how they went.

    .venv/bin/python tests/matrix.py                          # all of them: an hour or so on two cores
    .venv/bin/python tests/matrix.py --only "TZ=Pacific/Auckland" "one core" -- tests/models -k rotary

Surroundings of one core run side by side, each on a core of its own, in the environment of this Python and in this
checkout (the one with a space in its path: a clone of its last commit). What is behind `--` goes to pytest.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import venv
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
QUICK = "not slow and not browser"  # as `make test` has it
BUSY = "while True: pass"
# A shell without job control starts its background jobs with SIGINT ignored, and so are then all their children.
BACKGROUND = 'nohup "$@" </dev/null & wait $!'


@dataclass(frozen=True)
class Surrounding:
    name: str
    cores: int = 1
    environment: dict[str, str] = field(default_factory=dict)
    background: bool = False
    busy: bool = False
    space: bool = False


ALL = (
    Surrounding("two cores", 2),
    Surrounding("two cores, both busy", 2, busy=True),
    Surrounding("one core"),
    Surrounding("ATEN_CPU_CAPABILITY=default", environment={"ATEN_CPU_CAPABILITY": "default"}),
    Surrounding("ATEN_CPU_CAPABILITY=avx2", environment={"ATEN_CPU_CAPABILITY": "avx2"}),
    Surrounding("LC_ALL=C", environment={"LC_ALL": "C"}),
    Surrounding("TZ=Pacific/Auckland", environment={"TZ": "Pacific/Auckland"}),
    Surrounding("a space in the path", space=True),
    Surrounding("nohup, SIGINT ignored", background=True),
)


@dataclass(frozen=True)
class Outcome:
    passed: int
    failed: int
    skipped: int
    wall: float  # seconds
    processor: float  # seconds of it and of all its children
    code: int  # of pytest


def clone(folder: Path) -> Path:
    """The last commit in a folder with a space, with an environment that takes all but the lab from this one."""
    there = folder / "with space"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(there)], check=True)
    venv.create(there / ".venv", symlinks=True)
    (site_packages,) = (there / ".venv").glob("lib/python*/site-packages")
    # Last on the path, and .pth files in it, such as this checkout's editable install, are not obeyed.
    (site_packages / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", str(there / ".venv" / "bin" / "python"), "install"]
    subprocess.run([*pip, "--no-deps", "--no-index", "--no-build-isolation", "--editable", str(there)], check=True)
    return there


def run(this: Surrounding, cores: set[int], given: list[str], logs: Path, root: Path) -> Outcome:
    """Run pytest there, its output into a file named after the surrounding."""
    name = "".join(letter if letter.isalnum() else "-" for letter in this.name)
    python = root / ".venv" / "bin" / "python" if this.space else sys.executable
    counts = logs / f"{name}.xml"
    command = [str(python), "-m", "pytest", "-m", QUICK, "-p", "no:cacheprovider", f"--junitxml={counts}",
               "--numprocesses", str(this.cores), "--dist", "worksteal", *given]  # fmt: skip
    if this.background:
        command = ["sh", "-c", BACKGROUND, "sh", *command]
    command = ["taskset", "--cpu-list", ",".join(map(str, sorted(cores))), *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **this.environment}
    others = [subprocess.Popen(["taskset", "--cpu-list", str(core), sys.executable, "-c", BUSY])
              for core in cores if this.busy]  # fmt: skip
    began = time.monotonic()
    try:
        with (logs / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(command, cwd=root, env=environment, stdout=log, stderr=subprocess.STDOUT)
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)  # or Popen would wait for it again
    finally:
        for other in others:
            other.kill()
            other.wait()
    wall = time.monotonic() - began
    suites = ElementTree.parse(counts).getroot().iter("testsuite") if counts.exists() else ()
    tests, failed, errors, skipped = (
        sum(values)
        for values in zip(
            (0, 0, 0, 0),
            *(tuple(int(s.get(k, 0)) for k in ("tests", "failures", "errors", "skipped")) for s in suites),
            strict=True,
        )
    )
    failed += errors
    return Outcome(tests - failed - skipped, failed, skipped, wall, used.ru_utime + used.ru_stime, process.returncode)


def main() -> int:
    """Run what was asked for and print the table; 1 if anything failed."""
    # The surroundings differ in what they say, not in how this was started; and this can be stopped.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    given = sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [this.name for this in ALL]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help="; ".join(names))
    parser.add_argument("--logs", type=Path, help="folder for a log of each (default: a new one)")
    args = parser.parse_args(sys.argv[1 : len(sys.argv) - len(given) - ("--" in sys.argv)])
    logs = (args.logs or Path(tempfile.mkdtemp(prefix="engram-lab-matrix-"))).resolve()
    logs.mkdir(parents=True, exist_ok=True)
    cores = sorted(os.sched_getaffinity(0))[:2]
    chosen = [this for this in ALL if this.name in args.only]
    scratch = Path(tempfile.mkdtemp(prefix="engram-lab-clone-"))
    rows: dict[str, Outcome] = {}

    def do(this: Surrounding, on: set[int]) -> None:
        rows[this.name] = found = run(this, on, given, logs, clone(scratch) if this.space else ROOT)
        print(f"{this.name}: {found.passed} passed, {found.failed} failed in {found.wall:.0f} s", file=sys.stderr)

    try:
        for this in chosen:
            if this.cores == 2:
                do(this, set(cores))
        waiting: queue.SimpleQueue[Surrounding] = queue.SimpleQueue()
        for this in chosen:
            if this.cores == 1:
                waiting.put(this)

        def drain(core: int) -> None:
            while True:
                try:
                    this = waiting.get_nowait()
                except queue.Empty:
                    return
                do(this, {core})

        threads = [threading.Thread(target=drain, args=(core,)) for core in cores]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print("| surrounding | passed | failed | skipped | wall, s | processor, s |\n| --- " + "| ---: " * 5 + "|")
    for this in chosen:
        o = rows.get(this.name, Outcome(0, 1, 0, 0.0, 0.0, 1))
        ended = "" if o.code == 0 else f" (exit {o.code})"
        print(f"| {this.name} | {o.passed} | {o.failed}{ended} | {o.skipped} | {o.wall:.0f} | {o.processor:.0f} |")
    print(f"Logs: {logs}")
    return int(any(this.name not in rows or rows[this.name].code for this in chosen))


if __name__ == "__main__":
    sys.exit(main())
