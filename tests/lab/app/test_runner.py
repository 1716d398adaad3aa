"""What the pages run on, without a page: leases for the length of a script, results with their seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import streamlit as st

from engram_lab.lab.app import runner, settings
from engram_lab.lab.app.settings import Settings
from engram_lab.models import listing
from engram_lab.models.errors import LabError
from engram_lab.models.handle import Handle
from engram_lab.probes.lens import LensConfig


@pytest.fixture(autouse=True)
def one_place(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(listing, "SHIPPED", shipped)
    monkeypatch.setattr(settings, "_settings", Settings("cpu", None, 1))
    st.cache_resource.clear()
    yield
    st.cache_resource.clear()


def test_a_script_keeps_its_models_open() -> None:
    with runner.script():
        first = runner.handle("engram-mini")
        assert runner.handles(["engram-mini", "engram-mini"]) == [first, first]
        with pytest.raises(LabError, match="needs 2 models at once"):
            runner.handle("dense-mini")
        assert first.model is not None
    second = runner.handle("dense-mini")  # outside of a script it stays open until the place is needed
    with pytest.raises(LabError, match="closed"):
        _ = first.model
    with runner.script():
        assert runner.handle("dense-mini") is second
    with pytest.raises(ZeroDivisionError), runner.script():
        runner.handle("dense-mini")
        _ = 1 / 0
    runner.handle("engram-mini")


def test_with_one_place_nothing_is_compared_at_first() -> None:
    assert runner.default_pair(["dense-mini", "engram-mini"]) == ("engram-mini", runner.NOTHING)


def test_results_know_how_long_they_took() -> None:
    kept = runner.Results(2)
    reports = [object() for _ in range(3)]
    for n, report in enumerate(reports):
        kept.put(str(n), report, n + 0.5)  # type: ignore[arg-type]
    assert [kept.seconds(report) for report in reports] == [None, 1.5, 2.5]  # type: ignore[arg-type]
    assert kept.get("2") is reports[2]


def test_a_result_is_kept_for_one_number_format_and_device(pair: list[Handle]) -> None:
    """The same weights in bfloat16 give other numbers."""
    config = LensConfig((pair[0].name,), ("The river",))
    keys = {runner.request_key("lens", config, [pair[0]])}
    for name, value in (("dtype", "torch.bfloat16"), ("device", "cuda:0"), ("fingerprint", "other")):
        other = SimpleNamespace(
            fingerprint=pair[0].fingerprint, dtype=pair[0].dtype, device=pair[0].device, name=pair[0].name
        )
        setattr(other, name, value)
        keys.add(runner.request_key("lens", config, [other]))
    assert len(keys) == 4
