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
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from clearhead.data import images
from clearhead.data.images import (
    FORMATS,
    Budget,
    InvalidImageError,
    open_image,
    read_canvas_size,
    read_image,
    resize,
    to_rgb,
)
from clearhead.data.user_files import MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS, MAX_IMAGE_SIDE, MAX_JPEG_SCANS

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 20, 3), dtype=np.uint8)


def encoded(image, kind="PNG", **options):
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


@pytest.mark.parametrize("kind", FORMATS)
def test_supported_formats_are_decoded(kind, tmp_path):
    path = tmp_path / f"it{FORMATS[kind][0]}"
    path.write_bytes(encoded(Image.fromarray(PIXELS), kind))
    image = read_image(path)
    assert image.mode == "RGB"
    assert image.size == (20, 12)
    if kind in ("PNG", "BMP"):
        assert np.array_equal(np.asarray(image), PIXELS)


@pytest.mark.parametrize("kind", ["TIFF", "PPM", "ICO", "PDF"])
def test_unsupported_formats_are_rejected(kind):
    with pytest.raises(
        InvalidImageError, match=r"cannot read the image it: the file is not PNG, JPEG, WEBP, GIF or BMP"
    ):
        open_image(encoded(Image.fromarray(PIXELS), kind), "it")


@given(data=st.data(), kind=st.sampled_from(list(FORMATS)))
@settings(max_examples=200)
def test_corrupted_images_are_decoded_or_raise_value_error(data, kind):
    content = bytearray(encoded(Image.fromarray(PIXELS), kind))
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
def test_arbitrary_bytes_are_rejected(junk, start):
    with pytest.raises(
        ValueError, match=r"cannot read the image it: (the file is not|the file is damaged|it has more)"
    ):
        open_image(start + junk, "it")


def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width, height, rows, kind=0, depth=8, interlace=0):
    """A PNG whose compressed data is `rows`, whatever its length."""
    head = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, interlace)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def gif(width, height, frame=(0, 0, 1, 1), flags=0):
    """A GIF with one frame at (left, top, width, height) and one pixel of data; `flags` set the disposal method."""
    control = b"!\xf9\x04" + bytes([flags, 0, 0, 0, 0])
    head = b"GIF89a" + struct.pack("<HH", width, height) + b"\x80\0\0" + bytes(6)
    return head + control + b"," + struct.pack("<4H", *frame) + b"\0" + b"\x02\x02\x44\x01\0;"


def webp(width, height):
    """28 bytes that decode to an image of one color."""
    bits = bytes([0x2F]) + (width - 1 | (height - 1) << 14).to_bytes(4, "little") + b"\x88\x88\x08"
    body = b"WEBPVP8L" + struct.pack("<I", len(bits)) + bits + bytes(len(bits) % 2)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def with_declared_size(kind, width, height):
    """A small file whose header declares the given size."""
    if kind == "PNG":
        return png(width, height, bytes(1000))
    if kind == "GIF":
        return gif(width, height)
    small = bytearray(encoded(Image.new("RGB", (2, 2)), kind, **({"lossless": True} if kind == "WEBP" else {})))
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
def test_a_decompression_bomb_is_rejected_before_decoding(kind, monkeypatch):
    sizes = ((5_001, 5_000), (8_000, 8_000), (12_000, 12_000), (16_383, 16_383))
    bombs = [with_declared_size(kind, *size) for size in sizes]
    monkeypatch.setattr(ImageFile.ImageFile, "load", pytest.fail)
    for size, bomb in zip(sizes, bombs, strict=True):
        assert size[0] * size[1] > MAX_IMAGE_PIXELS
        with pytest.raises(InvalidImageError, match="image it: it has more than 25,000,000 pixels"):
            open_image(bomb, "it")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP"])
def test_an_image_with_an_excessive_side_is_rejected_before_decoding(kind):
    for size in ((1, MAX_IMAGE_SIDE + 1), (MAX_IMAGE_SIDE + 1, 1)):
        with pytest.raises(InvalidImageError, match=r"width or height is more than 32,768 pixels \("):
            open_image(with_declared_size(kind, *size), "it")


def test_animation_canvas_is_checked_before_the_file_is_opened(monkeypatch):
    frames = [Image.new("RGB", (4, 4), (i, 0, 0)) for i in (0, 200)]
    moving = bytearray(encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True))
    assert moving[12:16] == b"VP8X"
    assert read_canvas_size(bytes(moving)) == (4, 4)
    moving[24:30] = (9_999).to_bytes(3, "little") * 2
    monkeypatch.setattr(Image, "open", lambda *args, **options: pytest.fail("opened"))
    for content in (bytes(moving), webp(16_383, 16_383), gif(10_000, 10_000), gif(9, 9, (0, 0, 9_999, 9_999), 8)):
        with pytest.raises(InvalidImageError, match="it has more than 25,000,000 pixels"):
            open_image(content, "it")


