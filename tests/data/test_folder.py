import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load as from_safetensors
from safetensors.torch import save as to_safetensors

from clearhead.data import folder, user_files
from clearhead.data.downloads import cache_folder
from clearhead.data.folder import list_images, split_indices
from clearhead.data.user_files import MAX_FOLDER_DEPTH
from clearhead.tasks.images import Folder

pytestmark = pytest.mark.usefixtures("cache")


def write_image(path, shade):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((9, 9, 3), shade, np.uint8)).save(path)


def write_images(root, **counts):
    """Writes images of distinct gray levels."""
    shades = iter(range(250))
    for subfolder, count in counts.items():
        for i in range(count):
            write_image(root / subfolder.replace("_", "/") / f"{i}.png", next(shades))
    return root


def load_folder(root, seed=0, **options):
    return Folder(folder=str(root), image_size=4, **options).load(seed)


def shades(examples):
    return examples.get_batch(torch.arange(len(examples)))[0][:, 0, 0, 0].tolist()


def test_the_digest_depends_on_file_names_and_contents_only(tmp_path):
    root = write_images(tmp_path / "mine", cat=3, dog=3)
    (first,) = load_folder(root).files.values()
    os.utime(root / "cat/0.png", (0, 0))  # timestamps do not matter
    (root / "notes.txt").write_text("no picture")
    assert load_folder(root).files == {str(root): first}
    (root / "cat/0.png").rename(root / "cat/9.png")
    renamed = load_folder(root).files[str(root)]
    write_image(root / "cat/9.png", 200)
    repainted = load_folder(root).files[str(root)]
    write_image(root / "dog/new.png", 201)
    added = load_folder(root).files[str(root)]
    assert len({first, renamed, repainted, added}) == 4


def test_train_val_and_test_folders_are_used_as_splits(tmp_path):
    data = load_folder(
        write_images(tmp_path / "mine", train_cat=6, train_dog=5, val_cat=2, val_dog=1, test_cat=1, test_dog=3)
    )
    assert data.classes == ("cat", "dog")
    assert [sorted(shades(part)) for part in (data.train, data.validation, data.test)] == [
        list(range(11)),
        [11, 12, 13],
        [14, 15, 16, 17],
    ]
    images, labels = data.test.get_batch(torch.arange(4))
    assert images.shape == (4, 3, 4, 4)
    assert labels.tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("counts", [{"cat": 20, "dog": 10}, {"train_cat": 20, "train_dog": 10}])
def test_a_single_folder_is_split_per_class(tmp_path, counts):
    data = load_folder(write_images(tmp_path / "mine", **counts))
    parts = [shades(part) for part in (data.train, data.validation, data.test)]
    assert [len(part) for part in parts] == [20, 4, 6]
    assert sorted(sum(parts, [])) == list(range(30))  # noqa: RUF017
    assert sorted(data.test.get_batch(torch.arange(6))[1].tolist()) == [0, 0, 0, 0, 1, 1]


def test_the_seed_changes_the_validation_split_but_not_the_test_split(tmp_path):
    root = write_images(tmp_path / "mine", cat=40, dog=40)
    first, second = load_folder(root, seed=1), load_folder(root, seed=2)
    assert shades(first.test) == shades(second.test)
    assert set(shades(first.validation)) != set(shades(second.validation))


def test_the_test_split_does_not_depend_on_the_folder_path(tmp_path):
    first, second = (write_images(tmp_path / name, cat=20, dog=20) for name in ("here", "there"))
    assert shades(load_folder(first).test) == shades(load_folder(second).test)


def test_decoded_images_are_cached_until_a_file_changes(tmp_path, monkeypatch):
    root = write_images(tmp_path / "mine", cat=3, dog=3)
    write_image(root / "cat/0.bmp", 100)
    before = shades(load_folder(root).test)
    decoded = []
    original = folder.decode
    monkeypatch.setattr(
        folder, "decode", lambda files, *options: decoded.append(len(files)) or original(files, *options)
    )
    assert shades(load_folder(root).test) == before
    assert decoded == []
    length = (root / "cat/0.bmp").stat().st_size
    write_image(root / "cat/0.bmp", 200)
    assert (root / "cat/0.bmp").stat().st_size == length  # only the modification time differs
    os.utime(root / "cat/0.bmp", ns=(1, 1))
    data = load_folder(root)
    assert decoded == [7]
    assert 200 in shades(data.train) + shades(data.validation) + shades(data.test)
    Folder(folder=str(root), image_size=5).load(0)
    assert decoded == [7, 7]
    Folder(folder=str(root), image_size=5, fit="crop").load(0)
    assert decoded == [7, 7, 7]


