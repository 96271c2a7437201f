import os

import numpy as np
import pytest
import torch
from PIL import Image

from clearhead.data import folder
from clearhead.data.config import DataConfig
from clearhead.data.datasets import load
from clearhead.data.folder import list_pictures

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
    return load(DataConfig(name="folder", folder=str(root), image_size=4, **options), seed)


def shades(examples):
    return examples.take(torch.arange(len(examples)))[0][:, 0, 0, 0].tolist()


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
    images, labels = data.test.take(torch.arange(4))
    assert images.shape == (4, 3, 4, 4)
    assert labels.tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("counts", [{"cat": 20, "dog": 10}, {"train_cat": 20, "train_dog": 10}])
def test_one_folder_is_split(tmp_path, counts):
    data = data_of(fill(tmp_path / "mine", **counts))
    parts = [shades(part) for part in (data.train, data.validation, data.test)]
    assert [len(part) for part in parts] == [20, 4, 6]
    assert sorted(sum(parts, [])) == list(range(30))  # noqa: RUF017
    assert sorted(data.test.take(torch.arange(6))[1].tolist()) == [0, 0, 0, 0, 1, 1]


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
    monkeypatch.setattr(folder, "decode", lambda files, size: decoded.append(len(files)) or original(files, size))
    assert shades(data_of(root).test) == before
    assert decoded == []
    length = (root / "cat/0.bmp").stat().st_size
    paint(root / "cat/0.bmp", 200)
    assert (root / "cat/0.bmp").stat().st_size == length  # only the time tells
    os.utime(root / "cat/0.bmp", ns=(1, 1))
    data = data_of(root)
    assert decoded == [7]
    assert 200 in shades(data.train) + shades(data.validation) + shades(data.test)
    load(DataConfig(name="folder", folder=str(root), image_size=5), 0)
    assert decoded == [7, 7]


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
    assert len(list_pictures(str(root)).files) == 5


def test_names_that_are_no_text_are_read_but_a_class_has_to_be_text(tmp_path):
    root = fill(tmp_path / "mine", cat=3, dog=3)
    os.rename(root / "cat/0.png", os.fsencode(root / "cat") + b"/\xff.png")
    assert len(data_of(root).train) + len(data_of(root).test) == 6
    os.rename(root / "cat", os.fsencode(root) + b"/c\xff")
    with pytest.raises(ValueError, match=r"the name of a class must be text \(UTF-8\), got .*; rename that folder"):
        data_of(root)


def test_pictures_that_do_not_fit_into_memory_are_refused_before_one_is_read(tmp_path, monkeypatch):
    root = fill(tmp_path / "mine", cat=3, dog=3)
    monkeypatch.setattr(folder, "read_picture", pytest.fail)
    with pytest.raises(
        ValueError, match=r"all pictures must fit into memory, got 6 of 1000000 x 1000000, 18,000 GB of "
    ):
        load(DataConfig(name="folder", folder=str(root), image_size=1_000_000), 0)


def test_without_a_place_for_the_cache_pictures_are_read_all_the_same(tmp_path, monkeypatch):
    root = fill(tmp_path / "mine", cat=3, dog=3)
    (tmp_path / "file").write_text("where a folder should be")
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "file/cache"))
    assert len(data_of(root).train) + len(data_of(root).test) == 6


def test_an_unreadable_picture_is_named(tmp_path):
    root = fill(tmp_path / "mine", cat=3, dog=3)
    (root / "dog/7.jpg").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"mine/dog/7.jpg must be a whole picture .* repair or remove it"):
        data_of(root)


def test_folders_that_are_no_data_set_are_refused(tmp_path):
    for nothing in ("", str(tmp_path / "absent")):
        with pytest.raises(ValueError, match="folder must be a folder of pictures, got"):
            load(DataConfig(name="folder", folder=nothing), 0)
    root = fill(tmp_path / "mine", cat=3)
    with pytest.raises(ValueError, match=r"two classes or more, each a folder in .*mine, got 1"):
        data_of(root)
    (root / "dog").mkdir()
    with pytest.raises(ValueError, match=r"a class needs pictures \(.png, .*\), got none in .*dog"):
        data_of(root)
    paint(root / "dog/0.png", 3)
    with pytest.raises(ValueError, match="needs two pictures or more, one of them to test, got one of dog"):
        data_of(root)
    other = fill(tmp_path / "other", train_cat=2, train_dog=2, test_cow=2)
    with pytest.raises(ValueError, match=r"classes are those of the training folder, got another one, .*cow"):
        data_of(other)
