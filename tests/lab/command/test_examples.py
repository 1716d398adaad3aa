"""The example sessions that ship: what the command makes of them, and that they come out the same again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engram_lab.lab.command import main as cli
from engram_lab.lab.command.examples import EXAMPLES, SESSIONS, Example
from engram_lab.lab.fronts import front
from engram_lab.lab.sessions.archive import Archive, read_archive
from engram_lab.lab.sessions.replay import Replayer


@pytest.fixture(scope="module", params=EXAMPLES, ids=lambda example: example.file)
def shipped_example(request: pytest.FixtureRequest) -> tuple[Example, Archive]:
    return request.param, read_archive(SESSIONS / f"{request.param.file}.zip")


def test_the_files_hold_what_the_command_makes(shipped_example: tuple[Example, Archive]) -> None:
    example, archive = shipped_example
    assert (archive.name, archive.tags) == (example.name, example.tags)
    assert archive.note == (SESSIONS / f"{example.file}.md").read_text(encoding="utf-8")
    assert "What this does not say" in archive.note
    assert [(run.report.probe, run.report.config) for run in archive.runs] == example.requests()
    assert (SESSIONS / f"{example.file}.zip").stat().st_size < 1_000_000
    for run in archive.runs:
        assert run.environment is not None and run.environment["threads"] == "1"
        assert {(model.device, model.dtype) for model in run.report.protocol.models} == {("cpu", "float32")}
        settled = getattr(front(run.report.probe), "settled", lambda report: report.config)
        assert run.view == front(run.report.probe).ASK.view(settled(run.report)).to_dict()


@pytest.mark.parametrize("all_runs", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_example_comes_out_the_same_again(all_runs: bool, shipped_example: tuple[Example, Archive]) -> None:
    """In the short form the run of each that took the least time."""
    _, archive = shipped_example
    numbers = range(1, len(archive.runs) + 1)
    chosen = numbers if all_runs else [min(numbers, key=lambda n: archive.runs[n - 1].seconds or 0.0)]
    with Replayer(archive.runs, chosen) as replayer:
        found = [replayer.run(n) for n in replayer.chosen]
    for own in found:
        assert not own.failed, own
        # To the bit where processor, threads and versions are as they were; of the system the numbers know nothing.
        # Another processor, or another ATEN_CPU_CAPABILITY, sums in another order. `failed` then goes by TOLERANCE of
        # lab/sessions/compare.py, 1e-4 of a figure: float32 roundings over 8 layers, far below any effect shown.
        if all(cause.startswith(("system ", "machine ")) for cause in own.causes):
            assert own.verdict == "identical", own


def test_all_that_ships_is_listed() -> None:
    assert {file.stem for file in SESSIONS.glob("*.zip")} == {example.file for example in EXAMPLES}
    assert {file.stem for file in SESSIONS.glob("*.md")} == {"README", *(example.file for example in EXAMPLES)}
    listed = re.findall(r"^\| `(.+)\.zip`", (SESSIONS / "README.md").read_text(encoding="utf-8"), re.M)
    assert listed == [example.file for example in EXAMPLES]


def test_the_command_needs_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["examples", "--out", str(tmp_path / "none")]) == 2
    assert "There is no folder" in capsys.readouterr().err
