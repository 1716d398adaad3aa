"""The GPU check: honest without a GPU, and its comparison sees what differs."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engram_lab.lab.ask import brief
from engram_lab.lab.command import gpu_check
from engram_lab.lab.command.main import main
from engram_lab.lab.fronts import FRONTS
from engram_lab.models import listing
from engram_lab.probes.base import Report


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu-check", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["available"] is False
    assert "CUDA" in err


def test_rounding_is_judged_by_nats_and_probabilities(report: Report) -> None:
    first = report.result.models[0]

    def moved(**fields: np.ndarray) -> Report:
        models = (dataclasses.replace(first, **fields), *report.result.models[1:])
        return dataclasses.replace(report, result=dataclasses.replace(report.result, models=models))

    assert gpu_check.rounded(report, report) == (0.0, [])
    gap, wrong = gpu_check.rounded(report, moved(kl=first.kl + np.float32(0.2), settle_depth=first.settle_depth + 1))
    assert gap == pytest.approx(0.2, abs=1e-6) and wrong == []  # another depth is no nats
    gap, wrong = gpu_check.rounded(report, moved(entropy=first.entropy - np.float32(0.3 * 9)))
    assert gap == pytest.approx(2.7, abs=1e-6) and wrong[0].startswith("models[0].entropy: by up to 2.7 nats")


def test_every_probe_is_checked() -> None:
    assert set(gpu_check.requests("a", "b")) == set(FRONTS)


@pytest.mark.usefixtures("at_once")
def test_two_probes_on_tiny_models(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "SHIPPED", shipped)
    few = {name: gpu_check.requests("engram-mini", "dense-mini")[name] for name in ("gates", "cka")}
    few["gates"] = dataclasses.replace(few["gates"], prompts=("The river runs",))
    monkeypatch.setattr(gpu_check, "requests", lambda *names: few)
    monkeypatch.setattr(brief, "PROMPT", "The river runs")
    alike(gpu_check.check("cpu"), len(few))


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
def test_the_whole_check_runs_on_the_shipped_models() -> None:
    report = gpu_check.check("cpu")
    alike(report, len(FRONTS))
    assert report["ok"]
    gaps = {line["probe"]: line["largest_difference"] for line in report["runs"] if line["dtype"] == "bfloat16"}
    assert all(gap > 0 for probe, gap in gaps.items() if probe not in ("rows", "cka", "kv set")), "it is rounded"


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured twice."""
    monkeypatch.setattr(gpu_check, "REPEATS", 1)


def alike(report: dict[str, Any], probes: int) -> None:
    """On one device the same request has the same bits."""
    same = [line for line in report["runs"] if line["dtype"] == "float32" and "within" in line]
    assert [(line["largest_difference"], line["wrong"]) for line in same] == [(0.0, [])] * probes
    assert sum(line["dtype"] == "bfloat16" for line in report["runs"]) == probes
    json.dumps(report, allow_nan=False)
