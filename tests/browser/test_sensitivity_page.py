"""What the memory is for, in Chromium on the shipped models: two files brought, a change picked, its figure read."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from engram_lab.lab.ask.texts import items_of
from engram_lab.models.handle import open_model
from engram_lab.probes import sensitivity
from engram_lab.probes.base import Report
from engram_lab.probes.sensitivity import SensitivityConfig, TextSet
from tests.browser.plots import LOOKS, drawn, fits, in_mode, settled

pytestmark = [pytest.mark.browser, pytest.mark.timeout(1500)]

FILES = {
    "facts.jsonl": b'{"prompt": "Paris is the capital of", "answer": "France"}\n'
    b'{"prompt": "The Nile is a", "answer": "river"}\n',
    "reading.jsonl": b'{"context": "The mill is old.", "prompt": "The mill is", "answer": "old"}\n',
}  # fmt: skip
NAMES = ("engram-mini", "dense-mini")
TITLE = "What the loss rises by"


@pytest.fixture(scope="module")
def report() -> Report:
    """The probe's own numbers for these files and both changes."""
    handles = [open_model(name) for name in NAMES]
    sets = tuple(TextSet(name.partition(".")[0], items_of(raw, name)) for name, raw in FILES.items())
    found = sensitivity.run(handles, SensitivityConfig(NAMES, sets, ("off", "shuffled")))
    for handle in handles:
        handle.close()
    return found


def bring(page: Page) -> None:
    """Both files, before the page has computed its own sets."""
    page.locator("input[type=file]").first.set_input_files(
        [{"name": name, "mimeType": "application/jsonl", "buffer": raw} for name, raw in FILES.items()]
    )


def test_files_and_changes_draw_the_probes_figure(page: Page, address: str, report: Report) -> None:
    page.goto(f"{address}/sensitivity", wait_until="commit")
    bring(page)
    page.get_by_role("button", name="rows shuffled").or_(page.get_by_role("checkbox", name="rows shuffled")).click()
    page.wait_for_function(
        "n => [...document.querySelectorAll('.js-plotly-plot')].some(p => p._fullData?.[0].x.length === n)",
        arg=len(report.result.conditions) - 1,
    )
    settled(page)
    traces = {str(trace["name"]).split(" ")[0]: trace for trace in drawn(page, TITLE)}
    for s, name in enumerate(("facts", "reading")):
        assert np.allclose(traces[name]["x"], report.result.change[s, 1:], atol=1e-4)


@pytest.mark.parametrize(("scheme", "width"), LOOKS)
def test_dark_and_narrow(page: Page, address: str, scheme: Literal["light", "dark"], width: int) -> None:
    in_mode(page, scheme, width)
    page.goto(f"{address}/sensitivity", wait_until="commit")
    bring(page)
    drawn(page, TITLE)
    fits(page, scheme, width)


def test_a_model_without_a_memory_is_told(page: Page, address: str) -> None:
    page.goto(f"{address}/sensitivity?model=dense-mini&against=nothing", wait_until="commit")
    expect(page.get_by_test_id("stAlert")).to_contain_text("has no memory to take away")


def test_a_bad_file_is_one_sentence(page: Page, address: str) -> None:
    page.goto(f"{address}/sensitivity", wait_until="commit")
    page.locator("input[type=file]").first.set_input_files(
        [{"name": "bad.jsonl", "mimeType": "application/jsonl", "buffer": b"{}"}]
    )
    alert = page.get_by_test_id("stAlert")
    expect(alert).to_contain_text("bad.jsonl has no JSON object")
    expect(alert).to_have_count(1)
