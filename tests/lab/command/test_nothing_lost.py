"""No command loses a user's file: what is there stays, or is replaced by something whole, and it is said before."""

from __future__ import annotations

import json
import os
import resource
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engram_lab.lab.command import ship
from engram_lab.lab.command.console import check_outputs, write
from engram_lab.lab.command.main import main
from engram_lab.models import data, listing
from engram_lab.models.errors import DataError
from engram_lab.models.files import check_target, whole
from engram_lab.models.train import TrainConfig
from tests.children import ROOT

TEXTS = "".join(f"Document {n} tells of the river, the mill and the sea.\n\n" for n in range(900))
PROBE = ["probe", "lens", "--model", "dense-mini", "--prompt", "The river runs"]


@pytest.fixture
def lab(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(listing, "SHIPPED", shipped)
    return shipped


def kinds(folder: Path) -> dict[str, tuple[Path, str]]:
    """Paths that no file can take, and what is said of each."""
    (folder / "taken").mkdir()
    (folder / "file").write_text("a file")
    return {
        "a folder": (folder / "taken", "is a folder: name a file"),
        "no folder": (folder / "nowhere" / "x.csv", "There is no folder"),
        "below a file": (folder / "file" / "x.csv", "There is no folder"),
        "a name too long": (folder / ("x" * 300), "cannot be written"),
        "a device without room for a name": (Path("/dev/full/x"), "There is no folder"),
    }


@pytest.mark.parametrize(
    "kind", ["a folder", "no folder", "below a file", "a name too long", "a device without room for a name"]
)
@pytest.mark.parametrize("option", ["--csv", "--json", "--png"])
def test_an_output_that_cannot_be_is_said_before_the_work(
    kind: str,
    option: str,
    tmp_path: Path,
    lab: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, sentence = kinds(tmp_path)[kind]
    monkeypatch.setattr("engram_lab.models.handle.open_model", lambda *_, **__: pytest.fail("the work began"))
    assert main([*PROBE, option, str(path)]) == 2
    err = capsys.readouterr().err
    assert sentence in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--json", "-", "--csv", "-"], "Two files are to be written to -"),
        (["--json", "a.json", "--csv", "./a.json"], "Two files are to be written to"),
        (["--note", "x"], "add --save NAME"),
        (["--tag", "x"], "add --save NAME"),
    ],
)
def test_outputs_that_would_mix_or_be_ignored(
    options: list[str], sentence: str, tmp_path: Path, lab: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main([*PROBE, *options]) == 2
    assert sentence in capsys.readouterr().err


def test_what_is_read_is_not_written_over(tmp_path: Path, lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "texts.txt"
    text.write_text("The river runs\nParis is old\n")
    (tmp_path / "link.txt").symlink_to(text)
    for name in ("texts.txt", "link.txt"):
        command = ["probe", "lens", "--model", "dense-mini", "--prompts", str(text), "--csv", str(tmp_path / name)]
        assert main(command) == 2
        assert "is read for this, and would be written over" in capsys.readouterr().err
    assert text.read_text() == "The river runs\nParis is old\n"


def limited(bytes_: int) -> Callable[[], None]:
    """A limit on the size of files, as `ulimit -f` sets it: a write beyond it fails as one on a full disk does."""

    def limit() -> None:
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_, bytes_))

    return limit


WRITE = """
import sys
from pathlib import Path
from engram_lab.lab.command.console import write
try:
    write(sys.argv[1], "x" * 100_000)
except OSError:
    sys.exit(7)
"""


def test_a_disk_that_fills_leaves_what_was_there(tmp_path: Path) -> None:
    good = tmp_path / "good.csv"
    good.write_text("what was there")
    done = subprocess.run([sys.executable, "-c", WRITE, str(good)], cwd=ROOT, preexec_fn=limited(4096))
    assert done.returncode == 7 and good.read_text() == "what was there"
    assert [path.name for path in tmp_path.iterdir()] == ["good.csv"], "nothing hidden is left"


