"""The app on tiny models, one test after another in one process: models stay open, what was computed does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engram_lab.lab.app import reopened, runner
from tests import memory_lab


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is got, kept or computed yet. Open models know which folder they are from, and so may stay."""
    monkeypatch.setenv("ENGRAM_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ENGRAM_LAB_DATA", str(tmp_path / "data"))
    yield
    runner.results.clear()
    reopened.store.clear()


@pytest.fixture
def lab_of_twins(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An app whose shipped models are the tiny twins."""
    memory_lab.serve(shipped, monkeypatch)
    return shipped
