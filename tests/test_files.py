import errno
import math
import os
import struct
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.files import (
    UnsafeFileError,
    check_stored,
    check_tree,
    from_json,
    fsync_folder,
    make_folder,
    open_regular,
    opened_regular,
    read_regular,
    sha256,
    stored_bytes,
    to_json,
    write_atomic,
    write_durable,
)


def test_write_atomic_replaces_a_file(tmp_path):
    write_atomic(tmp_path / "a", b"old")
    write_atomic(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("kind", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EIO])
def test_any_failing_call_leaves_the_old_or_the_new_file(tmp_path, faults, kind, once):
    path = tmp_path / "a"
    for at in range(100):
        write_atomic(path, b"old")
        failure, reached = faults.during(
            lambda: write_atomic(path, b"new"), at, once, lambda: OSError(kind, os.strerror(kind))
        )
        if not reached:
            break
        assert isinstance(failure, OSError)
        assert failure.errno == kind
        assert failure.filename in (str(path), str(tmp_path), None)
        assert path.read_bytes() in (b"old", b"new")
        assert once is False or os.listdir(tmp_path) == ["a"]
    assert at > 4
    assert path.read_bytes() == b"new"


def test_a_kill_at_any_call_leaves_the_old_or_the_new_file(tmp_path, faults):
    path = tmp_path / "a"
    for at in range(100):
        write_atomic(path, b"old")
        _, reached = faults.during(lambda: write_atomic(path, b"new"), at, once=False, error=faults.KILLED)
        assert path.read_bytes() in (b"old", b"new")
        if not reached:
            break
    assert at > 4


def test_write_atomic_syncs_the_file_before_and_the_folder_after_renaming(tmp_path, faults):
    faults.during(lambda: write_atomic(tmp_path / "a", b"new"), faults.NEVER)
    assert [call for call, *_ in faults.trace] == ["open", "write", "fsync", "replace", "open", "fsync"]


def test_partial_writes_are_completed(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:3]))
    write_atomic(tmp_path / "a", b"0123456789")
    assert (tmp_path / "a").read_bytes() == b"0123456789"


def test_write_durable_never_overwrites(tmp_path):
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        write_durable(tmp_path / "a", b"new")


def test_write_errors_carry_the_file_name(tmp_path, faults):
    failure, _ = faults.during(lambda: write_durable(tmp_path / "a", b"new"), at=1)
    assert failure.filename == str(tmp_path / "a")


@pytest.mark.parametrize("kind", [errno.EINVAL, errno.ENOTSUP])
def test_fsync_folder_ignores_unsupported_file_systems_but_not_io_errors(tmp_path, faults, kind):
    def job():
        fsync_folder(tmp_path)

    assert faults.during(job, at=1, error=lambda: OSError(kind, "")) == (None, True)
    assert faults.during(job, at=1, error=lambda: OSError(errno.EIO, ""))[0].errno == errno.EIO


def test_holes_of_a_file_are_not_counted_as_stored(tmp_path):
    path, block = tmp_path / "a", 2**16
    path.write_bytes(bytes(block))
    assert stored_bytes(path) == block  # written zeros are not a hole
    os.truncate(path, 2**20)
    with path.open("r+b") as file:
        file.seek(2**20 - block)
        file.write(b"x" * block)
    assert stored_bytes(path) == 2 * block
    check_stored([path, path])
    os.truncate(path, 2**24)
    with pytest.raises(ValueError, match=r"of 16,777,216 bytes only 131,072 are stored"):
        check_stored([path])


@pytest.mark.parametrize("size", [0, 1, 5000])
def test_a_file_without_holes_is_stored_in_full(tmp_path, size):
    (tmp_path / "a").write_bytes(b"x" * size)
    assert stored_bytes(tmp_path / "a") == size


def test_without_hole_reporting_the_full_size_counts_as_stored(tmp_path, monkeypatch):
    def lseek(*args):
        raise OSError(errno.EINVAL, "Invalid argument")

    (tmp_path / "a").write_bytes(b"x")
    os.truncate(tmp_path / "a", 2**20)
    monkeypatch.setattr(os, "lseek", lseek)
    assert stored_bytes(tmp_path / "a") == 2**20


def test_sha256_of_a_file_equals_sha256_of_its_bytes(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert sha256(tmp_path / "a") == sha256(b"abc")
    assert sha256(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_round_trip_through_json_bit_for_bit(x):
    assert struct.pack("d", from_json(to_json({"x": x}))["x"]) == struct.pack("d", x)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, object(), {1, 2}])
