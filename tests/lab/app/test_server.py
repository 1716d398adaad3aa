"""`engram-lab app` as a process of its own, asked over HTTP and websockets: who gets in, what comes, how it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from engram_lab.lab.app import server
from engram_lab.lab.command.main import main
from engram_lab.models.errors import LabError

ROOT = Path(__file__).parents[3]
PASSWORD, HEADER = "correct horse", "X-Forwarded-User"
PATIENCE = 120  # seconds for what takes a few where nothing else runs
Capture = pytest.CaptureFixture[str]


@dataclass
class App:
    """A running app: its process, the line it printed, and where it is."""

    process: subprocess.Popen[str]
    line: str
    errors: Path

    @property
    def address(self) -> str:
        return self.line.split()[4]

    def wait(self) -> None:
        """Until it says where it is."""
        assert self.process.stdout is not None
        self.line = next((line for line in self.process.stdout if "http://" in line), "")
        assert self.line, self.errors.read_text()

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.address, timeout=PATIENCE, **options)

    def stream(self, **options: Any) -> ClientConnection:
        """The websocket on which the pages come."""
        url = self.address.replace("http", "ws") + "/_stcore/stream"
        options = {"origin": self.address, **options}
        return connect(url, subprotocols=["streamlit"], open_timeout=PATIENCE, max_size=None, legacy=True, **options)

    def ends(self, number: int) -> float:
        """The seconds until it has ended, with exit code 0, after a signal."""
        began = time.monotonic()
        self.process.send_signal(number)
        assert self.process.wait(PATIENCE) == 0
        return time.monotonic() - began


def begin(folder: Path, name: str, *options: str) -> App:
    errors = folder / f"{name}.err"
    with errors.open("w") as written:
        process = subprocess.Popen(
            [sys.executable, "-m", "engram_lab.lab", "app", "--port", "0", *options],
            cwd=ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "ENGRAM_LAB_DATA": str(folder)},
            stdout=subprocess.PIPE,
            stderr=written,
            text=True,
        )
    return App(process, "", errors)


@pytest.fixture(scope="module")
def apps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, App]]:
    """Two apps, started together: one behind a password and a proxy's header, one open to the network."""
    folder = tmp_path_factory.mktemp("apps")
    password = folder / "password"
    password.write_text(f"{PASSWORD}\n")
    password.chmod(0o644)
    made = {
        "locked": begin(folder, "locked", "--password-file", str(password), "--login-header", HEADER),
        "open": begin(folder, "open", "--host", "::", "--models", "2", "--dtype", "float32"),
    }
    try:
        for app in made.values():
            app.wait()
        yield made
    finally:
        for app in made.values():
            app.process.kill()


@pytest.fixture
def locked(apps: dict[str, App]) -> App:
    return apps["locked"]


@pytest.fixture
def exposed(apps: dict[str, App]) -> App:
    return apps["open"]


def rerun(stream: ClientConnection, page: str = "") -> None:
    """Ask for a page, as the browser does."""
    message = BackMsg()
    message.rerun_script.page_name = page
    stream.send(message.SerializeToString())


def heard(stream: ClientConnection) -> Iterator[ForwardMsg]:
    """What the server sends, until the script has ended."""
    while True:
        message = ForwardMsg()
        message.ParseFromString(stream.recv(PATIENCE))
        yield message
        if message.WhichOneof("type") == "script_finished":
            return


def session_of(stream: ClientConnection) -> str:
    """Show the start page; the id of the browser session."""
    rerun(stream)
    messages = list(heard(stream))
    assert any(m.delta.new_element.heading.body == "Engram Lab" for m in messages)
    return next(m.new_session.initialize.session_id for m in messages if m.HasField("new_session"))


def test_says_where_it_runs_and_warns_where_anyone_gets_in(locked: App, exposed: App) -> None:
    for app in (locked, exposed):
        assert app.line.startswith("Engram Lab runs at http://localhost:")
        assert app.client().get("/_stcore/health").text == "ok"
    assert "without a login" in exposed.errors.read_text() and "--password-file" in exposed.errors.read_text()
    told = locked.errors.read_text()
    assert "without a login" not in told and "others on this machine can read" in told and "chmod 600" in told


@pytest.mark.parametrize(
    "path", ["/", "/lens", "/_stcore/upload_file/a/b", "/_stcore/host-config", "/_stcore/metrics", "/media/a.png",
             "/static/none.js", "/favicon.png", "/_stcore/stream", "/component/a/b", "/oauth2callback"]
)  # fmt: skip
def test_every_path_asks_for_the_password(locked: App, path: str) -> None:
    with locked.client(headers={HEADER: "ada"}) as client:
        for method in ("GET", "PUT", "POST", "OPTIONS"):
            response = client.request(method, path)
            assert response.status_code == 401 and response.headers["www-authenticate"].startswith("Basic")
        assert client.get(path, auth=("ada", "wrong")).status_code == 401
    with locked.client(auth=("ada", PASSWORD)) as client:
        assert client.get(path).status_code == 403, "not logged in by the proxy"


def refused(app: App, **options: Any) -> int:
    """The status with which the websocket is refused."""
    with pytest.raises(InvalidStatus) as found:
        app.stream(**options)
    return found.value.response.status_code


def test_the_websocket_asks_for_it_too(locked: App, exposed: App) -> None:
    assert refused(locked, additional_headers={HEADER: "ada"}) == 401
    assert refused(locked, additional_headers={HEADER: "ada", "Cookie": "engram-lab=x"}) == 401
    assert refused(locked) == 403
    assert refused(exposed, origin="http://evil.example") == 403
    assert refused(exposed, origin="http://localhost:1") == 403


