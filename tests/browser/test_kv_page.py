"""The page on the KV cache in Chromium, on engram-mini: the drawn ladder, the prompt, a link, a click on the map."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlparse

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from engram_lab.lab.ask import scenarios
from engram_lab.models.handle import Handle, open_model
from engram_lab.probes.kv import map as kv_map
from engram_lab.probes.kv import swap
from engram_lab.probes.kv.map import MapConfig
from engram_lab.probes.kv.swap import SwapConfig
from tests.browser.plots import LOOKS, drawn, redrawn, settled

pytestmark = [pytest.mark.browser, pytest.mark.timeout(1500)]

MODEL = ("engram-mini",)
LADDER, ANSWERS, MAP = "How much of the new answer", "What the model would answer", "Where the cache holds"
OTHER = "pet-kind"


@pytest.fixture(scope="module")
def handle() -> Iterator[Handle]:
    opened = open_model(MODEL[0])
    yield opened
    opened.close()


def ladder(handle: Handle, scenario: str) -> dict[str, float]:
    """The probe's own recovery of each bar."""
    config = SwapConfig(MODEL, scenarios.find(scenario, scenarios.library()), align="split")
    result = swap.run([handle], config).result
    bars = {name: value for name, value in zip(result.names, result.effects.recovery.tolist(), strict=True)}
    return bars | {f"random {k}": float(result.random_mean[n]) for n, k in enumerate(result.random_k.tolist())}


def bars(traces: list[dict[str, Any]]) -> dict[str, float]:
    return {x: y for t in traces if t["type"] == "bar" for x, y in zip(t["x"], t["y"], strict=True)}


def agree(found: dict[str, float], wanted: dict[str, float]) -> None:
    assert found.keys() == wanted.keys()
    assert all(np.isclose(found[name], wanted[name], atol=2e-3) for name in wanted)


def test_the_drawn_ladder_is_the_probes(page: Page, address: str, handle: Handle) -> None:
    page.goto(f"{address}/kv", wait_until="commit")
    first = drawn(page, LADDER)
    library = scenarios.library()
    agree(bars(first), ladder(handle, library[0].id))
    settled(page)
    field = page.locator(".chip.field")
    assert "".join(field.all_text_contents()).replace("·", "") == library[0].old
    assert "recovers" in str(field.first.get_attribute("title"))
    expect(page.get_by_text("far too weak")).to_be_visible()
    drawn(page, ANSWERS)

    page.get_by_label("Scenario", exact=True).fill(OTHER)
    page.keyboard.press("Enter")
    agree(bars(redrawn(page, LADDER, json.dumps(first))), ladder(handle, OTHER))
    settled(page)
    assert parse_qs(urlparse(page.url).query)["scenario"] == [OTHER]


def test_a_link_reopens_and_a_click_inspects(page: Page, address: str, handle: Handle) -> None:
    page.goto(f"{address}/kv?experiment=Map&scenario={OTHER}&groups=2", wait_until="commit")
    (cells,) = [t for t in drawn(page, MAP) if t["type"] == "heatmap"]
    scenario = scenarios.find(OTHER, scenarios.library())
    result = kv_map.run([handle], MapConfig(MODEL, scenario, 2, align="split")).result
    assert np.allclose(np.array(cells["z"]), result.recovery, atol=2e-3)
    settled(page)
    area = page.locator(".st-key-map .nsewdrag").first
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    assert box is not None
    position = result.pair.n_editable // 2
    column = box["x"] + box["width"] * (position + 0.5) / result.pair.n_editable
    page.mouse.click(column, box["y"] + box["height"] * 0.25)  # the upper of the two rows
    expect(page.get_by_label("Position", exact=True)).to_have_value(str(position))
    expect(page.get_by_text(f"layers {result.group_names[1]}", exact=False).first).to_be_visible()
    settled(page)
    assert parse_qs(urlparse(page.url).query)["kv_pos"] == [str(position)]


@pytest.mark.parametrize(("scheme", "width"), LOOKS)
def test_dark_and_narrow(page: Page, address: str, scheme: Any, width: int) -> None:
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(f"{address}/kv?experiment=Map&scenario={OTHER}&groups=2", wait_until="commit")
    drawn(page, MAP)
    settled(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
