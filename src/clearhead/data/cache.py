"""The cache of downloaded data sets: one folder per data set with its decoded files, verified when they are read.

The environment variable CLEARHEAD_CACHE sets the cache folder (default: ~/.cache/clearhead).
"""

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from clearhead.data.sources import Source
from clearhead.data.user_files import MAX_MEMBER_BYTES, read_user_file
from clearhead.files import sha256, write_atomic

Files = dict[str, bytes]
SOURCE = "source.txt"
"""records the source of the files next to it; written last"""


@dataclass(frozen=True)
class CachedDataset:
    """A data set that is downloaded."""

    name: str
    digests: dict[str, str]
    """sha256 of each decoded file, by its name"""
    wanted: frozenset[str]
    """names of the source files"""
    decode: Callable[[Files], Files]
    sources: tuple[Source, ...]


def cache_folder() -> Path:
    if named := os.environ.get("CLEARHEAD_CACHE"):
        return Path(named)
    try:
        return Path.home() / ".cache" / "clearhead"
    except RuntimeError:
        raise ValueError("there is no home directory to keep data in; set CLEARHEAD_CACHE to a folder") from None


def folder_of(stored: CachedDataset) -> Path:
    return cache_folder() / stored.name


def has(name: str) -> bool:
    """Whether the data set was fetched. Its files are verified when they are read."""
    return (cache_folder() / name / SOURCE).is_file()


def is_complete(stored: CachedDataset) -> bool:
    """Whether all files were fetched and still have the expected digests."""
    paths = {folder_of(stored) / name: digest for name, digest in stored.digests.items()}
    return has(stored.name) and all(path.is_file() and sha256(path) == digest for path, digest in paths.items())


def read(stored: CachedDataset, name: str) -> bytes:
    """One decoded file from the cache."""
    path = folder_of(stored) / name
    if not path.is_file():
        raise LookupError(
            f"{stored.name} must be fetched before it is used, got no {path}; run: clearhead data get {stored.name}"
        )
    data = read_user_file(path, MAX_MEMBER_BYTES)
    if sha256(data) != stored.digests[name]:
        raise ValueError(f"{path} must be as it was fetched, got other bytes; run: clearhead data get {stored.name}")
    return data


def obtain(stored: CachedDataset, sources: Sequence[Source], report: Callable[[str], None]) -> Path:
    """Fetches the data set from the first source that has it, and returns its folder in the cache."""
    tried = []
    downloads_of(stored).mkdir(parents=True, exist_ok=True)  # an unwritable cache is not the source's fault
    for source in sources:
        report(f"{stored.name} from {source.what}")
        try:
            files = fetch(stored, source)
        except (OSError, ValueError, LookupError) as error:
            tried.append(f"{source.what}: {error}")
            report(f"  failed: {error}")
        else:
            folder_of(stored).mkdir(parents=True, exist_ok=True)
            for name, data in files.items():
                write_atomic(folder_of(stored) / name, data)
            write_atomic(folder_of(stored) / SOURCE, f"{source.what}\n".encode())
            shutil.rmtree(downloads_of(stored), ignore_errors=True)
            return folder_of(stored)
    raise LookupError(
        f"{stored.name} could not be fetched; tried {'; '.join(tried)}; "
        f"if you have it: clearhead data get {stored.name} --from PATH"
    )


def fetch(stored: CachedDataset, source: Source) -> Files:
    """Reads and decodes the files of a source, and verifies their digests."""
    downloads = downloads_of(stored)
    downloads.mkdir(exist_ok=True)  # a previous source may have removed it after invalid data
    source_files = source.read(stored.wanted, downloads)
    try:
        files = stored.decode(source_files)
        for name, expected in stored.digests.items():
            if sha256(files[name]) != expected:
                raise ValueError(f"{name} is not what its makers published (its digest differs)")
    except ValueError:
        shutil.rmtree(downloads)  # invalid data must not be reused
        raise
    return {name: files[name] for name in stored.digests}


def pick(files: Files, names: Sequence[str]) -> Files:
    """The named files. Raises a ValueError if any is missing."""
    missing = [name for name in names if name not in files]
    if missing:
        raise ValueError(f"{', '.join(missing)} {'are' if len(missing) > 1 else 'is'} missing")
    return {name: files[name] for name in names}


def downloads_of(stored: CachedDataset) -> Path:
    return cache_folder() / "downloads" / stored.name
