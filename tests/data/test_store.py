import io
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from clearhead import files
from clearhead.data.cache import CachedDataset, cache_folder, has, is_complete, obtain, pick, read
from clearhead.data.sources import HttpSource, LocalSource
from clearhead.files import sha256

FILES = {"one": b"first", "two": b"second"}


def double(files):
    """Stored as it is, but each byte twice: a stand-in for a decoder."""
    return {name: data[::2] for name, data in pick(files, ["one", "two"]).items()}


STORED = CachedDataset(
    name="toy",
    digests={name: sha256(data) for name, data in FILES.items()},
    wanted=frozenset(FILES),
    decode=double,
    sources=(),
)


def said(line):
    pass


@pytest.fixture
def good(tmp_path):
    return folder(tmp_path / "good", FILES)


def folder(path, files):
    path.mkdir()
    for name, data in files.items():
        (path / name).write_bytes(bytes(byte for byte in data for _ in range(2)))
    return path


def test_the_first_source_that_has_it_is_used(cache, tmp_path, good):
    lines = []
    sources = (LocalSource(tmp_path / "absent"), LocalSource(good), LocalSource(tmp_path / "never tried"))
    assert not has("toy")
    assert obtain(STORED, sources, lines.append) == cache / "toy"
    assert has("toy")
    assert {name: read(STORED, name) for name in FILES} == FILES
    assert [line.split(":")[0] for line in lines] == [f"toy from {tmp_path}/absent", "  failed", f"toy from {good}"]
    assert sorted(path.name for path in cache.rglob("*") if path.is_file()) == ["one", "source.txt", "two"]
    assert (cache / "toy/source.txt").read_text() == f"{good}\n"


def test_when_all_fail_each_is_named_with_its_reason(cache, tmp_path, server):
    wrong = folder(tmp_path / "wrong", {**FILES, "two": b"third!"})
    half = folder(tmp_path / "half", {"one": b"first"})
    sources = (
        LocalSource(tmp_path / "absent"),
        LocalSource(wrong),
        LocalSource(half),
        HttpSource((f"{server.address}/one",)),
    )
    with pytest.raises(LookupError) as caught:
        obtain(STORED, sources, said)
    message = str(caught.value)
    assert "absent: no such file or folder; " in message
    assert "wrong: two does not match its published SHA-256 digest" in message
    assert "half: two is missing; " in message
    assert f"{server.address}/one: HTTP Error 404" in message
    assert message.endswith("if you have the files, run: clearhead data get toy --from PATH")
    assert not has("toy")


def test_a_wrong_download_is_not_kept_for_the_next_try(cache, server):
    server.files = {"/one": b"ffiirrsstt", "/two": b"wrong"}
    source = HttpSource((f"{server.address}/one", f"{server.address}/two"))
    with pytest.raises(LookupError, match="two does not match its published SHA-256 digest"):
        obtain(STORED, (source,), said)
    server.files["/two"] = b"sseeccoonndd"
    obtain(STORED, (source,), said)
    assert read(STORED, "two") == b"second"


def test_a_page_instead_of_an_archive_is_not_kept_for_the_next_try(cache, server):
    """What a hotel's network answers with, until one has signed in."""
    server.files = {"/toy.tar": b"<html>please sign in</html>"}
    source = HttpSource((f"{server.address}/toy.tar",))
    with pytest.raises(LookupError, match=r"toy\.tar is not a valid \.tar, \.tar\.gz or \.zip archive"):
        obtain(STORED, (source,), said)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, data in {"one": b"ffiirrsstt", "two": b"sseeccoonndd"}.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    server.files = {"/toy.tar": packed.getvalue()}
    obtain(STORED, (source,), said)
    assert read(STORED, "two") == b"second"


def test_a_cache_that_cannot_be_made_is_named(tmp_path, good, monkeypatch):
    (tmp_path / "file").write_text("where a folder should be")
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "file/cache"))
    with pytest.raises(OSError, match="file/cache"):
        obtain(STORED, (LocalSource(good),), said)


def test_an_interrupted_download_is_kept_for_the_next_try(cache, server):
    server.files = {"/one": b"ffiirrsstt", "/two": b"sseeccoonndd"}
    source = HttpSource((f"{server.address}/one", f"{server.address}/two"))
    server.at_once = 0
    with pytest.raises(LookupError, match="the response ended after 0 of 10 bytes"):
        obtain(STORED, (source,), said)
    (cache / "downloads/toy/one.part").write_bytes(b"ffii")
    server.at_once = 100
    obtain(STORED, (source,), said)
    assert ("/one", "bytes=4-") in server.asked
    assert read(STORED, "one") == b"first"


def test_a_copy_that_is_absent_or_was_changed_is_noticed(cache, good):
    with pytest.raises(LookupError, match=r"toy has not been downloaded .*; run: clearhead data get toy"):
        read(STORED, "one")
    obtain(STORED, (LocalSource(good),), said)
    (cache / "toy/one").write_bytes(b"First")
    with pytest.raises(ValueError, match="does not match its SHA-256 digest; run: clearhead data get toy"):
        read(STORED, "one")
    obtain(STORED, (LocalSource(good),), said)
    assert read(STORED, "one") == b"first"


def test_a_decoder_that_fails_is_a_source_that_fails(cache, good):
    def refuse(files):
        raise ValueError("it is damaged")

    with pytest.raises(LookupError, match="good: it is damaged"):
        obtain(replace(STORED, decode=refuse), (LocalSource(good),), said)


def test_a_full_disk_is_no_fault_of_the_source(cache, good, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        obtain(STORED, (LocalSource(good), LocalSource(good)), said)
    assert not has("toy")
    assert list((cache / "toy").iterdir()) == []


def test_the_cache_is_where_the_user_says(cache, monkeypatch):
    assert cache_folder() == cache
    monkeypatch.delenv("CLEARHEAD_CACHE")
    assert cache_folder() == Path.home() / ".cache/clearhead"


def test_a_copy_is_complete_when_every_file_has_its_digest(cache, good):
    assert not is_complete(STORED)
    obtain(STORED, (LocalSource(good),), said)
    assert is_complete(STORED)
    (cache / "toy/one").write_bytes(b"First")
    assert not is_complete(STORED)
    (cache / "toy/one").unlink()
    assert not is_complete(STORED)
