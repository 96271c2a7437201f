"""Safe reading of the user's files, and the limits on everything that is read from files and servers.

Only regular files are read, because opening a named pipe blocks and a device has no end. A file is opened without
blocking and checked through its descriptor, so that it cannot be replaced between the check and the read.

Readers of untrusted data check the limits before they allocate memory. With these limits, no reader needs more than
512 MB in addition to the data that it returns. This module does not import torch.
"""

import codecs
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path

from clearhead.files import UnsafeFileError, open_regular

MAX_IMAGE_BYTES = 10_000_000
"""bytes of an image file"""
MAX_IMAGE_PIXELS = 25_000_000
"""pixels of an image, as declared in its header. Decoding takes up to 16 bytes per pixel (WebP)"""
MAX_IMAGE_SIDE = 32_768
"""width and height of an image. Resizing an image of 1 x 25,000,000 pixels would first make it wider"""
MAX_DECODING_PIXELS = MAX_IMAGE_PIXELS
"""pixels that all threads decode at the same time"""
MAX_JPEG_SCANS = 100
"""scans of a progressive JPEG file; encoders write about 10. Each one is a pass over all pixels"""

MAX_FOLDER_ENTRIES = 300_000
"""files and folders in a folder of images, and in a folder that is searched for a data set"""
MAX_FOLDER_DEPTH = 32
"""nesting of folders. Symbolic links to folders are not followed below a class"""

MAX_TEXT_BYTES = 100_000_000
"""bytes of a training text: the size of enwik8"""
MAX_SYMBOLS = 65_536
"""distinct characters of a text"""
MAX_LIST_BYTES = 10_000_000
"""bytes of a dictionary or word list: about three times the CMU dictionary"""
MAX_LIST_LINES = 500_000
"""lines of a dictionary or word list"""

MAX_MEMBERS = 10_000
"""files and folders in an archive"""
MAX_MEMBER_BYTES = 64_000_000
"""uncompressed bytes of one file of a data set"""
MAX_DATASET_BYTES = 256_000_000
"""uncompressed bytes of all files of a data set. CIFAR-10 has 184 million"""
MAX_HEADER_BYTES = 1_000_000
"""bytes of one extended header of a tar archive, and of the central directory of a zip archive"""

MAX_DOWNLOAD_BYTES = 512_000_000
"""bytes of a download"""
DOWNLOAD_WAITS = (1, 2, 4, 8, 16)
"""seconds to wait before each retry of an interrupted download"""
MIN_SPEED = 1_000
"""average bytes per second that a download must reach if it takes longer than a minute"""

MAX_MATRIX_BYTES = 10_000_000
"""bytes of a file of matrices or of a mask"""
MAX_MATRIX_VALUES = 2**22
"""values of all arrays in a file, checked in the array headers before the arrays are read"""

MAX_IMAGE_SIZE = 2_048
"""image_size in a config"""
MAX_LENGTH = 65_536
"""length and set_size in a config"""
MAX_EXAMPLES = 10_000_000
"""limit, validation and window in a config. Shuffling this many takes about 400 MB"""

CONVERT = "convert it first"
LINE_END = re.compile(r"\r\n|\r|\n")
CHUNK_BYTES = 1 << 20


class NotRegularError(ValueError):
    """The path is a pipe, a device or a socket instead of a regular file."""


def user_path(path: str | Path) -> Path:
    """The path with ~ and ~NAME expanded."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(f"there is no home directory for {str(path)!r}; use an absolute path") from None


def open_user_file(path: str | Path, max_bytes: int | None = None) -> io.BufferedReader:
    """Opens a regular file of at most `max_bytes` bytes. A folder or a missing file raises an OSError."""
    try:
        descriptor = open_regular(user_path(path), os.O_RDONLY, follow=True)
    except UnsafeFileError:
        raise NotRegularError(
            f"{path} must be a regular file because it is read more than once, got a pipe or a device; "
            "save it as a file first"
        ) from None
    try:
        size = os.fstat(descriptor).st_size
        if max_bytes is not None and size > max_bytes:
            raise ValueError(f"{path} has {size:,} bytes, the limit is {max_bytes:,}")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_user_file(path: str | Path, max_bytes: int) -> bytes:
    """All bytes of a regular file. Raises a ValueError if there are more than `max_bytes` or the file grows."""
    with open_user_file(path, max_bytes) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(size + 1)
    if len(data) > size:
        raise ValueError(f"{path} has changed while it was read: it had {size:,} bytes and has more now")
    return data


def check_user_file(path: str | Path, max_bytes: int = MAX_TEXT_BYTES) -> Path:
    """The expanded path, if it is a regular file of at most `max_bytes` bytes."""
    open_user_file(path, max_bytes).close()
    return user_path(path)


def read_text_chunks(path: str | Path, max_bytes: int, hint: str = CONVERT) -> list[str]:
    """The chunks of a UTF-8 text, without its byte order mark.

    Zero bytes are rejected: text contains none, but UTF-16 does. Python stores each chunk with 1, 2 or 4 bytes per
    character, so a single rare character does not enlarge the whole text.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    chunks = []
    try:
        for data in read_chunks(path, max_bytes):
            chunks.append(decoder.decode(data, final=not data))
            if "\0" in chunks[-1]:
                raise ValueError(f"{path} must be text in UTF-8, got other bytes (a zero byte); {hint}")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be text in UTF-8, got other bytes ({error.reason}); {hint}") from None
    return chunks


def read_chunks(path: str | Path, max_bytes: int) -> Iterator[bytes]:
    """The chunks of a regular file, then an empty one. Raises a ValueError if there are more than `max_bytes` bytes."""
    length = 0
    with open_user_file(path, max_bytes) as file:
        while data := file.read(CHUNK_BYTES):
            length += len(data)
            if length > max_bytes:
                raise ValueError(f"{path} has more than {max_bytes:,} bytes")
            yield data
    yield b""


def read_lines(path: str | Path) -> list[str]:
    """The lines of a text of at most MAX_LIST_BYTES and MAX_LIST_LINES, with any line endings."""
    text = "".join(read_text_chunks(path, MAX_LIST_BYTES))
    if text.count("\n") + text.count("\r") - text.count("\r\n") >= MAX_LIST_LINES:
        raise ValueError(f"{path} has more than {MAX_LIST_LINES:,} lines")
    return LINE_END.split(text)


def scandir_recursive(folder: Path) -> Iterator[os.DirEntry[str]]:
    """All entries of a folder and its subfolders, in file system order. Symbolic links to folders are not followed.

    Raises a ValueError if there are more than MAX_FOLDER_ENTRIES or they are nested deeper than MAX_FOLDER_DEPTH.
    """
    pending, count = [(os.fspath(folder), 1)], 0
    while pending:
        path, depth = pending.pop()
        with os.scandir(path) as entries:
            for entry in entries:
                count += 1
                if count > MAX_FOLDER_ENTRIES:
                    raise ValueError(f"{folder} has more than {MAX_FOLDER_ENTRIES:,} files and folders")
                if entry.is_dir(follow_symlinks=False):
                    if depth >= MAX_FOLDER_DEPTH:
                        raise ValueError(f"{folder} has folders that are nested more than {MAX_FOLDER_DEPTH} deep")
                    pending.append((entry.path, depth + 1))
                yield entry
