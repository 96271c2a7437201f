"""Who may talk to the local server: a guard in front of the application, and time limits on every connection.

Any page in the visitor's browser can send requests to 127.0.0.1, and another user of the machine can connect to it.
A request is let through only if all of this holds:

- `Host` is the address of the server, with its port. (DNS rebinding sends another name.)
- `Sec-Fetch-Site`, where the browser sends it, says that the request comes from this page or from the address bar;
  `Origin` is this page, and is required for everything but GET and HEAD.
- The cookie of this process is there. It is set by the opening link, which contains a random token; the answer is a
  redirect to an address without the token.

Bodies are limited, and a connection that sends a request slowly, or does not read the answer, is closed.
"""

import asyncio
import hmac
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_BODY_BYTES = 8 * 2**20
REQUEST_SECONDS = 8.0
"""until a request has been received completely"""
STALLED_SECONDS = 30.0
"""until an answer has been read"""
MAX_CONNECTIONS = 256
POLICY = "default-src 'self'; img-src 'self' data: blob:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
LOOPBACK = ("127.0.0.1", "localhost", "::1")
BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n"
    b"cache-control: no-store\r\n\r\n"
)


class RefusedError(Exception):
    """A request that is not let through."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status, self.reason = status, reason


def host_names(host: str, port: int) -> set[str]:
    """The values of `Host` that name this server. A browser leaves out port 80."""
    names = {"127.0.0.1", "localhost"} if host in LOOPBACK[:2] else {host}
    names = {f"[{name}]" if ":" in name else name for name in names}
    return {f"{name}:{port}" for name in names} | (names if port == 80 else set())


class Guard:
    """An ASGI application around another one."""

    def __init__(self, app: App, host: str, port: int):
        self.app, self.hosts = app, host_names(host, port)
        name = "127.0.0.1" if host == "localhost" else f"[{host}]" if ":" in host else host
        self.address = f"http://{name}:{port}"
        self.cookie = f"clearhead-{port}"  # browsers do not separate the cookies of two ports
        self.token, self.session = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        self.tokens_for_one_use: set[str] = set()

    def link(self, *, once: bool = False) -> str:
        """The opening link. One that is used `once` may become visible elsewhere, as in the list of processes."""
        token = self.token
        if once:
            token = secrets.token_urlsafe(32)
            self.tokens_for_one_use.add(token)
        return f"{self.address}/?token={token}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no WebSockets; a lifespan is not needed

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *own]}
            await send(message)

        try:
            self.check_sender(scope)
            if self.is_opening(scope):
                await redirect(send_guarded, f"{self.cookie}={self.session}; HttpOnly; SameSite=Strict; Path=/")
                return
            self.check_session(scope)
            body = await read_body(scope, receive)
        except RefusedError as refused:
            await refuse(send_guarded, refused)
            return
        await self.app(scope, replay(body, receive), send_guarded)

    def check_sender(self, scope: Scope) -> None:
        """Host, Sec-Fetch-Site and Origin."""
        hosts, origins, sites = (headers(scope, name) for name in ("host", "origin", "sec-fetch-site"))
        if len(hosts) != 1 or hosts[0] not in self.hosts:
            raise RefusedError(421, "This server answers only requests for its own address.")
        is_reading = scope["method"] in ("GET", "HEAD")
        allowed_sites = ("same-origin", "none") if is_reading else ("same-origin",)
        if len(sites) > 1 or any(site not in allowed_sites for site in sites):
            raise RefusedError(403, "Another site sent this request. Copy the link into the address bar instead.")
        if len(origins) > 1 or any(origin != f"http://{hosts[0]}" for origin in origins):
            raise RefusedError(403, "Another site sent this request.")
        if not is_reading and not origins:
            raise RefusedError(403, "Requests other than GET and HEAD must have an Origin header.")

    def is_opening(self, scope: Scope) -> bool:
        """Whether this is the opening link with a valid token."""
        prefix, query = b"token=", scope.get("query_string", b"")
        if scope["method"] != "GET" or scope["path"] != "/" or not query.startswith(prefix):
            return False
        given = query.removeprefix(prefix)
        once = [token for token in self.tokens_for_one_use if hmac.compare_digest(given, token.encode())]
        self.tokens_for_one_use.difference_update(once)
        return bool(once) or hmac.compare_digest(given, self.token.encode())

    def check_session(self, scope: Scope) -> None:
        pairs = [pair.strip().partition("=") for text in headers(scope, "cookie") for pair in text.split(";")]
        values = [value for name, _, value in pairs if name == self.cookie]
        is_known = [hmac.compare_digest(value.encode("latin-1"), self.session.encode()) for value in values]
        if not any(is_known):
            raise RefusedError(403, "Open the page with the link that `clearhead open` printed.")


def headers(scope: Scope, name: str) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name.encode()]


async def read_body(scope: Scope, receive: Receive) -> bytes:
    limit = 0 if scope["method"] in ("GET", "HEAD") else MAX_BODY_BYTES
    too_large = RefusedError(413, f"A body may have at most {limit:,} bytes.")
    if any(not length.isdecimal() or int(length) > limit for length in headers(scope, "content-length")):
        raise too_large
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RefusedError(400, "The request is incomplete.")
        body += message.get("body", b"")
        if len(body) > limit:
            raise too_large
        if not message.get("more_body", False):
            return bytes(body)


def replay(body: bytes, receive: Receive) -> Receive:
    """The body as one message, then whatever comes."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again


async def redirect(send: Send, cookie: str) -> None:
    own = [(b"location", b"/"), (b"set-cookie", cookie.encode()), (b"content-length", b"0")]
    await send({"type": "http.response.start", "status": 303, "headers": own})
    await send({"type": "http.response.body", "body": b""})


async def refuse(send: Send, refused: RefusedError) -> None:
    """The connection is closed, because the rest of the request was not read."""
    body = f"{refused.reason}\n".encode()
    own = [
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": refused.status, "headers": own})
    await send({"type": "http.response.body", "body": body})


class TimedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, with limits on the number of connections and on the time that each request may take."""

    request_timer: asyncio.TimerHandle | None = None
    answer_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.write(BUSY)
            transport.close()
            return
        self.time_request()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.time_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE:
            self.request_timer = cancel(self.request_timer)  # uvicorn's own timer closes idle connections

    def time_request(self) -> None:
        """The time runs from the first byte of a request, or from the connection, until its last byte."""
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            if self.request_timer is None:
                self.request_timer = self.loop.call_later(REQUEST_SECONDS, self.transport.abort)
        else:
            self.request_timer = cancel(self.request_timer)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.answer_timer is None:
            self.answer_timer = self.loop.call_later(STALLED_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.answer_timer = cancel(self.answer_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        self.request_timer, self.answer_timer = cancel(self.request_timer), cancel(self.answer_timer)
        super().connection_lost(exc)


def cancel(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Cancel a timer, if there is one. There is none afterwards."""
    if timer is not None:
        timer.cancel()
    return None
