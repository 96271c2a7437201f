from urllib.error import HTTPError

import pytest

from clearhead.data import sources as downloads
from clearhead.data.sources import download
from clearhead.data.user_files import DOWNLOAD_WAITS

DATA = bytes(range(256)) * 1000


@pytest.fixture
def url(server):
    server.files["/data.bin"] = DATA
    return f"{server.address}/data.bin"


def test_the_file_arrives_whole(server, url, tmp_path):
    download(url, tmp_path / "it", max_bytes=len(DATA))
    assert (tmp_path / "it").read_bytes() == DATA
    assert [path.name for path in tmp_path.iterdir()] == ["it"]
    assert server.asked == [("/data.bin", None)]


def test_it_goes_on_where_an_earlier_try_stopped(server, url, tmp_path):
    (tmp_path / "it.part").write_bytes(DATA[:1000])
    download(url, tmp_path / "it", max_bytes=len(DATA))
    assert (tmp_path / "it").read_bytes() == DATA
    assert server.asked == [("/data.bin", "bytes=1000-")]


def test_a_connection_that_breaks_is_taken_up_again(server, url, tmp_path):
    server.at_once = 100_000
    download(url, tmp_path / "it", max_bytes=len(DATA))
    assert (tmp_path / "it").read_bytes() == DATA
    assert [wanted for _, wanted in server.asked] == [None, "bytes=100000-", "bytes=200000-"]
    assert server.waited == [1, 2]


def test_a_server_that_breaks_off_and_then_refuses_is_asked_a_few_times_only(server, url, tmp_path):
    """6,366 requests in 8 seconds, and no end, before they were counted."""
    server.at_once, server.refuses_ranges = 1000, True
    with pytest.raises(OSError, match=r"416|the response ended"):
        download(url, tmp_path / "it", max_bytes=len(DATA))
    assert len(server.asked) == len(DOWNLOAD_WAITS) + 1
    assert server.waited == list(DOWNLOAD_WAITS) == [1, 2, 4, 8, 16]
    assert not (tmp_path / "it").exists()


def test_a_server_that_sends_a_little_each_time_is_asked_a_few_times_only(server, url, tmp_path):
    server.at_once = 10
    with pytest.raises(OSError, match="the response ended after 60 of 256000 bytes"):
        download(url, tmp_path / "it", max_bytes=len(DATA))
    assert len(server.asked) == len(DOWNLOAD_WAITS) + 1
    assert (tmp_path / "it.part").read_bytes() == DATA[:60]


def test_a_very_slow_server_is_left(server, url, tmp_path, monkeypatch):
    monkeypatch.setattr(downloads, "CHUNK_BYTES", 1000)
    server.clock = iter(range(0, 10**6, 10))  # ten seconds for each piece
    with pytest.raises(OSError, match=r"too slow: .* bytes in .* seconds"):
        download(url, tmp_path / "it", max_bytes=len(DATA))
    assert server.waited  # what came is kept, and the rest is asked for


def test_a_file_that_is_announced_as_too_large_is_not_read(server, url, tmp_path):
    with pytest.raises(ValueError, match="the file may have at most 1000 bytes, got 256000"):
        download(url, tmp_path / "it", max_bytes=1000)
    assert not (tmp_path / "it.part").exists()


def test_a_server_without_ranges_starts_again(server, url, tmp_path):
    server.knows_ranges = False
    (tmp_path / "it.part").write_bytes(b"other bytes")
    download(url, tmp_path / "it", max_bytes=len(DATA))
    assert (tmp_path / "it").read_bytes() == DATA


def test_a_part_that_is_longer_than_the_file_starts_again(server, url, tmp_path):
    (tmp_path / "it.part").write_bytes(DATA + b"more")
    download(url, tmp_path / "it", max_bytes=len(DATA))
    assert (tmp_path / "it").read_bytes() == DATA
    assert len(server.asked) == 2


def test_without_progress_it_gives_up_and_keeps_what_came(server, url, tmp_path):
    server.at_once = 0
    (tmp_path / "it.part").write_bytes(DATA[:1000])
    with pytest.raises(OSError, match="the response ended after 1000 of 256000 bytes"):
        download(url, tmp_path / "it", max_bytes=len(DATA))
    assert (tmp_path / "it.part").read_bytes() == DATA[:1000]
    assert not (tmp_path / "it").exists()


def test_a_file_without_end_is_refused(server, url, tmp_path):
    server.says_length = False
    with pytest.raises(ValueError, match="the file may have at most 1000 bytes, got more"):
        download(url, tmp_path / "it", max_bytes=1000)
    assert not (tmp_path / "it").exists()


def test_what_is_not_there_is_an_error(server, tmp_path):
    with pytest.raises(HTTPError, match="404"):
        download(f"{server.address}/other", tmp_path / "it", max_bytes=10)
    with pytest.raises(OSError, match="the server cannot be reached"):
        download("http://127.0.0.1:9/it", tmp_path / "it", max_bytes=10)
    with pytest.raises(ValueError, match="start with https:// or http://, got 'file:///etc/passwd'"):
        download("file:///etc/passwd", tmp_path / "it", max_bytes=10)
