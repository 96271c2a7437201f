"""The guard lets in exactly the requests of its own page, and nobody waits forever."""

import asyncio
import itertools
import re
import socket
import subprocess
import sys
import time

import pytest

from clearhead.page import check_host
from clearhead.page import guard as guard_module
from clearhead.page.guard import HEADERS, MAX_BODY_BYTES, Guard, host_names

PORT = 8123
OWN = f"127.0.0.1:{PORT}"
HOSTS = [
    OWN,
    f"localhost:{PORT}",
    None,
    "",
    "127.0.0.1",
    "localhost",
    "127.0.0.1:80",
    f"127.0.0.1:{PORT + 1}",
    f"evil.example:{PORT}",
    f"127.0.0.1.evil.example:{PORT}",
    f"{OWN}.evil.example",
    f"user@{OWN}",
    f"0.0.0.0:{PORT}",
    f"[::1]:{PORT}",
    f"{OWN}, {OWN}",
]
ORIGINS = [
    None,
    f"http://{OWN}",
    f"http://localhost:{PORT}",
    "null",
    "",
    f"https://{OWN}",
    "http://127.0.0.1",
    f"http://127.0.0.1:{PORT + 1}",
    "http://evil.example",
    f"http://{OWN}.evil.example",
]
SITES = [None, "same-origin", "none", "same-site", "cross-site", "", "Same-Origin"]
METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"]
COOKIES = ["right", None, "", "wrong", "prefix", "longer", "other port", "token"]


def cookie_header(guard, kind):
    return {
        "right": f"theme=dark; {guard.cookie}={guard.session}; x=y",
        "wrong": f"{guard.cookie}={'A' * len(guard.session)}",
        "prefix": f"{guard.cookie}={guard.session[:-1]}",
        "longer": f"{guard.cookie}={guard.session}x",
        "other port": f"clearhead-{PORT + 1}={guard.session}",
        "token": f"{guard.cookie}={guard.token}",
    }.get(kind, kind)


def ask(guard, *request, **options):
    """The messages that the guard sends for a request."""
    return asyncio.run(sent_by(guard, *request, **options))


async def sent_by(guard, method="GET", path="/", query=b"", headers=(), body=()):
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in body]
    messages.append({"type": "http.request", "body": b"", "more_body": False})
    sent = []

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": query,
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers if value is not None],
    }
    await guard(scope, receive, send)
    return sent


def is_own(host, origin, site, method, cookie):
    """What a browser that shows this page sends."""
    if host not in (OWN, f"localhost:{PORT}") or cookie != "right":
        return False
    if method in ("GET", "HEAD"):
        return origin in (None, f"http://{host}") and site in (None, "same-origin", "none")
    return origin == f"http://{host}" and site in (None, "same-origin")


def test_of_all_combinations_only_those_of_the_own_page_are_let_in(recorder):
    let_in, refused = asyncio.run(try_all_combinations(Guard(recorder, "127.0.0.1", PORT), recorder))
    assert let_in == 2 * (2 * 2 * 3 + 5 * 1 * 2)
    assert refused > 50_000


async def try_all_combinations(guard, recorder):
    counts = [0, 0]
    for host, origin, site, method, cookie in itertools.product(HOSTS, ORIGINS, SITES, METHODS, COOKIES):
        recorder.calls.clear()
        headers = {"host": host, "origin": origin, "sec-fetch-site": site, "cookie": cookie_header(guard, cookie)}
        sent = await sent_by(guard, method, "/api/models", headers=headers.items())
        expected = is_own(host, origin, site, method, cookie)
        assert bool(recorder.calls) == expected, headers
        assert sent[0]["status"] == 200 if expected else sent[0]["status"] in (403, 421)
        counts[not expected] += 1
    return counts


@pytest.mark.parametrize("name", ["host", "origin", "sec-fetch-site"])
def test_a_header_that_is_sent_twice_is_refused(name, recorder):
    guard = Guard(recorder, "127.0.0.1", PORT)
    headers = {"host": OWN, "origin": f"http://{OWN}", "sec-fetch-site": "same-origin"}
    own = [*headers.items(), ("cookie", cookie_header(guard, "right"))]
    assert ask(guard, "POST", headers=own)[0]["status"] == 200
    assert ask(guard, "POST", headers=[*own, (name, headers[name])])[0]["status"] in (403, 421)


