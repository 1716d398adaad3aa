"""The command line: what it writes where, its exit codes, and its one sentence for a bad request."""

from __future__ import annotations

import csv
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engram_lab.lab.command.console import ends_between_steps, progress
from engram_lab.lab.command.main import main
from engram_lab.lab.fronts import export
from engram_lab.models.handle import open_model
from engram_lab.probes.base import Report
from engram_lab.probes.lens import LensConfig, run
from tests.models import tiny

ROOT = Path(__file__).parents[3]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tiny checkpoints, one and two."""
    base = tmp_path_factory.mktemp("checkpoints")
    for seed, name in enumerate(("one", "two")):
        tiny.make("llama", seed=seed).save_pretrained(base / name)
        tiny.byte_level().save_pretrained(base / name)
    return base


def lens(*options: str | Path) -> int:
    return main(["probe", "lens", *map(str, options)])


def test_json_on_stdout_is_the_report_and_nothing_else(folder: Path, capsys: Capture) -> None:
    one, two = str(folder / "one"), str(folder / "two")
    options = ["--model", one, "--against", two, "--prompt", "The river", "--prompt", "naïve 東京"]
    assert lens(*options, "--target", " the", "--top-k", "3", "--seed", "4", "--bootstrap", "9", "--json", "-") == 0
    out, err = capsys.readouterr()
    assert err == ""
    config = LensConfig((one, two), ("The river", "naïve 東京"), " the", 3, 4, 9)
    expected = run([open_model(one), open_model(two)], config)
    assert out == expected.to_json() + "\n"
    assert Report.from_dict(json.loads(out)) == expected
    assert lens(*options, "--target", " the", "--top-k", "3", "--seed", "4", "--bootstrap", "9") == 0
    assert capsys.readouterr().out == out, "JSON on stdout is what it does without being asked"


def test_what_a_library_prints_does_not_reach_stdout(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engram_lab.models import handle

    def chatty(*args: Any, **options: Any) -> Any:
        print("Welcome to the library!")
        return open_model(*args, **options)

    monkeypatch.setattr(handle, "open_model", chatty)
    assert lens("--model", folder / "one", "--prompt", "a", "--json", "-") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["probe"] == "lens" and "Welcome" in err


def test_a_text_set_is_told_in_means(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    lines, objects = tmp_path / "set.txt", tmp_path / "set.jsonl"
    lines.write_text("The river\n\nthe sea\n", encoding="utf-8")
    objects.write_text('{"prompt": "The river"}\n{"prompt": "the sea", "answer": 1}\n', encoding="utf-8")
    found = []
    for file in (lines, objects):
        assert lens("--model", folder / "one", "--prompts", file, "--bootstrap", "10") == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    assert found[0]["config"]["prompts"] == ["The river", "the sea"] and not found[0]["config"]["detail"]
    model = found[0]["result"]["models"][0]
    assert model["top_ids"] is None and len(model["mean_kl_low"]) == len(model["layer_names"])


def test_files(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    table, report = tmp_path / "out.csv", tmp_path / "out.json"
    options = ["--model", folder / "one", "--against", folder / "two", "--prompt", "The river, a<b"]
    assert lens(*options, "--csv", table, "--json", report) == 0
    assert capsys.readouterr().out == ""
    stored = Report.from_dict(json.loads(report.read_text(encoding="utf-8")))
    rows = list(csv.DictReader(table.read_text(encoding="utf-8").splitlines()))
    models = stored.result.models
    assert len(rows) == sum(model.kl.size for model in models)
    assert {"model", "layer", "position", "token", "kl_nats", "entropy_nats"} <= rows[0].keys()
    last = rows[-1]
    assert last["model"] == str(folder / "two") and last["layer"] == "2" and float(last["kl_nats"]) == 0
    first = models[0]
    for row in rows[: first.kl.size]:
        layer, pos = first.layer_names.index(row["layer"]), int(row["position"])
        assert float(row["kl_nats"]) == pytest.approx(float(first.kl[layer, pos]))
    assert lens(*options, "--csv", table) == 0
    assert capsys.readouterr().out == "", "a file was named, so nothing is printed"


@pytest.mark.browser
@pytest.mark.skipif(export.no_png() is not None and "CI" not in os.environ, reason="no Chrome or Chromium")
def test_png(folder: Path, tmp_path: Path) -> None:
    picture = tmp_path / "curve.png"
    assert lens("--model", folder / "one", "--prompt", "The river", "--png", picture) == 0
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")


def refused(capsys: Capture, *arguments: str | Path) -> str:
    """The sentence of a request that has to be refused."""
    assert main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.endswith(".\n"), err
    return err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompt", ""], "empty"),
        (["--prompt", "x y " * 100], "at most 64"),
        (["--prompt", "\udce9"], "UTF-8"),
        (["--prompt", "a", "--target", "the river"], "not one token"),
        (["--prompt", "a", "--top-k", "0"], "top_k"),
        (["--prompt", "a", "--top-k", "many"], "--top-k"),
        (["--prompt", "a", "--device", "toaster"], "toaster"),
        (["--prompt", "a", "--dtype", "int3"], "int3"),
        (["--prompt", "a", "--against", "no/such/model"], "no/such/model"),
        (["--prompt", "a", "--prompts", "x"], "not allowed with"),
        (["--prompts", "no-such-file.txt"], "no-such-file.txt"),
        (["--prompt", "a", "--json", "no-such-folder/out.json"], "no-such-folder"),
        ([], "--prompt"),
    ],
)
def test_a_bad_request_is_one_sentence(folder: Path, capsys: Capture, options: list[str], words: str) -> None:
    assert words in refused(capsys, "probe", "lens", "--model", folder / "one", *options)


@pytest.mark.parametrize(
    ("name", "raw", "words"),
    [
        ("latin.txt", "naïve".encode("latin-1"), "not UTF-8"),
        ("blank.txt", b"\n \n", "no text"),
        ("list.jsonl", b"[1]\n", '"prompt"'),
        ("number.jsonl", b'{"prompt": 3}\n', "no text"),
    ],
)
def test_a_bad_text_set_is_one_sentence(
    folder: Path, tmp_path: Path, capsys: Capture, name: str, raw: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(raw)
    sentence = refused(capsys, "probe", "lens", "--model", folder / "one", "--prompts", tmp_path / name)
    assert words in sentence and name in sentence


@pytest.mark.parametrize("arguments", [[], ["probe"], ["nonsense"], ["models", "--nonsense"], ["probe", "lens"]])
def test_bad_usage_is_one_sentence(capsys: Capture, arguments: list[str]) -> None:
    assert "--help" in refused(capsys, *arguments)


def test_an_unknown_model_names_the_way_out(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "shipped models" in refused(capsys, "probe", "lens", "--model", "no-such-model", "--prompt", "a")


def test_an_interrupt_exits_with_130(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from engram_lab.models import handle

    def interrupted(*args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(handle, "open_model", interrupted)
    assert lens("--model", folder / "one", "--prompt", "a") == 130


def test_sigterm_ends_a_command_as_an_interrupt_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from engram_lab.models import handle

    ended = []

    def killed(*args: Any, **options: Any) -> Any:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        finally:
            ended.append(True)  # what is open is closed on the way out

    monkeypatch.setattr(handle, "open_model", killed)
    assert lens("--model", folder / "one", "--prompt", "a") == 143 and ended
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "a program that calls main() has its own handler back"


@pytest.mark.parametrize(("sign", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_work_in_steps_ends_between_them(sign: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from engram_lab.models import listing

    steps = []

    def work() -> Any:
        with ends_between_steps() as end_here:
            for _ in range(3):
                steps.append("begun")
                os.kill(os.getpid(), sign)
                steps.append("done")
                end_here()

    monkeypatch.setattr(listing, "list_models", work)
    assert main(["models"]) == code and steps == ["begun", "done"]


@pytest.mark.parametrize("fault", [ValueError("a bug"), OSError("a bug"), OSError(errno.EBADF, "a bug")])
def test_a_fault_of_ours_is_not_passed_off_as_a_bad_request(fault: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    from engram_lab.models import listing

    def broken() -> Any:
        raise fault

    monkeypatch.setattr(listing, "list_models", broken)
    with pytest.raises(type(fault), match="a bug"):
        main(["models"])


def test_a_full_disk_is_one_sentence(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    from engram_lab.models import listing

    def full() -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(listing, "list_models", full)
    assert refused(capsys, "models") == "Could not read or write: No space left on device.\n"


def test_models_are_listed(capsys: Capture) -> None:
    assert main(["models", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [model["name"] for model in listed]


def test_progress_shows_only_on_a_terminal(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    with progress() as show:
        assert show is None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress() as show:
        assert show is not None
        show(0.25, "one: prompt 1 of 4")
    err = capsys.readouterr().err
    assert " 25%  one: prompt 1 of 4" in err and err.endswith(" \r"), "the line is wiped in the end"


@pytest.mark.parametrize(
    ("options", "fronts", "words"),
    [
        (["--help"], [], "probe"),
        (["probe", "--help"], [], "kv"),
        (["probe", "lens", "--help"], ["lens"], "--tuned"),
        (["probe", "kv", "--help"], [], "erratum"),
    ],
)
def test_asking_for_help_does_not_wait_for_torch(options: list[str], fronts: list[str], words: str) -> None:
    program = (
        "import sys\nfrom engram_lab.lab.command.main import main\n"
        f"try: main({options})\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'transformers', 'streamlit', 'plotly', 'pandas', 'numpy'} & set(sys.modules)\n"
        "from engram_lab.lab.fronts import FRONTS\n"
        "files = {f'engram_lab.lab.fronts.{name.replace(chr(32), chr(95))}': name for name in FRONTS}\n"
        f"assert [files[name] for name in sys.modules if name in files] == {fronts}\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert words in done.stdout


@pytest.mark.slow
def test_as_a_program(folder: Path, tmp_path: Path) -> None:
    """In a terminal of another encoding, from another folder, with a prompt that is not ASCII."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "engram_lab.lab", "probe", "lens", "--model", str(folder / "one"), "--json", "-"]
    done = subprocess.run([*command, "--prompt", "東京"], cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == 0 and done.stderr == b"", done.stderr.decode()
    assert json.loads(done.stdout.decode("utf-8"))["config"]["prompts"] == ["東京"]
    # What is refused before torch is there: a file whose name this terminal cannot print.
    done = subprocess.run([*command, "--prompts", "東京.txt"], cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == 2 and done.stdout == b"" and done.stderr.count(b"\n") == 1, done.stderr.decode()
    assert b"\\u6771\\u4eac.txt" in done.stderr
