"""Starts the app: Streamlit in this process, with the lab's options, and the shipped models opened beforehand."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from pathlib import Path

from models.errors import LabError

APP = Path(__file__).with_name("app.py")
DEFAULT_PORT = 8501


def main(host: str = "127.0.0.1", port: int = DEFAULT_PORT) -> None:
    """Serve the app until it is interrupted; prints its address once it answers.

    Raises LabError where the address cannot be used.
    """
    _check_free(host, port)
    print("Engram Lab is starting …", file=sys.stderr, flush=True)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else it warns at every fork

    from streamlit.web import bootstrap

    import lab.runner  # noqa: F401 - all that is slow to import, before the address is given out
    from lab.theme import streamlit_options

    options = {
        "server.address": host,
        "server.port": port,
        "server.headless": True,
        "server.fileWatcherType": "none",  # it would walk through torch's lazy modules
        "server.maxUploadSize": 4,
        "browser.gatherUsageStats": False,
        "runner.magicEnabled": False,
        "global.disableWidgetStateDuplicationWarning": True,  # a callback's value is meant to win over a default
        "client.toolbarMode": "minimal",
        "client.showErrorDetails": "none",
        "logger.hideWelcomeMessage": True,
        **streamlit_options(),
    }
    _take_save_off_objects()
    bootstrap.load_config_options(options)
    threading.Thread(target=_prepare, args=(host, port), daemon=True).start()
    bootstrap.run(str(APP), False, [], options)


def _check_free(host: str, port: int) -> None:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise LabError(
            f"The app cannot listen on {host}:{port} ({reason}); choose another address with --host and --port."
        ) from error


def _take_save_off_objects() -> None:
    """Undo what nnsight does to every object of the process: anyio refuses to define classes with a `save`."""
    from nnsight._c import unmount

    if unmount is not None and hasattr(object, "save"):
        unmount("save")


def _prepare(host: str, port: int) -> None:
    """Once the server answers, open the shipped models, so that no first chart waits for them; then say where it is.

    Not before: two threads that import the same packages at once can meet half an import.
    """
    from lab import runner

    shown = "localhost" if host in ("127.0.0.1", "0.0.0.0", "::", "::1") else host
    while True:
        try:
            socket.create_connection((shown, port), timeout=1).close()
            break
        except OSError:
            time.sleep(0.05)
    for name in ("streamlit.runtime.caching", "streamlit.runtime.scriptrunner_utils.script_run_context"):
        logging.getLogger(name).setLevel(logging.ERROR)  # "missing ScriptRunContext": here there is none
    runner.warm_up()
    print(f"Engram Lab runs at http://{shown}:{port} (Ctrl-C stops it)", flush=True)
