"""The CKA page in Chromium, on the shipped models: read the drawn map and curves, bring a file, narrow and dark."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qs, urlparse

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from engram_lab.lab.fronts import cka_figures
from engram_lab.lab.fronts.cka import shipped
from engram_lab.models.handle import open_model
from engram_lab.probes import cka
from engram_lab.probes import lens as lens_probe
from engram_lab.probes.base import Report
from engram_lab.probes.cka import CKAConfig, looks_like
from engram_lab.probes.lens import LensConfig
from engram_lab.probes.points import read_sentences, take
from tests.browser.plots import LOOKS, drawn, redrawn, settled

pytestmark = [pytest.mark.browser, pytest.mark.timeout(1500)]

N = 12  # sentences: few, so that the test is quick
MODELS = ("engram-mini", "dense-mini")
# The figures of the page, found by their titles.
MAP, BIASED, ALIGNMENT = "CKA (unbiased)", "biased CKA", "Which layer of the other model"
LEAD, LENS = "How much deeper the layers", "How far each layer"
BIO = "Vienna\tB-a\nlies\tO\non\tO\nthe\tO\nDanube\tB-b\n.\tO\n\nAda\tB-p\nLovelace\tI-p\nmet\tO\nBabbage\tB-p\n"


@pytest.fixture(scope="module")
def reports() -> tuple[Report, Report, Report]:
    """The probes' own numbers: CKA and lens of our sentences, CKA of the file."""
    handles = [open_model(name) for name in MODELS]
    texts, entities = take(shipped(), "entity", N)
    ours = cka.run(handles, CKAConfig(MODELS, texts, entities))
    lens = lens_probe.run(handles, LensConfig(MODELS, texts, detail=False))
    brought = cka.run(handles, CKAConfig(MODELS, *take(read_sentences(BIO.encode(), "x"), "entity")))
    for handle in handles:
        handle.close()
    return ours, lens, brought


def heat(traces: list[dict[str, Any]]) -> np.ndarray:
    """[layer_a, layer_b] of the drawn map."""
    (cells,) = [t for t in traces if t["type"] == "heatmap"]
    return np.array(cells["z"]).T


def line(traces: list[dict[str, Any]], name: str) -> list[float]:
    (found,) = [t for t in traces if t["name"] == name]
    return found["y"]


def test_the_drawn_map_is_the_probes(page: Page, address: str, reports: tuple[Report, Report, Report]) -> None:
    ours, lens, _ = reports
    page.goto(f"{address}/cka?sentences={N}&biased=true&layer_a=3", wait_until="commit")
    cells = drawn(page, MAP)
    assert np.allclose(heat(cells), ours.result.cka, atol=1e-4)
    assert np.allclose(line(cells, "soft alignment"), ours.result.alignment_a, atol=1e-3)
    assert np.allclose(heat(drawn(page, BIASED)), ours.result.biased, atol=1e-4)
    curves = drawn(page, ALIGNMENT)
    assert np.allclose(line(curves, "dense-mini in engram-mini"), ours.result.alignment_b, atol=1e-3)
    assert np.allclose(line(drawn(page, LEAD), "lead"), ours.result.lead, atol=1e-3)
    lines = [t for t in drawn(page, LENS) if t["name"].startswith("dense-mini") and "markers" in (t["mode"] or "")]
    assert np.allclose(lines[0]["y"], lens.result.models[1].mean_kl, atol=1e-3)
    settled(page)
    expect(page.get_by_text(looks_like(ours, "3"))).to_be_visible()
    expect(page.get_by_text(cka_figures.deeper(ours, lens))).to_be_visible()


def test_the_two_answers_are_on_one_screen(page: Page, address: str) -> None:
    page.goto(f"{address}/cka?sentences={N}", wait_until="commit")
    drawn(page, LEAD)
    settled(page)
    boxes = [page.locator(f".st-key-{key} .js-plotly-plot").bounding_box() for key in ("lens_curves", "lead")]
    assert boxes[0] and boxes[1] and abs(boxes[0]["y"] - boxes[1]["y"]) < 5, "side by side"
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"] + 1


def test_a_file_with_entities(page: Page, address: str, reports: tuple[Report, Report, Report]) -> None:
    page.goto(f"{address}/cka?sentences={N}", wait_until="commit")
    before = json.dumps(drawn(page, MAP))
    file = {"name": "mine.bio", "mimeType": "text/plain", "buffer": BIO.encode()}
    page.locator('[data-testid="stFileUploader"] input').first.set_input_files(file)  # type: ignore[arg-type]
    found = redrawn(page, MAP, before)
    assert np.allclose(heat(found), reports[2].result.cka, atol=1e-4)
    expect(page.get_by_text("4 points of 2 sentences").first).to_be_visible()


@pytest.mark.parametrize(("scheme", "width"), LOOKS)
def test_dark_and_narrow(page: Page, address: str, scheme: Any, width: int) -> None:
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(f"{address}/cka?sentences={N}&points=all+tokens", wait_until="commit")
    drawn(page, LEAD)
    settled(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert parse_qs(urlparse(page.url).query)["points"] == ["all tokens"]
