"""The Reference page in Chromium: every formula is drawn whole, and a link leads to each probe."""

from __future__ import annotations

from typing import Literal

import pytest
from playwright.sync_api import Page, expect

from engram_lab.lab.fronts import FRONTS, reference
from tests.browser.plots import LOOKS, fits, in_mode, settled

pytestmark = [pytest.mark.browser, pytest.mark.timeout(1500)]


def test_every_formula_is_drawn(page: Page, address: str) -> None:
    for probe, entry in ((name, reference.entry(name)) for name in FRONTS):
        page.goto(f"{address}/reference?about={probe.replace(' ', '+')}", wait_until="commit")
        expect(page.get_by_role("heading", name=entry.asks)).to_be_visible()
        settled(page)
        expect(page.locator(".katex-display")).to_have_count(1)
        # What KaTeX does not know it draws in red, as it was typed.
        assert page.locator(".katex-error, .katex [style*='color:#cc0000']").count() == 0, probe
        assert page.locator("table .katex").count() >= len(entry.symbols), "each symbol of the table is drawn"


@pytest.mark.parametrize(("scheme", "width"), LOOKS)
def test_dark_and_narrow(page: Page, address: str, scheme: Literal["light", "dark"], width: int) -> None:
    in_mode(page, scheme, width)
    page.goto(f"{address}/reference?about=facts+check", wait_until="commit")
    expect(page.locator(".katex-display")).to_be_visible()
    fits(page, scheme, width)
