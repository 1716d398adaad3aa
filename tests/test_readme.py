"""What README.md and FINDINGS.md tell a reader to do, and where they point."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from engram_lab.lab.command.main import build_parser, main
from engram_lab.models import listing

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "FINDINGS.md", "CONTRIBUTING.md")
# A cluster, the hub, a server, and training for hours.
ELSEWHERE = ("--dask", "models get", "smollm2", "my_graft", "engram-lab app", "train", "ship", "corpus", "rows count")


def blocks(page: str, kind: str) -> list[str]:
    """What stands in the fenced blocks of a kind."""
    return re.findall(rf"^```{kind}\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)


def commands(page: str) -> list[list[str]]:
    """The words of each engram-lab command of the shell blocks, comments and continued lines resolved."""
    lines = "".join(blocks(page, "sh")).replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [line[1:] for line in words if line[:1] == ["engram-lab"]]


ALL = [(page, command) for page in PAGES for command in commands(page)]


def test_there_are_commands() -> None:
    assert len(ALL) > 20 and {page for page, _ in ALL} >= {"README.md", "FINDINGS.md"}


@pytest.mark.parametrize(("page", "command"), ALL, ids=[" ".join(command)[:60] for _, command in ALL])
def test_every_command_is_one_that_the_lab_takes(page: str, command: list[str]) -> None:
    assert callable(build_parser().parse_args(command).call)


@pytest.mark.parametrize("page", PAGES)
def test_every_link_inside_leads_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    headings = {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    for link in links:
        if link.startswith("#"):
            assert link[1:] in headings, f"{page} has no heading for {link}"
        elif not link.startswith("https://"):
            assert (ROOT / link.partition("#")[0]).exists(), f"{page} points to {link}, which is not there"
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert set(re.findall(r"^(?:\w+=\S+ )*make ([\w-]+)", "".join(blocks(page, "sh")), re.M)) <= targets


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_commands_of_the_readme_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that need neither network nor hours, on the shipped models, in a folder of the reader's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ENGRAM_LAB_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("ENGRAM_LAB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "my_texts.txt").write_text("The river runs past the mill.\nParis is the capital of France.\n")
    (sweep,) = blocks("README.md", "yaml")
    (tmp_path / "depth.yaml").write_text(sweep)
    done = 0
    for command in commands("README.md"):
        if not any(word in "engram-lab " + " ".join(command) for word in ELSEWHERE):
            assert main(command) == 0, command
            done += 1
    assert done >= 12 and (tmp_path / "depth.parquet").exists() and (tmp_path / "look.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize("n", range(len(blocks("README.md", "python"))))
def test_the_python_of_the_readme_runs(n: int) -> None:
    assert (listing.SHIPPED / "engram-mini").is_dir()
    program = blocks("README.md", "python")[n]
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
