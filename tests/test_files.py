import errno
import math
import os
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.files import from_json, fsync_folder, sha256, to_json, write_atomic, write_durable


def test_a_file_takes_the_place_of_another(tmp_path):
    write_atomic(tmp_path / "a", b"old")
    write_atomic(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("kind", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EIO])
def test_whichever_call_fails_the_file_is_the_old_one_or_the_new_one(tmp_path, faults, kind, once):
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


def test_a_kill_at_any_call_leaves_the_old_file_or_the_new_one(tmp_path, faults):
    path = tmp_path / "a"
    for at in range(100):
        write_atomic(path, b"old")
        _, reached = faults.during(lambda: write_atomic(path, b"new"), at, once=False, error=faults.KILLED)
        assert path.read_bytes() in (b"old", b"new")
        if not reached:
            break
    assert at > 4


def test_bytes_are_durable_before_they_get_their_name_and_the_name_before_it_returns(tmp_path, faults):
    faults.during(lambda: write_atomic(tmp_path / "a", b"new"), faults.NEVER)
    assert [call for call, *_ in faults.trace] == ["open", "write", "fsync", "replace", "open", "fsync"]


def test_what_the_system_writes_in_pieces_is_written_whole(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:3]))
    write_atomic(tmp_path / "a", b"0123456789")
    assert (tmp_path / "a").read_bytes() == b"0123456789"


def test_a_new_file_is_never_written_over_another(tmp_path):
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        write_durable(tmp_path / "a", b"new")


def test_an_error_carries_the_name_that_the_system_leaves_out(tmp_path, faults):
    failure, _ = faults.during(lambda: write_durable(tmp_path / "a", b"new"), at=1)
    assert failure.filename == str(tmp_path / "a")


@pytest.mark.parametrize("kind", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_sync_folders_is_no_failure_but_a_broken_disk_is(tmp_path, faults, kind):
    def job():
        fsync_folder(tmp_path)

    assert faults.during(job, at=1, error=lambda: OSError(kind, "")) == (None, True)
    assert faults.during(job, at=1, error=lambda: OSError(errno.EIO, ""))[0].errno == errno.EIO


def test_the_digest_of_a_file_is_that_of_its_bytes(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert sha256(tmp_path / "a") == sha256(b"abc")
    assert sha256(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_come_back_bit_for_bit(x):
    assert struct.pack("d", from_json(to_json({"x": x}))["x"]) == struct.pack("d", x)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, object(), {1, 2}])
def test_what_json_has_not_is_not_written(value):
    with pytest.raises(ValueError, match="must be one that JSON has"):
        to_json({"x": value})


@pytest.mark.parametrize("text", [b"NaN", b'{"x": Infinity}', b"\xff", b"{", b"[" * 100_000])
def test_what_json_has_not_is_not_read(text):
    with pytest.raises(ValueError, match=r".+"):
        from_json(text)
