"""`engram-lab train` and `ship` as a user runs them, on a text small enough for a minute."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from engram_lab.lab.command.main import main

SMALL = shlex.split(
    "--vocab-size 320 --n-layers 2 --d-model 32 --n-attention-heads 2 --d-mlp 48 --context 64 --short-context 32 "
    "--memory-layers 0 1 --rows-per-head 60 --hash-heads 2 --row-width 4 --batch-tokens 128 --points 2"
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(" ".join(f"w{i}" for i in rng.integers(0, 40, 30)) for _ in range(2400)))
    return path


def test_both_arms_are_trained_and_shipped(text: Path, tmp_path: Path) -> None:
    command = ["train", "--out", str(tmp_path / "run"), "--text", str(text), "--tokens", "512", *SMALL]
    assert main(command) == 0
    assert main([*command, "--twin"]) == 0
    run, to = str(tmp_path / "run"), tmp_path / "models"
    assert main(["ship", "--run", run, "--to", str(to), "--about-data", "words"]) == 0
    dense = json.loads((to / "dense-mini" / "card.json").read_text())
    for name in ("engram-mini", "engram-mini-early", "dense-mini"):
        card = json.loads((to / name / "card.json").read_text())
        training = json.loads((to / name / "training.json").read_text())
        model = AutoModelForCausalLM.from_pretrained(to / name)
        assert card["parameters"]["all"] == model.num_parameters()
        assert card["held_out_loss_nats"] == training["held_out_loss"]
        assert card["data"] == "words" and card["limits"]
        # Point 0 is recorded before a step; each carries the curve of the embedding and both blocks.
        assert all(len(point["mean_kl"]) == 3 for point in training["points"])
        if name != "dense-mini":
            rows = sum(model.config.engram_num_embeddings)
            assert card["parameters"]["table"] == rows * 4
            # 2 layers x 2 orders x 2 heads read one row of 4 each.
            projections = 2 * (2 * 16 * 32 + 3 * 32 + 4 * 32)
            assert card["parameters"]["active_per_token"] == dense["parameters"]["all"] + projections + 8 * 4


@pytest.mark.slow
def test_ctrl_c_leaves_a_checkpoint_that_goes_on(text: Path, tmp_path: Path) -> None:
    command = ["train", "--out", str(tmp_path / "run"), "--text", str(text), *SMALL]
    log = tmp_path / "run" / "engram" / "log.jsonl"
    with subprocess.Popen(
        [sys.executable, "-m", "engram_lab.lab", *command, "--tokens", "1280000"],
        cwd=Path(__file__).parents[3],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        deadline = time.monotonic() + 200
        while not (log.exists() and log.read_text().count("\n") >= 3) and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=100)
    assert process.returncode == 130, err.decode()
    assert out == b"" and b"Traceback" not in err and b"--resume" in err
    trainer = json.loads((tmp_path / "run" / "engram" / "checkpoint" / "trainer.json").read_text())
    assert trainer["step"] == log.read_text().count("\n") >= 3
    # Another number of tokens is another schedule: refused, not silently mixed.
    assert main([*command, "--tokens", "3840", "--resume"]) == 2


def test_bad_requests_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "latin.txt").write_bytes("Grüße\n\n".encode("latin-1"))
    for extra in (
        ["--text", str(tmp_path / "latin.txt")],
        ["--text", str(tmp_path / "missing.txt")],
        [],
        ["--text", str(tmp_path / "latin.txt"), "--context", "100"],
        ["--text", str(tmp_path / "latin.txt"), "--gate", "open"],
    ):
        assert main(["train", "--out", str(tmp_path / "run"), *extra]) == 2
        out, err = capsys.readouterr()
        assert out == "" and len([line for line in err.splitlines() if "training the" not in line]) == 1
    assert main(["ship", "--run", str(tmp_path), "--to", str(tmp_path / "x"), "--about-data", "x"]) == 2
    assert not (tmp_path / "x").exists()
