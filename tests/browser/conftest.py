"""A lab served by its own command, and a Chromium that looks at it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.browser.plots import PATIENCE_MS

ROOT = Path(__file__).parents[2]
CHROMIUM = "/usr/bin/chromium"


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """Where `engram-lab app` says that it runs, once it says so."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "engram_lab.lab", "app", "--port", str(port)]
    server = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        line = next((line for line in server.stdout if "http://" in line), "")
        assert line, f"the app ended with {server.wait()}"
        yield line.split()[4]
    finally:
        server.terminate()
        deadline = time.monotonic() + 30
        while server.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        server.kill()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if not shutil.which(CHROMIUM):
        pytest.skip(f"no Chromium at {CHROMIUM}")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
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
