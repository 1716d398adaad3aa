"""The page on what a memory is for, on tiny models: every widget, the exports, bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from engram_lab.lab.app import runner
from engram_lab.lab.ask.texts import items_of, shipped_sets
from engram_lab.lab.command.main import build_parser
from engram_lab.lab.fronts import export
from engram_lab.lab.fronts import sensitivity as front
from engram_lab.models.errors import DataError
from engram_lab.models.handle import Handle
from engram_lab.probes import sensitivity
from engram_lab.probes.sensitivity import Item, SensitivityConfig, TextSet
from tests.lab.fronts.test_export import words
from tests.pages.driving import chart, clean, command, numbers, page_of, sentence, table

FACTS = '{"prompt": "Paris is the capital of", "answer": "France"}\n{"prompt": "The river runs", "answer": " past"}\n'
READING = '{"context": "The mill is old.", "prompt": "The mill is", "answer": "old"}\n{"prompt": "a", "answer": "b"}\n'


pytestmark = pytest.mark.usefixtures("lab_of_twins")


@pytest.fixture
def at() -> AppTest:
    """The page with two small sets of its own, so that no test runs all that ships."""
    opened = _hold_back(page_of("sensitivity"))
    opened.file_uploader(key="sets").set_value(
        [("facts.jsonl", FACTS.encode(), "text/plain"), ("reading.jsonl", READING.encode(), "text/plain")]
    )
    return clean(opened.run())


def _hold_back(opened: AppTest) -> AppTest:
    """Draw the page without computing its default request: no change of the memory is picked yet."""
    opened.session_state["controls"] = []
    opened = clean(opened.run())
    assert "Pick at least one change" in opened.info[0].value
    opened.pills(key="controls").set_value(["memory off"])
    return opened


def shown(at: AppTest) -> Any:
    rows = table(at, "condition").values.tolist()
    return command(at), rows, numbers(chart(at, "changes")["data"][0]["x"]).tolist()


def test_the_page_shows_the_probe(at: AppTest, pair: list[Handle]) -> None:
    sets = tuple(TextSet(name, items_of(raw.encode(), f"{name}.jsonl")) for name, raw in
                 (("facts", FACTS), ("reading", READING)))  # fmt: skip
    report = sensitivity.run(pair, SensitivityConfig(("engram-mini", "dense-mini"), sets))
    drawn = {trace["name"].split(" ")[0]: numbers(trace["x"]) for trace in chart(at, "changes")["data"]}
    for s, name in enumerate(("facts", "reading")):
        np.testing.assert_allclose(drawn[name], report.result.change[s, 1:], atol=1e-6)
    assert len(table(at, "condition")) == 6
    assert any(f"{report.result.change[0, 1]:+.2f}" in element.value.replace("\\", "") for element in at.markdown)


def test_a_model_without_memory_is_told(at: AppTest) -> None:
    at.selectbox(key="model").set_value("dense-mini")
    at.selectbox(key="against").set_value(runner.NOTHING)
    assert "has no memory" in clean(at.run()).info[0].value


def test_a_bad_file_is_one_sentence(at: AppTest) -> None:
    at.file_uploader(key="sets").set_value([("bad.jsonl", b'{"prompt": 3}', "text/plain")])
    assert 'no JSON object with the texts "prompt" and "answer" as its item 1' in sentence(at.run())


def test_items_of_both_kinds_of_file() -> None:
    facts = items_of(FACTS.encode(), "x.jsonl")
    assert facts == (Item("Paris is the capital of", " France"), Item("The river runs", " past"))
    assert items_of(READING.encode(), "x.jsonl")[0] == Item("The mill is old. The mill is", " old")
    assert items_of(b"one text\n\nanother\n", "x.txt") == (Item("one text"), Item("another"))
    with pytest.raises(DataError, match="item 2"):
        items_of(FACTS.encode().splitlines()[0] + b"\n[]\n", "x.jsonl")


def test_the_command_gives_the_request_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = (TextSet("my facts", items_of(FACTS.encode(), "x.jsonl")), TextSet("whole", (Item("a text"),)))
    for sets in (shipped_sets(), own):
        config = SensitivityConfig(("a model", "b"), sets, ("off@1", "shuffled"), 3, 200)
        for name, text in export.files("sensitivity", config).items():
            Path(name).write_text(text, encoding="utf-8")
        made = front.ASK.config(build_parser().parse_args(words(export.command_line("sensitivity", config))))
        assert made == config
    assert json.loads(Path("my_facts.jsonl").read_text().splitlines()[0])["answer"] == " France"
