import io
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageColor, ImageDraw, ImageFile, ImageOps

from clearhead.data import images
from clearhead.data.images import (
    FORMATS,
    Budget,
    InvalidImageError,
    background_color,
    open_image,
    read_canvas_size,
    read_image,
    resize,
    to_rgb,
)
from clearhead.data.user_files import MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS, MAX_IMAGE_SIDE, MAX_JPEG_SCANS

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 20, 3), dtype=np.uint8)


def packed(image, kind="PNG", **options):
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


@pytest.mark.parametrize("kind", FORMATS)
def test_each_format_is_read(kind, tmp_path):
    path = tmp_path / f"it{FORMATS[kind][0]}"
    path.write_bytes(packed(Image.fromarray(PIXELS), kind))
    image = read_image(path)
    assert image.mode == "RGB"
    assert image.size == (20, 12)
    if kind in ("PNG", "BMP"):
        assert np.array_equal(np.asarray(image), PIXELS)


@pytest.mark.parametrize("kind", ["TIFF", "PPM", "ICO", "PDF"])
def test_other_formats_are_refused(kind):
    with pytest.raises(
        InvalidImageError, match=r"cannot read the image it: the file is not PNG, JPEG, WEBP, GIF or BMP"
    ):
        open_image(packed(Image.fromarray(PIXELS), kind), "it")


@given(data=st.data(), kind=st.sampled_from(list(FORMATS)))
@settings(max_examples=200)
def test_damaged_pictures_are_read_or_refused(data, kind):
    content = bytearray(packed(Image.fromarray(PIXELS), kind))
    for at, byte in data.draw(st.lists(st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255)), max_size=5)):
        content[at] = byte
    content = content[: data.draw(st.integers(0, len(content)))]
    try:
        image = to_rgb(open_image(bytes(content), "it"))
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
        open_image(start + junk, "it")


def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width, height, rows, kind=0, depth=8, interlace=0):
    """A PNG whose compressed data is `rows`, however many bytes these are."""
    head = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, interlace)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def gif(width, height, frame=(0, 0, 1, 1), flags=0):
    """A GIF of one frame at (left, top, width, height), with one pixel of data; `flags` say what to dispose of."""
    control = b"!\xf9\x04" + bytes([flags, 0, 0, 0, 0])
    head = b"GIF89a" + struct.pack("<HH", width, height) + b"\x80\0\0" + bytes(6)
    return head + control + b"," + struct.pack("<4H", *frame) + b"\0" + b"\x02\x02\x44\x01\0;"


def webp(width, height):
    """28 bytes that decode to a picture of one colour."""
    bits = bytes([0x2F]) + (width - 1 | (height - 1) << 14).to_bytes(4, "little") + b"\x88\x88\x08"
    body = b"WEBPVP8L" + struct.pack("<I", len(bits)) + bits + bytes(len(bits) % 2)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def declared(kind, width, height):
    """A small file that declares a size."""
    if kind == "PNG":
        return png(width, height, bytes(1000))
    if kind == "GIF":
        return gif(width, height)
    small = bytearray(packed(Image.new("RGB", (2, 2)), kind, **({"lossless": True} if kind == "WEBP" else {})))
    if kind == "BMP":
        small[18:26] = struct.pack("<ii", width, height)
    if kind == "JPEG":
        at = small.index(b"\xff\xc0") + 5
        small[at : at + 4] = struct.pack(">HH", height, width)
    if kind == "WEBP":
        small[21:25] = (int.from_bytes(small[21:25], "little") & ~0xFFFFFFF | width - 1 | (height - 1) << 14).to_bytes(
            4, "little"
        )
    return bytes(small)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_bomb_is_refused_before_it_is_decoded(kind, monkeypatch):
    sizes = ((5_001, 5_000), (8_000, 8_000), (12_000, 12_000), (16_383, 16_383))
    bombs = [declared(kind, *size) for size in sizes]
    monkeypatch.setattr(ImageFile.ImageFile, "load", pytest.fail)
    for size, bomb in zip(sizes, bombs, strict=True):
        assert size[0] * size[1] > MAX_IMAGE_PIXELS
        with pytest.raises(InvalidImageError, match="image it: it has more than 25,000,000 pixels"):
            open_image(bomb, "it")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP"])
