"""The pages that need no model, drawn by an interpreter that cannot import torch; and the others, which wait for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engram_lab.lab.sessions import archive, open_store

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "nnsight")
PROGRAM = """
import sys
HEAVY = sys.argv[2].split(",")
sys.modules.update(dict.fromkeys(HEAVY))  # importing one of them fails
from streamlit.testing.v1 import AppTest
from engram_lab.lab.app import imports
from engram_lab.lab.fronts import FRONTS
from tests.pages.driving import APP, PAGES, clean

def page(name, **query):
    at = AppTest.from_file(str(APP), default_timeout=200)
    at.query_params.update(query)
    return clean(at.switch_page(str(PAGES / f"{name}.py")).run())

assert page("start").title[0].value == "Engram Lab" and len(page("start").get("plotly_chart")) == 3
for probe in list(FRONTS)[::5]:
    (figures,) = [e for e in page("reference", about=probe).expander if e.label == "Every figure of a result"]
    assert figures.markdown[0].value.startswith("- **")
shown = page("sessions", session=sys.argv[1])
assert any(toggle.key.startswith("show_") for toggle in shown.toggle), "the runs of the chosen session"
assert not imports.are_done() and not imports.are_running(), "nobody asked for it"
for name in HEAVY:
    del sys.modules[name]
seconds = []
imports.wait(seconds.append)
assert seconds and seconds == sorted(seconds), "who waits is told"
assert all(name in sys.modules for name in HEAVY) and not hasattr(object, "save") and imports.are_done()
imports.wait(lambda seconds: sys.exit("there is nothing to wait for"))
page("hash")
"""


@pytest.mark.slow
def test_start_reference_and_sessions_need_no_torch(tmp_path: Path) -> None:
    environment = {**os.environ, "ENGRAM_LAB_DATA": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    store = open_store(f"sqlite:///{tmp_path / 'lab.db'}")
    example = sorted((ROOT / "assets" / "sessions").glob("*.zip"))[-1]
    session = archive.import_session(store, example)
    store.dispose()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, session.id, ",".join(HEAVY)],
        cwd=ROOT, env={**environment, "ENGRAM_LAB_STORE": f"sqlite:///{tmp_path / 'lab.db'}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
