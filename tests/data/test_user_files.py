import os

import pytest

from clearhead.data.user_files import (
    MAX_LIST_LINES,
    check_user_file,
    read_chunks,
    read_lines,
    read_text_chunks,
    read_user_file,
)
from clearhead.data.vocab import read_dictionary, read_text, read_words
from clearhead.tasks.language import Text

READERS = {
    "dictionary": lambda path: read_dictionary(path, stress=False),
    "words": read_words,
    "characters": lambda path: read_text(path, "character"),
    "bytes": lambda path: read_text(path, "byte"),
    "digest": lambda path: Text(file=path).digests(),
}


@pytest.mark.parametrize("reader", READERS)
def test_pipes_and_devices_are_rejected_before_opening(tmp_path, reader):
    os.mkfifo(tmp_path / "pipe")  # no writer: opening it would block forever
    for path in (str(tmp_path / "pipe"), "/dev/zero"):
        with pytest.raises(ValueError, match=f"{path} must be a regular file .*, got a pipe or a device; save"):
            READERS[reader](path)


@pytest.mark.parametrize("reader", READERS)
def test_folders_and_missing_files_raise_the_system_error(tmp_path, reader):
    with pytest.raises(IsADirectoryError):
        READERS[reader](str(tmp_path))
    with pytest.raises(FileNotFoundError):
        READERS[reader](str(tmp_path / "nothing"))


def test_home_directories_are_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x").touch()
    assert check_user_file("~/x") == tmp_path / "x"
    with pytest.raises(
        ValueError, match="there is no home directory for '~nobody-of-this-name/x'; use an absolute path"
    ):
        check_user_file("~nobody-of-this-name/x")


@pytest.mark.parametrize("reader", ["dictionary", "words", "characters"])
def test_utf_16_is_rejected(tmp_path, reader):
    (tmp_path / "x").write_bytes(
        "word W ER D\n".encode("utf-16-le")
    )  # without a byte order mark these bytes are also valid UTF-8
    with pytest.raises(ValueError, match=r"x must be text in UTF-8, got other bytes \(a zero byte\); convert it"):
        READERS[reader](str(tmp_path / "x"))


def test_byte_level_reads_any_bytes(tmp_path):
    (tmp_path / "x").write_bytes(b"\0\xff")
    assert "".join(read_text(str(tmp_path / "x"), "byte")) == "\0\xff"


def test_all_newline_conventions_are_supported(tmp_path):
    (tmp_path / "x").write_bytes("\ufeffa\r\nb\rc\n\x85d\u2028".encode())
    assert read_lines(tmp_path / "x") == ["a", "b", "c", "\x85d\u2028"]
    assert "".join(read_text_chunks(tmp_path / "x", 100)) == "a\r\nb\rc\n\x85d\u2028"


def test_files_above_the_size_limit_are_rejected_before_reading(tmp_path, monkeypatch):
    with (tmp_path / "x").open("wb") as file:
        file.truncate(10**12)  # a sparse file takes no disk space
    for name, reader in READERS.items():
        limit = "10,000,000" if name in ("dictionary", "words") else "100,000,000"
        with pytest.raises(ValueError, match=f"x has 1,000,000,000,000 bytes, the limit is {limit}"):
            reader(str(tmp_path / "x"))


def test_a_file_that_grows_while_being_read_is_rejected(tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(bytes(100))
    status = os.stat(tmp_path / "x")
    monkeypatch.setattr(os, "fstat", lambda file: os.stat_result((*status[:6], 10, *status[7:10])))
    with pytest.raises(ValueError, match="x has changed while it was read: it had 10 bytes"):
        read_user_file(tmp_path / "x", 50)
    with pytest.raises(ValueError, match="x has more than 50 bytes"):
        list(read_chunks(tmp_path / "x", 50))


def test_too_many_lines_are_rejected(tmp_path):
    (tmp_path / "x").write_text("a\n" * (MAX_LIST_LINES - 1))
    assert len(read_lines(tmp_path / "x")) == MAX_LIST_LINES
    for end in ("\n", "\r", "\r\n"):
        (tmp_path / "x").write_bytes(f"a{end}".encode() * MAX_LIST_LINES)
        with pytest.raises(ValueError, match="x has more than 500,000 lines"):
            read_lines(tmp_path / "x")


def test_file_descriptors_are_closed_on_errors(tmp_path):
    (tmp_path / "x").write_bytes(bytes(100))
    before = os.listdir("/dev/fd")
    for _ in range(20):
        with pytest.raises(ValueError, match="the limit is"):
            read_user_file(tmp_path / "x", 50)
        with pytest.raises(IsADirectoryError, match="got a folder"):
            read_user_file(tmp_path, 50)
    assert len(os.listdir("/dev/fd")) == len(before)
