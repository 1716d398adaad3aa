"""The gates page through the app's entry, on tiny models: every widget, both modes, what cannot be shown."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest
from transformers import PreTrainedTokenizerFast

from engram_lab.lab.app import runner
from engram_lab.lab.ask import texts
from engram_lab.lab.fronts import gates_figures
from engram_lab.lab.fronts.export import command_line
from engram_lab.models import listing
from engram_lab.models.handle import Handle
from engram_lab.probes import gates
from engram_lab.probes.gates import GatesConfig
from tests.models import tiny
from tests.pages.driving import change, chart, clean, command, numbers, open_page, sentence, table
from tests.pages.test_app import LINES, LONG
from tests.tiny_lab import CONTEXT

PROMPT = texts.examples()[0]["prompt"]


pytestmark = pytest.mark.usefixtures("lab_of_twins")


@pytest.fixture
def page() -> AppTest:
    """The page as it opens."""
    return open_page("gates")


def heat(at: AppTest) -> list[Any]:
    return numbers(chart(at, "map")["data"][0]["z"]).tolist()


def chips(at: AppTest) -> list[str]:
    return [element.proto.body for element in at.get("html") if 'class="chips"' in element.proto.body]


def metrics(at: AppTest) -> list[tuple[str, str, str]]:
    return [(m.label, m.value, m.delta) for m in at.metric]


def test_the_map_is_that_of_the_probe(page: AppTest, pair: list[Handle]) -> None:
    report = gates.run(pair[:1], GatesConfig(("engram-mini",), (PROMPT,)))
    assert np.allclose(heat(clean(page)), report.result.gate[0], atol=1e-6)
    assert chips(page) == [gates_figures.chips(report, gates_figures.GATE, 0)]
    assert command(page) == command_line("gates", report.config)


def test_a_control_beside_the_gates(page: AppTest, pair: list[Handle]) -> None:
    change(page, "text_input", "target", " the")
    change(page, "segmented_control", "control", "memory off")
    at = change(page, "segmented_control", "at", "layer 1")
    config = GatesConfig(("engram-mini",), (PROMPT,), " the", controls=("off@1",))
    result = gates.run(pair[:1], config).result
    assert command(at) == command_line("gates", config)
    assert not any(heat(at)[0]) and np.allclose(heat(at)[1], result.gate[0, 0], atol=1e-6)
    assert len(chips(at)) == 2
    shown = {m.label: m for m in at.metric}
    assert shown["Loss as it is, nats"].value == f"{result.mean_loss:.3f}"
    (off,) = result.controls
    loss = shown["Loss, memory off, layer 1"]
    assert (loss.value, loss.delta) == (f"{off.mean_loss:.3f}", f"{off.mean_loss_change:+.3f}")
    assert shown["Gate's rank corr., layer 1"].value == "constant"
    lines = [numbers(t["y"]) for t in chart(at, "curves")["data"] if t["mode"] == "lines+markers"]
    assert np.allclose(lines, [result.mean_kl, off.mean_kl])
    bars = [numbers(t["y"]) for t in chart(at, "bars")["data"]]
    assert np.concatenate(bars).sum() == pytest.approx(result.attribution.logit[-1], abs=1e-4)
    # What it does not change is shown as it is, and said.
    change(at, "selectbox", "shown", "attribution")
    assert len(heat(at)) == 1 and any("as it is" in c.value for c in at.caption)
    assert "difference" not in [toggle.key for toggle in at.toggle]


def test_knock_outs_at_a_position(page: AppTest, pair: list[Handle]) -> None:
    change(page, "text_input", "target", " the")
    change(page, "number_input", "pos", 5)
    at = change(page, "toggle", "knock_out", True)
    config = GatesConfig(("engram-mini",), (PROMPT,), " the", 5, knock_out=True)
    knocked = gates.run(pair[:1], config).result.knock_out
    assert command(at) == command_line("gates", config)
    assert at.selectbox(key="shown").value == gates_figures.KNOCK_OUT
    assert np.allclose(np.array(heat(at), dtype=float), knocked.logit_change, atol=1e-5, equal_nan=True)
    change(at, "selectbox", "shown", gates_figures.KNOCK_OUT_LOG_PROB)
    assert np.allclose(np.array(heat(at), dtype=float), knocked.log_prob_change, atol=1e-5, equal_nan=True)
    change(at, "toggle", "knock_out", False)
    assert at.selectbox(key="shown").value == gates_figures.GATE


def test_a_long_prompt_is_shown_in_windows(page: AppTest) -> None:
    change(page, "text_area", "prompt", LONG)
    assert numbers(chart(page, "map")["data"][0]["x"]).tolist() == list(range(64))
    second = numbers(chart(change(page, "selectbox", "from", 64), "map")["data"][0]["x"])
    assert second[0] == 64
    assert numbers(chart(change(page, "text_area", "prompt", "the river"), "map")["data"][0]["x"])[0] == 0


def test_a_link_reopens_the_request() -> None:
    query = {"prompt": "the <mill> & $5", "target": " the", "knock_out": "true", "pos": "3", "control": "rows shuffled"}
    at = clean(open_page("gates", **query, at="layer 1", seed="9", shown="written norm", difference="true"))
    config = GatesConfig(("engram-mini",), ("the <mill> & $5",), " the", 3, ("shuffled@1",), True, seed=9)
    assert command(at) == command_line("gates", config)
    assert at.selectbox(key="shown").value == "written norm" and at.toggle(key="difference").value
    assert len(heat(at)) == 1


def text_set(at: AppTest) -> AppTest:
    at.segmented_control(key="mode").set_value(texts.SET)
    at.session_state["texts"] = 2
    at.run()
    at.file_uploader(key="file").upload("mine.txt", "\n".join((*LINES, *LINES)).encode())
    at.session_state["texts"] = 18
    return at.run()


def ngram_tables(at: AppTest) -> list[Any]:
    return [t.value.values.tolist() for t in at.dataframe if "n-gram" in t.value.columns]


def test_a_text_set(page: AppTest, pair: list[Handle]) -> None:
    at = clean(text_set(page))
    change(at, "number_input", "min_count", 2)
    config = GatesConfig(("engram-mini",), (*LINES, *LINES), controls=("shuffled",), min_count=2, detail=False)
    report = gates.run(pair[:1], config)
    assert command(at) == command_line("gates", config)
    assert np.allclose(numbers(chart(at, "histogram")["data"][0]["y"]), 100 * report.result.histogram[0])
    assert table(at, "change of the loss").to_dict("records") == gates_figures.control_rows(report)
    highest, lowest = ngram_tables(at)
    assert highest == [list(row.values()) for row in gates_figures.ngram_rows(report, 1, 2, True)]
    assert lowest == [list(row.values()) for row in gates_figures.ngram_rows(report, 1, 2, False)]
    assert highest != lowest
    change(at, "segmented_control", "order", 3)
    assert ngram_tables(at)[0] == [list(row.values()) for row in gates_figures.ngram_rows(report, 1, 3, True)]
    change(at, "number_input", "min_count", 900)
    assert not ngram_tables(at) and sum("found so often" in c.value for c in at.caption) == 2


def test_a_model_without_a_memory_is_one_sentence(page: AppTest) -> None:
    page.selectbox(key="against").set_value(runner.NOTHING)
    page.selectbox(key="model").set_value("dense-mini")
    said = sentence(page.run())
    assert said.startswith("dense-mini has no Engram memory") and "engram-mini" in said
    # With two chosen, the one that has a memory is shown.
    page.selectbox(key="against").set_value("engram-mini")
    assert heat(clean(page.run()))
    assert "of" not in [box.key for box in page.selectbox]


def test_of_two_memories_one_is_shown(
    tmp_path: Path, shipped: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(shipped, tmp_path / "models")
    other = tiny.engram(tokenizer, max_position_embeddings=CONTEXT)
    other.model.layers[1].memory.key.weight.data.neg_()
    other.save_pretrained(tmp_path / "models" / "engram-other")
    tokenizer.save_pretrained(tmp_path / "models" / "engram-other")
    monkeypatch.setattr(listing, "SHIPPED", tmp_path / "models")
    at = clean(open_page("gates", against="engram-other"))
    before = heat(at)
    after = heat(change(at, "selectbox", "of", "engram-other"))
    # With the key turned round the score changes its sign, and the gate becomes what it was short of 1.
    assert np.allclose(np.array(before) + after, 1, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "key", "value", "says"),
    [("text_area", "prompt", "", "empty"), ("text_input", "target", "old mill", "not one token")],
)
def test_bad_input_is_one_sentence(page: AppTest, kind: str, key: str, value: str, says: str) -> None:
    getattr(page, kind)(key=key).set_value(value)
    assert says in sentence(page.run())
