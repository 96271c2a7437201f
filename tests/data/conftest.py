"""A web server on this machine that can be interrupted, and a cache of the test's own."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest


class Server:
    """Serves `files` by path; breaks off after `at_once` bytes of an answer; knows ranges unless told otherwise."""

    def __init__(self):
        self.files: dict[str, bytes] = {}
        self.at_once, self.knows_ranges, self.says_length = 1 << 30, True, True
        self.refuses_ranges = False
        self.asked: list[tuple[str, str | None]] = []
        self.waited: list[float] = []
        self.clock = iter([0.0] * 1000)
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.answer(self)

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.http.server_address[1]}"

    def answer(self, request):
        wanted = request.headers.get("Range")
        self.asked.append((request.path, wanted))
        data = self.files.get(request.path)
        if data is None:
            request.send_error(404)
            return
        if wanted and self.refuses_ranges:
            request.send_error(416)
            return
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.knows_ranges else 0
        if start and start >= len(data):
            request.send_error(416)
            return
        request.send_response(206 if start else 200)
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        if self.says_length:
            request.send_header("Content-Length", str(len(data) - start))
        request.end_headers()
        request.wfile.write(data[start : start + self.at_once])


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    """Nobody waits for it: seconds of waiting are noted, and the clock is the test's."""
    server = Server()
    clock = SimpleNamespace(sleep=server.waited.append, monotonic=lambda: next(server.clock))
    monkeypatch.setattr("clearhead.data.sources.time", clock)
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
