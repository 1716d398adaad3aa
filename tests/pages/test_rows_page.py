"""The Rows page through the app's entry: it shows what the probe says, every widget matters, bad input is one line."""

from __future__ import annotations

import csv
import io
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from engram_lab.lab.app import runner
from engram_lab.lab.ask import texts
from engram_lab.lab.draw import labels
from engram_lab.lab.fronts import export, rows_figures
from engram_lab.lab.fronts import rows as front
from engram_lab.models import row_counts
from engram_lab.models.errors import LabError
from engram_lab.models.handle import Handle, open_model
from engram_lab.models.ngrams import packed
from engram_lab.probes import rows
from engram_lab.probes.base import Report
from engram_lab.probes.rows import RowsConfig
from tests.pages.driving import chart, clean, command, open_page, sentence, table
from tests.pages.driving import put as change

PROMPT = "The river runs past the <old> mill, $5 and $6"
SOME = 12  # texts, as many as a test needs


@pytest.fixture(autouse=True)
def lab(lab_with_memories: Path) -> None:
    """Two memory layers, and another Engram beside the dense twin."""


@pytest.fixture
def page() -> AppTest:
    at = open_page("rows")
    return clean(change(at, "number_input", "texts", SOME))


@pytest.fixture
def handle() -> Handle:
    return open_model("engram-mini")


def config(**changes: Any) -> RowsConfig:
    fields = {"models": ("engram-mini",), "prompts": (PROMPT,), "text": texts.held_out()[:SOME], "layer": 2}
    return RowsConfig(**{**fields, **changes})


@pytest.fixture
def report(handle: Handle) -> Report:
    return rows.run([handle], config())


def test_the_table_is_the_probes(page: AppTest, handle: Handle) -> None:
    prompt = page.text_area(key="prompt").value
    result = rows.run([handle], config(prompts=(prompt,), layer=0)).result
    shown = table(page, "row norm")
    assert shown["row"].tolist() == [row.row for row in result.rows]
    assert shown["hits in text"].tolist() == [row.text_hits for row in result.rows]
    assert shown["row norm"].tolist() == pytest.approx([row.norm for row in result.rows])
    assert shown["hits in training"].isna().all()
    assert "No counts over its training text ship" in page.info[0].value
    assert f"gate **{result.gate:.3f}**" in " ".join(m.value for m in page.markdown)


def test_training_hits_are_shown_where_they_ship(lab_with_memories: Path, handle: Handle) -> None:
    counts = row_counts.count(handle, packed(handle, texts.held_out()[:50]), ("our sentences",))
    file = lab_with_memories.parent / "row_hits" / "engram-mini.safetensors"
    counts.save(file)
    try:
        at = open_page("rows")
        shown = clean(change(at, "number_input", "texts", 50))
        assert not shown.info
        hits = table(shown, "row norm")
        assert (hits["hits in training"] == hits["hits in text"]).all() and hits["hits in text"].notna().all()
        before = chart(shown, "usage")
        other = chart(clean(change(shown, "button_group", "over", "training")), "usage")
        assert "the training text" in other["layout"]["title"]["subtitle"]["text"]
        assert other["layout"]["title"] != before["layout"]["title"]
    finally:
        file.unlink()


def test_of_two_models_with_a_memory_either_is_shown(page: AppTest) -> None:
    assert "of" not in [box.key for box in page.selectbox]
    before = table(clean(change(page, "selectbox", "against", "engram-mini-early")), "row norm")["row norm"].tolist()
    after = table(clean(change(page, "selectbox", "of", "engram-mini-early")), "row norm")["row norm"].tolist()
    assert before != after
    assert "--model=engram-mini-early" in command(page)


def test_an_upload_is_the_text(page: AppTest, handle: Handle) -> None:
    own = "the old mill\nThe Old Mill\nmill"
    change(page, "text_area", "prompt", "past the old mill")
    page.get_by_key("file").upload("own.txt", own.encode(), "text/plain")
    shown = table(clean(page.run()), "row norm")
    result = rows.run([handle], config(prompts=("past the old mill",), text=tuple(own.split("\n")), layer=0)).result
    assert shown["hits in text"].tolist() == [row.text_hits for row in result.rows]
    assert shown["shared in text"].tolist() == [row.shared_total for row in result.rows]
    page.get_by_key("file").upload("own.txt", b"\xff\xfe", "text/plain")
    assert "own.txt is not UTF-8" in sentence(page.run())


