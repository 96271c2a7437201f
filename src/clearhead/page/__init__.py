"""The local server behind `clearhead open`: it serves the viewer, lists the models, and runs those that PyTorch runs.

    GET  /                             the page
    GET  /js/..., /viewer.css          the files of the viewer
    GET  /api/models                   the list of models
    GET  /api/models/ID/description    what the viewer shows (JSON)
    GET  /api/models/ID/tensors        weights and test images (safetensors)
    POST /api/models/ID/run            a call of js/remote.js: a line of JSON, then pixels; answers with safetensors

Every request has passed the guard (page/guard.py). Importing this does not import torch: a thread does when the page,
which is there by then, asks for a model that needs it.
"""

import asyncio
import socket
import sys
import threading
import time
import webbrowser
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import asdict
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from clearhead.files import from_json
from clearhead.messages import finite_or_none, printable
from clearhead.page.guard import LOOPBACK, Guard, TimedProtocol
from clearhead.page.models import Catalog, Listed, Loaded
from clearhead.training.run_summary import error_text
from clearhead.viewer import asset, asset_names, pack_tensors, server_document

MAX_WAITING = 32
"""calls that wait for the model; when another one comes, the oldest is refused"""
LIST_SECONDS = 1.0
"""for which the list of runs is kept"""
MAX_HEADER_BYTES = 2**18
TYPES = {".js": "text/javascript", ".css": "text/css"}


class BusyError(Exception):
    """Too many calls wait for the model."""


class Turns:
    """Lets one call at a time use the processor, the newest first: older ones are the most likely to be outdated."""

    def __init__(self, max_waiting: int):
        self.is_busy, self.max_waiting = False, max_waiting
        self.waiting: list[asyncio.Future[None]] = []

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        if self.is_busy:
            await self.wait()
        self.is_busy = True
        try:
            yield
        finally:
            self.is_busy = False
            while self.waiting:
                newest = self.waiting.pop()
                if not newest.done():
                    self.is_busy = True  # until the newest call continues, no other one may
                    newest.set_result(None)
                    break

    async def wait(self) -> None:
        if len(self.waiting) >= self.max_waiting:
            oldest = self.waiting.pop(0)
            if not oldest.done():
                oldest.set_exception(BusyError())
        own = asyncio.get_running_loop().create_future()
        self.waiting.append(own)
        try:
            await own
        except asyncio.CancelledError:
            if own in self.waiting:
                self.waiting.remove(own)
            raise


class Page:
    """The application: a catalog of models, and turns of using the processor."""

    def __init__(self, catalog: Catalog):
        self.catalog, self.turns = catalog, Turns(MAX_WAITING)
        self.listed: tuple[float, list[Listed]] = (-LIST_SECONDS, [])
        self.html = server_document()
        routes = [
            Route("/", self.index),
            *(Route(f"/{name}", self.asset) for name in asset_names()),
            Route("/api/models", self.models),
            Route("/api/models/{id}/description", self.description),
            Route("/api/models/{id}/tensors", self.tensors),
            Route("/api/models/{id}/run", self.run, methods=["POST"]),
        ]
        handlers: dict[Any, Any] = {BusyError: busy, Exception: failed}
        self.app = Starlette(routes=routes, exception_handlers=handlers)

    async def index(self, request: Request) -> Response:
        return HTMLResponse(self.html)

    async def asset(self, request: Request) -> Response:
        name = request.url.path.removeprefix("/")
        return Response(asset(name), media_type=TYPES[f".{name.rpartition('.')[2]}"])

    async def models(self, request: Request) -> Response:
        listed_at, models = self.listed
        if time.monotonic() - listed_at > LIST_SECONDS:
            models = await run_in_threadpool(self.catalog.models)
            self.listed = time.monotonic(), models
        return JSONResponse({"models": [asdict(model) for model in models], "opened": self.catalog.opened})

    async def load(self, request: Request) -> Loaded:
        return await run_in_threadpool(self.catalog.load, request.path_params["id"])

    async def description(self, request: Request) -> Response:
        return await answer(self.described(request))

    async def described(self, request: Request) -> Response:
        return JSONResponse(finite_or_none((await self.load(request)).description.to_dict()))

    async def tensors(self, request: Request) -> Response:
        return await answer(self.packed(request))

    async def packed(self, request: Request) -> Response:
        return Response((await self.load(request)).tensors, media_type="application/octet-stream")

    async def run(self, request: Request) -> Response:
        return await answer(self.computed(request))

    async def computed(self, request: Request) -> Response:
        live = (await self.load(request)).live
        if live is None:
            raise ValueError("this model runs in the browser")
        line, _, pixels = (await request.body()).partition(b"\n")
        if len(line) > MAX_HEADER_BYTES:
            raise ValueError(f"the first line of a request may have at most {MAX_HEADER_BYTES:,} bytes")
        steps = live.answer(from_json(line), pixels)
        while True:
            async with self.turns.turn():
                if await request.is_disconnected():
                    return Response(status_code=499)  # nobody reads it
                finished = await run_in_threadpool(advance, steps)
            if finished is not None:
                return Response(finished, media_type="application/octet-stream")


