"""Conversion of decoded images to upright RGB and to squares."""

import io

import numpy as np
import pytest
import torch
from PIL import Image, ImageColor, ImageDraw, ImageOps

from clearhead.data import images
from clearhead.data.images import (
    background_color,
    open_image,
    resize,
    to_rgb,
)

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 20, 3), dtype=np.uint8)


def packed(image, kind="PNG", **options):
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def test_a_picture_is_turned_upright():
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned by a quarter
    image = to_rgb(open_image(packed(Image.fromarray(PIXELS), exif=exif.tobytes()), "it"))
    assert np.array_equal(np.asarray(image), np.rot90(PIXELS, -1))


def test_what_is_transparent_is_white():
    clear = Image.new("RGBA", (3, 3), (255, 0, 0, 0))
    assert np.asarray(to_rgb(clear)).min() == 255
    palette = Image.new("P", (3, 3), 0)
    palette.info["transparency"] = 0
    assert np.asarray(to_rgb(palette)).min() == 255


def test_sixteen_bits_of_grey_become_eight():
    grey = Image.fromarray(np.array([[0, 257, 65535]], np.uint16))
    assert np.asarray(to_rgb(grey))[0, :, 0].tolist() == [0, 1, 255]


def test_crop_keeps_the_square_in_the_middle():
    wide = np.zeros((4, 12, 3), np.uint8)
    wide[:, 4:8] = PIXELS[:4, :4]
    assert torch.equal(resize(Image.fromarray(wide), 4, "crop"), torch.from_numpy(PIXELS[:4, :4]).permute(2, 0, 1))
    assert resize(Image.fromarray(wide), 7, "crop").shape == (3, 7, 7)
    assert resize(Image.new("L", (1, 900), 9), 3, "crop").unique().tolist() == [9]


def test_pad_keeps_the_whole_picture_in_the_middle_of_the_square():
    """A picture whose longer side has the right length is there pixel by pixel; the rest has its border's colour."""
    drawn = np.full((4, 12, 3), 200, np.uint8)
    drawn[1:3, 5:7] = PIXELS[:2, :2]
    for picture, inside in ((drawn, np.s_[4:8, :]), (drawn.transpose(1, 0, 2), np.s_[:, 4:8])):
        square = resize(Image.fromarray(np.ascontiguousarray(picture)), 12, "pad").permute(1, 2, 0).numpy()
        assert np.array_equal(square[inside], picture)
        square[inside] = 200
        assert (square == 200).all()


def test_padding_continues_the_paper_of_a_drawing_whose_strokes_touch_the_border():
    for paper, ink in (("white", "black"), ("black", "white"), ("#ffeecc", "navy")):
        drawing = Image.new("RGB", (80, 40), paper)
        ImageDraw.Draw(drawing).rectangle((0, 0, 79, 39), outline=ink, width=2)
        assert background_color(drawing) == ImageColor.getrgb(paper)


def test_stretch_keeps_all_of_a_picture_and_no_aspect_ratio():
    halves = np.zeros((8, 32, 3), np.uint8)
    halves[:, 16:] = 255
    square = resize(Image.fromarray(halves), 8, "stretch")
    assert square[:, :, :3].max() == 0
    assert square[:, :, 5:].min() == 255


@pytest.mark.parametrize("size", [5, 12, 31])
def test_every_fit_gives_the_same_of_a_square(size):
    square = Image.fromarray(PIXELS[:, :12])
    pad, crop, stretch = (resize(square, size, fit) for fit in ("pad", "crop", "stretch"))
    assert torch.equal(pad, crop)
    assert torch.equal(pad, stretch)


@pytest.mark.parametrize("fit", ["pad", "crop", "stretch"])
@pytest.mark.parametrize("shape", [(1, 900), (900, 1), (1, 1), (2, 3)])
def test_a_picture_of_any_shape_becomes_a_square(fit, shape):
    assert resize(Image.new("RGB", shape, (9, 9, 9)), 6, fit).unique().tolist() == [9]
    assert resize(Image.new("RGB", shape, (9, 9, 9)), 6, fit).shape == (3, 6, 6)


def test_a_picture_becomes_grey_where_one_channel_is_asked_for():
    grey = resize(Image.new("RGB", (6, 6), (255, 0, 0)), 4, "pad", channels=1)
    assert grey.shape == (1, 4, 4)
    assert grey.unique().tolist() == [76]  # 0.299 of 255


def modes():
    """A picture in every mode that the formats have, some of them transparent."""
    image = Image.fromarray(PIXELS)
    alpha = Image.fromarray(PIXELS[..., 0])
    yield from (image.convert(mode) for mode in ("1", "L", "P", "RGB", "CMYK", "YCbCr", "I"))
    yield Image.fromarray(PIXELS[..., 0].astype(np.uint16) * 200)
    yield Image.merge("LA", (alpha, alpha.transpose(Image.Transpose.ROTATE_180)))
    yield Image.merge("RGBA", (*image.split(), alpha))
    for mode, clear in (("P", 3), ("P", bytes(range(256))), ("L", 7), ("RGB", tuple(PIXELS[0, 0].tolist()))):
        transparent = image.convert(mode)
        transparent.info["transparency"] = clear
        yield transparent


@pytest.mark.parametrize("strip", [1, 50, 1 << 18])
def test_strips_do_not_change_a_pixel(strip, monkeypatch):
    monkeypatch.setattr(images, "STRIP_PIXELS", strip)
    for image in modes():
        once = image
        if once.mode.startswith("I"):
            once = Image.fromarray((np.asarray(once).clip(0, 65535) // 257).astype(np.uint8))
        if once.has_transparency_data:
            once = Image.alpha_composite(Image.new("RGBA", once.size, "white"), once.convert("RGBA"))
        assert np.array_equal(np.asarray(to_rgb(image)), np.asarray(once.convert("RGB"))), image.mode


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_pictures_are_turned_as_pillow_turns_them(orientation, kind):
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = packed(Image.fromarray(PIXELS), kind, exif=exif.tobytes())
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    assert np.array_equal(np.asarray(to_rgb(open_image(content, "it"))), np.asarray(upright.convert("RGB")))
