"""The guard in front of the app, driven without a server: who is let in, and what trying passwords costs."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from engram_lab.lab.app import access
from engram_lab.lab.app.access import Guard, is_readable_by_others, read_password
from engram_lab.models.errors import LabError

PASSWORD = "hunter: höhle"
T = TypeVar("T")


def run(job: Coroutine[Any, Any, T]) -> T:
    """In a thread of its own: the browser's tests may have left an event loop in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, job).result()


async def inside(scope: Any, receive: Any, send: Any) -> None:
    """An app that says which path was reached."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["path"].encode()})


def asked(guard: Guard, *paths: str, host: str = "localhost:8501", **headers: str) -> list[httpx.Response]:
    """The answers to one request after another by one browser."""

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(guard)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8501") as client:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return [await client.get(path, headers={"host": host, **named}) for path in paths]

    return run(ask())


def status(guard: Guard, host: str = "localhost:8501", **headers: str) -> int:
    return asked(guard, "/media/x", host=host, **headers)[0].status_code


def basic(password: str, user: str = "") -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.fixture
def locked() -> Guard:
    return Guard(inside, password=PASSWORD.encode())


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1:8501", "[::1]:8501", "10.0.0.7", "lab.example.org."]
)
def test_answers_to_addresses_and_its_own_names(host: str) -> None:
    assert status(Guard(inside, ["Lab.example.org"]), host) == 200


@pytest.mark.parametrize(
    "host", ["", "evil.example", "localhost.evil.example", "evil.example:8501", "127.0.0.1.evil.example", "[::1", "a b"]
)
def test_answers_to_no_other_name(host: str) -> None:
    response = asked(Guard(inside, ["lab.example.org", ""]), "/", host=host)[0]
    assert response.status_code == 403 and "--allowed-host" in response.text


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ("http://localhost:8501", 200),
        ("https://localhost:8501", 200),  # a proxy may end TLS
        ("http://localhost:8502", 403),
        ("http://localhost", 403),
        ("http://evil.example", 403),
        ("http://localhost:8501@evil.example", 403),
        ("null", 403),
        ("http://[", 403),
    ],
)
def test_requests_come_from_its_own_pages(origin: str, expected: int) -> None:
    assert status(Guard(inside), origin=origin) == expected


def test_without_a_login_everything_else_is_open() -> None:
    assert [r.text for r in asked(Guard(inside), "/", "/_stcore/stream")] == ["/", "/_stcore/stream"]


def test_asks_for_the_password(locked: Guard) -> None:
    refused = asked(locked, "/")[0]
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"].startswith("Basic ")
    assert asked(locked, "/_stcore/health")[0].status_code == 200
    assert status(locked, authorization=basic(PASSWORD, "anyone")) == 200
    assert status(locked, authorization=basic(PASSWORD).replace("Basic", "BASIC")) == 200


@pytest.mark.parametrize(
    "header",
    ["", "Basic", "Basic !", "Basic ===", "Basic " + base64.b64encode(b"nothing").decode(), "Bearer x", basic(""),
     basic(PASSWORD[:-1]), basic(PASSWORD + " "), basic(PASSWORD.upper()), basic(PASSWORD).replace("Basic", "Digest")],
)  # fmt: skip
def test_no_other_password_opens_it(locked: Guard, header: str) -> None:
    assert status(locked, authorization=header) == 401


def test_a_browser_that_gave_the_password_is_known_by_its_cookie(locked: Guard) -> None:
    page = asked(locked, "/", authorization=basic(PASSWORD), accept="text/html,*/*")[0]
    cookie = page.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    name, _, value = cookie.partition(";")[0].partition("=")
    assert status(locked, cookie=f"a=b; {name}={value}") == 200
    assert status(locked, cookie=f"{name}={value}x") == status(locked, cookie=f"{name}=") == 401
    assert status(Guard(inside, password=PASSWORD.encode()), cookie=f"{name}={value}") == 401, "one for each start"
    assert status(locked, cookie=f"{name}={value}", origin="http://evil.example") == 403
    for headers in ({"authorization": basic("wrong"), "accept": "text/html"}, {"authorization": basic(PASSWORD)}):
        assert "set-cookie" not in asked(locked, "/", **headers)[0].headers


def test_wrong_passwords_wait_for_each_other_and_nobody_else_does(
    locked: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six at once take six pauses; meanwhile who has the cookie is answered, and so is the rest of the event loop."""
    cookie = asked(locked, "/", authorization=basic(PASSWORD), accept="text/html")[0].headers["set-cookie"]

    async def attack() -> tuple[list[int], list[float], int]:
        transport = httpx.ASGITransport(locked)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8501") as client:
            began = time.monotonic()
            done = []

            async def guess(n: int) -> int:
                response = await client.get("/", headers={"authorization": basic(str(n))})
                done.append(time.monotonic() - began)
                return response.status_code

            guesses = [asyncio.create_task(guess(n)) for n in range(6)]
            await asyncio.sleep(0.05)
            known = await client.get("/", headers={"cookie": cookie.partition(";")[0]})
            assert known.status_code == 200
            before = len(done)
            return await asyncio.gather(*guesses), done, before

    codes, done, before = run(attack())
    assert codes == [401] * 6
    assert before < 6, "it waited until all of them were answered"
    assert all(at >= (n + 1) * access.WRONG_SECONDS - 0.01 for n, at in enumerate(sorted(done)))


