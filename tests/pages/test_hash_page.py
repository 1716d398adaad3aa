"""The Hash page: the published example comes out as published, and the model's steps are those of its forward."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from streamlit.testing.v1 import AppTest

from engram_lab.lab.app import runner
from engram_lab.lab.draw import hash_steps
from engram_lab.models import listing, ngrams
from engram_lab.models.canonical import canonical_map
from engram_lab.models.errors import LabError
from engram_lab.models.handle import open_model
from engram_lab.models.memory import read_memory
from engram_lab.models.tables import memories
from tests.pages.driving import clean, open_page, sentence, table
from tests.pages.driving import put as change

PUBLISHED = "mixes 549 and 174; rows 44, 34, 67, 65"


@pytest.fixture(autouse=True)
def lab(lab_with_memories: Path) -> None:
    """Two memory layers, and another Engram beside the dense twin."""


@pytest.fixture
def page() -> AppTest:
    return clean(open_page("hash"))


def outcomes(at: AppTest) -> list[str]:
    """The result lines, the model's first."""
    return [m.value for m in at.markdown if m.value.startswith("Position ") and "mixes" in m.value]


def test_the_published_example(page: AppTest) -> None:
    assert outcomes(page)[-1] == f"Position 3: **{PUBLISHED}**"
    shown = page.dataframe[-2].value
    assert shown["row = mix mod rows"].tolist() == [44, 34, 67, 65]
    assert shown["row of the table"].tolist() == [44, 135, 271, 376]
    assert shown["mix"].tolist() == ["549", "549", "174", "174"]
    worked = page.code[-1].value
    assert [int(n) for n in re.findall(r"= +(\d+) ", worked)] == [208 * 3, 17 * 5, 93 * 7]
    assert worked.count("XOR") == 2 and "549" in worked and "174" in worked
    every = table(page, "rows")
    assert every["rows"].tolist()[-1] == "44, 34, 67, 65"
    assert every["x[t-1]"].tolist() == [0, 41, 93, 17], "before the start stands the padding id"


def test_the_steps_are_those_of_the_forward(page: AppTest) -> None:
    handle = open_model("engram-mini")
    prompt = page.text_area(key="prompt").value
    ids = handle.encode(prompt)
    read = read_memory(handle, [ids])
    for n, layer in enumerate(handle.engram_layers):
        for position in (0, 4, len(ids) - 1):
            change(page, "number_input", "pos", position)
            at = clean(change(page, "selectbox", "memory", layer))
            shown = next(t.value for t in at.dataframe if "offset" in t.value.columns)
            assert shown["row of the table"].tolist() == read.rows[n, 0, position].flatten().tolist()
            assert f"position {position}, layer {layer}" in [s.value.partition(": ")[2] for s in at.subheader]
    canonical = canonical_map(handle.tokenizer)
    shown = table(page, "canonical id")
    assert shown["raw id"].tolist() == list(ids)
    assert shown["canonical id"].tolist() == canonical[list(ids)].tolist()
    for shared, own in zip(shown["raw tokens that share it"], shown["canonical id"], strict=True):
        many = int((canonical == own).sum())
        assert shared.count("  ") == (many - 1 if many <= 12 else 12)


def test_multipliers_and_xor_are_written_out_exactly(page: AppTest) -> None:
    """As Python's own integers give them, beyond what a float holds."""
    handle = open_model("engram-mini")
    lookback = ngrams.lookbacks(handle, torch.tensor([handle.encode(page.text_area(key="prompt").value)]))[
        0, -1
    ].tolist()
    multipliers = memories(handle)[0].hash.constants()["multipliers"].tolist()
    lines = page.code[0].value.splitlines()
    mix = 0
    for back, (i, m) in enumerate(zip(lookback, multipliers, strict=True)):
        mix ^= i * m
        line = lines[0 if back == 0 else 2 * back - 1]
        assert f"{i} × {m} = " in line and f" {i * m} " in line and line.endswith(f"{i * m:x}")
        if back:
            assert f" {mix} " in lines[2 * back] and lines[2 * back].endswith(f"{mix:x}")
    assert mix > 2**53


