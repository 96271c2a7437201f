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


def encoded(image, kind="PNG", **options):
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def test_exif_orientation_is_applied():
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by a quarter turn
    image = to_rgb(open_image(encoded(Image.fromarray(PIXELS), exif=exif.tobytes()), "it"))
    assert np.array_equal(np.asarray(image), np.rot90(PIXELS, -1))


def test_transparency_is_composited_on_white():
    clear = Image.new("RGBA", (3, 3), (255, 0, 0, 0))
    assert np.asarray(to_rgb(clear)).min() == 255
    palette = Image.new("P", (3, 3), 0)
    palette.info["transparency"] = 0
    assert np.asarray(to_rgb(palette)).min() == 255


def test_sixteen_bit_grayscale_is_scaled_to_eight_bits():
    gray = Image.fromarray(np.array([[0, 257, 65535]], np.uint16))
    assert np.asarray(to_rgb(gray))[0, :, 0].tolist() == [0, 1, 255]


def test_crop_keeps_the_center_square():
    wide = np.zeros((4, 12, 3), np.uint8)
    wide[:, 4:8] = PIXELS[:4, :4]
    assert torch.equal(resize(Image.fromarray(wide), 4, "crop"), torch.from_numpy(PIXELS[:4, :4]).permute(2, 0, 1))
    assert resize(Image.fromarray(wide), 7, "crop").shape == (3, 7, 7)
    assert resize(Image.new("L", (1, 900), 9), 3, "crop").unique().tolist() == [9]


def test_pad_centers_the_full_image_in_a_square():
    """An image whose longer side has the target length is copied pixel by pixel; the rest gets the border color."""
    drawn = np.full((4, 12, 3), 200, np.uint8)
    drawn[1:3, 5:7] = PIXELS[:2, :2]
    for image, inside in ((drawn, np.s_[4:8, :]), (drawn.transpose(1, 0, 2), np.s_[:, 4:8])):
        square = resize(Image.fromarray(np.ascontiguousarray(image)), 12, "pad").permute(1, 2, 0).numpy()
        assert np.array_equal(square[inside], image)
        square[inside] = 200
        assert (square == 200).all()


def test_padding_uses_the_background_color_even_if_strokes_touch_the_border():
    for paper, ink in (("white", "black"), ("black", "white"), ("#ffeecc", "navy")):
        drawing = Image.new("RGB", (80, 40), paper)
        ImageDraw.Draw(drawing).rectangle((0, 0, 79, 39), outline=ink, width=2)
        assert background_color(drawing) == ImageColor.getrgb(paper)


def test_stretch_keeps_the_full_image_but_not_the_aspect_ratio():
    halves = np.zeros((8, 32, 3), np.uint8)
    halves[:, 16:] = 255
    square = resize(Image.fromarray(halves), 8, "stretch")
    assert square[:, :, :3].max() == 0
    assert square[:, :, 5:].min() == 255


@pytest.mark.parametrize("size", [5, 12, 31])
def test_all_fit_modes_agree_on_square_images(size):
    square = Image.fromarray(PIXELS[:, :12])
    pad, crop, stretch = (resize(square, size, fit) for fit in ("pad", "crop", "stretch"))
    assert torch.equal(pad, crop)
    assert torch.equal(pad, stretch)


@pytest.mark.parametrize("fit", ["pad", "crop", "stretch"])
@pytest.mark.parametrize("shape", [(1, 900), (900, 1), (1, 1), (2, 3)])
def test_images_of_any_shape_become_square(fit, shape):
    assert resize(Image.new("RGB", shape, (9, 9, 9)), 6, fit).unique().tolist() == [9]
    assert resize(Image.new("RGB", shape, (9, 9, 9)), 6, fit).shape == (3, 6, 6)


def test_one_channel_converts_to_grayscale():
    gray = resize(Image.new("RGB", (6, 6), (255, 0, 0)), 4, "pad", channels=1)
    assert gray.shape == (1, 4, 4)
    assert gray.unique().tolist() == [76]  # 0.299 of 255


def images_of_all_modes():
    """One image in every mode of the supported formats, some with transparency."""
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
def test_conversion_in_strips_equals_conversion_at_once(strip, monkeypatch):
    monkeypatch.setattr(images, "STRIP_PIXELS", strip)
    for image in images_of_all_modes():
        expected = image
        if expected.mode.startswith("I"):
            expected = Image.fromarray((np.asarray(expected).clip(0, 65535) // 257).astype(np.uint8))
        if expected.has_transparency_data:
            expected = Image.alpha_composite(Image.new("RGBA", expected.size, "white"), expected.convert("RGBA"))
        assert np.array_equal(np.asarray(to_rgb(image)), np.asarray(expected.convert("RGB"))), image.mode


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_orientation_matches_pillow_exif_transpose(orientation, kind):
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(Image.fromarray(PIXELS), kind, exif=exif.tobytes())
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    assert np.array_equal(np.asarray(to_rgb(open_image(content, "it"))), np.asarray(upright.convert("RGB")))
