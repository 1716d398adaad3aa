"""torch and what is built on it: imported once, by a thread of its own, while pages that need none of it are drawn.

Two threads that import the same packages at once can meet half an import, so no page imports any of it before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LOOK_SECONDS = 0.2  # between two words to somebody who waits

_lock = threading.Lock()
_thread: threading.Thread | None = None
_failure: BaseException | None = None


def begin() -> threading.Thread:
    """Start to import, if nobody has; the thread that does."""
    global _thread
    with _lock:
        if _thread is None:
            _thread = threading.Thread(target=_import, name="imports", daemon=True)
            _thread.start()
        return _thread


def are_done() -> bool:
    """Whether everything is imported."""
    return _thread is not None and not _thread.is_alive() and _failure is None


def are_running() -> bool:
    """Whether something is being imported just now."""
    return _thread is not None and _thread.is_alive()


def wait(on_wait: Callable[[float], None] | None = None) -> None:
    """Until everything is imported; raises what importing raised.

    Meanwhile `on_wait` gets the seconds so far, again and again; what it raises ends the waiting.
    """
    began = time.monotonic()
    thread = begin()
    while thread.is_alive():
        if on_wait is not None:
            on_wait(time.monotonic() - began)
        thread.join(LOOK_SECONDS)
    if _failure is not None:
        raise _failure


def _import() -> None:
    global _failure
    try:
        from engram_lab.lab.app import streamlit_internals

        streamlit_internals.import_nnsight()
        import engram_lab.lab.fronts.export
        import engram_lab.lab.fronts.lens_figures
        import engram_lab.models.handle
        import engram_lab.probes.lens  # noqa: F401
    except BaseException as error:  # for whoever waits
        _failure = error
