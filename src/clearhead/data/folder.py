"""Picture files, decoded to squares of one size: all at once, in parallel, and cached until a file changes."""

import errno
import hashlib
import os
import shlex
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from safetensors.torch import load as from_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor

from clearhead.data.cache import cache_folder
from clearhead.data.dataset import Dataset, Images, Normalize, Subset, train_val_split
from clearhead.data.datasets import DataConfig, Fit
from clearhead.data.images import SUFFIXES, InvalidImageError, read_image, resize, with_image
from clearhead.data.prng import fold_in
from clearhead.data.user_files import open_user_file, read_user_file, scandir_recursive, user_path
from clearhead.files import write_atomic

DIGEST_BYTES = 32
MOST_CACHE_HEADER = 4096
"""bytes in the cache beside the tensors and the digest"""
MOST_THREADS = min(8, os.cpu_count() or 1)
"""each thread that waits for the budget holds an image file in memory"""


@dataclass(frozen=True, eq=False)
class DecodedImages:
    """Decoded pictures, in the order of their files."""

    pixels: Tensor
    """uint8 (N,3,size,size)"""
    sizes: Tensor
    """int32 (N,2): width and height of each picture in its file; 0 where it could not be decoded"""


def decoded(root: Path, files: Sequence[Path], size: int, fit: Fit) -> DecodedImages:
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


def from_cache(path: Path, n: int, size: int) -> DecodedImages | None:
    """The n pictures that are cached there; None where the file is absent, unreadable or damaged."""
    length = n * (3 * size**2 + 2 * 4)  # pixels, width and height
    try:
        data = memoryview(read_user_file(path, DIGEST_BYTES + length + MOST_CACHE_HEADER))
        digest, packed = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        if hashlib.sha256(packed).digest() != digest:
            return None
        found = DecodedImages(**from_safetensors(packed.tobytes()))
    except MemoryError:
        raise
    except Exception:  # the system says no, or what is there was not written by `decoded`
        return None
    right = (found.pixels.shape, found.pixels.dtype) == ((n, 3, size, size), torch.uint8)
    return found if right and (found.sizes.shape, found.sizes.dtype) == ((n, 2), torch.int32) else None


def decode(files: Sequence[Path], size: int, fit: Fit) -> DecodedImages:
    pixels = torch.zeros(len(files), 3, size, size, dtype=torch.uint8)
    sizes = torch.zeros(len(files), 2, dtype=torch.int32)

    def decode_one(i: int) -> None:
        with suppress(InvalidImageError):
            square, shape = with_image(files[i], lambda picture: (resize(picture, size, fit), picture.size))
            pixels[i], sizes[i] = square, torch.tensor(shape)

    console = Console(stderr=True)
    with ThreadPoolExecutor(MOST_THREADS) as pool:  # decoders leave Python's lock alone
        done = pool.map(decode_one, range(len(files)))
        for _ in track(done, "reading pictures", len(files), console=console, disable=not console.is_terminal):
            pass
    return DecodedImages(pixels, sizes)


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


# `folder`: the user's own pictures, one folder for each class.
#
# Either `train/<class>/*`, with `val/<class>/*` and `test/<class>/*` beside it or not, or just `<class>/*`. Where
# there
# is no test folder, a fifth of each class is the test set: always the same fifth, chosen by file names and TEST_SEED.
#
# All files are decoded before the first step, and the decoded pictures are cached. Files that cannot be decoded are
# named
# in one error; with `skip_invalid` they are left out, and the data set is the one of a folder without them.


