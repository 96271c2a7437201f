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
from clearhead.data.cache import cache_folder
from clearhead.data.datasets import DataConfig, digests, load_dataset
from clearhead.data.folder import list_images, split_indices
from clearhead.data.user_files import MAX_FOLDER_DEPTH

pytestmark = pytest.mark.usefixtures("cache")


def paint(path, shade):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((9, 9, 3), shade, np.uint8)).save(path)


def fill(root, **counts):
    """Each picture has a shade of its own."""
    shades = iter(range(250))
    for place, count in counts.items():
        for i in range(count):
            paint(root / place.replace("_", "/") / f"{i}.png", next(shades))
    return root


def data_of(root, seed=0, **options):
    return load_dataset(DataConfig(name="folder", folder=str(root), image_size=4, **options), seed)


def shades(examples):
    return examples.get_batch(torch.arange(len(examples)))[0][:, 0, 0, 0].tolist()


def test_a_folder_is_known_by_the_names_and_bytes_of_its_pictures(tmp_path):
    root = fill(tmp_path / "mine", cat=3, dog=3)
    (first,) = data_of(root).files.values()
    os.utime(root / "cat/0.png", (0, 0))  # copied elsewhere, it is the same
    (root / "notes.txt").write_text("no picture")
    assert data_of(root).files == {str(root): first}
    (root / "cat/0.png").rename(root / "cat/9.png")
    renamed = data_of(root).files[str(root)]
    paint(root / "cat/9.png", 200)
    repainted = data_of(root).files[str(root)]
    paint(root / "dog/new.png", 201)
    added = data_of(root).files[str(root)]
    assert len({first, renamed, repainted, added}) == 4


def test_three_folders_are_three_parts(tmp_path):
    data = data_of(fill(tmp_path / "mine", train_cat=6, train_dog=5, val_cat=2, val_dog=1, test_cat=1, test_dog=3))
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
def test_one_folder_is_split(tmp_path, counts):
    data = data_of(fill(tmp_path / "mine", **counts))
    parts = [shades(part) for part in (data.train, data.validation, data.test)]
    assert [len(part) for part in parts] == [20, 4, 6]
    assert sorted(sum(parts, [])) == list(range(30))  # noqa: RUF017
    assert sorted(data.test.get_batch(torch.arange(6))[1].tolist()) == [0, 0, 0, 0, 1, 1]


def test_the_test_set_is_the_same_for_every_seed_and_the_validation_set_is_not(tmp_path):
    root = fill(tmp_path / "mine", cat=40, dog=40)
    first, second = data_of(root, seed=1), data_of(root, seed=2)
    assert shades(first.test) == shades(second.test)
    assert set(shades(first.validation)) != set(shades(second.validation))


def test_the_test_set_does_not_depend_on_where_the_folder_is(tmp_path):
    first, second = (fill(tmp_path / name, cat=20, dog=20) for name in ("here", "there"))
    assert shades(data_of(first).test) == shades(data_of(second).test)


def test_pictures_are_decoded_once_until_one_changes(tmp_path, monkeypatch):
    root = fill(tmp_path / "mine", cat=3, dog=3)
    paint(root / "cat/0.bmp", 100)
    before = shades(data_of(root).test)
    decoded = []
    original = folder.decode
    monkeypatch.setattr(folder, "decode", lambda files, *how: decoded.append(len(files)) or original(files, *how))
    assert shades(data_of(root).test) == before
    assert decoded == []
    length = (root / "cat/0.bmp").stat().st_size
    paint(root / "cat/0.bmp", 200)
    assert (root / "cat/0.bmp").stat().st_size == length  # only the time tells
    os.utime(root / "cat/0.bmp", ns=(1, 1))
    data = data_of(root)
    assert decoded == [7]
    assert 200 in shades(data.train) + shades(data.validation) + shades(data.test)
    load_dataset(DataConfig(name="folder", folder=str(root), image_size=5), 0)
    assert decoded == [7, 7]
    load_dataset(DataConfig(name="folder", folder=str(root), image_size=5, fit="crop"), 0)
    assert decoded == [7, 7, 7]


