"""The probe that CONTRIBUTING.md adds in four places works as it stands there."""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.children import QUIET, ROOT

FOLDERS = ("models", "probes", "lab", "pages")
PAGE = """
from tests.pages.driving import clean, open_page
at = clean(open_page("norms", model="engram-mini", against="dense-mini", prompt="The river runs"))
assert "--prompt='The river runs'" in at.code[0].value, at.code[0].value
assert any("layer by layer?" in text.value for text in open_page("start").markdown)
"""


def places() -> dict[str, str]:
    """File -> text of the fenced blocks that name one."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^```python (\S+)\n(.*?)^```", text, re.M | re.S))


def test_there_are_four_places() -> None:
    assert [Path(file).parts[0] for file in places()] == ["probes", "lab", "pages", "tests"]


def test_the_blocks_are_written_as_the_rest_is() -> None:
    for file, text in places().items():
        given = [sys.executable, "-m", "ruff", "check", "--stdin-filename", str(ROOT / file), "-"]
        for command in (given, [*given[:3], "format", "--check", *given[4:]]):
            done = subprocess.run(command, input=text, cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, f"{file}: {done.stdout}{done.stderr}"


@pytest.mark.slow
def test_the_probe_runs_in_a_copy_of_the_lab(tmp_path: Path) -> None:
    copy, site = tmp_path / "copy", tmp_path / "site" / "engram_lab"
    site.mkdir(parents=True)
    for name in (*FOLDERS, "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    (copy / "assets").symlink_to(ROOT / "assets")
    for name in (*FOLDERS, "assets"):
        (site / name).symlink_to(copy / name)
    for file, text in places().items():
        (copy / file).write_text(text, encoding="utf-8")
    path = os.pathsep.join([str(site.parent), str(copy)])
    environment = {**os.environ, **QUIET, "PYTHONPATH": path, "ENGRAM_LAB_DATA": str(tmp_path / "data")}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=copy, env=environment, capture_output=True, text=True, encoding="utf-8"
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout

    asked = ("-m", "engram_lab.lab", "probe", "norms")
    assert "how long the residual stream is" in run(*asked[:3], "--help")
    rows = list(csv.DictReader(io.StringIO(run(*asked, "--model=dense-mini", "--prompt=The river runs", "--csv=-"))))
    assert len({row["layer"] for row in rows}) == 11 and all(float(row["norm"]) > 0 for row in rows)
    run("-c", PAGE)
    walks = ("tests/probes/test_norms.py", "tests/probes/test_running.py", "tests/probes/test_bounds.py")
    found = run("-m", "pytest", "-p", "no:cacheprovider", "-k", "norms", *walks)
    passed = re.search(r"(\d+) passed", found)
    assert passed and int(passed[1]) == 3, found[-500:]
