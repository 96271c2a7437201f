import gzip
import io
import stat
import struct
import tarfile
import tracemalloc
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.data import user_files
from clearhead.data.user_files import read_archive
from clearhead.files import MAX_RATIO, MAX_UNPACKED, UNPACKED_FLOOR, max_unpacked_bytes


def tar_archive(path, members, mode="w:gz"):
    with tarfile.open(path, mode) as archive:
        for member, data in members:
            info = tarfile.TarInfo(member) if isinstance(member, str) else member
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def zip_archive(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in members:
            archive.writestr(member, data)
    return path


def special(name, kind, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


MAKERS = {"tgz": tar_archive, "tar": lambda path, members: tar_archive(path, members, "w"), "zip": zip_archive}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_only_the_requested_members_are_read(tmp_path, make):
    path = make(tmp_path / "archive", [("a/b/one.bin", b"1" * 5000), ("two.bin", b""), ("a/three.bin", b"3")])
    assert read_archive(path, {"one.bin", "two.bin", "four.bin"}) == {"one.bin": b"1" * 5000, "two.bin": b""}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("name", ["../a", "a/../../b", "/etc/passwd", "..\\a", "C:/a", "a/.."])
def test_paths_outside_the_archive_are_rejected(tmp_path, make, name):
    path = make(tmp_path / "archive", [("fine", b"1"), (name, b"2")])
    with pytest.raises(ValueError, match=r"paths in an archive must be relative and without \.\., got"):
        read_archive(path, {"fine"})


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.CONTTYPE]
)
def test_tar_links_and_devices_are_rejected(tmp_path, kind):
    path = tar_archive(tmp_path / "archive", [("fine", b"1"), (special("odd", kind, "fine"), b"")])
    if kind == tarfile.CONTTYPE:  # a contiguous file is a regular file
        assert read_archive(path, {"fine"}) == {"fine": b"1"}
        return
    with pytest.raises(ValueError, match="only regular files, got a link or device 'odd'"):
        read_archive(path, {"fine"})


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFCHR, stat.S_IFIFO])
def test_zip_links_and_devices_are_rejected(tmp_path, kind):
    info = zipfile.ZipInfo("odd")
    info.external_attr = (kind | 0o777) << 16
    path = zip_archive(tmp_path / "archive", [(info, "fine")])
    with pytest.raises(ValueError, match="only regular files, got a link or device 'odd'"):
        read_archive(path, {"fine"})


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_members_above_max_bytes_are_rejected(tmp_path, make):
    path = make(tmp_path / "archive", [("bomb", bytes(300_000)), ("other", bytes(300_000))])
    assert len(read_archive(path, {"bomb"}, max_bytes=700_000)["bomb"]) == 300_000
    with pytest.raises(ValueError, match="may unpack to at most 400000 bytes, got more in archive"):
        read_archive(path, {"bomb", "other"}, max_bytes=400_000)


def test_a_decompression_bomb_in_an_unrequested_member_is_rejected(tmp_path):
    path = tar_archive(tmp_path / "archive", [("bomb", bytes(5_000_000)), ("fine", b"1")])
    assert path.stat().st_size < 10_000
    with pytest.raises(ValueError, match="may unpack to at most 1000000 bytes"):
        read_archive(path, {"fine"}, max_bytes=1_000_000)


def test_max_unpacked_bytes_limits_size_and_ratio():
    assert max_unpacked_bytes(10) == UNPACKED_FLOOR
    assert max_unpacked_bytes(1_000_000) == MAX_RATIO * 1_000_000
    assert max_unpacked_bytes(10**9) == MAX_UNPACKED == 512_000_000
    assert max_unpacked_bytes(10**9, 1000) == 1000


