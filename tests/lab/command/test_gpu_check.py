"""The GPU check: honest without a GPU, and its comparison sees what differs."""

import json

import numpy as np
import pytest
import torch

from engram_lab.lab.command import gpu_check
from engram_lab.lab.command.main import main


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu-check", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["available"] is False
    assert "CUDA" in err


def test_the_comparison_finds_the_largest_difference() -> None:
    a = {"x": np.array([0.0, 1.0, np.nan]), "y": np.zeros((2, 2))}
    b = {"x": np.array([0.25, 1.0, np.nan]), "y": np.full((2, 2), -0.5)}
    assert gpu_check.largest_difference(a, b) == 0.5
    assert gpu_check.largest_difference(a, {**b, "x": np.zeros(3)}) == float("inf")
    assert gpu_check.largest_difference(a, {**b, "y": np.zeros(3)}) == float("inf")


def test_the_whole_check_runs_on_the_shipped_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "REPEATS", 1)
    report = gpu_check.check("cpu")
    assert report["ok"]
    same = [line for line in report["runs"] if line["dtype"] == "float32" and "within" in line]
    # On one device the same request has the same bits.
    assert [line["largest_difference"] for line in same] == [0.0] * len(gpu_check.PROBES)
    rounded = [line for line in report["runs"] if line["dtype"] == "bfloat16"]
    assert all(0 < line["largest_difference"] <= gpu_check.BFLOAT16_BOUND for line in rounded)
    json.dumps(report, allow_nan=False)
