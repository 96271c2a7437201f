"""The user's copy of fetched data: one folder for each data set, with the decoded files, checked when they are read.

CLEARHEAD_CACHE names the folder that all of them are in; ~/.cache/clearhead unless it is set.
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
"""says where the files beside it came from; written when all of them are there"""


@dataclass(frozen=True)
class CachedDataset:
    """A data set that is fetched."""

    name: str
    digests: dict[str, str]
    """sha256 of each decoded file, by its name"""
    wanted: frozenset[str]
    """names of the files that they can be decoded from"""
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
    """All its files were fetched; whether they are still whole is seen when they are read."""
    return (cache_folder() / name / SOURCE).is_file()


def is_complete(stored: CachedDataset) -> bool:
    """All its files were fetched and still have the right bytes."""
    paths = {folder_of(stored) / name: digest for name, digest in stored.digests.items()}
    return has(stored.name) and all(path.is_file() and sha256(path) == digest for path, digest in paths.items())


def read(stored: CachedDataset, name: str) -> bytes:
    """One decoded file out of the user's copy."""
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
    """Fetches from the first source that has it, and returns the folder of the copy."""
    tried = []
    downloads_of(stored).mkdir(parents=True, exist_ok=True)  # here: a place that cannot be written is no source's fault
    for source in sources:
        report(f"{stored.name} from {source.what}")
        try:
            files = fetched(stored, source)
        except (OSError, ValueError, LookupError) as error:
            tried.append(f"{source.what}: {error}")
            report(f"  no: {error}")
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


def fetched(stored: CachedDataset, source: Source) -> Files:
    """The decoded files of a source, with the right digests."""
    downloads = downloads_of(stored)
    downloads.mkdir(exist_ok=True)  # again: a source before this one may have brought rubbish
    found = source.read(stored.wanted, downloads)
    try:
        files = stored.decode(found)
        for name, expected in stored.digests.items():
            if sha256(files[name]) != expected:
                raise ValueError(f"{name} is not what its makers published (its digest differs)")
    except ValueError:
        shutil.rmtree(downloads)  # it would only be found wrong again
        raise
    return {name: files[name] for name in stored.digests}


def pick(files: Files, names: Sequence[str]) -> Files:
    """Those of the files, all of which must be there."""
    missing = [name for name in names if name not in files]
    if missing:
        raise ValueError(f"{', '.join(missing)} {'are' if len(missing) > 1 else 'is'} missing")
    return {name: files[name] for name in names}


def downloads_of(stored: CachedDataset) -> Path:
    return cache_folder() / "downloads" / stored.name
