import numpy as np
import pytest
import torch

from clearhead.data import Augmentation
from clearhead.data.batches import Batches
from clearhead.data.dataset import Dataset, Images, Normalize
from clearhead.tasks.images import Folder
from clearhead.tasks.report import (
    BACKGROUND,
    HIGHLIGHT,
    MAX_CELL,
    MAX_ROWS,
    MIN_CELL,
    NUM_COLUMNS,
    NUM_VERSIONS,
    OUTLINE,
    TEXT_COLOR,
    SheetRow,
    augmented_sheet,
    contact_sheet,
    draw_sheet,
)
from clearhead.tasks.sequences import OddOneOut, Reverse


def colors(sheet):
    pixels = np.asarray(sheet).reshape(-1, 3)
    return {"#" + bytes(color).hex() for color in np.unique(pixels, axis=0)}


def sheet_of(shades, classes, size=5):
    images = torch.stack([torch.full((3, size, size), shade, dtype=torch.uint8) for shade, _ in shades])
    examples = Images(images, torch.tensor([label for _, label in shades]))
    return contact_sheet(Dataset(examples, examples, examples, classes, Normalize((0.5,) * 3, (0.5,) * 3)))


def test_each_class_has_one_row_of_its_images():
    sheet = np.asarray(sheet_of([(10, 1), (20, 0), (30, 1), (40, 0)], ("cat", "dog")))
    rows = {shade: np.argwhere((sheet == shade).all(2)) for shade in (10, 20, 30, 40)}
    tops = {shade: int(pixels[:, 0].min()) for shade, pixels in rows.items()}
    assert tops[20] == tops[40] < tops[10] == tops[30]
    assert all(len(pixels) >= MIN_CELL**2 for pixels in rows.values())


def test_class_names_are_drawn_and_rows_are_truncated():
    sheet = sheet_of([(100 + i, 0) for i in range(30)], ("cat",))
    assert {BACKGROUND, TEXT_COLOR} <= colors(sheet)
    areas = [(np.asarray(sheet) == 100 + i).all(2).sum() for i in range(30)]
    assert all(area >= MIN_CELL**2 for area in areas[:NUM_COLUMNS])
    assert all(area < 100 for area in areas[NUM_COLUMNS:])  # antialiased edges of letters


def test_a_class_without_images_has_an_empty_row():
    assert sheet_of([(10, 0)], ("cat", "dog")).height > sheet_of([(10, 0)], ("cat",)).height


def test_the_odd_image_of_each_set_is_framed():
    sheet = contact_sheet(OddOneOut(set_size=4).load(0))
    assert HIGHLIGHT in colors(sheet)


def test_contact_sheet_rejects_sequences():
    with pytest.raises(ValueError, match="a contact sheet needs images, got sequences"):
        contact_sheet(Reverse().load(0))


def random_data(num_classes=2, size=48):
    """Two images per class; images of 48 pixels are drawn without scaling."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (2 * num_classes, 3, size, size), dtype=torch.uint8, generator=generator)
    examples = Images(images, torch.arange(2 * num_classes) // 2)
    return Dataset(
        examples, examples, examples, tuple("abcdefghijklmnop"[:num_classes]), Normalize((0.4,) * 3, (0.2,) * 3)
    )


def cells(sheet, size=48):
    """The drawn images by row and column, without their edges."""
    pixels, edge = np.asarray(sheet), np.array([int(OUTLINE[i : i + 2], 16) for i in (1, 3, 5)])
    is_edge = (pixels == edge).all(2)
    tops = [y + 1 for y in np.flatnonzero(is_edge.sum(1) > size) if not is_edge[y - 1].sum() > size][::2]
    lefts = [x + 1 for x in np.flatnonzero(is_edge.sum(0) > size) if not is_edge[:, x - 1].sum() > size][::2]
    return [[torch.tensor(pixels[y : y + size, x : x + size]).permute(2, 0, 1) for x in lefts] for y in tops]


def test_augmented_images_match_the_training_batches():
    data = random_data()
    augmentation = Augmentation(crop=5, flip=True, cutout=7)
    config = Folder(augmentation=augmentation)
    rows = cells(augmented_sheet(data, config.augmentation, seed=4))
    assert [len(row) for row in rows] == [1 + NUM_VERSIONS] * 4
    batches = Batches(data, batch_size=4, seed=4, augmentation=config.augmentation)
    for row, original in zip(range(4), data.train.images, strict=True):
        assert torch.equal(rows[row][0], original)
    for step in range(NUM_VERSIONS):
        normal = batches.at(step).inputs
        for slot, row in enumerate(batches.epoch_order(step).tolist()):
            shown = data.normalize(rows[row][1 + step][None])[0]
            assert torch.allclose(shown, normal[slot], atol=0.5 / 255 / 0.2 + 1e-4)  # half a gray level
            assert not torch.equal(rows[row][1 + step], rows[row][0])


def test_without_augmentation_all_versions_equal_the_original():
    for row in cells(augmented_sheet(random_data(), Augmentation(), seed=0)):
        assert all(torch.equal(version, row[0]) for version in row)


def test_more_classes_show_fewer_augmented_images_per_class():
    def height(num_classes):
        return augmented_sheet(random_data(num_classes, 8), Augmentation(), seed=0).height

    assert height(5) == height(10)
    assert height(12) > height(10) > height(2)


def test_white_images_have_a_visible_edge():
    assert OUTLINE in colors(sheet_of([(255, 0)], ("",)))


def test_augmented_sheet_rejects_sequences():
    with pytest.raises(ValueError, match="augmentation needs images, got sequences"):
        augmented_sheet(Reverse().load(0), Augmentation(), 0)


def test_sheet_size_is_bounded():
    """Thousands of classes, names of 255 characters or large images would otherwise take gigabytes."""
    images = torch.zeros(1, 3, 4, 4, dtype=torch.uint8)
    assert (
        draw_sheet([SheetRow("n" * 255, images)] * 5000).size
        == draw_sheet([SheetRow("n" * 37 + "...", images)] * MAX_ROWS).size
    )
    large = torch.full((12, 3, 1024, 1024), 7, dtype=torch.uint8)
    width, height = draw_sheet([SheetRow("a", large)]).size
    assert MAX_CELL < height < 300
    assert 12 * MAX_CELL < width < 13 * MAX_CELL
