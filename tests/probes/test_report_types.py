"""mypy knows the fields of a report's config and result: a misspelt one is found before anything runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SNIPPET = """
from engram_lab.models.handle import Handle
from engram_lab.probes import lens
from engram_lab.probes.base import Report
from engram_lab.probes.lens import LensConfig, LensResult

def right(handle: Handle, config: LensConfig) -> float | None:
    report = lens.run([handle], config)
    return report.result.models[0].mean_loss if report.config.tuned else None

def wrong(report: Report[LensConfig, LensResult]) -> None:
    report.result.modles
    report.config.tunde
    report.protocol.sede

def any_probe(report: Report) -> None:
    report.result.whatever
"""


@pytest.mark.slow
def test_a_misspelt_field_of_a_report_fails_mypy(tmp_path: Path) -> None:
    if not (ROOT / ".venv/typed").exists():
        pytest.skip("the links by which mypy finds engram_lab are made by the Makefile")
    file = tmp_path / "snippet.py"
    file.write_text(SNIPPET, encoding="utf-8")
    mypy = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(file)]
    done = subprocess.run(mypy, cwd=ROOT, capture_output=True, text=True)
    errors = [line.partition("error: ")[2] for line in done.stdout.splitlines() if "snippet.py" in line]
    assert len(errors) == 3, done.stdout + done.stderr
    assert ['no attribute "modles"' in errors[0], 'no attribute "tunde"' in errors[1], '"sede"' in errors[2]] == [
        True
    ] * 3