def test_a_very_long_picture_is_refused_before_it_is_decoded(kind):
    for size in ((1, MAX_IMAGE_SIDE + 1), (MAX_IMAGE_SIDE + 1, 1)):
        with pytest.raises(InvalidImageError, match=r"width or height is more than 32,768 pixels \("):
            open_image(declared(kind, *size), "it")


def test_animation_canvas_is_checked_before_the_file_is_opened(monkeypatch):
    frames = [Image.new("RGB", (4, 4), (i, 0, 0)) for i in (0, 200)]
    moving = bytearray(packed(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True))
    assert moving[12:16] == b"VP8X"
    assert read_canvas_size(bytes(moving)) == (4, 4)
    moving[24:30] = (9_999).to_bytes(3, "little") * 2
    monkeypatch.setattr(Image, "open", lambda *args, **options: pytest.fail("opened"))
    for content in (bytes(moving), webp(16_383, 16_383), gif(10_000, 10_000), gif(9, 9, (0, 0, 9_999, 9_999), 8)):
        with pytest.raises(InvalidImageError, match="it has more than 25,000,000 pixels"):
            open_image(content, "it")


@pytest.mark.parametrize("kind", ["WEBP", "GIF"])
@pytest.mark.parametrize("options", [{}, {"lossless": True}, {"save_all": True, "comment": b"x" * 900}])
def test_the_canvas_is_the_size_that_the_decoder_finds(kind, options):
    image = Image.fromarray(PIXELS)
    others = {"append_images": [image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)]} if "save_all" in options else {}
    assert read_canvas_size(packed(image, kind, **options, **others)) == (20, 12)


def test_gif_canvas_includes_the_first_frame():
    assert read_canvas_size(gif(2, 2, (3, 4, 5, 6))) == (8, 10)
    assert Image.open(io.BytesIO(gif(2, 2, (3, 4, 5, 6)))).size == (8, 10)


def test_a_jpeg_with_very_many_scans_is_refused():
    content = packed(Image.fromarray(PIXELS), "JPEG", progressive=True)
    assert 1 < content.count(b"\xff\xda") < MAX_JPEG_SCANS
    open_image(content, "it")
    scan = content[content.rindex(b"\xff\xda") : -2]
    with pytest.raises(InvalidImageError, match="it has more than 100 scans"):
        open_image(content[:-2] + scan * MAX_JPEG_SCANS + content[-2:], "it")


