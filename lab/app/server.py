"""Starts the app: Streamlit in this process, with the lab's options; the shipped models are opened once it answers."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import uvicorn
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engram_lab.lab.app import imports, shortage
from engram_lab.lab.app.access import Guard
from engram_lab.lab.app.streamlit_internals import chart_script, end_process
from engram_lab.models.errors import LabError

APP = Path(__file__).with_name("entry.py")
DEFAULT_PORT = 8501
UPLOAD_MB = 64  # the server's limit, for an exported session; each uploader sets its own below it
WIDGETS_MB, CHARTS_MB = 8, 64  # what a browser sends at once, and gets at once
PING_SECONDS = 30
DRAIN_SECONDS, END_SECONDS = 1, 3  # after Ctrl-C: for answers under way, and until the process ends in any case


@dataclass(frozen=True)
class Access:
    """Who may use the app; see lab.app.access.Guard."""

    password: bytes | None = None
    login_header: str | None = None
    names: tuple[str, ...] = ()


def main(
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    access: Access | None = None,
    settings: Mapping[str, Any] | None = None,
) -> NoReturn:
    """Serve the app until it is interrupted, which ends the process; prints the address once it answers.

    `settings` are those of lab.app.settings.configure. Raises LabError where they or the address cannot be used.
    """
    access = access or Access()
    listener = listen(host, port)
    port = listener.getsockname()[1]
    if not access.password and not access.login_header and not is_local(listener):
        print(
            f"Warning: whoever can reach {host}:{port} can use this app without a login, so run models on this "
            "machine, open model files on it by their path, and read, change and delete the kept sessions. Start it "
            "with --password-file FILE, or behind a proxy that logs users in with --login-header NAME.",
            file=sys.stderr,
        )
    print("Engram Lab is starting …", file=sys.stderr, flush=True)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else it warns at every fork

    from streamlit.starlette import App
    from streamlit.web import bootstrap

    # What pages without a model import, so that no page does while another thread imports what is built on it.
    import engram_lab.lab.app.page
    import engram_lab.lab.fronts.reference
    import engram_lab.lab.sessions.archive  # noqa: F401
    from engram_lab.lab.app.settings import configure
    from engram_lab.lab.draw.theme import streamlit_options

    configure(**(settings or {}))
    options = {
        "server.address": host,
        "server.port": port,
        "server.headless": True,
        "server.fileWatcherType": "none",  # it would walk through torch's lazy modules
        "server.maxUploadSize": UPLOAD_MB,
        "server.maxMessageSize": CHARTS_MB,
        "server.maxWidgetStateSize": WIDGETS_MB,
        "server.enableCORS": True,  # Streamlit's own checks of where a request comes from, whatever a user's
        "server.enableXsrfProtection": True,  # configuration of Streamlit says
        "browser.gatherUsageStats": False,
        "runner.magicEnabled": False,
        "global.disableWidgetStateDuplicationWarning": True,  # a callback's value is meant to win over a default
        "client.toolbarMode": "minimal",
        "client.showErrorDetails": "none",
        "logger.hideWelcomeMessage": True,
        **streamlit_options(),
    }
    shortage.few_arenas()
    bootstrap.load_config_options(options)
    guarded = Guard(Preloading(App(APP), chart_script()), (host, *access.names), access.password, access.login_header)
    server = _Server(
        uvicorn.Config(
            guarded,
            host=host,
            port=port,
            ws="websockets-sansio",
            ws_max_size=WIDGETS_MB * 10**6,
            ws_ping_interval=PING_SECONDS,
            ws_ping_timeout=PING_SECONDS,
            timeout_graceful_shutdown=DRAIN_SECONDS,
            access_log=False,
            log_level="warning",
        )
    )
    threading.Thread(target=_prepare, args=(server, f"http://{host_in_address(host)}:{port}"), daemon=True).start()
    server.run(sockets=[listener])
    end_process()


class Preloading:
    """An app whose pages have the browser get a script at once, which it else asks for when the first chart comes."""

    def __init__(self, app: ASGIApp, script: str | None) -> None:
        self._app, self._script = app, script

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the app does, with one more header for a page."""

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if headers.get("content-type", "").startswith("text/html"):
                    headers.append("link", f"<{self._script}>; rel=modulepreload")
            await send(message)

        await self._app(scope, receive, sending if self._script and scope["type"] == "http" else send)


class _Server(uvicorn.Server):
    """Ends soon after Ctrl-C or SIGTERM, whatever is still being computed or sent."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end; at once if asked a second time."""
        if self.should_exit:
            end_process()
        self.should_exit = True
        last = threading.Timer(END_SECONDS, end_process)
        last.daemon = True
        last.start()


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to the address, which is then this process's own."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        try:
            if os.name == "posix":
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # "::" is IPv4's addresses too
            listener.bind((address[0], port, *address[2:]))  # getaddrinfo makes 4464 of 70000
        except BaseException:
            listener.close()
            raise
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise LabError(
            f"The app cannot listen on {host}:{port} ({reason}); choose another address with --host and --port."
        ) from error
    return listener


def is_local(listener: socket.socket) -> bool:
    """Whether only this machine can connect."""
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def host_in_address(host: str) -> str:
    """The host in an address for a browser on this machine."""
    if host in ("127.0.0.1", "0.0.0.0", "::", ""):
        return "localhost"
    return f"[{host}]" if ":" in host else host


def _prepare(server: uvicorn.Server, address: str) -> None:
    """Once the server answers, say where it is; then import what runs models, and open the shipped ones."""
    while not server.started:
        time.sleep(0.02)
    print(f"Engram Lab runs at {address} (Ctrl-C stops it)", flush=True)
    imports.wait()
    for name in ("streamlit.runtime.caching", "streamlit.runtime.scriptrunner_utils.script_run_context"):
        logging.getLogger(name).setLevel(logging.ERROR)  # "missing ScriptRunContext": here there is none
    warm_up()


def warm_up() -> None:
    """Open and run what the first page needs; a shipped model that cannot be opened is left to its page."""
    from engram_lab.lab.app import runner
    from engram_lab.probes import lens

    names = runner.model_names()
    for name in dict.fromkeys(runner.default_pair(names)):
        if name in names:
            try:
                opened = runner.open_models_here().lease([name])
            except LabError:
                continue
            with runner.line().turn(opened):
                lens.run(opened, lens.LensConfig(models=(name,), prompts=("Good morning",)))
            runner.open_models_here().release(opened)
