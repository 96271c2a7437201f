import os
import subprocess
import sys

import pytest

from clearhead.drawing import METADATA, displayable, format_number, new_figure, save_figure, text_width, wrap


def drawn():
    figure = new_figure(2, 1)
    figure.subplots().plot([0, 1], [1, 0], label="a")
    return figure


@pytest.mark.parametrize(
    ("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF"), (".PNG", b"\x89PNG")]
)
def test_the_suffix_selects_the_format_and_output_is_deterministic(tmp_path, suffix, start):
    a, b = (save_figure(drawn(), tmp_path / "deep" / f"{name}{suffix}") for name in "ab")
    assert a.read_bytes().startswith(start)
    assert a.read_bytes() == b.read_bytes()
    assert sorted(os.listdir(tmp_path / "deep")) == [a.name, b.name]


@pytest.mark.parametrize("name", ["a.jpg", "a", ".png"])
def test_unsupported_formats_raise_with_a_suggestion(tmp_path, name):
    with pytest.raises(ValueError, match=r"a figure is saved as .png, .svg, .pdf, got .*; try .*.png"):
        save_figure(drawn(), tmp_path / name)
    assert os.listdir(tmp_path) == []


def test_a_failed_write_raises_with_the_file_name_and_keeps_the_old_file(tmp_path, faults):
    save_figure(drawn(), tmp_path / "a.png")
    before = (tmp_path / "a.png").read_bytes()
    figure = new_figure(1, 1)
    faults.during(lambda: save_figure(figure, tmp_path / "b.png"), faults.NEVER)  # loads the fonts first
    calls = [call for call, *_ in faults.trace]
    failure, _ = faults.during(lambda: save_figure(figure, tmp_path / "a.png"), calls.index("write"))
    assert failure.filename == str(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes() == before


def test_pyplot_is_not_imported():
    """In a separate process, because other tests import libraries that import pyplot."""
    code = """
import sys
from clearhead.drawing import new_figure
new_figure(2, 1).subplots().plot([0, 1], [1, 0])
assert "matplotlib.figure" in sys.modules and "matplotlib.pyplot" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_png_svg_and_pdf_are_supported():
    assert set(METADATA) == {".png", ".svg", ".pdf"}


def test_numbers_are_formatted_with_enough_digits():
    assert [format_number(0.5, 1.0), format_number(12.3456, 100.0), format_number(0.00123, 0.002)] == [
        "0.50",
        "12",
        "0.00123",
    ]


@pytest.mark.parametrize(
    ("symbol", "name"),
    [("a", "a"), ("é", "é"), (" ", "space"), ("\n", r"\n"), ("\x00", r"\x00"), ("你", "U+4F60"), ("<end>", "<end>")],
)
def test_every_character_has_a_displayable_name(symbol, name):
    assert displayable(symbol) == name


@pytest.mark.parametrize("text", ["what one head attends to, in encoder.blocks.0.attention", "W" * 60, "a b c", ""])
@pytest.mark.parametrize("width", [0.8, 2.0, 6.0])
def test_wrapped_lines_fit_the_width_and_keep_the_text(text, width):
    lines = wrap(text, width, 15).split("\n")
    assert all(text_width(line, 15) <= width for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def test_wrapping_prefers_spaces_and_then_punctuation():
    assert wrap("one two", 0.6, 15) == "one\ntwo"
    assert (
        wrap("encoder.blocks.0.attention", text_width("encoder.blocks.0.atten", 15), 15)
        == "encoder.blocks.0.\nattention"
    )