def test_a_corrupted_cache_is_rebuilt(tmp_path, cache):
    root = write_images(tmp_path / "mine", cat=3, dog=3)
    before = shades(load_folder(root).train)
    (kept,) = (cache / "folders").iterdir()
    intact = kept.read_bytes()
    for damaged in (intact[:-1], intact[:10], b"", intact[:60] + b"?" + intact[61:]):
        kept.write_bytes(damaged)
        assert shades(load_folder(root).train) == before
        assert kept.read_bytes() == intact


def test_non_image_and_hidden_files_are_ignored(tmp_path):
    root = write_images(tmp_path / "mine", cat=2, dog=2)
    (root / "notes.txt").write_text("mine")
    (root / "cat/notes.txt").write_text("mine")
    (root / "cat/._0.png").write_text("operating system metadata")
    (root / ".git").mkdir()
    write_image(root / "cat/deep/NINE.PNG", 99)
    assert len(list_images(str(root)).files) == 5


def test_file_names_may_be_undecodable_but_class_names_must_be_utf_8(tmp_path):
    root = write_images(tmp_path / "mine", cat=3, dog=3)
    os.rename(root / "cat/0.png", os.fsencode(root / "cat") + b"/\xff.png")
    assert len(load_folder(root).train) + len(load_folder(root).test) == 6
    os.rename(root / "cat", os.fsencode(root) + b"/c\xff")
    with pytest.raises(
        ValueError, match=r"a class name must be a single line of UTF-8 text, got .*; rename that folder"
    ):
        load_folder(root)


def test_a_dataset_larger_than_memory_is_rejected_before_decoding(tmp_path, monkeypatch):
    root = write_images(tmp_path / "mine", cat=3, dog=3)
    monkeypatch.setattr(folder, "with_image", pytest.fail)
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    with pytest.raises(ValueError, match=r"must fit into memory, got 6 of 2048 x 2048 pixels \(0 GB, available: "):
        Folder(folder=str(root), image_size=2048).load(0)


def unusable_caches(path):
    """Functions that each replace the cache file with something unusable."""
    tensors = from_safetensors(path.read_bytes()[32:])

    def write(**changes):
        data = to_safetensors({**tensors, **changes})
        path.write_bytes(hashlib.sha256(data).digest() + data)

    yield lambda: write(pixels=tensors["pixels"][:3])
    yield lambda: write(sizes=tensors["sizes"].float())
    yield lambda: write(other=tensors["sizes"].clone())
    yield lambda: path.write_bytes(hashlib.sha256(b"no tensors").digest() + b"no tensors")
    yield lambda: path.write_bytes(b"")
    yield lambda: os.truncate(path, 10**12)
    yield lambda: (path.unlink(), os.mkfifo(path))
    yield lambda: (path.unlink(), path.symlink_to(path))
    yield lambda: (path.unlink(), path.mkdir(), (path / "file").touch())


def test_images_are_decoded_again_if_the_cache_is_unusable(tmp_path, cache):
    root = write_images(tmp_path / "mine", cat=3, dog=3)
    expected = shades(load_folder(root).train)
    (path,) = (cache / "folders").iterdir()
    for make_unusable in unusable_caches(path):
        make_unusable()
        assert shades(load_folder(root).train) == expected


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(5, "Input/output error")])
def test_an_unreadable_cache_is_skipped(tmp_path, cache, monkeypatch, error):
    root = write_images(tmp_path / "mine", cat=3, dog=3)
    load_folder(root)
    stat = os.stat

    def fail(path, *args, **options):
        if "folders" in str(path):
            raise error
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", fail)
    assert len(load_folder(root).train) + len(load_folder(root).test) == 6


def test_images_load_without_a_home_directory(tmp_path, monkeypatch):
    root = write_images(tmp_path / "mine", cat=3, dog=3)
    monkeypatch.delenv("CLEARHEAD_CACHE", raising=False)
    monkeypatch.setattr(
        Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("Could not determine home directory."))
    )
    assert len(load_folder(root).train) + len(load_folder(root).test) == 6
    with pytest.raises(ValueError, match="no home directory for the cache; set CLEARHEAD_CACHE"):
        cache_folder()


def test_images_load_if_the_cache_cannot_be_created(tmp_path, monkeypatch):
    root = write_images(tmp_path / "mine", cat=3, dog=3)
    (tmp_path / "file").write_text("where a folder should be")
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "file/cache"))
    assert len(load_folder(root).train) + len(load_folder(root).test) == 6