EXAMPLES: list[tuple[str, Any, str]] = [
    ("ids", "41 93 17 209", "mixes 550 and 173"),
    ("multipliers", "3, 5, 9", "mixes 549 and 352"),
    ("sizes", "7 11; 13 17", "rows 3, 10, 5, 4"),
    ("pad", "1", PUBLISHED),
]


@pytest.mark.parametrize(("key", "value", "expected"), EXAMPLES, ids=[e[0] for e in EXAMPLES])
def test_every_number_of_the_example_can_be_changed(page: AppTest, key: str, value: str, expected: str) -> None:
    before = table(page, "rows").values.tolist()
    assert expected in outcomes(clean(change(page, "text_input", key, value)))[-1]
    after = table(page, "rows").values.tolist()
    assert after != before or key == "sizes"


def test_any_position_of_the_example(page: AppTest) -> None:
    assert "rows 70, 62, 46, 38" in outcomes(clean(change(page, "number_input", "at", 1)))[-1]
    # A shorter example has no such position.
    change(page, "number_input", "at", 3)
    assert outcomes(clean(change(page, "text_input", "ids", "41")))[-1].startswith("Position 0: ")


def test_a_size_that_is_no_prime_is_said(page: AppTest) -> None:
    said = clean(change(page, "text_input", "sizes", "100 103; 107 109")).caption
    assert any(c.value.startswith("100: no prime") for c in said)


BAD = [
    ("ids", "41 x", '"x" among the ids is no whole number'),
    ("ids", "-3 4", '"-3" among the ids'),
    ("ids", " ", "The ids are empty"),
    ("multipliers", "3", "type at least two"),
    ("multipliers", "3 5", "2 multipliers make the orders 2 to 2, which need 1 groups of table sizes, not 2"),
    ("sizes", "101 103", "need 2 groups of table sizes, not 1"),
    ("sizes", "101; 107 109", "differ in length"),
    ("sizes", "0 1; 107 109", "A table size is 0"),
    ("pad", "1 2", "The padding id is 2 numbers"),
    ("ids", "9999999999999999999", "does not fit into 63 bits"),
    ("ids", "4611686018427387904", "does not fit into 63 bits"),
    ("multipliers", "3 5 9223372036854775808", "does not fit into 63 bits"),
    ("pad", "9999999999999999999", "does not fit into 63 bits"),
    ("sizes", "101 103; 107 9999999999999999999", "does not fit into 63 bits"),
]


@pytest.mark.parametrize(("key", "value", "expected"), BAD)
def test_bad_numbers_are_one_sentence(key: str, value: str, expected: str) -> None:
    with pytest.raises(LabError) as caught:
        hash_steps.example(**{**hash_steps.EXAMPLE, key: value})
    assert expected in str(caught.value)
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


def test_a_bad_number_leaves_the_page_usable(page: AppTest) -> None:
    assert "is no whole number" in sentence(change(page, "text_input", "ids", "one"))
    assert PUBLISHED in outcomes(clean(change(page, "text_input", "ids", "41 93 17 208")))[-1]


def test_without_a_memory_the_example_still_works(page: AppTest) -> None:
    change(page, "selectbox", "against", runner.NOTHING)
    at = change(page, "selectbox", "model", "dense-mini")
    assert "dense-mini has no Engram memory" in sentence(at) and PUBLISHED in outcomes(at)[-1]
    clean(change(page, "selectbox", "model", "engram-mini"))
    at = change(page, "text_area", "prompt", "")
    assert "The prompt is empty" in sentence(at) and PUBLISHED in outcomes(at)[-1]


def test_without_any_model_the_example_still_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "list_models", lambda: [])
    monkeypatch.setattr(listing, "SHIPPED", tmp_path)
    at = open_page("hash")
    assert "No model is chosen" in sentence(at) and PUBLISHED in outcomes(at)[-1]


def test_the_text_changes_the_steps(page: AppTest) -> None:
    before = (page.code[0].value, table(page, "canonical id").values.tolist())
    at = clean(change(page, "text_area", "prompt", "naïve 東京 👍🏽"))
    assert (at.code[0].value, table(at, "canonical id").values.tolist()) != before
    assert "⟨" in " ".join(table(at, "canonical id")["token"]), "bytes that are no character are shown as bytes"
