"""Odd values on the command line and in the files that it reads: one sentence and exit 2, never a traceback."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from engram_lab.lab.command.main import main
from engram_lab.lab.draw import labels
from engram_lab.lab.fronts.export import csv_text
from engram_lab.lab.sweep import grid
from engram_lab.models import listing
from engram_lab.models.errors import DataError, LabError
from engram_lab.probes.base import Report
from tests.children import QUIET, ROOT
from tests.full import FULL

LENS = ["probe", "lens", "--model", "dense-mini", "--prompt", "The river"]


@pytest.fixture(autouse=True)
def lab(shipped: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(listing, "SHIPPED", shipped)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ENGRAM_LAB_DATA", str(tmp_path / "data"))
    return shipped


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ([*LENS, "--seed", str(2**70)], "The seed must be below 2**63"),
        ([*LENS, "--bootstrap", "100000000"], "at most 1,000,000"),
        (["probe", "cka", "--model", "dense-mini", "--against", "engram-mini", "--seed", str(-(2**70))], "0 or more"),
        ([*LENS, "--model", "engram-mini"], "--model is given twice"),
        ([*LENS, "--seed", "1", "--seed", "2"], "--seed is given twice"),
        (["facts", "write", "--model", "engram-mini", "--fact", "a => b", "--layer", "1", "--layer", "2", "--out", "x"],
         "--layer is given twice"),
        (["lens", "fit", "--model", "dense-mini", "--text", "t.txt", "--threads", "-1"], "--threads is -1"),
        (["lens", "fit", "--model", "dense-mini", "--text", "t.txt", "--threads", "99999999"], "--threads is 99999999"),
        (["probe", "facts", "check", "--model", "engram-mini", "--facts", "f.json"], "save it as .jsonl"),
        (["probe", "rows", "--model", "engram-mini", "--prompt", "x", "--text", "half.jsonl"], "half a char|text 1"),
        (["probe", "kv", "set", "--model", "dense-mini", "--scenarios", "deep.jsonl"], "scenario 1"),
        (["probe", "sensitivity", "--model", "engram-mini", "--set", "a=deep.jsonl"], "item 1"),
        (["probe", "cka", "--model", "dense-mini", "--against", "engram-mini", "--entities", "deep.jsonl"], "Line 1"),
        (["probe", "cka", "--model", "dense-mini", "--against", "engram-mini", "--entities", "inf.jsonl"], "Line 1"),
    ],
)  # fmt: skip
def test_odd_values_are_one_sentence(
    command: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.txt").write_text("The river runs.\n")
    (tmp_path / "f.json").write_text('[{"trigger": "a", "answer": "b"}]')
    (tmp_path / "half.jsonl").write_text('{"prompt": "\\ud800"}\n')
    (tmp_path / "deep.jsonl").write_text('{"text": ' + "[" * 50_000 + "\n")
    (tmp_path / "inf.jsonl").write_text('{"text": "Paris", "entities": [[0, 1e999]]}\n')
    assert main(command) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "Traceback" not in err
    assert any(part in err for part in sentence.split("|")), err


@pytest.mark.parametrize(
    ("yaml", "sentence"),
    [
        ("probe: lens\nmodels: []\n", "empty list models"),
        ("probe: lens\nmodels: [a]\nprompts: []\n", "empty list prompts"),
        ("probe: lens\noptions: {model: m, prompt: x, seed: 010}\n", "010 is read as another number"),
        ("probe: lens\noptions: {model: m, prompt: x, seed: 1:30}\n", "1:30 is read as another number"),
        ("probe: lens\noptions: {model: m, prompt: x, seed: 0x10}\n", "0x10 is read as another number"),
        ("base: &b {seed: 1}\nprobe: lens\noptions:\n  <<: *b\n  model: m\n", "merge keys"),
        ("probe: lens\noptions: {model: m, prompt: [2020-01-01, x]}\n", "which YAML does not read as text"),
        ("probe: lens\noptions: " + "[" * 5000 + "\n", "no YAML"),
    ],
)
def test_odd_sweeps_are_one_sentence(yaml: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(yaml)
    with pytest.raises((LabError, DataError)) as caught:
        grid.read(tmp_path / "s.yaml")
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def program(*arguments: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    given = {"cwd": ROOT, "capture_output": True, "env": {**os.environ, **QUIET}} | options
    return subprocess.run([sys.executable, "-m", "engram_lab.lab", *arguments], **given)  # type: ignore[call-overload]


@pytest.mark.slow
def test_outputs_that_cannot_take_every_letter_or_are_gone(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path / 'store.db'}"
    name = "caf\u00e9 \u6771\u4eac \U0001f30a"
    kept = ("probe", "lens", "--model", "dense-mini", "--prompt", "a b", "--save", name, "--store", store)
    assert program(*kept).returncode == 0
    for encoding in ("ascii", "cp1252", "latin-1"):
        environment = {**os.environ, **QUIET, "PYTHONIOENCODING": encoding}
        for command in (("list",), ("show", name)):
            done = program("session", *command, "--store", store, env=environment)
            assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr
    closed = f'exec "{sys.executable}" -m engram_lab.lab session list --store "{store}" >&-'
    done = subprocess.run(["sh", "-c", closed], cwd=ROOT, capture_output=True, env={**os.environ, **QUIET})
    assert b"Traceback" not in done.stderr and done.returncode in (0, 2)
    piped = f'"{sys.executable}" -m engram_lab.lab session list --store "{store}" | true; exit 0'
    done = subprocess.run(["sh", "-c", piped], cwd=ROOT, capture_output=True, env={**os.environ, **QUIET})
    assert b"Traceback" not in done.stderr


def test_cells_that_a_spreadsheet_would_run(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    from engram_lab.lab.fronts import lens

    values = ["=1+1", "+1", "-x", "@a", "\tx", "plain", "a=b"]
    monkeypatch.setattr(lens, "rows", lambda _: iter([{"text": value, "number": -1.5} for value in values]))
    lines = csv_text(report).splitlines()[1:]
    assert [line.split(",")[0] for line in lines] == ["'=1+1", "'+1", "'-x", "'@a", "'\tx", "plain", "a=b"]
    assert all(line.endswith(",-1.5") for line in lines), "numbers stay numbers"


@pytest.mark.parametrize("char", "\u3164\u2800\u115f\uffa0\u202e\u200b\u034f")
def test_what_is_drawn_as_nothing_is_named(char: str) -> None:
    assert labels.label(char.encode()) == f"⟨U+{ord(char):04X}⟩"
    assert labels.spell(labels.label(f"a{char}b".encode())) == f"a{char}b".encode()


# --- Fuzz ------------------------------------------------------------------------------------------------------------

COMMANDS = (
    ["probe", "lens"], ["probe", "cka"], ["probe", "gates"], ["probe", "rows"], ["probe", "sensitivity"],
    ["probe", "kv", "swap"], ["probe", "kv", "map"], ["probe", "kv", "compose"], ["probe", "facts", "check"],
    ["facts", "write"], ["facts", "list"], ["session", "show"], ["session", "import"], ["sweep"], ["models"],
    ["rows", "count"], ["lens", "fit"], ["train"], ["ship"], ["graft"], ["card"], ["bench"], ["replay"], ["nonsense"],
)  # fmt: skip
OPTIONS = (
    "--model", "--against", "--prompt", "--prompts", "--seed", "--bootstrap", "--layer", "--layers", "--position",
    "--set", "--entities", "--scenarios", "--template", "--control", "--fact", "--facts", "--overlay", "--text",
    "--texts", "--out", "--json", "--csv", "--store", "--device", "--dtype", "--steps", "--rate", "--user",
    "--n-texts", "--target", "--chain", "--answers", "--points", "--max-sentences", "--threads", "--tokens",
    "--top-k", "--part", "--align", "--size", "--x",
)  # fmt: skip
ODD = (
    "", " ", "-1", "0", "1e999", "nan", "inf", str(2**70), "1.5", "x" * 5000, "\0", "a\nb", "\u202e", "=", "a=b=c", "@",
    "~", "/dev/null", "/nowhere/x", ".", "odd.jsonl", "odd.yaml", "odd.txt", "odd.zip", "odd.safetensors", "dense-mini",
    "engram-mini", "-", "--", "[", "{", "\\", "$HOME", "%s", "{field}", "\U0001f30a", "cuda", "float8", "kv", "off@99",
)  # fmt: skip
CONTENTS = (
    b"", b"\0", b"\xff\xfe", b"{", b"[]", b"null", b'{"prompt": 1}', b"[" * 9000, b"a => b => c", b"x: [",
    b"PK\x03\x04", b'{"text": "x", "entities": [[0, 1e999]]}', b'{"trigger": "\\ud800", "answer": "x"}', b"1\n2\n3",
    b"\x1f\x8b\x08", b"GGUF",
)  # fmt: skip


def odd_command(draw: random.Random) -> list[str]:
    command = list(draw.choice(COMMANDS))
    for _ in range(draw.randint(0, 4)):
        command.append(draw.choice(OPTIONS))
        command += draw.choices(ODD, k=draw.choice((0, 1, 1, 1, 2)))
    return command


def fuzz(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(seed)
    for name in ("odd.jsonl", "odd.yaml", "odd.txt", "odd.zip", "odd.safetensors"):
        Path(name).write_bytes(draw.choice(CONTENTS))
    command = odd_command(draw)
    if command[0] == "bench" and command[1:2] in (["lens"], ["trace"], ["cka"], ["start"]):
        return  # which is asked for well, and long
    try:
        code = main(command)
    except SystemExit as error:  # --help
        code = int(error.code or 0)
    out, err = capsys.readouterr()
    assert code in (0, 2), (command, code)
    assert "Traceback" not in out + err, command
    assert code == 0 or err.strip(), command


@pytest.mark.timeout(10)
@pytest.mark.parametrize("seed", range(60))
def test_a_few_odd_commands(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    fuzz(seed, capsys)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_odd_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(1000, 3000 if FULL else 1060):
        fuzz(seed, capsys)
