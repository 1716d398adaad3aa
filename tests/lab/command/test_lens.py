"""`engram-lab lens fit` as a user runs it: files, progress, Ctrl-C and --resume."""

from __future__ import annotations

import io
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from engram_lab.lab.command import lens as lens_command
from engram_lab.lab.command.main import main
from engram_lab.models import listing
from engram_lab.models.handle import open_model
from engram_lab.probes import lens as lens_probe
from engram_lab.probes import tuned_lens
from engram_lab.probes.lens import LensConfig


@pytest.fixture(autouse=True)
def lab(tmp_path: Path, shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny models as the shipped ones, and a cache of this test's own."""
    monkeypatch.setattr(listing, "SHIPPED", shipped)
    monkeypatch.setenv("ENGRAM_LAB_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(" ".join(f"w{i}" for i in rng.integers(0, 40, 12)) for _ in range(1200)))
    return path


def fit(*options: str) -> int:
    return main(["lens", "fit", "--model", "dense-mini", *options])


def test_the_lens_finds_what_was_fitted(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--text", str(text), "--steps", "3", "--tokens", "900") == 0
    out, err = capsys.readouterr()
    handle = open_model("dense-mini")
    path = tuned_lens.find(handle)
    assert path is not None and tmp_path / "cache" in path.parents, "what ships is not written over"
    made = tuned_lens.open_translators(handle)
    assert made.info.tokens == 900 and made.info.texts == ("text.txt",) and made.info.config.steps == 3
    assert "step 3 of 3" in err and f"Fitted on 900 tokens of text.txt, written to {path}" in err
    rows = [line.split() for line in out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["embed", "0", "1"]
    assert [float(row[2]) for row in rows] == pytest.approx(made.info.tuned_kl, abs=6e-4)
    line = next(line for line in text.read_text().split("\n\n") if made.seen((line,)))
    config = LensConfig(("dense-mini",), (line, "The river runs"), tuned=True)
    lens = lens_probe.run([handle], config).result.models[0]
    assert lens.tuned.fit == made.info and lens.tuned.prompts_in_fit == 1
    # In a folder that is asked for it does not disturb the model that lies there.
    folder = listing.SHIPPED / "dense-mini"
    assert fit("--text", str(text), "--steps", "1", "--tokens", "900", "--out", str(folder)) == 0
    try:
        assert open_model("dense-mini").fingerprint == handle.fingerprint
    finally:
        (folder / tuned_lens.FILE).unlink()


def test_a_users_model_gets_them_beside_its_weights(text: Path, shipped: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for file in (shipped / "dense-mini").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    handle = open_model(str(folder))
    assert lens_command.destination(handle, None) == folder / tuned_lens.FILE
    assert lens_command.destination(handle, tmp_path) == tmp_path / tuned_lens.FILE


class Pressed(io.StringIO):
    """A stderr at which somebody presses Ctrl-C when a line comes."""

    def __init__(self, start: str) -> None:
        super().__init__()
        self.start = start

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.start and text.startswith(self.start):
            self.start = ""
            signal.raise_signal(signal.SIGINT)
        return written


def test_ctrl_c_and_resume_give_the_weights_of_one_run(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["lens", "fit", "--model", "dense-mini", "--text", str(text), "--steps", "40", "--tokens", "3000"]
    out, pressed = ["--out", str(tmp_path / "out")], Pressed("step 7 ")
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(lens_command, "EVERY", 0.0)  # so that every step is told
        patch.setattr(sys, "stderr", pressed)
        assert main([*options, *out]) == 130
    told = pressed.getvalue()
    assert "go on with the same command and --resume" in told and "step 40 of" not in told, told
    assert signal.getsignal(signal.SIGINT) is before
    stopped = tmp_path / "out" / "tuned_lens.fit"
    assert stopped.exists() and not (tmp_path / "out" / tuned_lens.FILE).exists()
    assert main([*options, *out, "--resume"]) == 0
    told = capsys.readouterr().err
    assert "step 1 of" not in told and "step 40 of 40" in told and not stopped.exists(), told
    assert main([*options, "--out", str(tmp_path / "whole")]) == 0
    handle = open_model("dense-mini")
    one, two = (tuned_lens.open_translators(handle, tmp_path / name / tuned_lens.FILE) for name in ("out", "whole"))
    assert torch.equal(one.weight, two.weight) and torch.equal(one.bias, two.bias) and one.info == two.info