def test_more_wrong_passwords_than_can_wait_are_turned_away(locked: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "MOST_WAITING", 2)

    async def attack() -> list[int]:
        transport = httpx.ASGITransport(locked)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8501") as client:
            tries = [client.get("/", headers={"authorization": basic(str(n))}) for n in range(5)]
            return [response.status_code for response in await asyncio.gather(*tries)]

    assert sorted(run(attack())) == [401, 401, 429, 429, 429]
    assert status(locked, authorization=basic(PASSWORD)) == 200


def test_a_proxy_logs_in() -> None:
    guard = Guard(inside, header="X-Forwarded-User")
    assert status(guard) == status(guard, x_forwarded_user=" ") == 403
    assert status(guard, x_forwarded_user="ada") == 200
    assert status(guard, x_forwarded_user="ada", host="evil.example") == 403
    both = Guard(inside, header="X-Forwarded-User", password=PASSWORD.encode())
    assert status(both, x_forwarded_user="ada") == 401
    assert status(both, authorization=basic(PASSWORD)) == 403
    assert status(both, x_forwarded_user="ada", authorization=basic(PASSWORD)) == 200


@pytest.mark.parametrize("name", ["evil.example", "localhost:8501"])
def test_a_websocket_is_guarded_the_same(locked: Guard, name: str) -> None:
    sent: list[dict[str, Any]] = []
    scope = {
        "type": "websocket", "path": "/_stcore/stream", "headers": [(b"host", name.encode())], "query_string": b"",
        "scheme": "ws", "server": ("127.0.0.1", 8501), "extensions": {"websocket.http.response": {}},
    }  # fmt: skip

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    run(locked(scope, receive, send))
    assert [m["type"] for m in sent] == ["websocket.http.response.start", "websocket.http.response.body"]
    assert sent[0]["status"] == (403 if name == "evil.example" else 401)


def test_the_password_is_the_first_line(tmp_path: Path) -> None:
    file = tmp_path / "password"
    for content in (b"one two \nthree\n", b"\xef\xbb\xbfone two \r\n", b"one two "):
        file.write_bytes(content)
        assert read_password(file) == b"one two "
    for content in (b"", b"\n", b"  \nlate\n"):
        file.write_bytes(content)
        with pytest.raises(LabError, match="no password in its first line"):
            read_password(file)
    with pytest.raises(LabError, match="cannot be read"):
        read_password(tmp_path / "none")
    with pytest.raises(LabError, match="cannot be read"):
        read_password(tmp_path)


def test_a_file_that_others_can_read(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("x")
    for mode, expected in ((0o600, False), (0o640, True), (0o604, True)):
        file.chmod(mode)
        assert is_readable_by_others(file) is expected
