"""What the app uses of the pinned Streamlit, nnsight and Python beyond what they offer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from engram_lab.lab.app import streamlit_internals

ROOT = Path(__file__).parents[3]


def page_of_widgets() -> None:
    import streamlit as st

    from engram_lab.lab.app import streamlit_internals

    st.text_input("a", "x", key="text")
    st.toggle("b", True, key="switch")
    st.number_input("c", 0, 9, 3, key="whole")
    st.number_input("d", 0.0, 9.0, 0.5, key="number")
    st.multiselect("e", ["p", "q"], ["q"], key="several")
    st.selectbox("f", ["p", "q"], 1, key="one")
    st.slider("g", 0, 9, (2, 4), key="range")
    st.button("h", key="press")
    st.file_uploader("i", key="upload")
    st.session_state["mine"] = "no widget"
    st.session_state["result"] = streamlit_internals.settable_values()


def test_widgets_that_can_be_set_are_told_from_those_that_cannot() -> None:
    at = AppTest.from_function(page_of_widgets).run()
    assert not at.exception
    assert at.session_state["result"] == {
        "text": "x", "switch": True, "whole": 3, "number": 0.5, "several": ["q"], "one": "q", "range": (2, 4),
    }  # fmt: skip
    assert streamlit_internals.settable_values() == {}, "outside of a script"


def test_the_script_that_draws_charts_is_found() -> None:
    script = streamlit_internals.chart_script()
    assert script is not None and script.startswith("/static/js/PlotlyChart.") and script.endswith(".js")


def in_a_process(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_nnsight_leaves_no_save_on_every_object() -> None:
    program = """
import nnsight
assert hasattr(object, "save"), "it takes off nothing any more: drop import_nnsight"
from engram_lab.lab.app.streamlit_internals import import_nnsight
import_nnsight()
import_nnsight()
assert not hasattr(object, "save")
"""
    done = in_a_process(program)
    assert done.returncode == 0, done.stderr


def test_a_process_ends_at_once_with_what_it_printed() -> None:
    program = """
import atexit, threading, time
from engram_lab.lab.app.streamlit_internals import end_process
atexit.register(print, "late")
threading.Thread(target=time.sleep, args=(600,)).start()
print("said", end="")
end_process()
"""
    done = in_a_process(program)
    assert (done.returncode, done.stdout) == (0, "said")
