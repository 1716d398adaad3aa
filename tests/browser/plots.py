"""What the browser tests share: waiting for a page, and reading its figures as Plotly has drawn them."""

from __future__ import annotations

import json
import time
from typing import Any, Literal

from playwright.sync_api import Page

from engram_lab.lab.draw.theme import PALETTES
from tests.full import FULL

# A busy machine draws slowly; what is slow on an idle one is measured elsewhere.
PATIENCE_MS = 240_000
# How every page is looked at, (scheme, width); the main path of each runs in light at 1400 px.
LOOKS = [("dark", 800), *([("dark", 1400), ("light", 800)] if FULL else [])]

READ = """title => {
  const found = [...document.querySelectorAll('.js-plotly-plot')].find(
    plot => plot._fullData && plot.layout?.title && plot.layout.title.text.includes(title));
  if (!found) return null;
  return found._fullData.map(trace => ({
    name: trace.name, mode: trace.mode, type: trace.type,
    y: Array.from(trace.y || []), x: Array.from(trace.x || []),
    z: trace.z ? Array.from(trace.z, row => Array.from(row)) : null,
    text: trace.type === 'heatmap' ? trace.text : null}));
}"""


def settled(page: Page) -> None:
    """Wait until the page has been drawn and the script has ended."""
    page.wait_for_selector('[data-testid="stApp"][data-test-script-state="notRunning"]')


def drawn(page: Page, title: str) -> list[dict[str, Any]]:
    """The traces of the figure with this title, as Plotly has them in the page."""
    return redrawn(page, title, "")


def redrawn(page: Page, title: str, before: str) -> list[dict[str, Any]]:
    """The traces once they are no longer those of before; the script may have ended a moment earlier.

    A figure is drawn in steps, and on a busy machine one can look in between: two looks have to agree.
    """
    deadline, last = time.monotonic() + PATIENCE_MS / 1000, None
    while True:
        traces: list[dict[str, Any]] | None = page.evaluate(READ, title)
        whole = bool(traces) and all(trace["z"] for trace in traces if trace["type"] == "heatmap")
        if traces and whole and traces == last and json.dumps(traces) != before:
            return traces
        assert time.monotonic() < deadline, f"the figure with {title!r} is not drawn, or stayed as it was: {traces}"
        last = traces
        page.wait_for_timeout(100)


def type_prompt(page: Page, prompt: str) -> None:
    box = page.get_by_label("Prompt", exact=True)
    box.fill(prompt)
    box.press("Control+Enter")


def in_mode(page: Page, scheme: Literal["light", "dark"], width: int) -> None:
    """Look at what comes in this mode and through a window of this width."""
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page.set_viewport_size({"width": width, "height": 900})


def fits(page: Page, scheme: str, width: int) -> None:
    """The page has the colour of the mode, and nothing but a map scrolls sideways."""
    settled(page)
    colour = page.evaluate("getComputedStyle(document.querySelector('[data-testid=stApp]')).backgroundColor")
    red, green, blue = (int(PALETTES[scheme].page[n : n + 2], 16) for n in (1, 3, 5))
    assert colour == f"rgb({red}, {green}, {blue})"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