def break_files(root, *names):
    for name in names:
        (root / name).write_bytes(b"no picture")


def test_one_error_lists_all_unreadable_files(tmp_path):
    root = write_images(tmp_path / "mine", cat=3, dog=3)
    break_files(root, "cat/7.png", "dog/7.jpg")
    (root / "dog/8.png").write_bytes((root / "dog/0.png").read_bytes()[:50])
    for _ in range(2):  # decoded now, and from the cache
        with pytest.raises(ValueError, match="3 of 9 image files in") as caught:
            load_folder(root)
        message = str(caught.value)
        assert "cat/7.png (the file is not PNG" in message
        assert "dog/7.jpg (the file is not PNG" in message
        assert "dog/8.png (the file is damaged" in message
        assert message.endswith("; repair or remove them, or skip them with --data.skip-invalid")


def test_a_long_list_of_unreadable_files_is_truncated_with_a_count(tmp_path):
    root = write_images(tmp_path / "mine", cat=3, dog=3)
    break_files(root, *(f"dog/bad{i:03}.jpg" for i in range(25)))
    with pytest.raises(ValueError, match=r"25 of 31 image files in .*: dog/bad000.jpg .* and 5 more; ") as caught:
        load_folder(root)
    assert "bad019.jpg" in str(caught.value)
    assert "bad020.jpg" not in str(caught.value)
    assert load_folder(root, skip_invalid=True).notes[-1].endswith("dog/bad019.jpg and 5 more.")


def test_skip_invalid_equals_a_folder_without_the_unreadable_files(tmp_path):
    """The same splits, the same images in the same order, the same digest, though the names of the broken files come
    before, between and after those of the others."""
    clean, broken = (write_images(tmp_path / name, cat=20, dog=20) for name in ("clean", "broken"))
    break_files(broken, "cat/00.png", "cat/15x.png", "dog/zzz.jpg")
    expected, found = load_folder(clean, seed=3), load_folder(broken, seed=3, skip_invalid=True)
    for part in ("train", "validation", "test"):
        assert shades(getattr(found, part)) == shades(getattr(expected, part))
    assert list(found.files.values()) == list(expected.files.values())
    config = Folder(folder=str(broken), image_size=4, skip_invalid=True)
    assert config.digests() == found.files
    assert found.skipped == ("cat/00.png", "cat/15x.png", "dog/zzz.jpg")
    assert found.notes[-1] == "Skipped 3 image files that cannot be read: cat/00.png, cat/15x.png, dog/zzz.jpg."
    assert expected.skipped == ()


def test_repairing_a_skipped_file_changes_the_digest(tmp_path):
    root = write_images(tmp_path / "mine", cat=3, dog=3)
    break_files(root, "cat/7.png")
    before = load_folder(root, skip_invalid=True).files
    write_image(root / "cat/7.png", 77)
    assert load_folder(root, skip_invalid=True).files != before


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("train_dog/", "no image file of the training class dog in .* can be read"),
        ("test_", "no image file of the test folder in .* can be read"),
    ],
)
def test_a_class_or_split_without_readable_files_is_rejected(tmp_path, broken, message):
    """Otherwise a class would be missing, or training images would silently replace the test set."""
    root = write_images(tmp_path / "mine", train_cat=6, train_dog=6, test_cat=1, test_dog=1)
    break_files(root, *(str(path.relative_to(root)) for path in root.glob(f"{broken.replace('_', '/')}**/*.png")))
    with pytest.raises(ValueError, match=message):
        load_folder(root, skip_invalid=True)


def write_images_of_sizes(root, *sizes):
    """Two classes, each with images of these (width, height)."""
    for name in ("cat", "dog"):
        (root / name).mkdir(parents=True)
        for i, size in enumerate(sizes):
            Image.new("RGB", size, (i, i, i)).save(root / name / f"{i}.png")
    return root


def test_notes_report_image_counts_and_the_effect_of_fit(tmp_path):
    # 90 x 100 loses 10% to a center crop, and not more
    root = write_images_of_sizes(tmp_path / "my pictures", (10, 10), (90, 100), (89, 100), (100, 40), (30, 90))
    look = f"To see them as the model does: clearhead data show folder --data.folder '{root}'"
    options = {"image_size": 64}
    for fit, sentence, option in (
        ("pad", "Center-cropping would discard more than 10% of 6 images; they are padded to squares instead.", ""),
        ("crop", "Center-cropping discards more than 10% of 6 images; --data.fit pad keeps them whole.", "crop"),
        ("stretch", "Stretching changes the aspect ratio of 6 images by more than 10%; --data.fit pad", "stretch"),
    ):
        first, second = Folder(folder=str(root), fit=fit, **options).load(0).notes
        assert first.startswith(f"10 images, 2 classes (train 7, validation 1, test 2). {sentence}")
        assert second == look + (f" --data.fit {option}" if option else "")


