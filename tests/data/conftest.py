"""A local HTTP server that can be interrupted, and a temporary cache."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest


class Server:
    """Serves `files` by path; cuts a response off after `max_body` bytes; supports range requests by default."""

    def __init__(self):
        self.files: dict[str, bytes] = {}
        self.max_body, self.supports_ranges, self.sends_length = 1 << 30, True, True
        self.rejects_ranges = False
        self.requests: list[tuple[str, str | None]] = []
        self.sleeps: list[float] = []
        self.clock = iter([0.0] * 1000)
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.respond(self)

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.http.server_address[1]}"

    def respond(self, request):
        byte_range = request.headers.get("Range")
        self.requests.append((request.path, byte_range))
        data = self.files.get(request.path)
        if data is None:
            request.send_error(404)
            return
        if byte_range and self.rejects_ranges:
            request.send_error(416)
            return
        start = int(byte_range.removeprefix("bytes=").rstrip("-")) if byte_range and self.supports_ranges else 0
        if start and start >= len(data):
            request.send_error(416)
            return
        request.send_response(206 if start else 200)
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        if self.sends_length:
            request.send_header("Content-Length", str(len(data) - start))
        request.end_headers()
        request.wfile.write(data[start : start + self.max_body])


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    """An HTTP server; sleeps are recorded instead of slept, and the test controls the clock."""
    server = Server()
    clock = SimpleNamespace(sleep=server.sleeps.append, monotonic=lambda: next(server.clock))
    monkeypatch.setattr("clearhead.data.downloads.time", clock)
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.http.shutdown()
    server.http.server_close()
    thread.join()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("CLEARHEAD_CACHE", str(folder))
    return folder