def test_a_device_and_a_pipe_are_written_to_and_stay(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append(fifo.read_text()))
    reader.start()
    check_target(fifo)
    write(str(fifo), "through the pipe")
    reader.join(10)
    assert got == ["through the pipe"] and stat.S_ISFIFO(fifo.stat().st_mode)
    check_target(Path("/dev/null"))
    write("/dev/null", "x")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    if os.path.exists("/dev/full"):
        with pytest.raises(OSError, match="No space"):
            write("/dev/full", "x" * 10)


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write(str(tmp_path / "link"), "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"


def test_a_target_that_appears_meanwhile_is_replaced_whole(tmp_path: Path) -> None:
    target = tmp_path / "x"
    check_outputs(target)
    with whole(target) as fresh:
        target.write_text("somebody else's")
        fresh.write_text("ours, whole")
    assert target.read_text() == "ours, whole" and list(tmp_path.iterdir()) == [target]


# --- Training and shipping -------------------------------------------------------------------------------------------


def test_another_text_is_not_taken_for_the_prepared_one(tmp_path: Path) -> None:
    first, other = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text(TEXTS)
    other.write_text(TEXTS.replace("river", "road"))
    info = data.prepare(tmp_path / "data", [first], vocab_size=300)
    assert data.prepare(tmp_path / "data", [first], vocab_size=300) == info
    assert data.prepare(tmp_path / "data", [], vocab_size=300) == info, "no text: what is there"
    for texts, options in (([other], {}), ([first, other], {}), ([first], {"max_characters": 30})):
        with pytest.raises(DataError, match=r"was prepared from a\.txt, and other text"):
            data.prepare(tmp_path / "data", texts, **{"vocab_size": 300, **options})
    first.write_text(TEXTS + "One more document.\n\n")
    with pytest.raises(DataError, match="other text"):
        data.prepare(tmp_path / "data", [first], vocab_size=300)
    with pytest.raises(DataError, match=r"There is no text file .*gone\.txt"):
        data.prepare(tmp_path / "data", [tmp_path / "gone.txt"], vocab_size=300)


def test_two_that_prepare_one_folder_take_turns(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text(TEXTS)
    found: list[Any] = []
    said: list[str] = []

    def prepare() -> None:
        found.append(data.prepare(tmp_path / "data", [text], vocab_size=300, progress=said.append))

    threads = [threading.Thread(target=prepare) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found[0] == found[1] and said.count("training the tokenizer") == 1
    assert any("another command prepares" in line for line in said)


@pytest.mark.parametrize(
    "options",
    [
        {"n_layers": 4}, {"gate": "nope"}, {"memory_layers": (9, 12)}, {"memory_layers": (-1,)},
        {"memory_layers": (1, 1)}, {"memory_layers": ()}, {"tokens": 0}, {"tokens": -5}, {"d_model": 0},
        {"d_model": -128}, {"n_attention_heads": 0},
        {"n_attention_heads": 5}, {"d_mlp": 0}, {"context": 0}, {"context": -1}, {"short_context": 0},
        {"batch_tokens": 0},
        {"long_share": 1.5}, {"long_share": float("nan")}, {"long_share": -0.1}, {"muon_lr": float("nan")},
        {"adam_lr": float("inf")}, {"adam_lr": -1.0}, {"max_ngram": 1}, {"max_ngram": 99}, {"hash_heads": 0},
        {"row_width": 0}, {"rows_per_head": 0}, {"points": 0}, {"seed": -1}, {"seed": 2**64}, {"n_layers": 10**15},
        {"d_model": 12, "n_attention_heads": 4},
    ],
    ids=str,
)  # fmt: skip
def test_settings_with_which_nothing_can_be_trained(options: dict[str, Any]) -> None:
    with pytest.raises(DataError) as caught:
        TrainConfig(**options)
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


def test_a_run_is_not_begun_anew_over_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "a.txt"
    text.write_text(TEXTS)
    for name in ("final", "checkpoint"):
        folder = tmp_path / name / "dense" / name
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text("weights of days")
        assert main(["train", "--out", str(tmp_path / name), "--text", str(text), "--twin"]) == 2
        assert "is of a run that was made before: go on with it by --resume" in capsys.readouterr().err
        assert (folder / "model.safetensors").read_text() == "weights of days"


def run_folder(folder: Path) -> Path:
    settings = vars(TrainConfig(n_layers=3, memory_layers=(1,), d_model=64, tokens=61_440))
    config = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
    for arm, twin in (("engram", False), ("dense", True)):
        final = folder / arm / "final"
        final.mkdir(parents=True)
        (final / "model.safetensors").write_text(arm)
        training = {
            "config": config | {"twin": twin}, "steps": 10, "tokens": 61_440, "seconds": 1, "held_out_loss": 5.0,
            "held_out_tokens": 100, "parameters": {"all": 1000, "tables": 0},
            "points": [{"step": 10, "tokens": 61_440, "held_out_loss": 5.0}],
        }  # fmt: skip
        (final / "training.json").write_text(json.dumps(training))
    point = folder / "engram" / "points" / "step-000010"
    point.mkdir(parents=True)
    (point / "model.safetensors").write_text("early")
    (folder / "data").mkdir()
    info = {"documents": 9, "max_characters": 500, "vocab_size": 300}
    (folder / "data" / "data.json").write_text(json.dumps(info))
    return folder


def test_ship_spares_a_folder_of_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ship, "shortened", lambda training, point, run: training)
    run, to = run_folder(tmp_path / "run"), tmp_path / "models"
    (to / "dense-mini").mkdir(parents=True)
    (to / "dense-mini" / "thesis.txt").write_text("years of work")
    command = [
        "ship",
        "--run",
        str(run),
        "--to",
        str(to),
        "--about-data",
        "our letters",
        "--limit",
        "It knows letters.",
    ]
    assert main(command) == 2
    assert "holds something else than a shipped dense-mini" in capsys.readouterr().err
    assert (to / "dense-mini" / "thesis.txt").read_text() == "years of work" and not (to / "engram-mini").exists()
    (to / "dense-mini" / "thesis.txt").unlink()
    assert main(command) == 0 and main(command) == 0, "what was shipped is replaced"


def test_a_card_says_what_is_true_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ship, "shortened", lambda training, point, run: training)
    run, to = run_folder(tmp_path / "run"), tmp_path / "models"
    assert main(["ship", "--run", str(run), "--to", str(to), "--about-data", "our letters"]) == 0
    card = json.loads((to / "engram-mini" / "card.json").read_text())
    assert card["licence"] == "not stated" and "ten million" not in json.dumps(card)
    assert (
        card["limits"][0].startswith("It has read 61,440 tokens")
        and "256 tokens, for the last part of 512" in card["limits"][1]
    )
    for words in ("--n-layers 3", "--d-model 64", "--tokens 61440", "--memory-layers 1", "--max-characters 500"):
        assert words in card["command"], card["command"]
    assert "--twin" in json.loads((to / "dense-mini" / "card.json").read_text())["command"]
