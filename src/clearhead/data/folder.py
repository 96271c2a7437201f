"""`folder`: the user's own pictures, one folder for each class.

Either `train/<class>/*`, with `val/<class>/*` and `test/<class>/*` beside it or not, or just `<class>/*`. Where there
is no test folder, a fifth of each class is the test set: always the same fifth, chosen by file names and TEST_SEED.
"""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from clearhead.data.config import DataConfig
from clearhead.data.dataset import DataSet, Images, Normalise, Part, set_apart
from clearhead.data.draws import key_of
from clearhead.data.idx import parse
from clearhead.data.own_files import own_path
from clearhead.data.pictures import SUFFIXES, read_picture, resize
from clearhead.data.store import cache_folder
from clearhead.files import write_atomic

NORMALISE = Normalise(mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
TEST_SEED = 0
SHARE = 5
"""one in so many is set apart"""
SPLITS = {"train": ("train",), "validation": ("val", "validation"), "test": ("test",)}
DIGEST_BYTES = 32


@dataclass(frozen=True)
class Listing:
    """The picture files of a folder, sorted, each with its class and the split whose folder it is in."""

    root: Path
    classes: tuple[str, ...]
    files: tuple[Path, ...]
    labels: tuple[int, ...]
    splits: tuple[str, ...]

    def at(self, split: str) -> list[int]:
        return [i for i, name in enumerate(self.splits) if name == split]


def load(config: DataConfig, seed: int) -> DataSet:
    listing = list_pictures(config.folder)
    train, test, n_validation = divided(listing, config.validation)
    images = Images(pixels_of(listing, config.image_size), torch.tensor(listing.labels))
    learned, held = set_apart(Part(images, torch.tensor(train)), n_validation, config.limit, seed)
    if validation := listing.at("validation"):
        held = Part(images, torch.tensor(validation))
    return DataSet(learned, held, Part(images, torch.tensor(test)), listing.classes, NORMALISE)


def divided(listing: Listing, validation: int) -> tuple[list[int], list[int], int]:
    """The pictures to learn from, those to test on, and how many of the first are set apart if `validation` are wanted
    and there is no folder of them."""
    train, test = listing.at("train"), listing.at("test")
    if not test:
        train, test = without_test(listing, train)
    return train, test, 0 if listing.at("validation") else min(validation, len(train) // SHARE)


def list_pictures(folder: str) -> Listing:
    root = own_path(folder)
    if not folder or not root.is_dir():
        raise ValueError(f"folder must be a folder of pictures, got {folder!r}; name one with a folder for each class")
    homes = {split: [root / name for name in names if (root / name).is_dir()] for split, names in SPLITS.items()}
    if not homes["train"]:
        homes = {"train": [root], "validation": [], "test": []}
    classes = tuple(path.name for path in subfolders(homes["train"][0]))
    check_classes(classes, homes["train"][0])
    found = [
        (path, classes.index(name), split)
        for split, places in homes.items()
        for place in places
        for name, paths in pictures_by_class(place, classes).items()
        for path in paths
    ]
    files, labels, splits = zip(*found, strict=True)
    return Listing(root, classes, files, labels, splits)


def check_classes(classes: tuple[str, ...], place: Path) -> None:
    if len(classes) < 2:
        raise ValueError(
            f"there must be two classes or more, each a folder in {place}, got {len(classes)}; "
            "sort the pictures into folders"
        )
    for name in classes:
        if name.encode(errors="replace").decode() != name:  # names of files are bytes, and not all bytes are text
            raise ValueError(f"the name of a class must be text (UTF-8), got {name!r} in {place}; rename that folder")


def pictures_by_class(place: Path, classes: tuple[str, ...]) -> dict[str, list[Path]]:
    found = {}
    for folder in subfolders(place):
        if folder.name not in classes:
            raise ValueError(
                f"classes are those of the training folder, got another one, {folder}; rename or remove it"
            )
        paths = [path for path in folder.rglob("*") if is_picture(path)]
        if not paths:
            raise ValueError(f"a class needs pictures ({', '.join(SUFFIXES)}), got none in {folder}; add or remove it")
        found[folder.name] = sorted(paths)
    return found


def is_picture(path: Path) -> bool:
    """By its name; a hidden file is the computer's own business."""
    return path.suffix.lower() in SUFFIXES and path.name[0] != "." and path.is_file()


def subfolders(place: Path) -> list[Path]:
    return sorted(path for path in place.iterdir() if path.is_dir() and path.name[0] != ".")


def without_test(listing: Listing, train: list[int]) -> tuple[list[int], list[int]]:
    """The rest, and a fifth of each class, but at least one picture."""
    test: set[int] = set()
    for label, name in enumerate(listing.classes):
        members = [i for i in train if listing.labels[i] == label]
        if len(members) < 2:
            raise ValueError(f"a class needs two pictures or more, one of them to test, got one of {name}; add more")
        members.sort(key=lambda i: key_of(TEST_SEED, listing.files[i].relative_to(listing.root).as_posix()))
        test.update(members[: max(1, len(members) // SHARE)])
    return [i for i in train if i not in test], sorted(test)


def pixels_of(listing: Listing, size: int) -> Tensor:
    """uint8 (N,3,size,size), decoded once and then kept in the cache until a file changes."""
    kept = cache_folder() / "folders" / f"{key_of_files(listing, size)}.idx"
    if kept.is_file():
        data = kept.read_bytes()
        if hashlib.sha256(data[DIGEST_BYTES:]).digest() == data[:DIGEST_BYTES]:
            return parse(data[DIGEST_BYTES:], str(kept))
    check_room(len(listing.files), size)
    pixels = decode(listing.files, size)
    head = b"\0\0\x08\x04" + b"".join(n.to_bytes(4, "big") for n in pixels.shape)
    data = head + pixels.numpy().tobytes()
    with suppress(OSError):  # without a place for it they are decoded again the next time
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(kept, hashlib.sha256(data).digest() + data)
    return pixels


def digest(folder: str) -> str:
    """One sha256 over the names and the bytes of all pictures: another picture would mean another split."""
    listing = list_pictures(folder)
    with ThreadPoolExecutor() as pool:  # hashing leaves Python's lock alone
        lines = [
            f"{path.relative_to(listing.root).as_posix()} {of_file}"
            for path, of_file in zip(listing.files, pool.map(file_sha256, listing.files), strict=True)
        ]
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_room(n: int, size: int) -> None:
    """Refuses what this machine's memory cannot hold, before the first picture is read."""
    needed, there = n * 3 * size**2, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise ValueError(
            f"all pictures must fit into memory, got {n} of {size} x {size}, {needed / 1e9:,.0f} GB of "
            f"{there / 1e9:,.0f}; choose a smaller image_size"
        )


def key_of_files(listing: Listing, size: int) -> str:
    """Changes with any file's name, length or time, and with the size asked for."""
    lines = [f"{listing.root.resolve()} {size}"]
    for path in listing.files:
        status = path.stat()
        lines.append(f"{path.relative_to(listing.root)} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()[:32]


def decode(files: tuple[Path, ...], size: int) -> Tensor:
    console = Console(stderr=True)
    with ThreadPoolExecutor() as pool:  # decoders leave Python's lock alone
        pixels = pool.map(lambda path: resize(read_picture(path), size), files)
        shown = track(pixels, "reading pictures", len(files), console=console, disable=not console.is_terminal)
        return torch.stack(list(shown))
