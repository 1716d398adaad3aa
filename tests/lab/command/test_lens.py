"""`engram-lab lens fit` as a user runs it: files, progress, Ctrl-C and --resume."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from engram_lab.lab.command import lens as lens_command
from engram_lab.models import listing
from engram_lab.models.handle import open_model
from engram_lab.probes import logit_lens, tuned_lens
from engram_lab.probes.logit_lens import LensConfig

RUN = """
import argparse, sys
from pathlib import Path
from engram_lab.lab.command import lens as lens_command
from engram_lab.models import listing
listing.SHIPPED = Path(sys.argv.pop(1))
parser = argparse.ArgumentParser()
lens_command.add_arguments(parser)
try:
    sys.exit(lens_command.run(parser.parse_args()))
except KeyboardInterrupt:
    sys.exit(130)
"""


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
    parser = argparse.ArgumentParser()
    lens_command.add_arguments(parser)
    return lens_command.run(parser.parse_args(["--model", "dense-mini", *options]))


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
    lens = logit_lens.run([handle], config).result.models[0]
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


def test_ctrl_c_and_resume_give_the_weights_of_one_run(text: Path, shipped: Path, tmp_path: Path) -> None:
    options = ["--text", str(text), "--steps", "400", "--tokens", "3000", "--model", "dense-mini", "--threads", "1"]
    command = [sys.executable, "-c", RUN, str(shipped), *options]
    run = {"cwd": Path(__file__).parents[3], "env": {**os.environ, "OMP_NUM_THREADS": "1"}, "text": True}
    out = ["--out", str(tmp_path / "out")]
    with subprocess.Popen([*command, *out], stderr=subprocess.PIPE, **run) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("step 1 "):
                break
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == 130 and "go on with the same command and --resume" in rest, rest
    stopped = tmp_path / "out" / "tuned_lens.fit"
    assert stopped.exists() and not (tmp_path / "out" / tuned_lens.FILE).exists()
    again = subprocess.run([*command, *out, "--resume"], capture_output=True, timeout=200, **run)
    assert again.returncode == 0 and "step 1 of" not in again.stderr and not stopped.exists(), again.stderr
    whole = subprocess.run([*command, "--out", str(tmp_path / "whole")], capture_output=True, timeout=200, **run)
    assert whole.returncode == 0
    handle = open_model("dense-mini")
    one, two = (tuned_lens.open_translators(handle, tmp_path / name / tuned_lens.FILE) for name in ("out", "whole"))
    assert torch.equal(one.weight, two.weight) and torch.equal(one.bias, two.bias) and one.info == two.info
