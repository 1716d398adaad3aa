"""A lab served by its own command, and a Chromium that looks at it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from choreographer.browsers.chromium import Chromium
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.browser.plots import PATIENCE_MS
from tests.children import serving


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """Where `engram-lab app` says that it runs, once it says so."""
    with serving() as (where, _):
        yield f"http://{where}"


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    found = Chromium.find_browser(skip_local=False)  # as the PNG of a figure does
    if not found:
        missing = "There is no Chromium and no Chrome on this machine."
        pytest.fail(missing) if os.environ.get("CI") else pytest.skip(missing)
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(
            executable_path=found, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    opened = browser.new_page(viewport={"width": 1400, "height": 1000}, reduced_motion="reduce")
    opened.set_default_timeout(PATIENCE_MS)
    expect.set_options(timeout=PATIENCE_MS)
    yield opened
    opened.close()
