import numpy as np
import pytest
import torch

from clearhead.data.config import DataConfig
from clearhead.data.dataset import DataSet, Images, Normalise
from clearhead.data.datasets import load
from clearhead.data.sheet import INK, MARKED, PAPER, PER_ROW, SMALLEST, contact_sheet


def colours(sheet):
    pixels = np.asarray(sheet).reshape(-1, 3)
    return {"#" + bytes(colour).hex() for colour in np.unique(pixels, axis=0)}


def sheet_of(shades, classes, size=5):
    images = torch.stack([torch.full((3, size, size), shade, dtype=torch.uint8) for shade, _ in shades])
    examples = Images(images, torch.tensor([label for _, label in shades]))
    return contact_sheet(DataSet(examples, examples, examples, classes, Normalise((0.5,) * 3, (0.5,) * 3)))


def test_each_class_has_a_row_with_its_own_images():
    sheet = np.asarray(sheet_of([(10, 1), (20, 0), (30, 1), (40, 0)], ("cat", "dog")))
    rows = {shade: np.argwhere((sheet == shade).all(2)) for shade in (10, 20, 30, 40)}
    tops = {shade: int(place[:, 0].min()) for shade, place in rows.items()}
    assert tops[20] == tops[40] < tops[10] == tops[30]
    assert all(len(place) >= SMALLEST**2 for place in rows.values())


def test_names_are_written_and_a_row_is_not_longer_than_it_may_be():
    sheet = sheet_of([(100 + i, 0) for i in range(30)], ("cat",))
    assert {PAPER, INK} <= colours(sheet)
    areas = [(np.asarray(sheet) == 100 + i).all(2).sum() for i in range(30)]
    assert all(area >= SMALLEST**2 for area in areas[:PER_ROW])
    assert all(area < 100 for area in areas[PER_ROW:])  # edges of the letters


def test_a_class_without_a_picture_leaves_its_row_empty():
    assert sheet_of([(10, 0)], ("cat", "dog")).height > sheet_of([(10, 0)], ("cat",)).height


def test_the_odd_one_of_each_set_is_framed():
    sheet = contact_sheet(load(DataConfig(name="oddity", set_size=4), seed=0))
    assert MARKED in colours(sheet)


def test_sequences_have_no_sheet():
    with pytest.raises(ValueError, match="a contact sheet needs images, got sequences"):
        contact_sheet(load(DataConfig(name="reverse"), seed=0))
