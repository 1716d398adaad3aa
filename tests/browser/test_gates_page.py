"""The gates page in Chromium, on the shipped Engram: type, click controls, read what is drawn, dark and narrow."""

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
from engram_lab.probes import gates
from engram_lab.probes.base import Report
from engram_lab.probes.gates import GatesConfig
from tests.browser.plots import LOOKS, drawn, redrawn, settled, type_prompt

pytestmark = [pytest.mark.browser, pytest.mark.timeout(1500)]

PROMPT = "The $5 river & the <mill> of the United"
TARGET = " States"
MODEL = "engram-mini"
# The figures of the page, found by their titles.
MAP, KNOCKED, LENS, BARS = "the memory opens", "when one gate is shut", "with and without", "Which parts give"
QUERY = f"target={TARGET.replace(' ', '+')}&prompt={PROMPT.replace('&', '%26').replace('$', '%24').replace(' ', '+')}"


@pytest.fixture(scope="module")
def report() -> Report:
    """The probe's own numbers for what the tests ask."""
    handle = open_model(MODEL)
    config = GatesConfig((MODEL,), (PROMPT,), TARGET, controls=("shuffled",), knock_out=True)
    found = gates.run([handle], config)
    handle.close()
    return found


def test_typed_prompt_draws_the_probes_gates(page: Page, address: str, report: Report) -> None:
    page.goto(f"{address}/gates", wait_until="commit")
    before = json.dumps(drawn(page, MAP))
    type_prompt(page, PROMPT)
    cells = redrawn(page, MAP, before)
    settled(page)
    result = report.result
    assert np.allclose(cells[0]["z"][::-1], result.gate[:, 0], atol=1e-4)
    # The prompt itself, coloured: its text is as it was typed.
    chips = page.locator(".chip:not(.special)").evaluate_all("chips => chips.map(c => c.textContent)")
    assert "".join(chips).replace("·", " ") == PROMPT
    colours = page.locator(".chip").evaluate_all("chips => chips.map(c => getComputedStyle(c).backgroundColor)")
    order = np.argsort(result.gate[0, 0])
    brightness = [sum(int(part) for part in re.findall(r"\d+", colour)[:3]) for colour in colours]
    assert brightness[order[-1]] > brightness[order[0]] + 100, "Cividis goes from dark to bright"
    page.get_by_label("Target token", exact=True).fill(TARGET)
    page.get_by_label("Target token", exact=True).press("Enter")
    page.wait_for_function(
        "name => [...document.querySelectorAll('.js-plotly-plot')].some(p => p.layout.title.text.includes(name))",
        arg="give ·States",
    )
    bars = drawn(page, BARS)
    assert sum(sum(trace["y"]) for trace in bars) == pytest.approx(result.attribution.logit[-1], abs=1e-3)
    assert parse_qs(urlparse(page.url).query)["target"] == [TARGET]


def test_a_control_is_one_click(page: Page, address: str, report: Report) -> None:
    page.goto(f"{address}/gates?{QUERY}", wait_until="commit")
    before = json.dumps(drawn(page, MAP))
    settled(page)
    page.get_by_role("button", name="rows shuffled").or_(page.get_by_role("radio", name="rows shuffled")).click()
    cells = redrawn(page, MAP, before)
    (shuffled,) = report.result.controls
    assert np.allclose(cells[0]["z"][::-1], np.concatenate([report.result.gate, shuffled.gate])[:, 0], atol=1e-4)
    expect(page.get_by_text(f"{shuffled.mean_loss_change:+.3f}")).to_be_visible()
    lines = [trace for trace in drawn(page, LENS) if trace["mode"] == "lines+markers"]
    assert np.allclose([line["y"] for line in lines], [report.result.mean_kl, shuffled.mean_kl], atol=1e-4)
    assert parse_qs(urlparse(page.url).query)["control"] == ["rows shuffled"]


def test_knock_outs_and_a_click_on_the_map(page: Page, address: str, report: Report) -> None:
    page.goto(f"{address}/gates?{QUERY}", wait_until="commit")
    drawn(page, MAP)
    settled(page)
    page.get_by_text("Knock-outs", exact=True).click()
    cells = drawn(page, KNOCKED)
    assert np.allclose(cells[0]["z"][::-1], report.result.knock_out.logit_change, atol=1e-3)
    settled(page)
    plot = page.locator(".st-key-map_scroll .js-plotly-plot")
    plot.scroll_into_view_if_needed()
    x, y = page.evaluate(
        """() => { const plot = document.querySelector('.st-key-map_scroll .js-plotly-plot');
        const area = plot.querySelector('.nsewdrag').getBoundingClientRect();
        const {xaxis, yaxis} = plot._fullLayout;
        return [area.left + xaxis.l2p(3), area.top + yaxis.l2p(0)]; }"""
    )
    page.mouse.click(x, y)
    page.wait_for_function("() => new URLSearchParams(location.search).get('pos') === '3'")
    page.wait_for_function(
        "() => [...document.querySelectorAll('.js-plotly-plot')].some(p => p.layout.title.text.includes('position 3'))"
    )


@pytest.mark.parametrize(("scheme", "width"), LOOKS)
def test_dark_and_narrow(page: Page, address: str, scheme: Any, width: int) -> None:
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(f"{address}/gates?{QUERY}&control=memory+off", wait_until="commit")
    drawn(page, MAP)
    drawn(page, BARS)
    settled(page)
    colours = page.evaluate(
        """() => [getComputedStyle(document.querySelector('[data-testid=stApp]')).backgroundColor,
        document.querySelector('.js-plotly-plot .main-svg').style.background]"""
    )
    red, green, blue = (int(PALETTES[scheme].page[n : n + 2], 16) for n in (1, 3, 5))
    assert colours == [f"rgb({red}, {green}, {blue})"] * 2, "page and figures have the colour of the mode"
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "only the map scrolls sideways"


def test_a_model_without_a_memory_is_one_sentence(page: Page, address: str) -> None:
    page.goto(f"{address}/gates?model=dense-mini&against=nothing", wait_until="commit")
    alert = page.get_by_test_id("stAlert")
    expect(alert).to_have_count(1)
    expect(alert).to_contain_text("dense-mini has no Engram memory")