NORMALISE = Normalize(mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
TEST_SEED = 0
SHARE = 5
"""one in so many is set apart"""
SPLITS = {"train": ("train",), "validation": ("val", "validation"), "test": ("test",)}
MOST_NAMED = 20
"""invalid files that a message names; of more it gives the number"""
OTHER_SUFFIXES = (".tif", ".tiff", ".heic", ".heif", ".avif", ".jp2", ".ico", ".svg")
"""of images that are not read"""


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

    def name(self, i: int) -> str:
        """The file's path below the root. Names of files are bytes, and not all bytes are text."""
        return self.files[i].relative_to(self.root).as_posix().encode(errors="replace").decode()

    def only(self, is_kept: list[bool]) -> "Listing":
        """The listing of the selected files; every class must keep a training image, and no split may become empty."""
        left = replace(
            self,
            files=tuple(compress(self.files, is_kept)),
            labels=tuple(compress(self.labels, is_kept)),
            splits=tuple(compress(self.splits, is_kept)),
        )
        learned = {left.labels[i] for i in left.at("train")}
        if without := [name for label, name in enumerate(self.classes) if label not in learned]:
            raise ValueError(f"no image file of the training class {', '.join(without)} in {self.root} can be read")
        if gone := set(self.splits) - set(left.splits):  # else other pictures would take their place unnoticed
            raise ValueError(f"no image file of the {' or '.join(sorted(gone))} folder in {self.root} can be read")
        return left


def load_folder(config: DataConfig, seed: int) -> Dataset:
    listing, found, skipped = usable(config)
    train, test, n_validation = divided(listing, config.validation)
    images = Images(found.pixels, torch.tensor(listing.labels))
    learned, held = train_val_split(Subset(images, torch.tensor(train)), n_validation, config.limit, seed)
    if validation := listing.at("validation"):
        held = Subset(images, torch.tensor(validation))
    data = Dataset(learned, held, Subset(images, torch.tensor(test)), listing.classes, NORMALISE)
    return replace(
        data,
        files={config.folder: digest_of(listing)},
        skipped=skipped,
        notes=(*describe(data, config, found.sizes), *named_skipped(skipped), *named_ignored(listing.root)),
    )


def usable(config: DataConfig) -> tuple[Listing, DecodedImages, tuple[str, ...]]:
    """The pictures that can be decoded, and the names of the files that cannot, which `skip_invalid` leaves out."""
    listing = list_images(config.folder)
    found = decoded(listing.root, listing.files, config.image_size, config.fit)
    is_valid = found.sizes[:, 0] > 0
    invalid = (~is_valid).nonzero().flatten().tolist()
    if not invalid:
        return listing, found, ()
    if not config.skip_invalid:
        raise ValueError(describe_invalid(listing, invalid))
    skipped = tuple(listing.name(i) for i in invalid)
    return listing.only(is_valid.tolist()), DecodedImages(found.pixels[is_valid], found.sizes[is_valid]), skipped


def describe_invalid(listing: Listing, invalid: list[int]) -> str:
    """One line that names every file which cannot be decoded, with the reason."""
    reasons = [f"{listing.name(i)} ({reason_of(listing.files[i])})" for i in invalid[:MOST_NAMED]]
    return (
        f"{len(invalid):,} of {len(listing.files):,} image files in {listing.root} cannot be read: "
        f"{', '.join(reasons)}{and_more(invalid)}; repair or remove them, or leave them out with --data.skip-invalid"
    )


def reason_of(path: Path) -> str:
    try:
        read_image(path)
    except InvalidImageError as error:
        return error.reason
    return "it could not be decoded before"


def and_more(names: Sequence[object]) -> str:
    return f" and {len(names) - MOST_NAMED:,} more" if len(names) > MOST_NAMED else ""


def named_skipped(skipped: tuple[str, ...]) -> tuple[str, ...]:
    if not skipped:
        return ()
    what = "image file that cannot be read" if len(skipped) == 1 else "image files that cannot be read"
    return (f"Skipped {len(skipped):,} {what}: {', '.join(skipped[:MOST_NAMED])}{and_more(skipped)}.",)


def named_ignored(root: Path) -> tuple[str, ...]:
    """Image files of formats that are not read: nobody should miss them in silence."""
    suffixes = (os.path.splitext(entry.name)[1].lower() for entry in scandir_recursive(root))
    found = sorted(suffix for suffix in suffixes if suffix in OTHER_SUFFIXES)
    if not found:
        return ()
    kinds = ", ".join(f"{found.count(kind):,} {kind}" for kind in dict.fromkeys(found))
    return (f"Ignored image files of formats that are not read: {kinds}. Convert them to PNG or JPEG to use them.",)


def describe(data: Dataset, config: DataConfig, sizes: Tensor) -> tuple[str, ...]:
    """What is in the folder, what `fit` does to it, and how to look at it."""
    counts = f"train {len(data.train):,}, validation {len(data.validation):,}, test {len(data.test):,}"
    what = f"{len(sizes):,} images, {len(data.classes):,} classes ({counts})."
    shorter, longer = sizes.amin(1), sizes.amax(1)
    n = int((10 * (longer - shorter) > longer).sum())  # center-cropping discards (longer - shorter) / longer
    images = "1 image" if n == 1 else f"{n:,} images"
    effect = {
        "pad": f"Center-cropping would discard more than 10% of {images}; they are padded to squares instead.",
        "crop": f"Center-cropping discards more than 10% of {images}; --data.fit pad keeps them whole.",
        "stretch": f"Stretching changes the aspect ratio of {images} by more than 10%; --data.fit pad keeps it.",
    }[config.fit]
    return (f"{what} {effect}" if n else what, f"To see them as the model does: {show_command(config)}")


def show_command(config: DataConfig) -> str:
    command = f"clearhead data show folder --data.folder {shlex.quote(config.folder)}"
    command += f" --data.fit {config.fit}" if config.fit != DataConfig.fit else ""
    for field in ("image_size", "validation", "limit"):
        if (value := getattr(config, field)) != getattr(DataConfig, field):
            command += f" --data.{field.replace('_', '-')} {value}"
    return command + (" --data.skip-invalid" if config.skip_invalid else "")


def divided(listing: Listing, validation: int) -> tuple[list[int], list[int], int]:
    """The pictures to learn from, those to test on, and how many of the first are set apart if `validation` are wanted
    and there is no folder of them."""
    train, test = listing.at("train"), listing.at("test")
    if not test:
        train, test = without_test(listing, train)
    return train, test, 0 if listing.at("validation") else min(validation, len(train) // SHARE)


def list_images(folder: str) -> Listing:
    root = user_path(folder)
    if not folder or not root.is_dir():
        raise ValueError(f"folder must be a folder of pictures, got {folder!r}; name one with a folder for each class")
    homes = {split: [root / name for name in names if (root / name).is_dir()] for split, names in SPLITS.items()}
    if not homes["train"]:
        homes = {"train": [root], "validation": [], "test": []}
    classes = tuple(path.name for path in subfolders(homes["train"][0]))
    check_classes(classes, homes["train"][0])
    labels_by_name = {name: label for label, name in enumerate(classes)}
    found = [
        (path, labels_by_name[name], split)
        for split, places in homes.items()
        for place in places
        for name, paths in pictures_by_class(place, labels_by_name).items()
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
        if name.encode(errors="replace").decode() != name or "\n" in name:  # names of files are any bytes
            raise ValueError(
                f"the name of a class must be one line of text (UTF-8), got {name!r} in {place}; rename that folder"
            )


def pictures_by_class(place: Path, classes: Collection[str]) -> dict[str, list[Path]]:
    found = {}
    for folder in subfolders(place):
        if folder.name not in classes:
            raise ValueError(
                f"classes are those of the training folder, got another one, {folder}; rename or remove it"
            )
        paths = [Path(entry.path) for entry in scandir_recursive(folder) if is_image_file(entry)]
        if not paths:
            raise ValueError(f"a class needs pictures ({', '.join(SUFFIXES)}), got none in {folder}; add or remove it")
        for path in paths:
            if "\n" in str(path.relative_to(place)):  # a digest is made of lines, one for each file
                raise ValueError(f"the name of an image file must be one line, got {str(path)!r}; rename it")
        found[folder.name] = sorted(paths)
    return found


def is_image_file(entry: os.DirEntry[str]) -> bool:
    """By its name; a hidden file is the computer's own business."""
    suffix = os.path.splitext(entry.name)[1].lower()
    return suffix in SUFFIXES and entry.name[0] != "." and is_file(entry)


def is_file(entry: os.DirEntry[str]) -> bool:
    """A link that leads nowhere, or back to itself, is none."""
    try:
        return entry.is_file()
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            return False
        raise


def subfolders(place: Path) -> list[Path]:
    return sorted(path for path in place.iterdir() if path.is_dir() and path.name[0] != ".")


def without_test(listing: Listing, train: list[int]) -> tuple[list[int], list[int]]:
    """The rest, and a fifth of each class, but at least one picture."""
    test: set[int] = set()
    by_class: list[list[int]] = [[] for _ in listing.classes]
    for i in train:
        by_class[listing.labels[i]].append(i)
    for name, members in zip(listing.classes, by_class, strict=True):
        if len(members) < 2:
            raise ValueError(f"a class needs two pictures or more, one of them to test, got one of {name}; add more")
        members.sort(key=lambda i: fold_in(TEST_SEED, listing.files[i].relative_to(listing.root).as_posix()))
        test.update(members[: max(1, len(members) // SHARE)])
    return [i for i in train if i not in test], sorted(test)


def digest(config: DataConfig) -> str:
    """See digest_of; which files `skip_invalid` leaves out is known when all have been decoded."""
    return digest_of(usable(config)[0] if config.skip_invalid else list_images(config.folder))


def digest_of(listing: Listing) -> str:
    """One sha256 over the names and the bytes of all pictures: another picture would mean another split."""
    with ThreadPoolExecutor() as pool:  # hashing leaves Python's lock alone
        lines = [
            f"{path.relative_to(listing.root).as_posix()} {of_file}"
            for path, of_file in zip(listing.files, pool.map(file_sha256, listing.files), strict=True)
        ]
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()


def file_sha256(path: Path) -> str:
    with open_user_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
