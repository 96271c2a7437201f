import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageColor, ImageDraw

from clearhead.data.pictures import (
    FORMATS,
    MOST_PIXELS,
    InvalidPictureError,
    background_of,
    in_rgb,
    open_picture,
    read_picture,
    resize,
)

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 20, 3), dtype=np.uint8)


def packed(image, kind="PNG", **options):
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


@pytest.mark.parametrize("kind", FORMATS)
def test_each_format_is_read(kind, tmp_path):
    path = tmp_path / f"it{FORMATS[kind][0]}"
    path.write_bytes(packed(Image.fromarray(PIXELS), kind))
    image = read_picture(path)
    assert image.mode == "RGB"
    assert image.size == (20, 12)
    if kind in ("PNG", "BMP"):
        assert np.array_equal(np.asarray(image), PIXELS)


@pytest.mark.parametrize("kind", ["TIFF", "PPM", "ICO", "PDF"])
def test_other_formats_are_refused(kind):
    with pytest.raises(
        InvalidPictureError, match=r"cannot read the image it: the file is not PNG, JPEG, WEBP, GIF or BMP"
    ):
        open_picture(packed(Image.fromarray(PIXELS), kind), "it")


@given(data=st.data(), kind=st.sampled_from(list(FORMATS)))
@settings(max_examples=200)
def test_damaged_pictures_are_read_or_refused(data, kind):
    content = bytearray(packed(Image.fromarray(PIXELS), kind))
    for at, byte in data.draw(st.lists(st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255)), max_size=5)):
        content[at] = byte
    content = content[: data.draw(st.integers(0, len(content)))]
    try:
        image = in_rgb(open_picture(bytes(content), "it"))
    except ValueError as error:
        assert "it" in str(error)  # noqa: PT017
    else:
        assert resize(image, 4, "pad").shape == (3, 4, 4)


@given(
    junk=st.binary(max_size=300), start=st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"\xff\xd8\xff", b"BM"])
)
def test_junk_is_refused(junk, start):
    with pytest.raises(
        ValueError, match=r"cannot read the image it: (the file is not|the file is damaged|it has more)"
    ):
        open_picture(start + junk, "it")


def test_a_bomb_is_refused_before_it_is_decoded():
    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    for side in (8_000, 12_000, 60_000):
        head = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
        rows = zlib.compress(bytes(1000))
        bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
        assert side * side > MOST_PIXELS
        with pytest.raises(ValueError, match="it has more than 50,000,000 pixels"):
            open_picture(bomb, "it")


def test_a_picture_is_turned_upright():
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned by a quarter
    image = in_rgb(open_picture(packed(Image.fromarray(PIXELS), exif=exif.tobytes()), "it"))
    assert np.array_equal(np.asarray(image), np.rot90(PIXELS, -1))


def test_what_is_transparent_is_white():
    clear = Image.new("RGBA", (3, 3), (255, 0, 0, 0))
    assert np.asarray(in_rgb(clear)).min() == 255
    palette = Image.new("P", (3, 3), 0)
    palette.info["transparency"] = 0
    assert np.asarray(in_rgb(palette)).min() == 255


def test_sixteen_bits_of_grey_become_eight():
    grey = Image.fromarray(np.array([[0, 257, 65535]], np.uint16))
    assert np.asarray(in_rgb(grey))[0, :, 0].tolist() == [0, 1, 255]


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
        assert background_of(drawing) == ImageColor.getrgb(paper)


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


@pytest.mark.parametrize("content", [b"", b"hello"])
def test_what_is_no_picture_is_refused_by_its_name(tmp_path, content):
    (tmp_path / "words.png").write_bytes(content)
    with pytest.raises(InvalidPictureError, match=r"words\.png: the file is not PNG, JPEG, WEBP, GIF or BMP$"):
        read_picture(tmp_path / "words.png")


def test_a_file_without_end_is_refused(monkeypatch):
    monkeypatch.setattr("clearhead.data.pictures.MOST_BYTES", 1000)
    with pytest.raises(ValueError, match="/dev/zero: the file has more than 1,000 bytes"):
        read_picture(Path("/dev/zero"))


def test_a_bomb_that_pillow_sees_first_is_called_large_and_not_damaged(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(ValueError, match=f"image x: it has more than {MOST_PIXELS:,} pixels"):
        open_picture(packed(Image.new("L", (10, 10))), "x")