@pytest.mark.parametrize("kind", ["WEBP", "GIF"])
@pytest.mark.parametrize("options", [{}, {"lossless": True}, {"save_all": True, "comment": b"x" * 900}])
def test_read_canvas_size_agrees_with_the_decoder(kind, options):
    image = Image.fromarray(PIXELS)
    others = {"append_images": [image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)]} if "save_all" in options else {}
    assert read_canvas_size(encoded(image, kind, **options, **others)) == (20, 12)


def test_gif_canvas_includes_the_first_frame():
    assert read_canvas_size(gif(2, 2, (3, 4, 5, 6))) == (8, 10)
    assert Image.open(io.BytesIO(gif(2, 2, (3, 4, 5, 6)))).size == (8, 10)


def test_a_jpeg_with_too_many_scans_is_rejected():
    content = encoded(Image.fromarray(PIXELS), "JPEG", progressive=True)
    assert 1 < content.count(b"\xff\xda") < MAX_JPEG_SCANS
    open_image(content, "it")
    scan = content[content.rindex(b"\xff\xda") : -2]
    with pytest.raises(InvalidImageError, match="it has more than 100 scans"):
        open_image(content[:-2] + scan * MAX_JPEG_SCANS + content[-2:], "it")


@pytest.mark.parametrize("interlace", [0, 1])
@pytest.mark.parametrize(
    ("kind", "depth", "bytes_in_a_row"), [(0, 8, 30), (2, 8, 90), (0, 1, 4), (0, 16, 60), (6, 8, 120)]
)
def test_a_png_with_missing_rows_is_rejected(kind, depth, bytes_in_a_row, interlace):
    """Pillow fills missing rows with zeros if the compressed stream ends early but cleanly."""
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
def test_a_truncated_file_is_rejected(kind):
    content = encoded(Image.fromarray(PIXELS.repeat(8, 0).repeat(8, 1)), kind)
    with pytest.raises(InvalidImageError, match="the file is damaged"):
        open_image(content[: len(content) // 2], "it")


@pytest.mark.parametrize("content", [b"", b"hello"])
def test_a_file_that_is_not_an_image_is_named_in_the_error(tmp_path, content):
    (tmp_path / "words.png").write_bytes(content)
    with pytest.raises(InvalidImageError, match=r"words\.png: the file is not PNG, JPEG, WEBP, GIF or BMP$"):
        read_image(tmp_path / "words.png")


def test_a_file_above_the_size_limit_is_rejected_before_reading(tmp_path):
    with (tmp_path / "long.png").open("wb") as file:
        file.truncate(MAX_IMAGE_BYTES + 1)
    with pytest.raises(InvalidImageError, match=r"long\.png: the file has more than 10,000,000 bytes"):
        read_image(tmp_path / "long.png")


def test_pipes_devices_and_sockets_are_rejected_without_blocking(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.png")  # no writer: a plain open would block forever
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket.png")
        for path in ("pipe.png", "socket.png", "/dev/zero"):
            with pytest.raises(InvalidImageError, match=f"{path}: it is a pipe or a device and not a file"):
                read_image(Path(path))


def test_a_bomb_detected_by_pillow_is_reported_as_too_large(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(ValueError, match=f"image x: it has more than {MAX_IMAGE_PIXELS:,} pixels"):
        open_image(encoded(Image.new("L", (10, 10))), "x")


def test_concurrent_decoding_stays_within_the_pixel_budget(tmp_path, monkeypatch):
    """Four threads decode images of 240 pixels with a budget for two."""
    monkeypatch.setattr(images, "BUDGET", Budget(500))
    path = tmp_path / "it.png"
    path.write_bytes(encoded(Image.fromarray(PIXELS)))
    started, go_on, inside, concurrent = threading.Semaphore(0), threading.Event(), [], []

    def use(image):
        inside.append(image)
        concurrent.append(len(inside))
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
    assert max(concurrent) == 2
    assert len(concurrent) == 4
    assert images.BUDGET.free == 500


def test_a_failed_decode_releases_its_share_of_the_budget(tmp_path):
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
decode(files[:1], 64, "pad")  # warm-up: imports and thread pool
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = decode(files[1:], 64, "pad")
assert found.sizes.all(), found.sizes
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux only")
def test_small_files_with_large_declared_sizes_take_bounded_memory(tmp_path):
    """Four files of 28 bytes with the largest allowed size are decoded in parallel."""
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 1000
    (tmp_path / "0.png").write_bytes(encoded(Image.fromarray(PIXELS)))
    for i in range(4):
        (tmp_path / f"{i + 1}.webp").write_bytes(webp(5_000, 5_000))
    names = [str(tmp_path / "0.png"), *(str(path) for path in sorted(tmp_path.glob("*.webp")))]
    done = subprocess.run([sys.executable, "-c", PEAK, *names], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 512 * 1024
