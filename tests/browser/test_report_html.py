"""The HTML page of a session in Chromium, from a file: drawn, silent, asking nothing of a network, running no text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from engram_lab.lab.draw.theme import PALETTES
from engram_lab.lab.sessions import open_store
from engram_lab.lab.sessions.report import html_report
from engram_lab.models.handle import Handle
from engram_lab.probes import lens as lens_probe
from engram_lab.probes.lens import LensConfig
from tests.full import FULL
from tests.models import tiny

pytestmark = [pytest.mark.browser, pytest.mark.timeout(1500)]

POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
NOTE = (
    f"""{HOSTILE} [x](javascript:window.hacked=1) ![x](https://example.org/x.png) <a href="javascript:hacked=1">y</a>"""
)


@pytest.fixture(scope="module")
def page_of_a_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A session whose every text means harm, its model's name too."""
    folder = tmp_path_factory.mktemp("report")
    tokenizer = tiny.byte_level()
    handle = Handle(tiny.engram(tokenizer, max_position_embeddings=256), tokenizer, HOSTILE)
    report = lens_probe.run([handle], LensConfig((HOSTILE,), (HOSTILE,), top_k=2))
    store = open_store(f"sqlite:///{folder / 'store.db'}", folder)
    store.save(report, HOSTILE, note=NOTE, tags=[HOSTILE[9:60]], seconds=1.0)
    store.save(report, HOSTILE)
    path = folder / "report.html"
    path.write_text(html_report(store, HOSTILE, [handle]), encoding="utf-8")
    store.dispose()
    yield path


def watched(page: Page) -> tuple[list[str], list[str]]:
    """(what the page says on its console, what it asks for), as it goes on."""
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    return said, asked


def draw_all(page: Page) -> int:
    """Scroll through the figures; their number."""
    boxes = page.locator(".figure")
    for n in range(boxes.count()):
        boxes.nth(n).scroll_into_view_if_needed()
        boxes.nth(n).locator(".main-svg").first.wait_for()
    return boxes.count()


@pytest.mark.parametrize(
    ("scheme", "width"), [("light", 1400), ("dark", 800), *([("dark", 1400), ("light", 800)] if FULL else [])]
)
def test_drawn_silent_and_alone(browser: Browser, page_of_a_session: Path, scheme: Any, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 1000}, color_scheme=scheme)
    page.set_default_timeout(240_000)
    said, asked = watched(page)
    address = page_of_a_session.as_uri()
    page.goto(address)
    assert draw_all(page) == 6, "for each run the curves, a map and a histogram"
    for box in page.locator("details").all():
        box.evaluate("box => box.open = true")
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "only maps and tables scroll sideways"
    red, green, blue = (int(PALETTES[scheme].page[n : n + 2], 16) for n in (1, 3, 5))
    colours = page.evaluate(
        "() => [getComputedStyle(document.body).backgroundColor, document.querySelector('.main-svg').style.background]"
    )
    assert colours == [f"rgb({red}, {green}, {blue})"] * 2, "page and figures have the colour of the mode"
    other = "dark" if scheme == "light" else "light"
    page.emulate_media(color_scheme=other)
    red, green, blue = (int(PALETTES[other].page[n : n + 2], 16) for n in (1, 3, 5))
    page.wait_for_function(
        """colour => [...document.querySelectorAll('.main-svg:first-child')]
        .every(svg => svg.style.background == colour)""",
        arg=f"rgb({red}, {green}, {blue})",
    )
    assert said == [] and asked == [address]
    page.close()


@pytest.mark.parametrize("policy", [True, False])
def test_nothing_of_a_session_runs(browser: Browser, page_of_a_session: Path, tmp_path: Path, policy: bool) -> None:
    """With the page's policy, and also without: each alone has to hold."""
    text = page_of_a_session.read_text(encoding="utf-8")
    shown = text if policy else POLICY.sub("", text)
    assert (shown == text) == policy
    path = tmp_path / "shown.html"
    path.write_text(shown, encoding="utf-8")
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    page.set_default_timeout(240_000)
    said, asked = watched(page)
    page.goto(path.as_uri())
    draw_all(page)
    for point in page.locator(".figure .points path").all()[:3]:  # what a figure shows on hover too
        point.hover(force=True)
    assert page.evaluate("window.hacked") is None
    assert page.locator("img[src=x]").count() == 0
    assert page.locator("h1").inner_text() == HOSTILE
    assert page.locator(".note a").evaluate_all("links => links.map(a => a.href)") == ["https://example.org/x.png"]
    assert said == [] and asked == [path.as_uri()]
    page.close()


def test_the_policy_stops_a_script_that_got_in(browser: Browser, page_of_a_session: Path, tmp_path: Path) -> None:
    text = page_of_a_session.read_text(encoding="utf-8").replace("<main>", "<main><script>window.hacked = 1</script>")
    for name, shown, ran in (("with", text, None), ("without", POLICY.sub("", text), 1)):
        path = tmp_path / f"{name}.html"
        path.write_text(shown, encoding="utf-8")
        page = browser.new_page()
        said, _ = watched(page)
        page.goto(path.as_uri())
        assert page.evaluate("window.hacked") == ran
        assert any("Content Security Policy" in line for line in said) == (ran is None)
        page.close()