@pytest.mark.parametrize("interlace", [0, 1])
@pytest.mark.parametrize(
    ("kind", "depth", "bytes_in_a_row"), [(0, 8, 30), (2, 8, 90), (0, 1, 4), (0, 16, 60), (6, 8, 120)]
)
def test_a_png_without_all_of_its_rows_is_refused(kind, depth, bytes_in_a_row, interlace):
    """Pillow fills up with zeros where the compressed data ends early in an orderly way."""
    rows = (b"\0" + bytes(bytes_in_a_row)) * 40
    if interlace:
        columns = [(4, 5), (4, 5), (8, 5), (7, 10), (15, 10), (15, 20), (30, 20)]
        bits = 8 * bytes_in_a_row // 30 if depth > 1 else 1
        rows = b"".join((b"\0" + bytes(-(-width * bits // 8))) * height for width, height in columns)
    assert open_image(png(30, 40, rows, kind, depth, interlace), "it").size == (30, 40)
    for part in (rows[: 1 + bytes_in_a_row], rows[: len(rows) // 2], rows[:-1]):
        with pytest.raises(InvalidImageError, match="the file is damaged"):
            open_image(png(30, 40, part, kind, depth, interlace), "it")


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_that_ends_early_is_refused(kind):
    content = packed(Image.fromarray(PIXELS.repeat(8, 0).repeat(8, 1)), kind)
    with pytest.raises(InvalidImageError, match="the file is damaged"):
        open_image(content[: len(content) // 2], "it")


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


@pytest.mark.parametrize("content", [b"", b"hello"])
def test_what_is_no_picture_is_refused_by_its_name(tmp_path, content):
    (tmp_path / "words.png").write_bytes(content)
    with pytest.raises(InvalidImageError, match=r"words\.png: the file is not PNG, JPEG, WEBP, GIF or BMP$"):
        read_image(tmp_path / "words.png")


def test_a_file_that_is_too_long_is_refused_before_it_is_read(tmp_path):
    with (tmp_path / "long.png").open("wb") as file:
        file.truncate(MAX_IMAGE_BYTES + 1)
    with pytest.raises(InvalidImageError, match=r"long\.png: the file has more than 10,000,000 bytes"):
        read_image(tmp_path / "long.png")


def test_pipes_devices_and_sockets_are_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.png")  # nobody writes: to open it in the usual way would take for ever
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket.png")
        for path in ("pipe.png", "socket.png", "/dev/zero"):
            with pytest.raises(InvalidImageError, match=f"{path}: it is a pipe or a device and not a file"):
                read_image(Path(path))


def test_a_bomb_that_pillow_sees_first_is_called_large_and_not_damaged(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(ValueError, match=f"image x: it has more than {MAX_IMAGE_PIXELS:,} pixels"):
        open_image(packed(Image.new("L", (10, 10))), "x")


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


def test_threads_together_decode_no_more_than_the_budget(tmp_path, monkeypatch):
    """Four threads, pictures of 240 pixels, room for two of them."""
    monkeypatch.setattr(images, "BUDGET", Budget(500))
    path = tmp_path / "it.png"
    path.write_bytes(packed(Image.fromarray(PIXELS)))
    started, go_on, inside, most = threading.Semaphore(0), threading.Event(), [], []

    def use(picture):
        inside.append(picture)
        most.append(len(inside))
        started.release()
        assert go_on.wait(10)
        inside.pop()

    threads = [threading.Thread(target=images.with_image, args=(path, use)) for _ in range(4)]
    for thread in threads:
        thread.start()
    started.acquire(timeout=10)
    started.acquire(timeout=10)
    assert not started.acquire(timeout=0.05)
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert max(most) == 2
    assert len(most) == 4
    assert images.BUDGET.free == 500


def test_a_picture_that_fails_gives_its_part_of_the_budget_back(tmp_path):
    (tmp_path / "it.png").write_bytes(png(30, 40, bytes(31)))
    for _ in range(3):
        with pytest.raises(InvalidImageError):
            read_image(tmp_path / "it.png")
    assert images.BUDGET.free == images.BUDGET.total


PEAK = """
import resource, sys
from pathlib import Path
from clearhead.data import folder
folder.MAX_THREADS, decode = 4, folder.decode
files = [Path(name) for name in sys.argv[1:]]
decode(files[:1], 64, "pad")  # a tiny one: all is imported and started
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = decode(files[1:], 64, "pad")
assert found.sizes.all(), found.sizes
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux only")
def test_a_folder_of_tiny_files_that_declare_much_takes_little_memory(tmp_path):
    """Four files of 28 bytes, each of the largest size that is read, in all threads at once."""
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 1000
    (tmp_path / "0.png").write_bytes(packed(Image.fromarray(PIXELS)))
    for i in range(4):
        (tmp_path / f"{i + 1}.webp").write_bytes(webp(5_000, 5_000))
    names = [str(tmp_path / "0.png"), *(str(path) for path in sorted(tmp_path.glob("*.webp")))]
    done = subprocess.run([sys.executable, "-c", PEAK, *names], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 512 * 1024
