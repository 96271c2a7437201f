"""A file from the web, with a progress bar; an interrupted download is resumed where it stopped.

A server decides neither how long this takes nor how much is written: a request is repeated once for each entry of
DOWNLOAD_WAITS, at most `most` bytes are written, and a server that is silent or very slow is given up.
"""

import http.client
import os
import time
from pathlib import Path
from typing import BinaryIO
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from clearhead.data.limits import DOWNLOAD_WAITS, LEAST_SPEED

SECONDS = 20
"""that a server may be silent"""
PATIENCE = 60
"""seconds after which a server must have reached LEAST_SPEED"""
PIECE = 1 << 16
RANGE_NOT_SATISFIABLE = 416


def download(url: str, target: Path, most: int) -> None:
    """Writes target once the file is whole; until then target.part has what came. At most `most` bytes are taken."""
    if not url.startswith(("https://", "http://")):
        raise ValueError(f"an address starts with https:// or http://, got {url!r}; use --from for a path")
    part = part_of(target)
    for wait in (*DOWNLOAD_WAITS, None):
        before = size_of(part)
        try:
            fetch_rest(url, part, most)
        except HTTPError as error:
            if error.code != RANGE_NOT_SATISFIABLE or not before or wait is None:
                raise
            part.unlink()  # it does not continue what we have
        except OSError:
            if size_of(part) <= before or wait is None:  # nothing gained: no use in trying again
                raise
        else:
            os.replace(part, target)
            return
        time.sleep(wait)


def fetch_rest(url: str, part: Path, most: int) -> None:
    have = size_of(part)
    request = Request(url, headers={"User-Agent": "clearhead", **({"Range": f"bytes={have}-"} if have else {})})
    try:
        with urlopen(request, timeout=SECONDS) as answer:
            starts = answer.headers.get("Content-Range", "").startswith(f"bytes {have}-")
            resumes = answer.status == http.HTTPStatus.PARTIAL_CONTENT and starts
            expected = answer.headers.get("Content-Length")
            whole = int(expected) + have * resumes if expected and expected.isdecimal() else None
            if whole is not None and whole > most:
                raise ValueError(f"the file may have {most} bytes, got {whole}")
            with open(part, "ab" if resumes else "wb") as file:
                copy(answer, file, whole, most, url)
    except HTTPError:
        raise
    except URLError as error:
        raise OSError(f"it cannot be reached ({error.reason})") from None
    except http.client.HTTPException as error:
        raise OSError(f"the answer was broken off ({error!r})") from None


def copy(answer: http.client.HTTPResponse, file: BinaryIO, whole: int | None, most: int, url: str) -> None:
    start, before = time.monotonic(), file.tell()
    with bar() as progress:
        task = progress.add_task(url.rpartition("/")[2], total=whole, completed=file.tell())
        while piece := answer.read1(PIECE):  # what is there: `read` would wait until all of it has come
            file.write(piece)
            progress.advance(task, len(piece))
            if file.tell() > most:
                raise ValueError(f"the file may have {most} bytes, got more")
            seconds = time.monotonic() - start
            if seconds > PATIENCE and file.tell() - before < LEAST_SPEED * seconds:
                raise OSError(
                    f"the server sent {file.tell() - before} bytes in {seconds:.0f} seconds, which is too slow"
                )
    if whole is not None and file.tell() < whole:
        raise OSError(f"the answer ended after {file.tell()} of {whole} bytes")


def bar() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal, transient=True)


def part_of(target: Path) -> Path:
    """Where the bytes are that have come so far."""
    return target.with_name(target.name + ".part")


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
