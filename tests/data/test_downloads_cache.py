import io
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from clearhead import files
from clearhead.data.downloads import (
    CachedDataset,
    HttpSource,
    LocalSource,
    cache_folder,
    has,
    is_complete,
    obtain,
    pick,
    read,
)
from clearhead.files import sha256

FILES = {"one": b"first", "two": b"second"}


def decode_doubled(files):
    """A toy decoder: the source files contain every byte twice."""
    return {name: data[::2] for name, data in pick(files, ["one", "two"]).items()}


TOY = CachedDataset(
    name="toy",
    digests={name: sha256(data) for name, data in FILES.items()},
    wanted=frozenset(FILES),
    decode=decode_doubled,
    sources=(),
)


def ignore_message(line):
    pass


@pytest.fixture
def valid_folder(tmp_path):
    return doubled_folder(tmp_path / "good", FILES)


def doubled_folder(path, files):
    path.mkdir()
    for name, data in files.items():
        (path / name).write_bytes(bytes(byte for byte in data for _ in range(2)))
    return path


def test_the_first_working_source_is_used(cache, tmp_path, valid_folder):
    lines = []
    sources = (LocalSource(tmp_path / "absent"), LocalSource(valid_folder), LocalSource(tmp_path / "never tried"))
    assert not has("toy")
    assert obtain(TOY, sources, lines.append) == cache / "toy"
    assert has("toy")
    assert {name: read(TOY, name) for name in FILES} == FILES
    assert [line.split(":")[0] for line in lines] == [
        f"toy from {tmp_path}/absent",
        "  failed",
        f"toy from {valid_folder}",
    ]
    assert sorted(path.name for path in cache.rglob("*") if path.is_file()) == ["one", "source.txt", "two"]
    assert (cache / "toy/source.txt").read_text() == f"{valid_folder}\n"


def test_the_error_lists_every_failed_source_with_its_reason(cache, tmp_path, server):
    wrong = doubled_folder(tmp_path / "wrong", {**FILES, "two": b"third!"})
    half = doubled_folder(tmp_path / "half", {"one": b"first"})
    sources = (
        LocalSource(tmp_path / "absent"),
        LocalSource(wrong),
        LocalSource(half),
        HttpSource((f"{server.address}/one",)),
    )
    with pytest.raises(LookupError) as caught:
        obtain(TOY, sources, ignore_message)
    message = str(caught.value)
    assert "absent: no such file or folder; " in message
    assert "wrong: two does not match its published SHA-256 digest" in message
    assert "half: two is missing; " in message
    assert f"{server.address}/one: HTTP Error 404" in message
    assert message.endswith("if you have the files, run: clearhead data get toy --from PATH")
    assert not has("toy")


def test_a_download_with_a_wrong_digest_is_discarded(cache, server):
    server.files = {"/one": b"ffiirrsstt", "/two": b"wrong"}
    source = HttpSource((f"{server.address}/one", f"{server.address}/two"))
    with pytest.raises(LookupError, match="two does not match its published SHA-256 digest"):
        obtain(TOY, (source,), ignore_message)
    server.files["/two"] = b"sseeccoonndd"
    obtain(TOY, (source,), ignore_message)
    assert read(TOY, "two") == b"second"


def test_an_html_page_in_place_of_an_archive_is_discarded(cache, server):
    """Captive portals answer every request with a sign-in page."""
    server.files = {"/toy.tar": b"<html>please sign in</html>"}
    source = HttpSource((f"{server.address}/toy.tar",))
    with pytest.raises(LookupError, match=r"toy\.tar is not a valid \.tar, \.tar\.gz or \.zip archive"):
        obtain(TOY, (source,), ignore_message)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, data in {"one": b"ffiirrsstt", "two": b"sseeccoonndd"}.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    server.files = {"/toy.tar": packed.getvalue()}
    obtain(TOY, (source,), ignore_message)
    assert read(TOY, "two") == b"second"


def test_an_unwritable_cache_path_is_named_in_the_error(tmp_path, valid_folder, monkeypatch):
    (tmp_path / "file").write_text("where a folder should be")
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "file/cache"))
    with pytest.raises(OSError, match="file/cache"):
        obtain(TOY, (LocalSource(valid_folder),), ignore_message)


def test_a_partial_download_is_resumed(cache, server):
    server.files = {"/one": b"ffiirrsstt", "/two": b"sseeccoonndd"}
    source = HttpSource((f"{server.address}/one", f"{server.address}/two"))
    server.max_body = 0
    with pytest.raises(LookupError, match="the response ended after 0 of 10 bytes"):
        obtain(TOY, (source,), ignore_message)
    (cache / "downloads/toy/one.part").write_bytes(b"ffii")
    server.max_body = 100
    obtain(TOY, (source,), ignore_message)
    assert ("/one", "bytes=4-") in server.requests
    assert read(TOY, "one") == b"first"


def test_a_missing_or_modified_cached_file_raises(cache, valid_folder):
    with pytest.raises(LookupError, match=r"toy has not been downloaded .*; run: clearhead data get toy"):
        read(TOY, "one")
    obtain(TOY, (LocalSource(valid_folder),), ignore_message)
    (cache / "toy/one").write_bytes(b"First")
    with pytest.raises(ValueError, match="does not match its SHA-256 digest; run: clearhead data get toy"):
        read(TOY, "one")
    obtain(TOY, (LocalSource(valid_folder),), ignore_message)
    assert read(TOY, "one") == b"first"


def test_a_decode_error_counts_as_a_failed_source(cache, valid_folder):
    def refuse(files):
        raise ValueError("it is damaged")

    with pytest.raises(LookupError, match="good: it is damaged"):
        obtain(replace(TOY, decode=refuse), (LocalSource(valid_folder),), ignore_message)


def test_a_full_disk_raises_instead_of_trying_the_next_source(cache, valid_folder, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        obtain(TOY, (LocalSource(valid_folder), LocalSource(valid_folder)), ignore_message)
    assert not has("toy")
    assert list((cache / "toy").iterdir()) == []


def test_cache_folder_follows_the_environment_variable(cache, monkeypatch):
    assert cache_folder() == cache
    monkeypatch.delenv("CLEARHEAD_CACHE")
    assert cache_folder() == Path.home() / ".cache/clearhead"


def test_is_complete_requires_every_file_with_its_digest(cache, valid_folder):
    assert not is_complete(TOY)
    obtain(TOY, (LocalSource(valid_folder),), ignore_message)
    assert is_complete(TOY)
    (cache / "toy/one").write_bytes(b"First")
    assert not is_complete(TOY)
    (cache / "toy/one").unlink()
    assert not is_complete(TOY)
