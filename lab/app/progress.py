"""What a page shows while something waits or runs, and the button that stops it."""

from __future__ import annotations

import time
from typing import Any

import streamlit as st

from engram_lab.lab.app import imports

QUIET_SECONDS = 0.4  # what is done sooner shows no progress bar


def wait_for_imports() -> None:
    """Wait for what runs models, with a word on the page; before anything that imports it."""
    if imports.are_done():
        return
    slot = st.empty()
    imports.wait(lambda seconds: _say_what_is_waited_for(slot, seconds))
    slot.empty()


def _say_what_is_waited_for(slot: Any, seconds: float) -> None:
    # Streamlit ends a script that was asked for something else at such a call.
    slot.info(
        f"The lab has just started: waiting for torch, which runs the models ({seconds:.0f} s so far) …",
        icon=":material/hourglass_top:",
    )


class Bar:
    """What is shown while something waits or runs: a bar and a button that stops it.

    A click reruns the page, and Streamlit then ends this script at its next call, here; the next one finds `key` in
    the session. With `otherwise`, what the page then lacks, this is told in its place, and the script ends.
    """

    def __init__(self, key: str, otherwise: str = "") -> None:
        if otherwise and is_cancelled(key):
            offer_again(f"Cancelled: {otherwise}", "Go on")
            st.stop()
        self._key = key
        self._began = time.monotonic()
        self._slot = st.empty()  # always, so that what is below stays where it is
        self._bar: Any = None

    def waiting(self, before: int) -> None:
        """Said while others are before, at every look: so that a script which was ended ends here."""
        self._show(0.0, f"Waiting: {before} before you" if before else "Waiting for a model that is being opened")

    def progress(self, fraction: float, doing: str) -> None:
        """The fraction done, 0 to 1, and what is being done; nothing to see in the first moments."""
        if self._bar is not None or time.monotonic() - self._began > QUIET_SECONDS:
            self._show(min(max(fraction, 0.0), 1.0), f"{doing} · {fraction:.0%}")

    def clear(self) -> None:
        """Take it off the page."""
        self._slot.empty()

    def _show(self, fraction: float, text: str) -> None:
        if self._bar is None:
            left, right = self._slot.container().columns([6, 1], vertical_alignment="center")
            self._bar = left.progress(0.0)
            right.button("Cancel", key=f"cancel_{self._key}", on_click=_set_cancelled, args=(self._key,))
        self._bar.progress(fraction, text=text)


def is_cancelled(key: str) -> bool:
    """Whether what has this key was cancelled, and not asked for since."""
    return bool(st.session_state.get("cancelled") == key)


def offer_again(sentence: str, button: str) -> None:
    """Say that something was cancelled, with a button that asks for it again."""
    st.info(sentence, icon=":material/cancel:")
    st.button(button, key="run_again", on_click=_set_cancelled, args=(None,))


def _set_cancelled(key: str | None) -> None:
    st.session_state["cancelled"] = key