def test_with_the_password_pages_come(locked: App) -> None:
    with locked.client(auth=("ada", PASSWORD), headers={HEADER: "ada", "Accept": "text/html"}) as client:
        page = client.get("/")
        assert page.status_code == 200 and "<title>Streamlit</title>" in page.text
        assert client.get("/", auth=None).status_code == 200, "by the cookie"
        script, _, rest = page.headers["link"].removeprefix("<").partition(">")
        assert rest == "; rel=modulepreload" and "javascript" in client.get(script).headers["content-type"]
        assert "link" not in client.get("/_stcore/health").headers, "pages alone"
        cookies = "; ".join(f"{name}={value}" for name, value in client.cookies.items())
    with locked.stream(additional_headers={HEADER: "ada", "Cookie": cookies}) as stream:
        assert session_of(stream)
    with contextlib.closing(locked.stream(**signed_in())) as stream:
        assert session_of(stream)


def signed_in() -> dict[str, Any]:
    return {"additional_headers": {HEADER: "ada", "Authorization": httpx.BasicAuth("a", PASSWORD)._auth_header}}


def test_names_that_are_not_its_own_are_refused(exposed: App) -> None:
    port = int(exposed.address.rpartition(":")[2])
    for address in ("127.0.0.1", "[::1]"):  # both kinds of addresses reach "::"
        url = f"http://{address}:{port}/"
        assert httpx.get(url).status_code == 200
        assert httpx.get(url, headers={"Host": f"evil.example:{port}"}).status_code == 403
        assert httpx.get(url, headers={"Origin": "http://evil.example"}).status_code == 403


@pytest.mark.slow
def test_uploads_are_limited(exposed: App) -> None:
    with exposed.stream() as stream, exposed.client() as client:
        path = f"/_stcore/upload_file/{session_of(stream)}/file"
        client.get("/_stcore/health")
        token = {"X-Xsrftoken": client.cookies["_streamlit_xsrf"]}

        def put(size: int, headers: dict[str, str]) -> int:
            return client.put(path, files={"file": ("a.zip", bytes(size))}, headers=headers).status_code

        assert put(server.UPLOAD_MB * 2**20 - 1024, token) == 204
        assert put(server.UPLOAD_MB * 2**20, token) == 413, "with what is around it"
        assert put(1, {}) == 403, "from another site"
        stream.send(bytes(server.WIDGETS_MB * 10**6 + 1))
        with pytest.raises(ConnectionClosed) as closed:
            while True:
                stream.recv(PATIENCE)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--models", "0"], "--models is 0; a server keeps at least 1 model in memory."),
        (["--device", "abacus"], '"abacus" is not a device'),
        (["--dtype", "int3"], '"int3" is not a dtype'),
        (["--store", "nonsense"], "The store nonsense is no URL"),
        (["--login-header", "X: y"], "give the name of a header"),
        (["--allowed-host", "http://lab.example.org"], "give a name alone"),
        (["--password-file", os.devnull], "no password in its first line"),
        (["--port", "70000"], "cannot listen on 127.0.0.1:70000"),
        (["--host", "203.0.113.1"], "cannot listen on 203.0.113.1:8501"),  # an address for documentation, nobody's
        (["--host", "." * 300], "cannot listen on"),
    ],
)
def test_a_bad_option_is_one_sentence(options: list[str], sentence: str, capsys: Capture) -> None:
    if "--port" not in options and "--host" not in options:
        options = [*options, "--port", "0"]
    assert main(["app", *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    assert sentence in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("host", "local"), [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False)]
)
def test_listens_where_it_was_told(host: str, local: bool) -> None:
    with server.listen(host, 0) as listener:
        assert server.is_local(listener) is local
        listener.listen()
        socket.create_connection((host, listener.getsockname()[1]), timeout=5).close()
        with pytest.raises(LabError, match="cannot listen"):
            server.listen(host, listener.getsockname()[1])
    assert server.host_in_address("::1") == "[::1]" and server.host_in_address("127.0.0.1") == "localhost"


def ends_in_the_middle_of_a_run(app: App, **options: Any) -> float:
    """The seconds until an app has ended that measures for half a minute, with an upload that never ends."""
    port = int(app.address.rpartition(":")[2])
    with (
        contextlib.closing(app.stream(**options)) as stream,
        socket.create_connection(("localhost", port)) as slow,
    ):
        session_of(stream)
        slow.sendall(b"PUT /_stcore/upload_file/a/b HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n")
        rerun(stream, "sensitivity")
        took = list[float]()
        with pytest.raises(ConnectionClosed):  # and not because the run was over
            for message in heard(stream):
                if message.delta.new_element.HasField("progress") and not took:
                    took.append(app.ends(signal.SIGTERM))
    (seconds,) = took
    return seconds


def test_ends_in_the_middle_of_a_run(locked: App) -> None:
    """Last, as are those below: the app is gone then."""
    ends_in_the_middle_of_a_run(locked, **signed_in())


def test_ends_by_ctrl_c(exposed: App) -> None:
    exposed.ends(signal.SIGINT)
    assert "Traceback" not in exposed.errors.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_ends_at_once(tmp_path: Path, how: signal.Signals) -> None:
    """By the clock, on a machine that does nothing else: idle, or in the middle of a run."""
    app = begin(tmp_path, "app")
    try:
        app.wait()
        assert (app.ends(how) if how == signal.SIGINT else ends_in_the_middle_of_a_run(app)) < 5
    finally:
        app.process.kill()
