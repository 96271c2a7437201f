"""Picture files, decoded to squares of one size: all at once, in parallel, and cached until a file changes."""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from safetensors.torch import load as from_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor

from clearhead.data.config import Fit
from clearhead.data.own_files import read_own
from clearhead.data.pictures import InvalidPictureError, resize, with_picture
from clearhead.data.store import cache_folder
from clearhead.files import write_atomic

DIGEST_BYTES = 32
MOST_CACHE_HEADER = 4096
"""bytes in the cache beside the tensors and the digest"""
MOST_THREADS = min(8, os.cpu_count() or 1)
"""each thread that waits for the budget holds an image file in memory"""


@dataclass(frozen=True, eq=False)
class Pictures:
    """Decoded pictures, in the order of their files."""

    pixels: Tensor
    """uint8 (N,3,size,size)"""
    sizes: Tensor
    """int32 (N,2): width and height of each picture in its file; 0 where it could not be decoded"""


def decoded(root: Path, files: Sequence[Path], size: int, fit: Fit) -> Pictures:
    """All pictures, decoded once and then cached until a file changes. A cache that cannot be read or written, or is
    damaged, is no reason to stop: then they are decoded each time."""
    check_room(len(files), size)
    kept = cache_file(f"{key_of_files(root, files, size, fit)}.safetensors")
    if kept is not None and (cached := from_cache(kept, len(files), size)):
        return cached
    found = decode(files, size, fit)
    if kept is None or not found.sizes.all():
        return found  # a file that cannot be read today may be tomorrow, with a decoder that was installed since
    data = to_safetensors({"pixels": found.pixels, "sizes": found.sizes})
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(kept, hashlib.sha256(data).digest() + data)
    return found


def cache_file(name: str) -> Path | None:
    """None where there is no folder for it, as without a home."""
    try:
        return cache_folder() / "folders" / name
    except ValueError:
        return None


def from_cache(path: Path, n: int, size: int) -> Pictures | None:
    """The n pictures that are cached there; None where the file is absent, unreadable or damaged."""
    length = n * (3 * size**2 + 2 * 4)  # pixels, width and height
    try:
        data = memoryview(read_own(path, DIGEST_BYTES + length + MOST_CACHE_HEADER))
        digest, packed = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        if hashlib.sha256(packed).digest() != digest:
            return None
        found = Pictures(**from_safetensors(packed.tobytes()))
    except MemoryError:
        raise
    except Exception:  # the system says no, or what is there was not written by `decoded`
        return None
    right = (found.pixels.shape, found.pixels.dtype) == ((n, 3, size, size), torch.uint8)
    return found if right and (found.sizes.shape, found.sizes.dtype) == ((n, 2), torch.int32) else None


def decode(files: Sequence[Path], size: int, fit: Fit) -> Pictures:
    pixels = torch.zeros(len(files), 3, size, size, dtype=torch.uint8)
    sizes = torch.zeros(len(files), 2, dtype=torch.int32)

    def decode_one(i: int) -> None:
        with suppress(InvalidPictureError):
            square, shape = with_picture(files[i], lambda picture: (resize(picture, size, fit), picture.size))
            pixels[i], sizes[i] = square, torch.tensor(shape)

    console = Console(stderr=True)
    with ThreadPoolExecutor(MOST_THREADS) as pool:  # decoders leave Python's lock alone
        done = pool.map(decode_one, range(len(files)))
        for _ in track(done, "reading pictures", len(files), console=console, disable=not console.is_terminal):
            pass
    return Pictures(pixels, sizes)


def check_room(n: int, size: int) -> None:
    """Refuses what this machine's memory cannot hold, before the first picture is read."""
    needed, there = n * 3 * size**2, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise ValueError(
            f"all pictures must fit into memory, got {n} of {size} x {size}, {needed / 1e9:,.0f} GB of "
            f"{there / 1e9:,.0f}; choose a smaller image_size"
        )


def key_of_files(root: Path, files: Sequence[Path], size: int, fit: Fit) -> str:
    """Changes with any file's name, length or time, and with the size and the fit asked for."""
    lines = [f"{root.resolve()} {size} {fit}"]
    for path in files:
        status = path.stat()
        lines.append(f"{path.relative_to(root)} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()[:32]