def test_to_json_rejects_values_outside_json(value):
    with pytest.raises(ValueError, match="JSON"):
        to_json({"x": value})


@pytest.mark.parametrize("text", [b"NaN", b'{"x": Infinity}', b"1e999", b"[-1e400]", b"\xff", b"{", b"[" * 100_000])
def test_from_json_rejects_invalid_json(text):
    with pytest.raises(ValueError, match=r".+"):
        from_json(text)


class TestUntrustedFolders:
    """Files in a folder with untrusted contents."""

    READ, WRITE = os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_APPEND

    @pytest.fixture
    def path(self, tmp_path):
        (tmp_path / "victim").write_bytes(b"precious")
        yield tmp_path / "a"
        assert (tmp_path / "victim").read_bytes() == b"precious"

    @pytest.mark.parametrize("flags", [READ, WRITE])
    @pytest.mark.parametrize("target", ["victim", "nothing", "a", "."])
    def test_symbolic_links_are_not_followed(self, path, flags, target):
        path.symlink_to(path.parent / target)
        with pytest.raises(UnsafeFileError, match="expected a regular file, got a symbolic link") as caught:
            open_regular(path, flags)
        assert caught.value.filename == str(path)
        assert not path.with_name("nothing").exists()

    @pytest.mark.parametrize("flags", [READ, WRITE, os.O_RDWR])
    def test_named_pipes_are_rejected_without_blocking(self, path, flags):
        os.mkfifo(path)
        with pytest.raises(UnsafeFileError, match="got a named pipe"):
            open_regular(path, flags)

    def test_devices_and_folders_are_rejected(self, path):
        path.mkdir()
        for other in (path, type(path)("/dev/null")):
            with pytest.raises((UnsafeFileError, IsADirectoryError), match=r"got a (folder|device)"):
                read_regular(other)

    def test_files_with_several_hard_links_are_read_only(self, path):
        path.hardlink_to(path.with_name("victim"))
        assert read_regular(path) == b"precious"
        with pytest.raises(UnsafeFileError, match="a file with 2 hard links"):
            open_regular(path, self.WRITE)

    def test_rejected_files_are_closed(self, path):
        path.hardlink_to(path.with_name("victim"))
        before = os.open(os.devnull, os.O_RDONLY)
        os.close(before)
        with pytest.raises(UnsafeFileError):
            open_regular(path, self.WRITE)
        after = os.open(os.devnull, os.O_RDONLY)
        os.close(after)
        assert after == before

    def test_regular_files_are_read_and_written(self, path):
        with opened_regular(path, self.WRITE) as file:
            os.write(file, b"new")
        assert read_regular(path, max_bytes=3) == b"new"
        with pytest.raises(OSError, match="expected at most 2 bytes, got 3"):
            read_regular(path, max_bytes=2)
        with pytest.raises(FileNotFoundError):
            read_regular(path.with_name("b"))

    def test_make_folder_accepts_folders_but_not_links(self, path):
        make_folder(path)
        make_folder(path)
        path.with_name("link").symlink_to(path)
        with pytest.raises(UnsafeFileError, match="expected a folder, got a symbolic link"):
            make_folder(path.with_name("link"))
        with pytest.raises(FileExistsError):
            make_folder(path.with_name("victim"))

    def test_check_tree_limits_the_nesting_depth(self, path):
        (path / "/".join("x" * 30)).mkdir(parents=True)
        with pytest.raises(UnsafeFileError, match="nested"):
            check_tree(path, for_writing=False)

    def test_check_tree_ignores_files_that_disappear(self, path, monkeypatch):
        path.mkdir()
        monkeypatch.setattr(os, "listdir", lambda folder: ["gone"])
        check_tree(path, for_writing=True)


MEASURE = """
import re, sys
from pathlib import Path
from clearhead.files import MAX_JSON_BYTES, from_json, read_regular
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024
before = peak()
try:
    from_json(read_regular(Path(sys.argv[1]), MAX_JSON_BYTES))
except (ValueError, OSError) as error:
    print(error, file=sys.stderr)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured with /proc")
@pytest.mark.parametrize("item", ["{}", '{"":0}', "[]", '"ab"', '"ā"', "999"])
@pytest.mark.parametrize("size", [16, 60])
def test_untrusted_json_takes_less_than_512_mb(tmp_path, item, size):
    path = tmp_path / "state.json"
    n = (size * 2**20 - 16) // (len(item.encode()) + 1)
    path.write_text(f'["😀",{",".join([item] * n)}]')  # the emoji makes every decoded character take four bytes
    command = [sys.executable, "-c", MEASURE, str(path)]
    completed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert int(completed.stdout) <= 512
