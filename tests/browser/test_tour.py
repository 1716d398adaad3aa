"""A full tour in Chromium on the shipped models: run, keep, leave, reopen, compare, export, import, replay."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from tests.browser.plots import drawn, settled
from tests.children import ROOT

pytestmark = [pytest.mark.browser, pytest.mark.timeout(1500)]

PROMPTS = ("The cities of London and Paris are", "The $5 mill & the <river> of New")
NAME = "A tour"
CURVES = "How far each layer"


def keep(page: Page) -> None:
    """Keep what the page shows under NAME, with a note and a tag."""
    page.get_by_role("button", name="Keep this run").click()
    name = page.get_by_role("combobox", name=re.compile("Session")).last
    name.fill(NAME)
    name.press("Enter")
    note = page.get_by_role("textbox", name="Note (Markdown)")
    note.fill("Two prompts, **one** lens.")
    note.press("Control+Enter")
    settled(page)
    page.get_by_role("button", name="Keep", exact=True).click()
    expect(page.get_by_text(f"Kept in {NAME}.")).to_be_visible()
    settled(page)


def mean_kl(traces: list[dict[str, Any]]) -> np.ndarray:
    """The raw curve of the first model."""
    (line,) = [
        trace
        for trace in traces
        if trace["name"].startswith("engram-mini") and "tuned" not in trace["name"] and "markers" in trace["mode"]
    ]
    return np.array(line["y"])


def test_tour(page: Page, address: str, tmp_path: Path) -> None:
    kept = {}
    for prompt in PROMPTS:  # run, and save
        page.goto(f"{address}/lens?prompt={quote(prompt)}&colour=entropy", wait_until="commit")
        expect(page.get_by_label("Prompt", exact=True)).to_have_value(prompt)
        kept[prompt] = drawn(page, CURVES)
        settled(page)
        keep(page)
    page.get_by_role("link", name="Open sessions").click()  # leave

    expect(page.get_by_role("heading", name="Sessions")).to_be_visible()
    page.get_by_role("button", name=NAME, exact=True).click()
    expect(page.get_by_text("Two prompts, one lens.")).to_be_visible()
    settled(page)
    page.locator('[class*="st-key-open_"] button:visible').nth(1).click()  # reopen the first run
    expect(page.get_by_text("nothing was computed")).to_be_visible()
    expect(page.get_by_label("Prompt", exact=True)).to_have_value(PROMPTS[0])
    assert json.dumps(drawn(page, CURVES)) == json.dumps(kept[PROMPTS[0]]), "the figure is the one that was kept"
    expect(page.get_by_role("combobox", name=re.compile("Colour"))).to_have_value("entropy")
    settled(page)

    page.get_by_role("link", name="Sessions", exact=True).click()  # compare
    page.get_by_role("button", name=NAME, exact=True).click()
    page.get_by_text("Compare them").click()
    (difference,) = [trace for trace in drawn(page, "B minus A") if len(trace["y"]) == 11]
    a, b = (mean_kl(kept[prompt]) for prompt in PROMPTS)
    assert np.allclose(difference["y"], b - a, atol=1e-6)
    settled(page)

    with page.expect_download() as download:  # export
        page.get_by_role("button", name="Export").click()
    out = tmp_path / "tour.zip"
    download.value.save_as(out)
    with page.expect_download() as download:
        page.get_by_role("button", name="HTML report").click()
    page_file = tmp_path / "tour.html"
    download.value.save_as(page_file)

    page.get_by_role("button", name="Delete", exact=True).first.click()  # delete, and undo
    expect(page.get_by_text(f"The session {NAME} was deleted.")).to_be_visible()
    page.get_by_role("button", name="Undo").click()
    expect(page.get_by_role("button", name=NAME, exact=True)).to_be_visible()

    page.get_by_text("Import a session, or open an example").click()  # import
    page.locator('input[type="file"]').first.set_input_files(out)
    expect(page.get_by_role("button", name=f"{NAME} (2)", exact=True)).to_be_visible()
    settled(page)

    page.goto(page_file.as_uri())  # the report, without the server
    assert drawn(page, CURVES)

    replayed = subprocess.run(  # replay
        [sys.executable, "-m", "engram_lab.lab", "replay", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert replayed.stdout.count("identical") >= 2, replayed.stdout


def test_start_page_opens_an_example_on_its_pages(page: Page, address: str) -> None:
    page.goto(address, wait_until="commit")
    expect(page.get_by_role("heading", name="Experiments to open")).to_be_visible()
    settled(page)
    page.locator('[class*="st-key-open_when"] button:visible').click()
    expect(page.get_by_role("heading", name="When does it know?", exact=True)).to_be_visible()
    settled(page)
    page.locator('[class*="st-key-open_session"] button:visible').click()
    expect(page.get_by_text("nothing was computed").first).to_be_visible()
    assert drawn(page, "How alike the layers are")