def test_a_damaged_cache_is_made_anew(tmp_path, cache):
    root = fill(tmp_path / "mine", cat=3, dog=3)
    before = shades(data_of(root).train)
    (kept,) = (cache / "folders").iterdir()
    whole = kept.read_bytes()
    for damaged in (whole[:-1], whole[:10], b"", whole[:60] + b"?" + whole[61:]):
        kept.write_bytes(damaged)
        assert shades(data_of(root).train) == before
        assert kept.read_bytes() == whole


def test_other_files_are_left_alone(tmp_path):
    root = fill(tmp_path / "mine", cat=2, dog=2)
    (root / "notes.txt").write_text("mine")
    (root / "cat/notes.txt").write_text("mine")
    (root / "cat/._0.png").write_text("a computer's own")
    (root / ".git").mkdir()
    paint(root / "cat/deep/NINE.PNG", 99)
    assert len(list_images(str(root)).files) == 5


def test_names_that_are_no_text_are_read_but_a_class_has_to_be_text(tmp_path):
    root = fill(tmp_path / "mine", cat=3, dog=3)
    os.rename(root / "cat/0.png", os.fsencode(root / "cat") + b"/\xff.png")
    assert len(data_of(root).train) + len(data_of(root).test) == 6
    os.rename(root / "cat", os.fsencode(root) + b"/c\xff")
    with pytest.raises(
        ValueError, match=r"a class name must be a single line of UTF-8 text, got .*; rename that folder"
    ):
        data_of(root)


def test_pictures_that_do_not_fit_into_memory_are_refused_before_one_is_read(tmp_path, monkeypatch):
    root = fill(tmp_path / "mine", cat=3, dog=3)
    monkeypatch.setattr(folder, "with_image", pytest.fail)
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    with pytest.raises(ValueError, match=r"must fit into memory, got 6 of 2048 x 2048 pixels \(0 GB, available: "):
        load_dataset(DataConfig(name="folder", folder=str(root), image_size=2048), 0)


def spoiled_caches(path):
    """What may be where the cache was, each as a function that puts it there."""
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


def test_pictures_are_decoded_again_where_the_cache_cannot_be_used(tmp_path, cache):
    root = fill(tmp_path / "mine", cat=3, dog=3)
    wanted = shades(data_of(root).train)
    (path,) = (cache / "folders").iterdir()
    for spoil in spoiled_caches(path):
        spoil()
        assert shades(data_of(root).train) == wanted


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(5, "Input/output error")])
def test_a_cache_that_may_not_be_read_is_done_without(tmp_path, cache, monkeypatch, error):
    root = fill(tmp_path / "mine", cat=3, dog=3)
    data_of(root)
    stat = os.stat

    def fail(path, *args, **options):
        if "folders" in str(path):
            raise error
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", fail)
    assert len(data_of(root).train) + len(data_of(root).test) == 6


def test_without_a_home_pictures_are_read_all_the_same(tmp_path, monkeypatch):
    root = fill(tmp_path / "mine", cat=3, dog=3)
    monkeypatch.delenv("CLEARHEAD_CACHE", raising=False)
    monkeypatch.setattr(
        Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("Could not determine home directory."))
    )
    assert len(data_of(root).train) + len(data_of(root).test) == 6
    with pytest.raises(ValueError, match="no home directory for the cache; set CLEARHEAD_CACHE"):
        cache_folder()


def test_without_a_place_for_the_cache_pictures_are_read_all_the_same(tmp_path, monkeypatch):
    root = fill(tmp_path / "mine", cat=3, dog=3)
    (tmp_path / "file").write_text("where a folder should be")
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "file/cache"))
    assert len(data_of(root).train) + len(data_of(root).test) == 6


def break_files(root, *names):
    for name in names:
        (root / name).write_bytes(b"no picture")


def test_all_unreadable_files_are_named_in_one_error(tmp_path):
    root = fill(tmp_path / "mine", cat=3, dog=3)
    break_files(root, "cat/7.png", "dog/7.jpg")
    (root / "dog/8.png").write_bytes((root / "dog/0.png").read_bytes()[:50])
    for _ in range(2):  # decoded now, and from the cache
        with pytest.raises(ValueError, match="3 of 9 image files in") as caught:
            data_of(root)
        message = str(caught.value)
        assert "cat/7.png (the file is not PNG" in message
        assert "dog/7.jpg (the file is not PNG" in message
        assert "dog/8.png (the file is damaged" in message
        assert message.endswith("; repair or remove them, or skip them with --data.skip-invalid")


