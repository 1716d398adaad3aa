"""The Rows and Hash pages in Chromium, on the shipped weights: a link, a click, a typed number, dark and narrow."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qs, urlparse

import pytest
from playwright.sync_api import Page, expect

from engram_lab.lab.draw import labels
from engram_lab.lab.draw.theme import PALETTES
from engram_lab.models.handle import open_model
from engram_lab.probes import rows
from engram_lab.probes.rows import RowsConfig
from tests.browser.plots import LOOKS, drawn, settled

pytestmark = [pytest.mark.browser, pytest.mark.timeout(1500)]

PROMPT = "He was the capital of the United"
THROUGH = "What came through"


def test_what_came_through_is_the_probes(page: Page, address: str) -> None:
    page.goto(f"{address}/rows?prompt={PROMPT.replace(' ', '+')}&memory=6&top=4&texts=20", wait_until="commit")
    (bars,) = drawn(page, THROUGH)
    settled(page)
    handle = open_model("engram-mini")
    asked = RowsConfig(("engram-mini",), (PROMPT,), layer=6, top_k=4)
    result = rows.run([handle], asked).result
    assert bars["x"][:4] == pytest.approx(result.came_through.promoted.tolist(), abs=1e-4)
    chips = page.locator(".chip").evaluate_all("chips => chips.map(c => c.firstChild.textContent)")
    own = [labels.label(piece) for piece in handle.pieces(handle.encode(PROMPT))]
    assert chips[: len(own)] == own
    for gram in result.ngrams:
        assert "".join(gram.canonical_texts) in "".join(chips[len(own) :])
    expect(page.get_by_text(re.compile(f"gate {result.gate:.3f} of at most")).first).to_be_visible()


def test_a_measure_is_picked_by_click_and_by_link(page: Page, address: str) -> None:
    page.goto(f"{address}/rows?texts=20", wait_until="commit")
    drawn(page, "How much of each head")
    settled(page)
    page.get_by_role("radio", name="collisions").or_(page.get_by_role("button", name="collisions")).first.click()
    traces = drawn(page, "How many n-grams share their row")
    assert sum(len(t["x"]) for t in traces) >= 48, "16 bars, their expectation, their deviation"
    page.get_by_role("radio", name="training").or_(page.get_by_role("button", name="training")).first.click()
    expect(page.get_by_text("over the training text")).to_be_visible()
    # The link by itself: Streamlit may write a choice into the address late, or not at all while it is busy.
    page.goto(f"{address}/rows?texts=20&measure=collisions&over=training", wait_until="commit")
    drawn(page, "How many n-grams share their row")
    expect(page.get_by_text("over the training text")).to_be_visible()


@pytest.mark.parametrize(("scheme", "width"), LOOKS)
@pytest.mark.parametrize("name", ["rows", "hash"])
def test_dark_and_narrow(page: Page, address: str, scheme: Any, width: int, name: str) -> None:
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(f"{address}/{name}?texts=20", wait_until="commit")
    last = "Take it with you" if name == "rows" else "The published example, worked through"
    expect(page.get_by_role("heading", name=last)).to_be_visible()
    settled(page)
    colour = page.evaluate("getComputedStyle(document.querySelector('[data-testid=stApp]')).backgroundColor")
    red, green, blue = (int(PALETTES[scheme].page[n : n + 2], 16) for n in (1, 3, 5))
    assert colour == f"rgb({red}, {green}, {blue})"
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_example_is_worked_through_and_edited(page: Page, address: str) -> None:
    page.goto(f"{address}/hash", wait_until="commit")
    expect(page.get_by_text("mixes 549 and 174; rows 44, 34, 67, 65")).to_be_visible()
    box = page.get_by_label("Canonical ids", exact=True)
    box.fill("41 93 17 x")
    box.press("Enter")
    expect(page.get_by_test_id("stAlert")).to_contain_text("is no whole number")
    box.fill("208 93 17 41")
    box.press("Enter")
    # 41*3 ^ 17*5 = 46, ^ 93*7 = 677
    expect(page.get_by_text("mixes 46 and 677; rows 46, 46, 35, 23")).to_be_visible()
    expect(page.get_by_test_id("stAlert")).to_have_count(0)
    assert parse_qs(urlparse(page.url).query)["ids"] == ["208 93 17 41"]
