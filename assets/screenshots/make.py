"""The pictures in the README, from the real app: `make screenshots`, or this file with names of SHOTS.

Serves the app with a store of its own, drives Chromium through it, and writes a PNG for each of SHOTS beside this file.
Needs playwright and Chromium; one that needs a model which is not here is left out, and says so.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from engram_lab.models.listing import list_models

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
WIDTH = 1400
LARGE = 250_000  # bytes, above which a picture gets a palette
PATIENCE_MS = 300_000


def nothing(page: Page) -> None:
    """The page is as its link makes it."""


def write_facts(page: Page) -> None:
    page.get_by_role("button", name="Write 10 facts").click()
    page.get_by_text("Did it learn?").wait_for()


def take_examples(page: Page) -> None:
    """Take the example sessions in, choose one, and show its first run."""
    page.get_by_text("Import a session, or open an example").click()
    for name in ("What the memory says", "When does it know?"):
        page.get_by_role("button", name=f"Example: {name}").click()
        page.get_by_role("heading", name=name).wait_for()
    settle(page)
    page.get_by_text("Show", exact=True).first.click()


@dataclass(frozen=True)
class Shot:
    """A page by its link, what is done there, and the text that is brought to the picture's top."""

    page: str
    query: dict[str, str]
    top: str = ""
    act: Callable[[Page], None] = nothing
    dark: bool = False
    height: int = 900
    needs: str = "engram-mini"


PROMPT = "Washington, D.C., is the capital of the United"
SHOTS = {
    "lens": Shot("lens", {"prompt": PROMPT, "target": " States"}, height=1160),
    "lens-dark": Shot("lens", {"prompt": PROMPT}, top="Layer by layer, position by position", dark=True),
    "cka": Shot("cka", {}, top="All layers in numbers"),
    "gates": Shot("gates", {"prompt": PROMPT, "control": "rows shuffled"}, top="Token by token"),
    "rows": Shot("rows", {"prompt": "The president of the United", "memory": "6"}, top="The rows it reads"),
    "kv": Shot("kv", {"model": "smollm2-135m", "against": "nothing"}, top="The model gets both", needs="smollm2-135m"),
    "facts": Shot("facts", {}, top="Did it learn?", act=write_facts),
    "sessions": Shot("sessions", {}, act=take_examples, top="Sessions", height=1160),
    "reference": Shot("reference", {"about": "cka"}),
}


@contextmanager
def served() -> Iterator[str]:
    """The app's address, with a store that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"ENGRAM_LAB_DATA": folder, "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "engram_lab.lab", "app", "--port", "0"]
        server = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            line = next((line for line in server.stdout if "http://" in line), "")
            if not line:
                raise SystemExit(f"The app ended with {server.wait()}.")
            yield next(word for word in line.split() if word.startswith("http://")).rstrip("/.")
        finally:
            server.terminate()
            server.wait(60)


def settle(page: Page) -> None:
    """Wait until the script has ended and every figure is drawn."""
    page.wait_for_selector('[data-testid="stApp"][data-test-script-state="notRunning"]')
    page.wait_for_function(
        "() => [...document.querySelectorAll('[data-testid=stPlotlyChart]')].every(c => c.querySelector('.main-svg'))"
    )
    page.wait_for_timeout(1500)  # fonts, and the last of what moves into place


def take(page: Page, shot: Shot, address: str) -> bytes:
    """One picture."""
    page.emulate_media(color_scheme="dark" if shot.dark else "light", reduced_motion="reduce")
    page.goto(f"{address}/{shot.page}?{urlencode(shot.query)}", wait_until="commit")
    page.get_by_role("heading").first.wait_for()
    settle(page)
    shot.act(page)
    settle(page)
    if shot.top:
        page.get_by_text(shot.top).first.evaluate(
            "found => { found.style.scrollMarginTop = '76px'; found.scrollIntoView({block: 'start'}); }"
        )
    page.mouse.move(0, 0)  # nothing shows what it shows under a pointer
    page.wait_for_timeout(500)
    return page.screenshot()


def small(picture: bytes) -> bytes:
    """The PNG packed as well as it goes; with a palette of 256 colours where it is large."""
    opened = Image.open(io.BytesIO(picture)).convert("RGB")
    packed = _png(opened)
    if len(packed) > LARGE:
        packed = _png(opened.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE))
    return packed


def _png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG", optimize=True)
    return out.getvalue()


def main(names: list[str]) -> None:
    """All pictures, or those named."""
    here = {info.name for info in list_models()}
    with served() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        for name in names or list(SHOTS):
            shot = SHOTS[name]
            if shot.needs not in here:
                sys.stdout.write(f"{name}: left out, as {shot.needs} is not here\n")
                continue
            # A browser session of its own: what one page was set to does not stand on the next.
            context = browser.new_context(viewport={"width": WIDTH, "height": shot.height})
            context.set_default_timeout(PATIENCE_MS)
            picture = small(take(context.new_page(), shot, address))
            (HERE / f"{name}.png").write_bytes(picture)
            sys.stdout.write(f"{name}: {len(picture):,} bytes\n")
            sys.stdout.flush()
            context.close()
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1:])