@pytest.mark.parametrize("make", [MAKERS["tgz"], MAKERS["zip"]])
def test_compression_ratio_above_the_limit_is_rejected(tmp_path, make):
    path = make(tmp_path / "archive", [("a", bytes(UNPACKED_FLOOR // 2))])
    assert len(read_archive(path, {"a"})["a"]) == UNPACKED_FLOOR // 2  # small archives may exceed the ratio
    path = make(tmp_path / "archive", [("a", bytes(UNPACKED_FLOOR // 2)), ("b", bytes(UNPACKED_FLOOR // 2 + 1))])
    assert path.stat().st_size < UNPACKED_FLOOR // MAX_RATIO
    with pytest.raises(ValueError, match=f"may unpack to at most {UNPACKED_FLOOR} bytes, got more in archive"):
        read_archive(path, {"a", "b"})


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_members_larger_than_any_dataset_file_are_rejected(tmp_path, make, monkeypatch):
    monkeypatch.setattr(user_files, "MAX_MEMBER_BYTES", 1000)
    path = make(tmp_path / "archive", [("a", bytes(1000)), ("b", bytes(1001))])
    assert len(read_archive(path, {"a"})["a"]) == 1000
    with pytest.raises(ValueError, match="a file of a data set may have at most 1000 bytes, got 1001 in b of archive"):
        read_archive(path, {"b"})
    monkeypatch.setattr(user_files, "MAX_DATASET_BYTES", 1999)
    path = make(tmp_path / "archive", [("a", bytes(1000)), ("b", bytes(1000))])
    with pytest.raises(ValueError, match="the files of a data set may have at most 1999 bytes, got 2000 in archive"):
        read_archive(path, {"a", "b"})


def block(**fields):
    """A tar header in GNU format with its checksum."""
    info = tarfile.TarInfo("fine")
    for name, value in fields.items():
        setattr(info, name, value)
    return bytearray(info.tobuf(tarfile.GNU_FORMAT))


def with_checksum(head):
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head)


@pytest.mark.parametrize("form", ["gnu", "0.0", "0.1", "1.0"])
def test_sparse_tar_members_are_rejected(tmp_path, form):
    """A few bytes that stand for any number of zeros."""
    size = 40_000_000
    path = tmp_path / "archive"
    if form == "gnu":
        head = block(type=tarfile.GNUTYPE_SPARSE)
        head[386:410] = b"%011o\0%011o\0" % (size, 0)
        head[483:495] = b"%011o\0" % size
        path.write_bytes(with_checksum(head) + bytes(1024))
    else:
        notes = {
            "0.0": {"GNU.sparse.numblocks": "1", "GNU.sparse.offset": str(size), "GNU.sparse.numbytes": "0"},
            "0.1": {"GNU.sparse.map": f"{size},0"},
            "1.0": {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "fine"},
        }[form]
        info = tarfile.TarInfo("fine")
        info.pax_headers = notes | {"GNU.sparse.size": str(size), "GNU.sparse.realsize": str(size)}
        content = f"1\n{size}\n0\n".encode().ljust(512, b"\0") if form == "1.0" else b""
        with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    assert path.stat().st_size < 20_000
    with pytest.raises(ValueError, match=r"only regular files, got a (sparse file|link or device) 'fine'"):
        read_archive(path, {"fine"})


def test_a_large_tar_header_is_rejected_without_reading_it_into_memory(tmp_path):
    info = tarfile.TarInfo("fine")
    info.pax_headers = {"comment": "a" * 8_000_000}
    path = tmp_path / "archive"
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(info)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="a tar header may have at most 1000000 bytes, got 80000"):
            read_archive(path, {"fine"})
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_nested_tar_headers_are_rejected_without_recursion(tmp_path):
    head = with_checksum(block(type=tarfile.XHDTYPE, size=0))
    (tmp_path / "archive").write_bytes(head * 3000 + bytes(1024))
    with pytest.raises(ValueError, match=r"is not a valid .* archive \(nested headers\)"):
        read_archive(tmp_path / "archive", {"fine"})


def test_a_large_zip_directory_is_rejected_without_reading_it_into_memory(tmp_path):
    path = zip_archive(tmp_path / "archive", [(f"{i:0200}", b"") for i in range(5000)])
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="a zip directory may have at most 1000000 bytes, got 1230000 in archive"):
            read_archive(path, {"fine"})
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("fine", b"1")
    data = path.read_bytes()
    end = data.index(b"PK\x05\x06")
    path.write_bytes(data[:end] + b"PK\x06\x07" + struct.pack("<IQI", 0, 0, 1) + data[end:])
    with pytest.raises(ValueError, match="zip64 archives are not supported"):
        read_archive(path, {"fine"})


def test_a_zip_with_a_wrong_member_size_is_rejected(tmp_path):
    path = zip_archive(tmp_path / "archive", [("bomb", bytes(100_000))])
    data = path.read_bytes()
    size = (100_000).to_bytes(4, "little")
    assert data.count(size) == 2
    path.write_bytes(data.replace(size, (10).to_bytes(4, "little")))
    with pytest.raises(ValueError, match=r"is not a valid .* archive"):
        read_archive(path, {"bomb"})


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_duplicate_and_too_many_members_are_rejected(tmp_path, make, monkeypatch):
    path = make(tmp_path / "archive", [("a/one", b"1"), ("b/one", b"2")])
    with pytest.raises(ValueError, match="got one twice in archive"):
        read_archive(path, {"one"})
    monkeypatch.setattr(user_files, "MAX_MEMBERS", 1)
    with pytest.raises(ValueError, match="may have at most 1 members, got more"):
        read_archive(path, {"two"})


def test_an_encrypted_zip_is_rejected(tmp_path):
    path = zip_archive(tmp_path / "archive", [("one", b"1")])
    data = bytearray(path.read_bytes())
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(mark) + offset] |= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="encryption or an unsupported compression method"):
        read_archive(path, {"one"})


def test_an_empty_member_name_is_rejected(tmp_path):
    path = zip_archive(tmp_path / "archive", [("one", b"1")])
    path.write_bytes(path.read_bytes().replace(b"one", b"\0ne"))
    with pytest.raises(ValueError, match=r"must be relative and without \.\., got ''"):
        read_archive(path, {"one"})


@given(data=st.data())
@settings(max_examples=150)
def test_a_corrupted_archive_is_read_or_raises_value_error(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged")
    make = data.draw(st.sampled_from(list(MAKERS.values())))
    path = make(folder / "archive", [("a/one", b"abc" * 50), ("two", b"x" * 700)])
    content = bytearray(path.read_bytes())
    for at, byte in data.draw(st.lists(st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255)), max_size=4)):
        content[at] = byte
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        found = read_archive(path, {"one", "two"}, max_bytes=100_000)
    except ValueError:
        return
    assert set(found) <= {"one", "two"}


@given(junk=st.binary(max_size=2000), packed=st.booleans())
@settings(max_examples=100)
def test_arbitrary_bytes_are_read_or_raise_value_error(junk, packed, tmp_path_factory):
    path = tmp_path_factory.mktemp("junk") / "archive"
    path.write_bytes(gzip.compress(junk) if packed else junk)
    try:
        assert read_archive(path, {"one"}) == {}
    except ValueError as error:
        assert "archive" in str(error)  # noqa: PT017