def test_of_very_many_unreadable_files_some_are_named_and_all_are_counted(tmp_path):
    root = fill(tmp_path / "mine", cat=3, dog=3)
    break_files(root, *(f"dog/bad{i:03}.jpg" for i in range(25)))
    with pytest.raises(ValueError, match=r"25 of 31 image files in .*: dog/bad000.jpg .* and 5 more; ") as caught:
        data_of(root)
    assert "bad019.jpg" in str(caught.value)
    assert "bad020.jpg" not in str(caught.value)
    assert data_of(root, skip_invalid=True).notes[-1].endswith("dog/bad019.jpg and 5 more.")


def test_without_the_unreadable_files_the_data_set_is_that_of_a_folder_without_them(tmp_path):
    """The same splits, the same images in the same order, the same digest, though the names of the broken files come
    before, between and after those of the others."""
    clean, broken = (fill(tmp_path / name, cat=20, dog=20) for name in ("clean", "broken"))
    break_files(broken, "cat/00.png", "cat/15x.png", "dog/zzz.jpg")
    expected, found = data_of(clean, seed=3), data_of(broken, seed=3, skip_invalid=True)
    for part in ("train", "validation", "test"):
        assert shades(getattr(found, part)) == shades(getattr(expected, part))
    assert list(found.files.values()) == list(expected.files.values())
    config = DataConfig(name="folder", folder=str(broken), image_size=4, skip_invalid=True)
    assert digests(config) == found.files
    assert found.skipped == ("cat/00.png", "cat/15x.png", "dog/zzz.jpg")
    assert found.notes[-1] == "Skipped 3 image files that cannot be read: cat/00.png, cat/15x.png, dog/zzz.jpg."
    assert expected.skipped == ()


def test_a_repaired_file_is_another_data_set(tmp_path):
    root = fill(tmp_path / "mine", cat=3, dog=3)
    break_files(root, "cat/7.png")
    before = data_of(root, skip_invalid=True).files
    paint(root / "cat/7.png", 77)
    assert data_of(root, skip_invalid=True).files != before


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("train_dog/", "no image file of the training class dog in .* can be read"),
        ("test_", "no image file of the test folder in .* can be read"),
    ],
)
def test_a_class_or_a_part_without_a_readable_file_is_refused(tmp_path, broken, message):
    """Otherwise a class would be missing, or training images would silently take the place of the test set."""
    root = fill(tmp_path / "mine", train_cat=6, train_dog=6, test_cat=1, test_dog=1)
    break_files(root, *(str(path.relative_to(root)) for path in root.glob(f"{broken.replace('_', '/')}**/*.png")))
    with pytest.raises(ValueError, match=message):
        data_of(root, skip_invalid=True)


def shaped(root, *sizes):
    """Two classes, each with pictures of these (width, height)."""
    for name in ("cat", "dog"):
        (root / name).mkdir(parents=True)
        for i, size in enumerate(sizes):
            Image.new("RGB", size, (i, i, i)).save(root / name / f"{i}.png")
    return root


def test_what_is_in_the_folder_is_said_with_what_happens_to_it(tmp_path):
    # 90 x 100 loses 10% to a center crop, and not more
    root = shaped(tmp_path / "my pictures", (10, 10), (90, 100), (89, 100), (100, 40), (30, 90))
    look = f"To see them as the model does: clearhead data show folder --data.folder '{root}'"
    how = {"image_size": 64}
    for fit, sentence, option in (
        ("pad", "Center-cropping would discard more than 10% of 6 images; they are padded to squares instead.", ""),
        ("crop", "Center-cropping discards more than 10% of 6 images; --data.fit pad keeps them whole.", "crop"),
        ("stretch", "Stretching changes the aspect ratio of 6 images by more than 10%; --data.fit pad", "stretch"),
    ):
        first, second = load_dataset(DataConfig(name="folder", folder=str(root), fit=fit, **how), 0).notes
        assert first.startswith(f"10 images, 2 classes (train 7, validation 1, test 2). {sentence}")
        assert second == look + (f" --data.fit {option}" if option else "")


