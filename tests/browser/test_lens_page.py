"""The lens page in Chromium, on the shipped models: type a prompt, read the drawn curve, click, reopen."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import parse_qs, urlparse

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from engram_lab.lab.draw.theme import PALETTES
from engram_lab.models.handle import open_model
from engram_lab.probes import lens as lens_probe
from engram_lab.probes.base import Report
from engram_lab.probes.lens import LensConfig
from tests.browser.plots import LOOKS, drawn, redrawn, settled, type_prompt

pytestmark = [pytest.mark.browser, pytest.mark.timeout(1500)]

PROMPT = "The $5 river & the <mill> of New"
MODELS = ("engram-mini", "dense-mini")
# The figures of the page, found by their titles.
CURVES = "How far each layer"
MAP = "at each layer and position"


@pytest.fixture(scope="module")
def report() -> Report:
    """The probe's own numbers for what the tests type."""
    handles = [open_model(name) for name in MODELS]
    found = lens_probe.run(handles, LensConfig(MODELS, (PROMPT,), tuned=True))
    for handle in handles:
        handle.close()
    return found


def test_typed_prompt_draws_the_probes_curve(page: Page, address: str, report: Report) -> None:
    page.goto(f"{address}/lens", wait_until="commit")
    before = [json.dumps(drawn(page, title)) for title in (CURVES, MAP)]
    type_prompt(page, PROMPT)
    curves, cells = (redrawn(page, title, old) for title, old in zip((CURVES, MAP), before, strict=True))
    settled(page)
    lines = {t["name"]: t for t in curves if "markers" in (t["mode"] or "")}
    assert len(lines) == 4
    for lens in report.result.models:
        of_model = {"tuned" in name: t for name, t in lines.items() if name.startswith(lens.name)}
        for line, reading in ((of_model[False], lens), (of_model[True], lens.tuned)):
            assert np.allclose(line["y"], reading.mean_kl, atol=1e-4)
            assert line["y"][-1] == 0, "the last layer is the final one"
    assert np.allclose(cells[0]["z"], report.result.models[0].kl, atol=1e-4)
    # The text of the prompt is shown as it is: as chips, and under the map.
    chips = page.locator(".chip:not(.special)").evaluate_all("chips => chips.map(c => c.firstChild.textContent)")
    assert "".join(chips).replace("·", " ") == PROMPT
    assert parse_qs(urlparse(page.url).query)["prompt"] == [PROMPT]


def test_link_reopens_and_a_click_inspects(page: Page, address: str, report: Report) -> None:
    page.goto(f"{address}/lens?prompt={PROMPT.replace('&', '%26').replace('$', '%24')}", wait_until="commit")
    expect(page.get_by_label("Prompt", exact=True)).to_have_value(PROMPT)
    drawn(page, MAP)
    settled(page)
    plot = page.locator(".st-key-map_scroll .js-plotly-plot")
    plot.scroll_into_view_if_needed()
    # Where Plotly itself has put the middle of layer index 2, position 3.
    x, y = page.evaluate(
        """() => { const plot = document.querySelector('.st-key-map_scroll .js-plotly-plot');
        const area = plot.querySelector('.nsewdrag').getBoundingClientRect();
        const at = (axis, v) => axis._offset + axis.l2p(v);
        const {xaxis, yaxis} = plot._fullLayout;
        return [area.left + xaxis.l2p(3), area.top + yaxis.l2p(2)]; }"""
    )
    page.mouse.click(x, y)
    lens = report.result.models[0]
    shown = page.get_by_text(re.compile(r"layer 1, position 3 \("))
    expect(shown.first).to_be_visible()
    expect(shown.first).to_contain_text(f"id {lens.token_ids[3]}")
    assert parse_qs(urlparse(page.url).query)["pos"] == ["3"]


@pytest.mark.parametrize(("scheme", "width"), LOOKS)
def test_dark_and_narrow(page: Page, address: str, scheme: Any, width: int) -> None:
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(f"{address}/lens", wait_until="commit")
    drawn(page, MAP)
    settled(page)
    colours = page.evaluate(
        """() => [getComputedStyle(document.querySelector('[data-testid=stApp]')).backgroundColor,
        document.querySelector('.js-plotly-plot .main-svg').style.background]"""
    )
    red, green, blue = (int(PALETTES[scheme].page[n : n + 2], 16) for n in (1, 3, 5))
    assert colours == [f"rgb({red}, {green}, {blue})"] * 2, "page and figures have the colour of the mode"
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "only the map scrolls sideways"
    inner, outer = page.locator(".st-key-map_scroll").evaluate("box => [box.scrollWidth, box.clientWidth]")
    assert inner > outer if width == 800 else inner >= outer


def test_start_page_opens_the_lens(page: Page, address: str) -> None:
    page.goto(address, wait_until="commit")
    expect(page.get_by_role("heading", name="Engram Lab")).to_be_visible()
    page.get_by_role("button", name="Look inside").first.click()
    drawn(page, CURVES)
    expect(page.get_by_label("Prompt", exact=True)).not_to_have_value("")


def test_bad_prompt_is_one_sentence(page: Page, address: str) -> None:
    page.goto(f"{address}/lens", wait_until="commit")
    drawn(page, CURVES)
    type_prompt(page, "")
    alert = page.get_by_test_id("stAlert")
    expect(alert).to_have_count(1)
    expect(alert).to_contain_text("empty")
    type_prompt(page, "the river")
    expect(alert).to_have_count(0)


def test_a_long_run_can_be_cancelled(page: Page, address: str) -> None:
    page.goto(f"{address}/lens?mode=text+set&seed=77", wait_until="commit")
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_text("Cancelled")).to_be_visible()
    # The lab is as usable as before.
    page.goto(f"{address}/lens?prompt=the+river", wait_until="commit")
    assert drawn(page, CURVES)
