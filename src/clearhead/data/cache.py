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