def test_combinations_over_a_real_connection(client):
    """A sample of 300 combinations, with uvicorn and a socket in between."""
    right = f"127.0.0.1:{client.port}"
    hosts = [right, f"localhost:{client.port}", "127.0.0.1", f"evil.example:{client.port}"]
    origins = [None, f"http://{right}", "null", "http://evil.example", f"http://127.0.0.1:{client.port + 1}"]
    combinations = list(itertools.product(hosts, origins, [None, "same-origin", "cross-site"], ["GET", "POST", "PUT"]))
    assert len(combinations) * 2 > 300
    for (host, origin, site, method), cookie in itertools.product(combinations, [client.cookie, None]):
        answer = client.send(method, "/api/models", host=host, origin=origin, sec_fetch_site=site, cookie=cookie)
        is_right = host in hosts[:2] and cookie is not None and site != "cross-site"
        is_right &= origin == f"http://{host}" or (origin is None and method == "GET")
        expected = ({200} if method == "GET" else {405}) if is_right else {403, 421}
        assert answer.status in expected, (host, origin, site, method, cookie)
        if not is_right:
            assert b"shipped" not in answer.body


# The opening link


def test_the_opening_link_is_exchanged_for_a_cookie(client):
    link = client.guard.link()
    assert link.startswith(f"http://127.0.0.1:{client.port}/?token=")
    answer = client.get(link.partition(str(client.port))[2], cookie=None)
    assert answer.status == 303
    assert answer.headers["location"] == "/"
    parts = answer.headers["set-cookie"].split("; ")
    assert parts[0] == client.cookie
    assert str(client.port) in parts[0].partition("=")[0]
    assert set(parts[1:]) == {"HttpOnly", "SameSite=Strict", "Path=/"}
    assert client.guard.token not in str(answer.headers)
    assert client.get("/", cookie=parts[0]).status == 200


def test_tokens_are_long_random_and_different():
    guards = [Guard(None, "127.0.0.1", PORT) for _ in range(20)]
    secrets = {secret for guard in guards for secret in (guard.token, guard.session)}
    assert len(secrets) == 40
    assert min(map(len, secrets)) >= 43  # 256 bits in base64


@pytest.mark.parametrize(
    "change",
    [
        {"method": "POST", "headers": [("origin", f"http://{OWN}")]},
        {"method": "HEAD"},
        {"path": "/api/models"},
        {"path": "//"},
        {"query": lambda token: b"token=" + token[:-1]},
        {"query": lambda token: b"token=" + token + b"&x=1"},
        {"query": lambda token: b"x=1&token=" + token},
        {"query": lambda token: b"Token=" + token},
        {"query": lambda token: b"token="},
        {"query": lambda token: b"token=\xff\xfe"},
        {"headers": [("sec-fetch-site", "cross-site")]},
        {"headers": [("sec-fetch-site", "same-site")]},
        {"headers": [("origin", "http://evil.example")]},
        {"host": f"evil.example:{PORT}"},
    ],
)
def test_nothing_but_the_exact_link_sets_a_cookie(change, recorder):
    guard = Guard(recorder, "127.0.0.1", PORT)
    query = change.get("query", lambda token: b"token=" + token)(guard.token.encode())
    headers = [("host", change.get("host", OWN)), *change.get("headers", ())]
    sent = ask(guard, change.get("method", "GET"), change.get("path", "/"), query, headers)
    assert sent[0]["status"] in (403, 421)
    assert b"set-cookie" not in dict(sent[0]["headers"])
    assert not recorder.calls


def test_a_link_for_one_use_works_once(recorder):
    guard = Guard(recorder, "127.0.0.1", PORT)
    query = guard.link(once=True).partition("?")[2].encode()
    assert guard.token not in query.decode()
    statuses = [ask(guard, query=query, headers=[("host", OWN)])[0]["status"] for _ in range(2)]
    assert statuses == [303, 403]


