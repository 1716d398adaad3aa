"""Who may use the served app: the names it answers to, its own pages only, a password or a proxy's login."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import ipaddress
import os
import secrets
import socket
import stat
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engram_lab.models.errors import LabError

OPEN_PATH = "/_stcore/health"  # says "ok" and nothing else
WRONG_SECONDS = 0.2  # how long a wrong password keeps the others waiting
MOST_WAITING = 25  # passwords that wait to be compared; more are turned away


def read_password(file: Path) -> bytes:
    """The first line of a file. LabError where there is none."""
    try:
        lines = file.read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines()
    except OSError as error:
        raise LabError(f"The password file {file} cannot be read: {error.strerror or error}.") from error
    if not lines or not lines[0].strip():
        raise LabError(f"The password file {file} has no password in its first line: write one there.")
    return lines[0]


def is_readable_by_others(file: Path) -> bool:
    """Whether another user of this machine may read the file; not known on Windows."""
    return os.name == "posix" and bool(file.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))


class Guard:
    """In front of every path of an ASGI app, websockets too.

    - The name in the Host header is an IP address, localhost, this machine's, or one of `names`: a site whose name was
      pointed at this machine (DNS rebinding) is none of them. Else 403.
    - A request with an Origin comes from a page of this server. Else 403.
    - `header` is there, set by the proxy that logged the user in. Else 403.
    - `password` by HTTP Basic authentication, with any user name. Else 401.
    """

    def __init__(
        self, app: ASGIApp, names: Iterable[str] = (), password: bytes | None = None, header: str | None = None
    ) -> None:
        self._app = app
        here = socket.gethostname()
        self._names = {name.lower() for name in ("localhost", here, f"{here}.local", *names) if name}
        self._password = None if password is None else _digest(password)
        self._header = header
        # Shown by a browser that gave the password: some send none with a websocket, and while someone tries
        # passwords those who are in must not wait.
        self._pass = secrets.token_urlsafe(32)
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        request = HTTPConnection(scope)
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        name = _host_name(host)
        if not (name in self._names or _is_address(name)):
            return await _refuse(403, "This server does not answer to this name: start it with --allowed-host NAME.")(
                scope, receive, send
            )
        if origin is not None and _netloc(origin) != host.lower():
            return await _refuse(403, "This request comes from a page of another site.")(scope, receive, send)
        if scope["path"] == OPEN_PATH:
            return await self._app(scope, receive, send)
        if self._header is not None and not request.headers.get(self._header, "").strip():
            return await _refuse(403, f"The proxy that sets {self._header} has logged nobody in.")(scope, receive, send)
        if self._password is None or self._has_pass(request):
            return await self._app(scope, receive, send)
        given = _basic_password(request.headers.get("authorization", ""))
        if given is not None and self._waiting >= MOST_WAITING:
            busy = _refuse(429, "Too many passwords are tried: try again later.", {"Retry-After": "5"})
            return await busy(scope, receive, send)
        if given is None or not await self._is_right(given):
            challenge = {"WWW-Authenticate": 'Basic realm="Engram Lab", charset="UTF-8"'}
            return await _refuse(401, "Engram Lab asks for a password.", challenge)(scope, receive, send)
        # Only with a page: what else there is may be kept by a proxy for everyone.
        page = "text/html" in request.headers.get("accept", "")
        return await self._app(scope, receive, self._with_pass(scope, send) if page else send)

    async def _is_right(self, given: bytes) -> bool:
        """Compare one at a time and pause after a wrong one: many at once try no more than one would."""
        self._waiting += 1
        try:
            async with self._turn:
                right = hmac.compare_digest(_digest(given), self._password or b"")
                if not right:
                    await asyncio.sleep(WRONG_SECONDS)
        finally:
            self._waiting -= 1
        return right

    def _cookie(self, scope: Scope) -> str:
        # A browser sends cookies to every port of a host: each server has its own.
        return f"engram-lab-{(scope.get('server') or ('', ''))[1]}"

    def _has_pass(self, request: HTTPConnection) -> bool:
        given = request.cookies.get(self._cookie(request.scope), "")
        return hmac.compare_digest(given.encode(), self._pass.encode())

    def _with_pass(self, scope: Scope, send: Send) -> Send:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                cookie = f"{self._cookie(scope)}={self._pass}; HttpOnly; SameSite=Strict; Path=/"
                MutableHeaders(scope=message).append("set-cookie", cookie)
            await send(message)

        return sending


def _refuse(status: int, text: str, headers: dict[str, str] | None = None) -> PlainTextResponse:
    return PlainTextResponse(f"{text}\n", status, {"Cache-Control": "no-store", **(headers or {})})


def _digest(password: bytes) -> bytes:
    return hashlib.sha256(password).digest()


def _basic_password(header: str) -> bytes | None:
    """The password in an Authorization header; None where it is no Basic authentication."""
    scheme, _, value = header.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
    except (binascii.Error, ValueError):
        return None


def _netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _host_name(host: str) -> str:
    """The name in a Host header without the port, "" where it is none."""
    try:
        return (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
