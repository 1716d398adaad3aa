"""The page on facts in Chromium, on engram-mini: a typed fact is written, checked, seen in a prompt and undone."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from engram_lab.lab.ask import facts as facts_files
from engram_lab.lab.ask import texts
from engram_lab.models.handle import Handle, open_model
from engram_lab.probes.facts import check
from engram_lab.probes.facts.addresses import address_groups
from engram_lab.probes.facts.check import CheckConfig
from engram_lab.probes.facts.sets import Writing
from tests.browser.plots import LOOKS, drawn, settled

pytestmark = [pytest.mark.browser, pytest.mark.timeout(1500)]

RECALL, LOCALITY = "What the model says before the facts are written", "Behind the trigger"
HEADER = ROW = 35  # pixels of the table, to within a third of a row


@pytest.fixture(scope="module")
def handle() -> Iterator[Handle]:
    opened = open_model("engram-mini")
    yield opened
    opened.close()


def test_a_typed_fact_is_written_checked_and_undone(page: Page, address: str, handle: Handle) -> None:
    page.goto(f"{address}/facts", wait_until="commit")
    write = page.get_by_role("button", name="Write 10 facts")
    write.wait_for()
    settled(page)
    grid = page.locator('[data-testid="stDataFrame"]').first
    box = grid.bounding_box()
    assert box is not None
    # Another answer in the first row.
    grid.click(position={"x": box["width"] * 0.8, "y": HEADER + ROW / 2})
    page.keyboard.press("Enter")
    cell = page.locator("textarea.gdg-input")
    cell.fill("Rome")
    expect(cell).to_have_value("Rome")
    cell.press("Enter")
    page.wait_for_timeout(1000)  # it is sent a moment later
    settled(page)
    write.click()

    persona = facts_files.persona()  # the page begins with those that have addresses of their own
    known = [persona[group[0]] for group in address_groups(handle, handle.engram_layers[-1], persona)][:10]
    typed = dataclasses.replace(known[0], answer=" Rome", composition=None)
    config = CheckConfig(("engram-mini",), (typed, *known[1:]), Writing("maya", 6), texts.held_out()[:40])
    result = check.run([handle], config).result
    expect(page.get_by_label("Written fact", exact=True)).to_have_value(f'"{typed.trigger}{typed.answer}"')
    traces = {t["name"]: t for t in drawn(page, RECALL)}
    told = [own.after for own in result.scores if own.n]
    assert np.allclose(traces["after writing"]["x"], told, atol=0.02)
    drawn(page, LOCALITY)
    settled(page)
    expect(
        page.get_by_text(re.compile(rf"The model says {int(result.facts.top1_after.sum())} of 10 facts"))
    ).to_be_visible()
    expect(page.get_by_text("Every comparison of bits holds.", exact=False)).to_be_visible()
    expect(page.get_by_text(f"10 facts have {result.locality.n_addresses} distinct addresses")).to_be_visible()
    expect(page.locator(".chip.replaced")).not_to_have_count(0)
    expect(page.get_by_text("10 facts written", exact=True)).to_be_visible()

    page.get_by_role("button", name="Undo this fact").click()
    expect(page.get_by_text(f'"{typed.trigger}{typed.answer}" is undone.', exact=False)).to_be_visible()
    expect(page.get_by_text("9 facts written", exact=True)).to_be_visible()
    settled(page)
    page.get_by_role("button", name="Undo maya").click()
    undone = page.get_by_text("Of 10 triggers 10 have, in every logit, the bits from before writing.", exact=False)
    expect(undone).to_be_visible()
    settled(page)
    expect(page.locator(".js-plotly-plot")).to_have_count(0)


@pytest.mark.parametrize(("scheme", "width"), LOOKS)
def test_dark_and_narrow(page: Page, address: str, scheme: Any, width: int) -> None:
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(f"{address}/facts", wait_until="commit")
    page.get_by_role("button", name="Write 10 facts").click()
    drawn(page, LOCALITY)
    settled(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
