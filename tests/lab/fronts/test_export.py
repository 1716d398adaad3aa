"""Exports against the report they come from, and the two ways to have the same report again."""

from __future__ import annotations

import csv
import io
import json
import subprocess
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from engram_lab.lab.command.main import build_parser, main
from engram_lab.lab.fronts import export
from engram_lab.models.errors import LabError
from engram_lab.probes.base import Report
from engram_lab.probes.lens import LensConfig
from engram_lab.probes.sensitivity import Item, SensitivityConfig, TextSet

NASTY = '-x it\'s "quoted" $HOME `ls` \\n\nnaïve 東京 👍🏽 <b>'


def test_csv_has_a_row_for_every_number(report: Report) -> None:
    rows = list(csv.DictReader(io.StringIO(export.csv_text(report))))
    assert len(rows) == sum(lens.kl.size for lens in report.result.models)
    lens = report.result.models[1]
    row = next(r for r in rows if (r["model"], r["position"], r["layer"]) == ("dense-mini", "5", "1"))
    assert float(row["kl_nats"]) == float(lens.kl[2, 5]), "layer 1 has index 2, after embed"
    assert float(row["entropy_nats"]) == float(lens.entropy[2, 5])
    assert int(row["top_id"]) == lens.top_ids[2, 5, 0]
    assert int(row["target_rank"]) == lens.target_rank[2, 5]
    assert float(row["target_probability"]) == float(lens.target_prob[2, 5])
    assert row["settle_layer"] == lens.layer_names[lens.settle_depth[5]]
    last = next(r for r in reversed(rows) if r["model"] == "dense-mini")
    assert last["next_token_loss_nats"] == "", "nothing follows the last position"


def test_csv_of_a_set_counts_positions_in_each_text(set_report: Report) -> None:
    rows = list(csv.DictReader(io.StringIO(export.csv_text(set_report))))
    starts = [r for r in rows if r["position"] == "0" and r["layer"] == "embed" and r["model"] == "dense-mini"]
    assert [r["prompt"] for r in starts] == ["0", "1", "2"]
    assert all(r["top_id"] == "" and r["target_rank"] == "" for r in rows)
    text = "".join(
        r["token"]
        for r in rows
        if (r["prompt"], r["layer"], r["model"]) == ("1", "0", "dense-mini") and r["position"] != "0"
    )
    assert text.replace("·", " ") == set_report.config.prompts[1]


def words(line: str) -> list[str]:
    """The arguments that a shell makes of a command line for engram-lab."""
    shown = subprocess.run(
        ["sh", "-c", f"engram_lab() {{ printf '%s\\0' \"$@\"; }}; {line.replace('engram-lab', 'engram_lab', 1)}"],
        capture_output=True,
        check=True,
    )
    return shown.stdout.decode().split("\0")[:-1]


def parsed(line: str) -> Any:
    return build_parser().parse_args(words(line))


@pytest.mark.parametrize("target", [None, " the", "-t"])
def test_command_line_parses_to_the_request(target: str | None) -> None:
    config = LensConfig(("a model", "b"), (NASTY, "two"), target, top_k=7, seed=3, bootstrap=9)
    args = parsed(export.command_line("lens", config))
    assert (args.model, args.against, tuple(args.prompt)) == ("a model", "b", config.prompts)
    assert (args.target, args.top_k, args.seed, args.bootstrap) == (target, 7, 3, 9)


def test_command_line_of_a_set_reads_the_file() -> None:
    config = LensConfig(("a",), ("one", "two"), seed=3, bootstrap=9, detail=False)
    args = parsed(export.command_line("lens", config))
    assert args.prompts == Path("texts.txt") and args.prompt is None and args.against is None


def run_python(program: str) -> Report:
    names: dict[str, Any] = {}
    exec(compile(program, "exported", "exec"), names)
    report = names["report"]
    assert isinstance(report, Report)
    return report


def test_command_and_program_give_the_same_report(shipped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = (str(shipped / "engram-mini"), str(shipped / "dense-mini"))
    config = LensConfig(models, (NASTY,), " the", top_k=3)
    assert main(words(export.command_line("lens", config))) == 0
    printed = capsys.readouterr().out
    report = run_python(export.python("lens", config))
    assert report.config == config
    assert printed == report.to_json() + "\n"


def test_the_same_for_a_set(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = ("The river runs", "past the old mill") * 60  # too long to stand in the program
    config = LensConfig((str(shipped / "dense-mini"),), texts, seed=5, bootstrap=20, detail=False)
    files = export.files("lens", config)
    assert set(files) == {"texts.txt", "request.json"}
    for name, text in files.items():
        Path(name).write_text(text, encoding="utf-8")
    assert main(words(export.command_line("lens", config))) == 0
    printed = json.loads(capsys.readouterr().out)
    report = run_python(export.python("lens", config))
    assert report.config == config and printed == json.loads(report.to_json())


def test_a_request_of_records_is_read_from_its_file(
    shipped: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    sets = (TextSet("facts", (Item("The river runs", " past"),)),)
    config = SensitivityConfig((str(shipped / "engram-mini"),), sets, bootstrap=20)
    for name, text in export.files("sensitivity", config).items():
        Path(name).write_text(text, encoding="utf-8")
    assert run_python(export.python("sensitivity", config)).config == config


FIGURE = go.Figure(go.Scatter(y=[1, 2]), layout={"width": 300, "height": 200})


@pytest.mark.browser
def test_png_is_a_png() -> None:
    if export.no_png():
        pytest.skip("no Chrome or Chromium here")
    image = export.png(FIGURE, scale=1)
    assert image.startswith(b"\x89PNG\r\n\x1a\n")
    assert (int.from_bytes(image[16:20]), int.from_bytes(image[20:24])) == (300, 200)


def test_png_without_a_browser_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROWSER_PATH", "/nowhere/chromium")
    with pytest.raises(LabError, match=r"Chrome or Chromium") as caught:
        export.png(FIGURE)
    assert "\n" not in str(caught.value)
