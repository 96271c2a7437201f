"""The user's own files, read with care. Does not import torch."""

import re
from pathlib import Path

CONVERT = "convert it first"
LINE_END = re.compile(r"\r\n|\r|\n")


def own_path(path: str | Path) -> Path:
    """Where it is, ~ resolved."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(f"~NAME must be somebody's home, got {str(path)!r}; write the path in full") from None


def own_file(path: str | Path) -> Path:
    """A file that is read more than once, and to its end, which neither a pipe nor a device allows; that it is a
    folder, or not there, the system says."""
    found = own_path(path)
    if found.exists() and not found.is_file() and not found.is_dir():
        raise ValueError(
            f"data is read from files, and more than once, got a pipe or a device: {path}; save it as a file first"
        )
    return found


def own_text(path: str | Path, otherwise: str = CONVERT) -> str:
    """All of a text, without its byte order mark. The byte 0 is in no text, but in every second place of UTF-16."""
    try:
        text = own_file(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be text in UTF-8, got other bytes ({error.reason}); {otherwise}") from None
    if "\0" in text:
        raise ValueError(f"{path} must be text in UTF-8, got other bytes (a zero); {otherwise}")
    return text


def own_lines(path: str | Path) -> list[str]:
    """The lines of a text, whichever system wrote them."""
    return LINE_END.split(own_text(path))
