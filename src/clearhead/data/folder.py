"""`folder`: the user's own images, one folder per class.

The layout is `train/<class>/*` with optional `val/<class>/*` and `test/<class>/*`, or just `<class>/*`. Without a test
folder, a fifth of each class is held out as the test set. The choice depends only on the file names and TEST_SEED.

All files are decoded before the first step, in parallel, and the decoded images are cached until a file changes. If
files cannot be decoded, one error lists them. With `skip_invalid` they are skipped, and the data set is identical to
that of a folder without them.
"""

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

from clearhead.data import Fit, FolderOptions
from clearhead.data.dataset import Dataset, Examples, Images, Normalize, Subset, fold_in, train_val_split
from clearhead.data.downloads import cache_folder
from clearhead.data.images import SUFFIXES, InvalidImageError, read_image, resize, with_image
from clearhead.data.user_files import open_user_file, read_user_file, scandir_recursive, user_path
from clearhead.files import write_atomic

NORMALIZE = Normalize(mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
TEST_SEED = 0
HOLD_OUT_EVERY = 5
"""one in this many images is held out for testing, and at most one in this many for validation"""
SPLITS = {"train": ("train",), "validation": ("val", "validation"), "test": ("test",)}
UNSUPPORTED_SUFFIXES = (".tif", ".tiff", ".heic", ".heif", ".avif", ".jp2", ".ico", ".svg")
"""suffixes of image formats that are not supported"""
MAX_LISTED_FILES = 20
"""file names that a message lists; it only counts the remaining ones"""
DIGEST_BYTES = 32
MAX_CACHE_HEADER_BYTES = 4096
"""bytes of a cache file besides the tensors and the digest"""
MAX_THREADS = min(8, os.cpu_count() or 1)
"""each thread that waits for the pixel budget holds an image file in memory"""


@dataclass(frozen=True)
class Listing:
    """The sorted image files of a folder, each with its class and its split."""

    root: Path
    classes: tuple[str, ...]
    files: tuple[Path, ...]
    labels: tuple[int, ...]
    splits: tuple[str, ...]

    def at(self, split: str) -> list[int]:
        """Indices of the files in a split."""
        return [i for i, name in enumerate(self.splits) if name == split]

    def name(self, i: int) -> str:
        """The path of file i relative to the root. File names are bytes, which need not be valid UTF-8."""
        return self.files[i].relative_to(self.root).as_posix().encode(errors="replace").decode()

    def filter(self, is_valid: list[bool]) -> "Listing":
        """The listing of the valid files; every class must keep a training image, and no split may become empty."""
        valid = replace(
            self,
            files=tuple(compress(self.files, is_valid)),
            labels=tuple(compress(self.labels, is_valid)),
            splits=tuple(compress(self.splits, is_valid)),
        )
        train_labels = {valid.labels[i] for i in valid.at("train")}
        if missing := [name for label, name in enumerate(self.classes) if label not in train_labels]:
            raise ValueError(f"no image file of the training class {', '.join(missing)} in {self.root} can be read")
        if empty := set(self.splits) - set(valid.splits):  # otherwise training images would silently replace them
            raise ValueError(f"no image file of the {' or '.join(sorted(empty))} folder in {self.root} can be read")
        return valid


@dataclass(frozen=True, eq=False)
class DecodedImages:
    """Decoded images, in the order of their files."""

    pixels: Tensor
    """uint8 (N,3,size,size)"""
    sizes: Tensor
    """int32 (N,2): original width and height of each image; 0 if it could not be decoded"""


def load_folder(config: FolderOptions, seed: int) -> Dataset:
    listing, decoded, skipped = read_valid_images(config)
    train_indices, test_indices, n_validation = split_indices(listing, config.validation)
    images = Images(decoded.pixels, torch.tensor(listing.labels))
    train, validation = train_val_split(Subset(images, torch.tensor(train_indices)), n_validation, config.limit, seed)
    if validation_indices := listing.at("validation"):
        validation = Subset(images, torch.tensor(validation_indices))
    data = Dataset(train, validation, Subset(images, torch.tensor(test_indices)), listing.classes, NORMALIZE)
    return replace(
        data,
        files={config.folder: digest_of(listing)},
        skipped=skipped,
        notes=(*describe(data, config, decoded.sizes), *describe_skipped(skipped), *describe_ignored(listing.root)),
    )


def read_valid_images(config: FolderOptions) -> tuple[Listing, DecodedImages, tuple[str, ...]]:
    """The files that can be decoded, their images, and the names of the files that `skip_invalid` skips."""
    listing = list_images(config.folder)
    decoded = load_images(listing.root, listing.files, config.image_size, config.fit)
    is_valid = decoded.sizes[:, 0] > 0
    invalid = (~is_valid).nonzero().flatten().tolist()
    if not invalid:
        return listing, decoded, ()
    if not config.skip_invalid:
        raise ValueError(describe_invalid(listing, invalid))
    skipped = tuple(listing.name(i) for i in invalid)
    return listing.filter(is_valid.tolist()), DecodedImages(decoded.pixels[is_valid], decoded.sizes[is_valid]), skipped


def count_images(config: FolderOptions) -> tuple[int, int]:
    """The number of classes and of training images; with `skip_invalid`, of those that can be read."""
    listing = read_valid_images(config)[0] if config.skip_invalid else list_images(config.folder)
    train, _, n_validation = split_indices(listing, config.validation)
    return len(listing.classes), len(train) - n_validation


def file_names(config: FolderOptions, examples: Examples) -> list[str]:
    """The path of the image of each example, relative to the folder."""
    indices = torch.arange(len(examples))
    while isinstance(examples, Subset):
        indices, examples = examples.indices[indices], examples.examples
    listing, _, _ = read_valid_images(config)
    return [listing.name(i) for i in indices.tolist()]


def split_indices(listing: Listing, validation: int) -> tuple[list[int], list[int], int]:
    """Training indices, test indices, and the number of training images to hold out for validation.

    At most `validation` images are held out, and none if there is a validation folder.
    """
    train, test = listing.at("train"), listing.at("test")
    if not test:
        train, test = train_test_split(listing, train)
    return train, test, 0 if listing.at("validation") else min(validation, len(train) // HOLD_OUT_EVERY)


def train_test_split(listing: Listing, indices: list[int]) -> tuple[list[int], list[int]]:
    """Hold out a fifth of each class, and at least one image, as the test set."""
    test: set[int] = set()
    by_class: list[list[int]] = [[] for _ in listing.classes]
    for i in indices:
        by_class[listing.labels[i]].append(i)
    for name, group in zip(listing.classes, by_class, strict=True):
        if len(group) < 2:
            raise ValueError(f"each class needs at least 2 images, one of them for testing, got 1 of {name}")
        group.sort(key=lambda i: fold_in(TEST_SEED, listing.files[i].relative_to(listing.root).as_posix()))
        test.update(group[: max(1, len(group) // HOLD_OUT_EVERY)])
    return [i for i in indices if i not in test], sorted(test)


def list_images(folder: str) -> Listing:
    root = user_path(folder)
    if not folder or not root.is_dir():
        raise ValueError(f"folder must be a folder with one subfolder of images per class, got {folder!r}")
    split_folders = {
        split: [root / name for name in names if (root / name).is_dir()] for split, names in SPLITS.items()
    }
    if not split_folders["train"]:
        split_folders = {"train": [root], "validation": [], "test": []}
    train_folder = split_folders["train"][0]
    classes = tuple(path.name for path in subfolders(train_folder))
    check_classes(classes, train_folder)
    labels_by_name = {name: label for label, name in enumerate(classes)}
    entries = [
        (path, labels_by_name[name], split)
        for split, folders in split_folders.items()
        for split_folder in folders
        for name, paths in images_by_class(split_folder, labels_by_name).items()
        for path in paths
    ]
    files, labels, splits = zip(*entries, strict=True)
    return Listing(root, classes, files, labels, splits)


def check_classes(classes: tuple[str, ...], folder: Path) -> None:
    if len(classes) < 2:
        raise ValueError(f"at least 2 classes are required, each a subfolder of {folder}, got {len(classes)}")
    for name in classes:
        if name.encode(errors="replace").decode() != name or "\n" in name:  # file names may be arbitrary bytes
            raise ValueError(
                f"a class name must be a single line of UTF-8 text, got {name!r} in {folder}; rename that folder"
            )


def images_by_class(split_folder: Path, classes: Collection[str]) -> dict[str, list[Path]]:
    paths_by_class = {}
    for folder in subfolders(split_folder):
        if folder.name not in classes:
            raise ValueError(f"{folder} is not a class of the training folder; rename or remove it")
        paths = [Path(entry.path) for entry in scandir_recursive(folder) if is_image_file(entry)]
        if not paths:
            raise ValueError(f"no images ({', '.join(SUFFIXES)}) in the class folder {folder}; add some or remove it")
        for path in paths:
            if "\n" in str(path.relative_to(split_folder)):  # the digest hashes one line per file
                raise ValueError(f"the name of an image file must be a single line, got {str(path)!r}; rename it")
        paths_by_class[folder.name] = sorted(paths)
    return paths_by_class


def is_image_file(entry: os.DirEntry[str]) -> bool:
    """Whether the suffix is that of a supported format. Hidden files are ignored."""
    suffix = os.path.splitext(entry.name)[1].lower()
    return suffix in SUFFIXES and entry.name[0] != "." and is_file(entry)


def is_file(entry: os.DirEntry[str]) -> bool:
    """False for broken and circular symbolic links, too."""
    try:
        return entry.is_file()
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            return False
        raise


def subfolders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")


def load_images(root: Path, files: Sequence[Path], size: int, fit: Fit) -> DecodedImages:
    """Decode all images, or read them from the cache if no file has changed.

    If the cache is damaged or cannot be read or written, the images are decoded each time.
    """
    check_memory(len(files), size)
    path = cache_path(f"{cache_key(root, files, size, fit)}.safetensors")
    if path is not None and (cached := read_cache(path, len(files), size)):
        return cached
    decoded = decode(files, size, fit)
    if path is None or not decoded.sizes.all():
        return decoded  # an unreadable file may become readable, for example with a newly installed decoder
    data = to_safetensors({"pixels": decoded.pixels, "sizes": decoded.sizes})
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, hashlib.sha256(data).digest() + data)
    return decoded


def decode(files: Sequence[Path], size: int, fit: Fit) -> DecodedImages:
    pixels = torch.zeros(len(files), 3, size, size, dtype=torch.uint8)
    sizes = torch.zeros(len(files), 2, dtype=torch.int32)

    def decode_one(i: int) -> None:
        with suppress(InvalidImageError):
            square, original_size = with_image(files[i], lambda image: (resize(image, size, fit), image.size))
            pixels[i], sizes[i] = square, torch.tensor(original_size)

    console = Console(stderr=True)
    with ThreadPoolExecutor(MAX_THREADS) as pool:  # decoders release the GIL
        results = pool.map(decode_one, range(len(files)))
        for _ in track(results, "reading images", len(files), console=console, disable=not console.is_terminal):
            pass
    return DecodedImages(pixels, sizes)


def check_memory(n: int, size: int) -> None:
    """Raise an error before the first image is read if the decoded images would exceed the physical memory."""
    if not hasattr(os, "sysconf"):  # Windows
        return
    needed, available = n * 3 * size**2, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        raise ValueError(
            f"all images must fit into memory, got {n} of {size} x {size} pixels ({needed / 1e9:,.0f} GB, "
            f"available: {available / 1e9:,.0f} GB); try a smaller image_size"
        )


def cache_path(name: str) -> Path | None:
    """None if there is no cache folder because the user has no home directory."""
    try:
        return cache_folder() / "folders" / name
    except ValueError:
        return None


def cache_key(root: Path, files: Sequence[Path], size: int, fit: Fit) -> str:
    """A hash of the name, size and modification time of every file, the image size and the fit."""
    lines = [f"{root.resolve()} {size} {fit}"]
    for path in files:
        status = path.stat()
        lines.append(f"{path.relative_to(root)} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()[:32]


def read_cache(path: Path, n: int, size: int) -> DecodedImages | None:
    """The n cached images; None if the file is absent, unreadable or damaged."""
    length = n * (3 * size**2 + 2 * 4)  # pixels, width and height
    try:
        data = memoryview(read_user_file(path, DIGEST_BYTES + length + MAX_CACHE_HEADER_BYTES))
        digest, tensors = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        if hashlib.sha256(tensors).digest() != digest:
            return None
        cached = DecodedImages(**from_safetensors(tensors.tobytes()))
    except MemoryError:
        raise
    except Exception:  # the file cannot be read, or `load_images` did not write it
        return None
    is_valid = (cached.pixels.shape, cached.pixels.dtype) == ((n, 3, size, size), torch.uint8)
    return cached if is_valid and (cached.sizes.shape, cached.sizes.dtype) == ((n, 2), torch.int32) else None


def describe(data: Dataset, config: FolderOptions, sizes: Tensor) -> tuple[str, ...]:
    """The size of the data set, the effect of `fit`, and the command that shows the images."""
    counts = f"train {len(data.train):,}, validation {len(data.validation):,}, test {len(data.test):,}"
    summary = f"{len(sizes):,} images, {len(data.classes):,} classes ({counts})."
    shorter, longer = sizes.amin(1), sizes.amax(1)
    n = int((10 * (longer - shorter) > longer).sum())  # center-cropping discards (longer - shorter) / longer
    images = "1 image" if n == 1 else f"{n:,} images"
    effect = {
        "pad": f"Center-cropping would discard more than 10% of {images}; they are padded to squares instead.",
        "crop": f"Center-cropping discards more than 10% of {images}; --data.fit pad keeps them whole.",
        "stretch": f"Stretching changes the aspect ratio of {images} by more than 10%; --data.fit pad keeps it.",
    }[config.fit]
    return (f"{summary} {effect}" if n else summary, f"To see them as the model does: {show_command(config)}")


def show_command(config: FolderOptions) -> str:
    command = f"clearhead data show folder --data.folder {shlex.quote(config.folder)}"
    command += f" --data.fit {config.fit}" if config.fit != type(config).fit else ""
    for field in ("image_size", "validation", "limit"):
        if (value := getattr(config, field)) != getattr(type(config), field):
            command += f" --data.{field.replace('_', '-')} {value}"
    return command + (" --data.skip-invalid" if config.skip_invalid else "")


def describe_invalid(listing: Listing, invalid: list[int]) -> str:
    """An error message that lists the files that cannot be decoded, with the reasons."""
    reasons = [f"{listing.name(i)} ({decoding_error(listing.files[i])})" for i in invalid[:MAX_LISTED_FILES]]
    return (
        f"{len(invalid):,} of {len(listing.files):,} image files in {listing.root} cannot be read: "
        f"{', '.join(reasons)}{and_more(invalid)}; repair or remove them, or skip them with --data.skip-invalid"
    )


def decoding_error(path: Path) -> str:
    try:
        read_image(path)
    except InvalidImageError as error:
        return error.reason
    return "decoding failed before, but succeeds now"


def describe_skipped(skipped: tuple[str, ...]) -> tuple[str, ...]:
    if not skipped:
        return ()
    files = "image file that cannot be read" if len(skipped) == 1 else "image files that cannot be read"
    return (f"Skipped {len(skipped):,} {files}: {', '.join(skipped[:MAX_LISTED_FILES])}{and_more(skipped)}.",)


def describe_ignored(root: Path) -> tuple[str, ...]:
    """A note with the number of image files of unsupported formats, so that they are not ignored silently."""
    suffixes = (os.path.splitext(entry.name)[1].lower() for entry in scandir_recursive(root))
    ignored = sorted(suffix for suffix in suffixes if suffix in UNSUPPORTED_SUFFIXES)
    if not ignored:
        return ()
    counts = ", ".join(f"{ignored.count(suffix):,} {suffix}" for suffix in dict.fromkeys(ignored))
    return (f"Ignored image files of unsupported formats: {counts}. Convert them to PNG or JPEG to use them.",)


def and_more(names: Sequence[object]) -> str:
    return f" and {len(names) - MAX_LISTED_FILES:,} more" if len(names) > MAX_LISTED_FILES else ""


def digest(config: FolderOptions) -> str:
    """The digest of the configured folder. With `skip_invalid`, all files are decoded to find the valid ones."""
    return digest_of(read_valid_images(config)[0] if config.skip_invalid else list_images(config.folder))


def digest_of(listing: Listing) -> str:
    """One sha256 over the names and contents of all image files, because any other file may change the split."""
    with ThreadPoolExecutor() as pool:  # hashing releases the GIL
        lines = [
            f"{path.relative_to(listing.root).as_posix()} {file_digest}"
            for path, file_digest in zip(listing.files, pool.map(file_sha256, listing.files), strict=True)
        ]
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()


def file_sha256(path: Path) -> str:
    with open_user_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