def test_notes_for_square_images_report_only_counts(tmp_path):
    notes = load_folder(write_images(tmp_path / "mine", cat=3, dog=3)).notes
    assert notes[0] == "6 images, 2 classes (train 4, validation 0, test 2)."
    assert notes[1].endswith("--data.image-size 4")


def test_invalid_folder_layouts_are_rejected(tmp_path):
    for nothing in ("", str(tmp_path / "absent")):
        with pytest.raises(ValueError, match="folder must be a folder with one subfolder of images per class, got"):
            Folder(folder=nothing).load(0)
    root = write_images(tmp_path / "mine", cat=3)
    with pytest.raises(ValueError, match=r"at least 2 classes are required, each a subfolder of .*mine, got 1"):
        load_folder(root)
    (root / "dog").mkdir()
    with pytest.raises(ValueError, match=r"no images \(.png, .*\) in the class folder .*dog"):
        load_folder(root)
    write_image(root / "dog/0.png", 3)
    with pytest.raises(ValueError, match="needs at least 2 images, one of them for testing, got 1 of dog"):
        load_folder(root)
    other = write_images(tmp_path / "other", train_cat=2, train_dog=2, test_cow=2)
    with pytest.raises(ValueError, match=r"cow is not a class of the training folder"):
        load_folder(other)


def test_notes_mention_image_files_of_unsupported_formats(pictures):
    for name in ("red/x.tif", "red/y.TIFF", "blue/z.tif"):
        (pictures / name).write_bytes(b"II*\0")
    notes = Folder(folder=str(pictures)).load(0).notes
    assert "Ignored image files of unsupported formats: 2 .tif, 1 .tiff." in notes[-1]


def test_symlink_loops_are_not_followed(tmp_path):
    root = write_images(tmp_path / "mine", cat=3, dog=3)
    (root / "cat/loop").symlink_to(root, target_is_directory=True)
    (root / "cat/loop.png").symlink_to("loop.png")
    (root / "dog/other.png").symlink_to(root / "cat/0.png")
    assert len(list_images(str(root)).files) == 7


def test_too_deeply_nested_folders_are_rejected(tmp_path):
    root = write_images(tmp_path / "mine", cat=3, dog=3)
    deep = root / "cat" / "/".join("d" * (MAX_FOLDER_DEPTH - 1))
    write_image(deep / "9.png", 9)
    assert len(list_images(str(root)).files) == 7
    (deep / "d").mkdir()
    with pytest.raises(ValueError, match="cat has folders that are nested more than 32 deep"):
        list_images(str(root))


def test_too_many_files_are_rejected(tmp_path, monkeypatch):
    root = write_images(tmp_path / "mine", cat=3, dog=3)
    monkeypatch.setattr(user_files, "MAX_FOLDER_ENTRIES", 2)
    with pytest.raises(ValueError, match="cat has more than 2 files and folders"):
        list_images(str(root))


def test_names_with_newlines_are_rejected(tmp_path):
    root = write_images(tmp_path / "mine", cat=3, dog=3)
    os.rename(root / "cat/0.png", root / "cat/a\nb.png")
    with pytest.raises(ValueError, match=r"the name of an image file must be a single line, got '.*a\\nb.png'"):
        list_images(str(root))
    os.rename(root / "cat", root / "ca\nt")
    with pytest.raises(ValueError, match=r"a class name must be a single line of UTF-8 text, got 'ca\\nt'"):
        list_images(str(root))


def test_named_pipes_are_ignored(tmp_path):
    root = write_images(tmp_path / "mine", cat=3, dog=3)
    os.mkfifo(root / "cat/pipe.png")
    assert len(load_folder(root).train) + len(load_folder(root).test) == 6


def test_splitting_many_classes_visits_each_image_once(tmp_path, monkeypatch):
    """Each image is visited once, not once for each class."""
    root = write_images(tmp_path / "mine", **{f"class{i}": 2 for i in range(100)})
    listing = list_images(str(root))
    train, test, n_validation = split_indices(listing, 1000)
    assert (len(train), len(test), n_validation) == (100, 100, 20)
    assert [listing.labels[i] for i in train] == list(range(100)) == [listing.labels[i] for i in test]