def advance(steps: Generator[None, None, Any]) -> bytes | None:
    """Compute until the next pass is done: None, or the answer as a safetensors file."""
    try:
        next(steps)
    except StopIteration as stop:
        return pack_tensors(*stop.value)
    return None


async def answer(response: Any) -> Response:
    """The response, or the error as a sentence."""
    try:
        return await response
    except BusyError:
        raise
    except LookupError as error:
        return problem(404, error.args[0] if error.args else error)
    except (ValueError, OSError) as error:
        return problem(422, error_text(error))
    except Exception as error:  # of a module of the user's own
        return problem(422, f"{type(error).__name__}: {error}")


def problem(status: int, message: object) -> Response:
    return JSONResponse({"error": " ".join(printable(str(message)).split())}, status)


async def busy(request: Request, error: Exception) -> Response:
    response = problem(503, "The model is busy with other calls.")
    response.headers["retry-after"] = "1"
    return response


async def failed(request: Request, error: Exception) -> Response:
    print(f"clearhead: {type(error).__name__}: {printable(str(error))}", file=sys.stderr)
    return problem(500, f"{type(error).__name__} on the server")


# Serving


class PageServer(uvicorn.Server):
    """Calls `on_start` as soon as connections are accepted."""

    def __init__(self, config: uvicorn.Config, on_start: Callable[[], None]):
        super().__init__(config)
        self.on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.on_start()


def bind(host: str, port: int) -> socket.socket:
    """A socket at this address; port 0 stands for any free one. OSError names the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if sys.platform != "win32":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(error.errno, error.strerror or str(error), f"{host}:{port}") from None
    return listener


def check_host(host: str) -> None:
    if host in ("", "0.0.0.0", "::", "*"):
        raise ValueError(
            f"--host must be the address by which others reach this machine, got {host!r}; try --host 192.168.1.5"
        )


def create_server(
    catalog: Catalog, listener: socket.socket, host: str, on_start: Callable[[Guard], None]
) -> PageServer:
    """A server for a bound socket."""
    guard = Guard(Page(catalog).app, host, listener.getsockname()[1])
    config = uvicorn.Config(
        guard,
        http=TimedProtocol,
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        h11_max_incomplete_event_size=2**14,
        timeout_graceful_shutdown=1,
    )
    return PageServer(config, lambda: on_start(guard))


def serve(catalog: Catalog, *, host: str, port: int, browser: bool, announce: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C. `announce` is called with the opening link as soon as the server answers."""
    check_host(host)
    listener = bind(host, port)

    def on_start(guard: Guard) -> None:
        announce(guard.link())
        if browser:
            threading.Thread(target=webbrowser.open, args=(guard.link(once=True),), daemon=True).start()

    with closing(listener), suppress(KeyboardInterrupt):
        create_server(catalog, listener, host, on_start).run(sockets=[listener])


def is_loopback(host: str) -> bool:
    return host in LOOPBACK or host.startswith("127.")