def test_a_position_beyond_a_shorter_prompt(page: AppTest) -> None:
    clean(change(page, "number_input", "pos", 5))
    clean(change(page, "text_area", "prompt", "the"))
    assert page.number_input(key="pos").value == page.number_input(key="pos").max < 5


def test_bad_requests_are_one_sentence(page: AppTest) -> None:
    assert "The prompt is empty" in sentence(change(page, "text_area", "prompt", ""))
    clean(change(page, "text_area", "prompt", "the river"))
    change(page, "selectbox", "against", runner.NOTHING)
    assert "dense-mini has no Engram memory" in sentence(change(page, "selectbox", "model", "dense-mini"))


def test_the_exported_command_gives_the_same_report(report: Report, tmp_path: Path) -> None:
    import argparse

    for name, text in front.ASK.files(report.config).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    parser = argparse.ArgumentParser()
    front.ASK.add_arguments(parser)
    flags = shlex.split(" ".join(front.ASK.options(report.config)).replace("texts.txt", str(tmp_path / "texts.txt")))
    assert front.ASK.config(parser.parse_args(flags)) == report.config
    bare = RowsConfig(("m",), ("a 'quoted' $prompt",), counts="some file")
    assert front.ASK.files(bare) == {}
    assert front.ASK.config(parser.parse_args(shlex.split(" ".join(front.ASK.options(bare))))) == bare
    program = export.python("rows", bare)
    found: dict[str, Any] = {}
    exec(program.partition("report =")[0], found)
    assert found["config"] == bare


def test_csv_has_a_row_for_each_head(report: Report) -> None:
    read = list(csv.DictReader(io.StringIO(export.csv_text(report))))
    assert len(read) == len(report.result.rows) == 4
    for line, row in zip(read, report.result.rows, strict=True):
        assert (int(line["order"]), int(line["head"]), int(line["row_id"])) == (row.order, row.head, row.row_id)
        assert float(line["row_norm"]) == row.norm and int(line["text_hits"]) == row.text_hits
        assert line["training_hits"] == line["training_coverage"] == ""
        assert float(line["text_coverage"]) == report.result.text.coverage[row.order - 2, row.head]


def test_figures_show_the_numbers(report: Report, handle: Handle) -> None:
    def name_of(i: int) -> str:
        return labels.label(handle.pieces([i], whole=False)[0])

    result = report.result
    said = rows_figures.came_through(report, name_of)
    (bars,) = said.data
    assert list(bars.x) == [*result.came_through.promoted, *result.came_through.suppressed[::-1]]
    assert f"{result.gate:.3f}" in said.layout.title.subtitle.text
    assert front.figure(report, "light", [handle]).to_json() == said.to_json()
    row = result.rows[3]
    assert rows_figures.row_says(report, row, name_of).data[0].x[0] == row.says.promoted[0]
    for measure in rows_figures.MEASURES:
        figure = rows_figures.usage_bars(report, "text", measure, "dark")
        values = np.concatenate([trace.y for trace in figure.data if trace.type == "bar"])
        usage = result.text
        assert np.allclose(values, (usage.load_mean if measure == "load" else getattr(usage, measure)).ravel())
        name = "spread" if measure == "load" else measure
        z = (getattr(usage, name) - getattr(usage, f"{name}_expected")) / getattr(usage, f"{name}_sd")
        points = np.concatenate([t.y for t in figure.data if t.type == "scatter" and t.yaxis == "y2"])
        assert np.allclose(points, z.ravel())
    with pytest.raises(LabError, match="bring a text"):
        rows_figures.usage_bars(report, "training", "coverage")


def test_the_deviation_of_what_cannot_deviate_is_zero(report: Report) -> None:
    """Where all rows are hit by far, the expectation is 1 and its deviation a rounding error."""
    usage = report.result.text
    fields = {name: np.ones_like(usage.coverage) for name in ("coverage", "coverage_expected")}
    tight = type(usage)(**{**{k: getattr(usage, k) for k in type(usage).__annotations__}, **fields,
                           "coverage_sd": np.full_like(usage.coverage, 1e-17)})  # fmt: skip
    assert (rows_figures.deviation(tight, "coverage") == 0).all()


def test_cells_name_the_most_frequent_sharers(report: Report) -> None:
    for row in report.result.rows:
        cell = rows_figures.sharers(row)
        assert cell is not None
        for other in row.shared[: rows_figures.NAMED]:
            assert rows_figures.canonical(other.canonical_texts) in cell
        if row.shared_total > rows_figures.NAMED:
            assert cell.endswith(f"and {row.shared_total - rows_figures.NAMED} more")
    assert any(row.shared_total > rows_figures.NAMED for row in report.result.rows)
