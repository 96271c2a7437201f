"""A page server in a thread, and a client that sends exactly the bytes that it is told to."""

import http.client
import socket
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from clearhead.page import bind, create_server
from clearhead.page.guard import Guard
from clearhead.page.models import Catalog


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


@dataclass
class Client:
    """Requests with the right headers, unless `changes` replaces some of them or leaves them out (None)."""

    guard: Guard
    port: int
    timeout: float = 30.0

    @property
    def cookie(self) -> str:
        return f"{self.guard.cookie}={self.guard.session}"

    def send(self, method: str, path: str, body: bytes | None = None, **changes: str | None) -> Answer:
        headers: dict[str, str | None] = {"host": f"127.0.0.1:{self.port}", "cookie": self.cookie}
        if method not in ("GET", "HEAD"):
            headers["origin"] = f"http://127.0.0.1:{self.port}"
            headers["content-length"] = str(len(body or b""))
        headers |= {name.replace("_", "-"): value for name, value in changes.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.timeout)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers.items():
                if value is not None:
                    connection.putheader(name, value)
            connection.endheaders(body)
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def get(self, path: str, **changes: str | None) -> Answer:
        return self.send("GET", path, **changes)

    def post(self, path: str, body: bytes, **changes: str | None) -> Answer:
        return self.send("POST", path, body, **changes)

    def connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=self.timeout)
        connection.settimeout(self.timeout)
        return connection


@contextmanager
def running(catalog: Catalog):
    """A client of a server that runs in a thread."""
    listener, guards, started = bind("127.0.0.1", 0), [], threading.Event()

    def on_start(guard: Guard) -> None:
        guards.append(guard)
        started.set()

    server = create_server(catalog, listener, "127.0.0.1", on_start)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    assert started.wait(30)
    try:
        yield Client(guards[0], listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture
def client(tmp_path, monkeypatch):
    """A server without runs, which shows the shipped checkpoint."""
    monkeypatch.chdir(tmp_path)
    with running(Catalog()) as client:
        yield client


@pytest.fixture(scope="session")
def serve():
    """serve(catalog): a context with a client of its server."""
    return running


@pytest.fixture(scope="session")
def open_link():
    """open_link(link): a client of a server in another process, which opens the link as a browser does."""

    def open_link(link: str) -> Client:
        port = int(link.partition("127.0.0.1:")[2].partition("/")[0])
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("GET", link.partition(str(port))[2])
        cookie = connection.getresponse().getheader("set-cookie") or ""
        connection.close()
        guard = Guard(None, "127.0.0.1", port)  # type: ignore[arg-type]
        guard.session = cookie.partition(";")[0].partition("=")[2]
        return Client(guard, port)

    return open_link


@dataclass
class Recorder:
    """An application that answers everything with 200 and remembers that it was called."""

    calls: list[str] = field(default_factory=list)

    async def __call__(self, scope, receive, send):
        self.calls.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


@pytest.fixture
def recorder():
    return Recorder()