def test_neither_tokens_nor_requests_are_printed(tmp_path):
    """The link is printed once, and nothing else, whatever is requested."""
    command = [sys.executable, "-m", "clearhead", "open", "--no-browser"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path
    ) as process:
        try:
            lines = iter(process.stdout.readline, "")
            link = next(line.strip() for line in lines if "http://" in line)
            port, token = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\?token=([\w-]+)", link).groups()
            for request in (
                f"GET /?token={token} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n\r\n",
                f"GET /x?token={token} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n\r\n",
                f"GET /?token={token} HTTP/1.1\r\nhost: evil.example\r\n\r\n",
                f"BROKEN {token}\r\n\r\n",
                f"GET /\x00{token} HTTP/9.9\r\n\r\n",
            ):
                with socket.create_connection(("127.0.0.1", int(port)), timeout=20) as connection:
                    connection.sendall(request.encode())
                    connection.recv(4096)
        finally:
            process.terminate()
        rest = process.stdout.read()
    assert token not in rest
    assert "/x" not in rest


# Headers


def test_every_answer_has_the_security_headers(client):
    opening = client.guard.link().partition(str(client.port))[2]
    for answer in (
        client.get("/"),
        client.get("/js/host.js"),
        client.get("/missing"),
        client.get("/", cookie=None),
        client.get("/", host="evil.example"),
        client.get(opening, cookie=None),
        client.post("/api/models/none/run", b"{}"),
    ):
        assert {name: answer.headers.get(name) for name in HEADERS} == HEADERS
        assert not any(name.startswith("access-control-") for name in answer.headers)
        assert "server" not in answer.headers
    policy = HEADERS["content-security-policy"]
    for directive in ("default-src 'self'", "frame-ancestors 'none'", "base-uri 'none'"):
        assert directive in policy.split("; ")
    assert "unsafe" not in policy


# Limits


def test_large_bodies_are_refused(client):
    path = "/api/models/shipped/run"
    assert client.post(path, b"x" * 1000).status == 422
    declared = client.send("POST", path, b"", content_length=str(MAX_BODY_BYTES + 1))
    assert declared.status == 413
    for length in ("-1", "1e9", "9" * 400):
        assert client.send("POST", path, b"", content_length=length).status in (400, 413)
    assert client.get("/", content_length="5").status == 413