def test_of_squares_only_the_number_is_said(tmp_path):
    notes = data_of(fill(tmp_path / "mine", cat=3, dog=3)).notes
    assert notes[0] == "6 images, 2 classes (train 4, validation 0, test 2)."
    assert notes[1].endswith("--data.image-size 4")


def test_folders_that_are_no_data_set_are_refused(tmp_path):
    for nothing in ("", str(tmp_path / "absent")):
        with pytest.raises(ValueError, match="folder must be a folder with one subfolder of images per class, got"):
            load_dataset(DataConfig(name="folder", folder=nothing), 0)
    root = fill(tmp_path / "mine", cat=3)
    with pytest.raises(ValueError, match=r"at least 2 classes are required, each a subfolder of .*mine, got 1"):
        data_of(root)
    (root / "dog").mkdir()
    with pytest.raises(ValueError, match=r"no images \(.png, .*\) in the class folder .*dog"):
        data_of(root)
    paint(root / "dog/0.png", 3)
    with pytest.raises(ValueError, match="needs at least 2 images, one of them for testing, got 1 of dog"):
        data_of(root)
    other = fill(tmp_path / "other", train_cat=2, train_dog=2, test_cow=2)
    with pytest.raises(ValueError, match=r"cow is not a class of the training folder"):
        data_of(other)


def test_image_files_of_other_formats_are_not_ignored_in_silence(pictures):
    for name in ("red/x.tif", "red/y.TIFF", "blue/z.tif"):
        (pictures / name).write_bytes(b"II*\0")
    notes = load_dataset(DataConfig(name="folder", folder=str(pictures)), 0).notes
    assert "Ignored image files of unsupported formats: 2 .tif, 1 .tiff." in notes[-1]


def test_folders_that_lead_back_to_themselves_are_not_followed(tmp_path):
    root = fill(tmp_path / "mine", cat=3, dog=3)
    (root / "cat/loop").symlink_to(root, target_is_directory=True)
    (root / "cat/loop.png").symlink_to("loop.png")
    (root / "dog/other.png").symlink_to(root / "cat/0.png")
    assert len(list_images(str(root)).files) == 7


def test_folders_nested_very_deep_are_refused(tmp_path):
    root = fill(tmp_path / "mine", cat=3, dog=3)
    deep = root / "cat" / "/".join("d" * (MAX_FOLDER_DEPTH - 1))
    paint(deep / "9.png", 9)
    assert len(list_images(str(root)).files) == 7
    (deep / "d").mkdir()
    with pytest.raises(ValueError, match="cat has folders that are nested more than 32 deep"):
        list_images(str(root))


def test_very_many_files_are_refused(tmp_path, monkeypatch):
    root = fill(tmp_path / "mine", cat=3, dog=3)
    monkeypatch.setattr(user_files, "MAX_FOLDER_ENTRIES", 2)
    with pytest.raises(ValueError, match="cat has more than 2 files and folders"):
        list_images(str(root))


def test_names_of_two_lines_are_refused(tmp_path):
    root = fill(tmp_path / "mine", cat=3, dog=3)
    os.rename(root / "cat/0.png", root / "cat/a\nb.png")
    with pytest.raises(ValueError, match=r"the name of an image file must be a single line, got '.*a\\nb.png'"):
        list_images(str(root))
    os.rename(root / "cat", root / "ca\nt")
    with pytest.raises(ValueError, match=r"a class name must be a single line of UTF-8 text, got 'ca\\nt'"):
        list_images(str(root))


def test_pipes_are_no_pictures(tmp_path):
    root = fill(tmp_path / "mine", cat=3, dog=3)
    os.mkfifo(root / "cat/pipe.png")
    assert len(data_of(root).train) + len(data_of(root).test) == 6


def test_very_many_classes_are_split_in_good_time(tmp_path, monkeypatch):
    """Each image is looked at once, not once for each class."""
    root = fill(tmp_path / "mine", **{f"class{i}": 2 for i in range(100)})
    listing = list_images(str(root))
    train, test, n_validation = split_indices(listing, 1000)
    assert (len(train), len(test), n_validation) == (100, 100, 20)
    assert [listing.labels[i] for i in train] == list(range(100)) == [listing.labels[i] for i in test]
