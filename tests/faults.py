"""Seeded faults: each is put into a copy of the tree, and the tests that should notice are run. No test itself.

    python tests/faults.py --check                    every snippet is there, once
    python tests/faults.py --out before.jsonl --tree OLD_CHECKOUT
    python tests/faults.py --out after.jsonl          a run that was ended goes on where it stopped
    python tests/faults.py --out some.jsonl --only lens_rank,kv_part

A line of the output is a fault and what became of it: "caught" (a test failed), "missed" (all passed), or "broken" (the
tests fail without the fault too). The table is faults.toml; its files and tests are those of this tree, and in an older
checkout they are found by git's renames, or by `was` where the code has changed since.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).resolve().parents[1]
PARTS = ("models", "probes", "lab", "pages")
LIMIT = 900  # seconds for one selection: a fault may hang
# Imported once, before each run forks: of a short selection this is most of the time. nnsight, which gives every object
# a method, comes behind the rest.
HEAVY = (
    "pytest", "hypothesis", "anyio.pytest_plugin", "torch", "transformers", "peft", "pandas", "pyarrow", "sqlalchemy",
    "plotly.graph_objects", "safetensors.torch", "sklearn.feature_extraction", "streamlit.testing.v1", "alembic",
    "starlette", "uvicorn", "nnsight",
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """`old`, which stands once in `file`, becomes `new`; `what` is wrong then, and one of `tests` should notice."""

    name: str
    file: str
    old: str
    new: str
    what: str
    tests: str  # as pytest takes them
    was: Sequence[str] | None = None  # (file, old, new) in an older tree, where renames alone do not lead there


def table() -> tuple[Fault, ...]:
    """All faults of faults.toml."""
    stored = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    chosen = stored["selections"]
    return tuple(Fault(name, **own | {"tests": chosen[own["tests"]]}) for name, own in stored["faults"].items())


@functools.cache
def renames(tree: Path) -> tuple[tuple[str, str], ...]:
    """(path before, path after) of every rename between an older checkout and this one, the latest first."""

    def git(where: Path, *words: str) -> str:
        return subprocess.run(["git", "-C", str(where), *words], capture_output=True, text=True, check=True).stdout

    since = git(tree, "rev-parse", "HEAD").strip()
    shown = git(HERE, "log", "-M50", "--diff-filter=R", "--name-status", "--format=", f"{since}..HEAD")
    return tuple((before, after) for _, before, after in (line.split("\t") for line in shown.splitlines() if line))


def before(path: str, tree: Path) -> str:
    """The path in a checkout, perhaps an older one, of a path in this one."""
    if tree != HERE and not (tree / path).exists():
        for old, new in renames(tree):
            path = old if path == new else path
    return path


def place(fault: Fault, tree: Path) -> tuple[str, str, str]:
    """(file, old, new) of a fault in a checkout."""
    if fault.was is not None and tree != HERE and fault.old not in _text(tree / fault.file):
        return fault.was[0], fault.was[1], fault.was[2]
    return before(fault.file, tree), fault.old, fault.new


def selection(fault: Fault, tree: Path) -> list[str]:
    """The arguments for pytest in a checkout; without the tests that it does not have yet."""
    found = []
    for word in shlex.split(fault.tests):
        path, colons, name = word.partition("::")
        path = before(path, tree)
        if tree == HERE or not path.startswith("tests/") or (tree / path).exists():
            found.append(path + colons + name)
    return found


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def lost(tree: Path, faults: Sequence[Fault]) -> Iterator[str]:
    """What is wrong with the table, in a sentence each."""
    for fault in faults:
        file, old, new = place(fault, tree)
        times = _text(tree / file).count(old)
        if times != 1 or old == new:
            yield f"{fault.name}: its snippet is {times} times in {file}" if times != 1 else f"{fault.name}: no change"
        yield from (
            f"{fault.name}: there is no {word}"
            for word in selection(fault, tree)
            if word.startswith("tests/") and not (tree / word.partition("::")[0]).exists()
        )


@contextmanager
def copied(tree: Path, tests: Path | None) -> Iterator[Path]:
    """A copy of what git tracks, in a folder engram_lab, with the tests of another folder if one is given."""
    listed = ["git", "-C", str(tree), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\0")
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        copy = Path(folder).resolve() / "engram_lab"
        for name in filter(None, files):
            if (tree / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(tree / name, copy / name)
        if tests is not None:
            shutil.rmtree(copy / "tests")
            shutil.copytree(tests, copy / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        yield copy


def run(copy: Path, changed: str, arguments: list[str]) -> dict[str, Any]:
    """What pytest says of a selection in a copy: code, the first test that failed, seconds of processor time.

    `strangers` are modules of the lab that are not the copy's, `loaded` tells whether the changed one was used.
    """
    log, found = copy.parent / "output.txt", copy.parent / "found.json"
    found.unlink(missing_ok=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    child = os.fork()
    if not child:
        with log.open("w") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        _test(copy, changed, arguments, found)
    code, until = 0, time.monotonic() + LIMIT
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.1)
    code = os.waitstatus_to_exitcode(ended[1])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    told = json.loads(found.read_text()) if found.exists() else {"strangers": [], "loaded": None}
    by = [line for line in log.read_text(errors="replace").splitlines() if line.startswith(("FAILED", "ERROR"))]
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return told | {"code": code, "by": by[0][:300] if by else "", "seconds": round(spent, 1)}


def _test(copy: Path, changed: str, arguments: list[str], found: Path) -> NoReturn:
    """In the child: run the selection on the copy, and say which modules of the lab it used."""
    import pytest

    os.setsid()
    os.chdir(copy)
    paths = [str(copy.parent), str(copy)]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # for programs that the tests start
    options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "--tb=no", "-rfE"]
    if "slow:" in (copy / "pyproject.toml").read_text(encoding="utf-8"):  # as `make test`
        options += ["-m", "not slow and not browser"]
    code = 70
    try:
        code = int(pytest.main([*options, *arguments]))
        files = [
            Path(module.__file__).resolve()
            for name, module in list(sys.modules.items())
            if getattr(module, "__file__", None) and name.removeprefix("engram_lab.").partition(".")[0] in PARTS
        ]
        strangers = [str(file) for file in files if not file.is_relative_to(copy)]
        found.write_text(json.dumps({"strangers": strangers, "loaded": copy / changed in files}))
    finally:
        sys.stdout.flush()
        os._exit(code)


def main() -> int:
    """Run what is not in the output yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only look whether every snippet is there, once")
    parser.add_argument("--out", type=Path, help="JSON lines, one a fault; what is in it already is not run again")
    parser.add_argument("--tree", type=Path, default=HERE, help="the checkout that gets the faults (default: this one)")
    parser.add_argument("--tests-from", type=Path, metavar="FOLDER", help="tests to use in place of the checkout's")
    parser.add_argument("--only", help="names of faults, separated by commas")
    args = parser.parse_args()
    tree = args.tree.resolve()
    names = set(args.only.split(",")) if args.only else {fault.name for fault in table()}
    faults = [fault for fault in table() if fault.name in names]
    wrong = list(lost(tree, faults))
    print("\n".join([*wrong, f"{len(faults)} faults, {len(wrong)} of them not as they should be"]))
    if wrong or args.check or args.out is None:
        return int(bool(wrong))
    lines = args.out.read_text(encoding="utf-8").splitlines() if args.out.exists() else []
    known = [json.loads(line) for line in lines]
    done = {line["name"] for line in known if "name" in line}
    green = {tuple(line["green"]): line for line in known if "green" in line}

    # No bytecode: a file that is changed within its second, to one of the same length, would count as unchanged.
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for name in HEAVY:
        importlib.import_module(name)

    def note(line: dict[str, Any]) -> None:
        with args.out.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line, ensure_ascii=False) + "\n")

    with copied(tree, args.tests_from) as copy:
        for fault in faults:
            if fault.name in done:
                continue
            (file, old, new), chosen = place(fault, tree), selection(fault, tree)
            if tuple(chosen) not in green:
                green[tuple(chosen)] = {"green": chosen} | run(copy, file, chosen)
                note(green[tuple(chosen)])
            clean = green[tuple(chosen)]
            line = {"name": fault.name, "file": file, "what": fault.what, "tests": chosen}
            if clean["code"] or clean["strangers"]:
                line |= {"outcome": "broken", "by": clean["by"], "strangers": clean["strangers"], "seconds": 0}
            else:
                text = (copy / file).read_text(encoding="utf-8")
                (copy / file).write_text(text.replace(old, new), encoding="utf-8")
                told = run(copy, file, chosen)
                (copy / file).write_text(text, encoding="utf-8")
                line |= {"outcome": "caught" if told["code"] else "missed"} | told
            note(line)
            print(f"{line['outcome']:7} {fault.name}: {fault.what}  {line['by']}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
