"""Limits on what is read from files and servers. Every reader of foreign data checks them before it allocates memory.

They are chosen so that no reader needs more than 512 MB beside the data that it returns. Does not import torch.
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
"""pixels of an image, by the size that its header declares. Decoding takes up to 16 bytes per pixel (WebP)"""
MAX_IMAGE_SIDE = 32_768
"""width and height of an image: resizing an image of 1 x 25,000,000 pixels would first make it wider"""
MAX_DECODING_PIXELS = MAX_IMAGE_PIXELS
"""pixels that are being decoded at the same time, over all threads"""
MAX_JPEG_SCANS = 100
"""scans of a progressive JPEG file; encoders write about 10. Each one is a pass over all pixels"""

MAX_FOLDER_ENTRIES = 300_000
"""files and folders in a folder of images, and in a folder that is searched for a data set"""
MAX_FOLDER_DEPTH = 32
"""folders inside folders; symbolic links to folders are not followed below a class"""

MAX_TEXT_BYTES = 100_000_000
"""bytes of a text to learn: as many as enwik8 has"""
MAX_SYMBOLS = 65_536
"""different characters of a text"""
MAX_LIST_BYTES = 10_000_000
"""bytes of a dictionary or a list of words: about three times the CMU dictionary"""
MAX_LIST_LINES = 500_000
"""lines of a dictionary or a list of words"""

MAX_MEMBERS = 10_000
"""files and folders in an archive"""
MAX_MEMBER_BYTES = 64_000_000
"""bytes of one file of a data set, unpacked"""
MAX_DATASET_BYTES = 256_000_000
"""bytes of all files of a data set, unpacked: CIFAR-10 has 184 million"""
MAX_HEADER_BYTES = 1_000_000
"""bytes of one extended header of a tar archive, and of the directory of a zip archive"""

MAX_DOWNLOAD_BYTES = 512_000_000
"""bytes of a download"""
DOWNLOAD_WAITS = (1, 2, 4, 8, 16)
"""seconds before each further request for a download that broke off; after the last one it fails"""
MIN_SPEED = 1_000
"""bytes per second of a download, on average once it takes longer than a minute"""

MAX_MATRIX_BYTES = 10_000_000
"""bytes of a file of matrices or of a mask"""
MAX_MATRIX_VALUES = 2**22
"""values of all arrays in a file, read from the headers of the arrays before the arrays are read"""

MAX_IMAGE_SIZE = 2_048
"""image_size in a config"""
MAX_LENGTH = 65_536
"""length and set_size in a config"""
MAX_EXAMPLES = 10_000_000
"""limit, validation and window in a config; to shuffle so many takes about 400 MB"""


# The user's own files, read with care. Does not import torch.
#
# Only regular files are read: to open a named pipe waits for a writer, and a device has no end. A file is opened
# without
# waiting and examined through its descriptor, so that it cannot be exchanged between the check and the reading.


CONVERT = "convert it first"
LINE_END = re.compile(r"\r\n|\r|\n")
PIECE = 1 << 20


class NotRegularError(ValueError):
    """A pipe, a device or a socket where a file is needed."""


def user_path(path: str | Path) -> Path:
    """Where it is, ~ resolved."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(f"~NAME must be somebody's home, got {str(path)!r}; write the path in full") from None


def open_user_file(path: str | Path, most: int | None = None) -> io.BufferedReader:
    """A regular file of at most `most` bytes, opened for reading. A folder, or a path without a file, is an OSError."""
    try:
        file = open_regular(user_path(path), os.O_RDONLY, follow=True)
    except UnsafeFileError:
        raise NotRegularError(
            f"data is read from files, and more than once, got a pipe or a device: {path}; save it as a file first"
        ) from None
    try:
        size = os.fstat(file).st_size
        if most is not None and size > most:
            raise ValueError(f"{path} has {size:,} bytes, the limit is {most:,}")
        return os.fdopen(file, "rb")
    except BaseException:
        os.close(file)
        raise


def read_user_file(path: str | Path, most: int) -> bytes:
    """All bytes of a regular file; more than `most` are refused, and a file that grows while it is read."""
    with open_user_file(path, most) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(size + 1)
    if len(data) > size:
        raise ValueError(f"{path} has more bytes than the {size:,} that it had when it was opened")
    return data


def check_user_file(path: str | Path, most: int = MAX_TEXT_BYTES) -> Path:
    """The path of a regular file of at most `most` bytes."""
    open_user_file(path, most).close()
    return user_path(path)


def read_text_chunks(path: str | Path, most: int, otherwise: str = CONVERT) -> list[str]:
    """All of a text, in pieces, without its byte order mark. The byte 0 is in no text, but in every second place of
    UTF-16. A piece takes 1, 2 or 4 bytes per character: one rare character does not make all of the text large."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    pieces = []
    try:
        for data in read_chunks(path, most):
            pieces.append(decoder.decode(data, final=not data))
            if "\0" in pieces[-1]:
                raise ValueError(f"{path} must be text in UTF-8, got other bytes (a zero); {otherwise}")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be text in UTF-8, got other bytes ({error.reason}); {otherwise}") from None
    return pieces


def read_chunks(path: str | Path, most: int) -> Iterator[bytes]:
    """All bytes of a regular file, in pieces, with an empty one at the end; more than `most` are refused."""
    length = 0
    with open_user_file(path, most) as file:
        while data := file.read(PIECE):
            length += len(data)
            if length > most:
                raise ValueError(f"{path} has more than {most:,} bytes")
            yield data
    yield b""


def read_lines(path: str | Path) -> list[str]:
    """The lines of a text of at most MAX_LIST_BYTES and MAX_LIST_LINES, whichever system wrote them."""
    text = "".join(read_text_chunks(path, MAX_LIST_BYTES))
    if text.count("\n") + text.count("\r") - text.count("\r\n") >= MAX_LIST_LINES:
        raise ValueError(f"{path} has more than {MAX_LIST_LINES:,} lines")
    return LINE_END.split(text)


def scandir_recursive(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Everything in a folder and in the folders below it. Symbolic links to folders are listed and not followed.

    At most MAX_FOLDER_ENTRIES, at most MAX_FOLDER_DEPTH deep. Their order is the file system's.
    """
    waiting, count = [(os.fspath(folder), 1)], 0
    while waiting:
        place, depth = waiting.pop()
        with os.scandir(place) as entries:
            for entry in entries:
                count += 1
                if count > MAX_FOLDER_ENTRIES:
                    raise ValueError(f"{folder} has more than {MAX_FOLDER_ENTRIES:,} files and folders")
                if entry.is_dir(follow_symlinks=False):
                    if depth >= MAX_FOLDER_DEPTH:
                        raise ValueError(f"{folder} has folders that are nested more than {MAX_FOLDER_DEPTH} deep")
                    waiting.append((entry.path, depth + 1))
                yield entry
