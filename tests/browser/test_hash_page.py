"""The Hash page in Chromium, on the shipped weights: the rows of a typed prompt, a link, dark and narrow."""

from __future__ import annotations

from typing import Literal
from urllib.parse import parse_qs, urlparse

import pytest
from playwright.sync_api import Page, expect

from engram_lab.models.handle import open_model
from engram_lab.models.memory import read_memory
from tests.browser.plots import LOOKS, fits, in_mode, settled, type_prompt

pytestmark = [pytest.mark.browser, pytest.mark.timeout(1500)]

PROMPT = "The mill of New"
LAYER = 6


def rows_read() -> list[int]:
    """The rows within their heads that the prompt's last position reads in LAYER, as the model itself reads them."""
    handle = open_model("engram-mini")
    at = handle.engram_layers.index(LAYER)
    offsets = handle.model.model.memories()[at].hash.constants()["offsets"].flatten().tolist()
    read = read_memory(handle, [handle.encode(PROMPT)]).rows[at, 0, -1].flatten().tolist()
    handle.close()
    return [row - offset for row, offset in zip(read, offsets, strict=True)]


def test_the_rows_of_a_typed_prompt_are_the_models(page: Page, address: str) -> None:
    page.goto(f"{address}/hash?memory={LAYER}", wait_until="commit")
    settled(page)
    type_prompt(page, PROMPT)
    expect(page.get_by_text(f"rows {', '.join(map(str, rows_read()))}").first).to_be_visible()
    page.wait_for_function("prompt => new URLSearchParams(location.search).get('prompt') === prompt", arg=PROMPT)
    assert parse_qs(urlparse(page.url).query)["memory"] == [str(LAYER)]


def test_a_model_without_a_memory_keeps_the_example(page: Page, address: str) -> None:
    page.goto(f"{address}/hash?model=dense-mini&against=nothing", wait_until="commit")
    alert = page.get_by_test_id("stAlert")
    expect(alert).to_have_count(1)
    expect(alert).to_contain_text("The example below needs no model")
    expect(page.get_by_text("mixes 549 and 174; rows 44, 34, 67, 65")).to_be_visible()


@pytest.mark.parametrize(("scheme", "width"), LOOKS)
def test_dark_and_narrow(page: Page, address: str, scheme: Literal["light", "dark"], width: int) -> None:
    in_mode(page, scheme, width)
    page.goto(f"{address}/hash", wait_until="commit")
    expect(page.get_by_role("heading", name="The published example, worked through")).to_be_visible()
    fits(page, scheme, width)