def test_a_chunked_body_is_refused_as_soon_as_it_is_too_large(client):
    chunk = b"%x\r\n%s\r\n" % (2**20, b"x" * 2**20)
    headers = (
        f"POST /api/models/shipped/run HTTP/1.1\r\nhost: 127.0.0.1:{client.port}\r\ncookie: {client.cookie}\r\n"
        f"origin: http://127.0.0.1:{client.port}\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    with client.connect() as connection:
        connection.sendall(headers.encode())
        sent = 0
        try:
            while sent < 10 * MAX_BODY_BYTES:
                connection.sendall(chunk)
                sent += 2**20
        except OSError:  # closed by the server
            pass
        assert sent < 4 * MAX_BODY_BYTES


def seconds_until_closed(connection, drip=b"", pause=0.1, patience=15.0):
    """Sends one byte of `drip` after another until the server closes the connection."""
    start = time.monotonic()
    connection.settimeout(pause)
    for byte in itertools.chain(drip, itertools.repeat(None)):
        assert time.monotonic() - start < patience, "the connection is still open"
        try:
            if byte is not None:
                connection.sendall(bytes([byte]))
            if not connection.recv(4096):
                break
        except TimeoutError:
            continue
        except OSError:
            break
    return time.monotonic() - start


def half_sent_requests(client):
    own = f"host: 127.0.0.1:{client.port}\r\ncookie: {client.cookie}\r\norigin: http://127.0.0.1:{client.port}\r\n"
    post = f"POST /api/models/shipped/run HTTP/1.1\r\n{own}content-length: 1000\r\n\r\n".encode()
    chunked = f"POST /api/models/shipped/run HTTP/1.1\r\n{own}transfer-encoding: chunked\r\n\r\n5\r\nab".encode()
    whole = f"GET /viewer.css HTTP/1.1\r\n{own}\r\n".encode()
    return {
        "no byte": (b"", b""),
        "half a line": (b"GET / HT", b""),
        "headers byte by byte": (b"GET / HTTP/1.1\r\n", b"x-header: " + b"a" * 1000),
        "no body": (post, b""),
        "body byte by byte": (post, b"x" * 900),
        "half a chunk": (chunked, b""),
        "a second request": (whole + b"GET / HTTP/1.1\r\nhost", b": 127"),
        "strangers": (b"POST / HTTP/1.1\r\nhost: evil.example\r\ncontent-length: 1000\r\n\r\n", b"x" * 900),
    }


@pytest.mark.parametrize("kind", list(half_sent_requests(type("_", (), {"port": 0, "cookie": ""}))))
def test_half_sent_requests_are_closed(kind, client, monkeypatch):
    monkeypatch.setattr(guard_module, "REQUEST_SECONDS", 0.7)
    first, drip = half_sent_requests(client)[kind]
    with client.connect() as connection:
        connection.sendall(first)
        assert seconds_until_closed(connection, drip, pause=0.05, patience=8.0) < 6.0
    assert client.get("/").status == 200


@pytest.mark.slow
def test_half_sent_requests_are_closed_within_ten_seconds(client):
    """With the real limit: all kinds at once."""
    kinds = half_sent_requests(client)
    connections = {kind: client.connect() for kind in kinds}
    start = time.monotonic()
    for kind, (first, _) in kinds.items():
        connections[kind].sendall(first)
    for connection in connections.values():
        seconds_until_closed(connection)
        connection.close()
    assert time.monotonic() - start < 10


def test_a_client_that_does_not_read_is_closed(client, monkeypatch):
    monkeypatch.setattr(guard_module, "STALLED_SECONDS", 0.5)
    request = (
        f"GET /api/models/shipped/tensors HTTP/1.1\r\nhost: 127.0.0.1:{client.port}\r\ncookie: {client.cookie}\r\n"
    )
    with client.connect() as connection:
        connection.sendall(f"{request}\r\n".encode() * 60)
        time.sleep(1.5)
        connection.settimeout(5)
        received = 0
        try:
            while part := connection.recv(2**16):
                received += len(part)
        except OSError:
            pass
        assert received < 60 * len(client.get("/api/models/shipped/tensors").body)


def test_too_many_connections_are_refused_and_do_no_harm(client, monkeypatch):
    monkeypatch.setattr(guard_module, "MAX_CONNECTIONS", 8)
    connections = [client.connect() for _ in range(8)]
    deadline = time.monotonic() + 10
    while True:
        with client.connect() as extra:
            extra.settimeout(5)
            if (answer := extra.recv(200)).startswith(b"HTTP/1.1 503"):
                break
        assert time.monotonic() < deadline
    assert b"retry-after" in answer
    for connection in connections:
        connection.close()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if client.get("/").status == 200:
                break
        except OSError:
            time.sleep(0.1)
    assert client.get("/").status == 200


def test_garbage_is_answered_or_closed(client):
    for garbage in (b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"\x00" * 100, b"G" * 100_000, b"\r\n" * 50_000):
        with client.connect() as connection:
            try:
                connection.sendall(garbage)
                connection.shutdown(socket.SHUT_WR)
                answer = connection.recv(100)
            except OSError:
                continue
            assert not answer or answer.startswith(b"HTTP/1.1 400")
    assert client.get("/").status == 200


# Addresses


def test_the_server_listens_on_this_machine_only(client):
    others = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    for address in others - {"127.0.0.1"}:
        if address.startswith("127."):
            continue
        with pytest.raises(OSError, match=r"refused|timed out|unreachable"):
            socket.create_connection((address, client.port), timeout=2)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "*"])
def test_an_address_that_others_cannot_name_is_refused(host):
    with pytest.raises(ValueError, match="--host"):
        check_host(host)


def test_host_names_of_other_addresses():
    assert host_names("192.168.1.5", 99) == {"192.168.1.5:99"}
    assert host_names("::1", 99) == {"[::1]:99"}
    assert host_names("127.0.0.1", 80) == {"127.0.0.1:80", "localhost:80", "127.0.0.1", "localhost"}
    assert Guard(None, "::1", 99).link().startswith("http://[::1]:99/?token=")
