import json
import math
import re
import subprocess
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.messages import closest_name, did_you_mean, duration, json_text, printable, round_count, unknown_name

PRESETS = ["bert_cifar10", "vit_cifar10", "vit_tiny", "gpt2_small", "vit_mnist_plain"]


@pytest.mark.parametrize(
    ("name", "names", "expected"),
    [
        ("fp32", ["auto", "float32", "bf16"], "float32"),
        ("bfloat16", ["auto", "float32", "bf16"], "bf16"),
        ("gpt2", PRESETS, "gpt2_small"),
        ("vit", PRESETS, "vit_cifar10"),  # a common prefix takes precedence over containment
        ("vit-tiny", PRESETS, "vit_tiny"),
        ("VIT_TINY", PRESETS, "vit_tiny"),
        ("bert_cifra10", PRESETS, "bert_cifar10"),
        ("xyz", PRESETS, None),
        ("nosuch", ["reverse", "mnist", "pronounce", "words", "text"], None),
        ("", PRESETS, None),
        ("fp32", PRESETS, None),  # its synonym is not among the names
    ],
)
def test_closest_name_finds_the_intended_name(name, names, expected):
    assert closest_name(name, names) == expected


def test_unknown_name_errors_put_the_suggestion_before_the_list():
    message = str(unknown_name("preset", "gpt2", PRESETS))
    assert message == f"unknown preset 'gpt2'; did you mean gpt2_small? Choose from {', '.join(PRESETS)}"
    assert str(unknown_name("preset", "xyz", PRESETS)) == f"unknown preset 'xyz'; choose from {', '.join(PRESETS)}"
    assert (did_you_mean("gpt2", PRESETS), did_you_mean("xyz", PRESETS)) == ("; did you mean gpt2_small?", "")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.00234, "2.34 ms"),
        (0.5, "0.5 s"),
        (3.61, "3.6 s"),
        (9.96, "10 s"),
        (44.2, "44 s"),
        (119.4, "119 s"),
        (120, "2 min"),
        (332, "5 min 32 s"),
        (599.9, "10 min"),
        (2549, "42 min"),
        (3599, "1 h"),
        (5560, "1 h 33 min"),
        (47.999 * 3600, "2 d"),
        (76 * 3600, "3 d 4 h"),
    ],
)
def test_durations_use_readable_units(seconds, text):
    assert duration(seconds) == text


@given(st.floats(min_value=0.1, max_value=1e12))
def test_durations_avoid_scientific_notation_and_are_accurate_to_5_percent(seconds):
    text = duration(seconds)
    sizes = {"s": 1, "min": 60, "h": 3600, "d": 86400}
    parts = re.findall(r"([\d.,]+) (s|min|h|d)\b", text)
    assert " ".join(f"{number} {unit}" for number, unit in parts) == text
    total = sum(float(number.replace(",", "")) * sizes[unit] for number, unit in parts)
    assert abs(total - seconds) <= 0.05 * 1.001 * max(1, seconds)


def test_counts_avoid_scientific_notation():
    assert [round_count(n) for n in (0.25, 12.34, 30, 5560.4)] == ["0.25", "12.3", "30", "5,560"]


def test_messages_import_neither_torch_nor_rich():
    code = "import sys, clearhead.messages; sys.exit(bool({'torch', 'rich'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;t\x07", r"\x1b]0;t\x07"),
        ("a\nb\r\tc\x00\x7f", r"a\nb\r\tc\x00\x7f"),
        ("\x85\x9b31m", r"\x85\x9b31m"),
        ("a\u202ebc\u2066\u200b\ufeff\u00ad", r"a\u202ebc\u2066\u200b\ufeff\xad"),
        ("\u2028\u2029", r"\u2028\u2029"),
        ("\udcff\ud800", r"\udcff\ud800"),
        ("pay\u200dpal", r"pay\u200dpal"),
        ("\U000e0041", r"\U000e0041"),
        ("kᵀ ü ñ 猫 θ ˈæ 👩\u200d💻 ❤\ufe0f می\u200cخواهم", "kᵀ ü ñ 猫 θ ˈæ 👩\u200d💻 ❤\ufe0f می\u200cخواهم"),
        (7, "7"),
    ],
)
def test_printable_escapes_only_deceptive_characters(text, shown):
    assert printable(text) == shown
    assert printable(shown) == shown


def test_every_control_character_is_escaped():
    for character in map(chr, range(sys.maxunicode + 1)):
        if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp"):
            assert printable(character).isascii()
            assert printable(character).isprintable()


def test_printable_keeps_the_requested_characters():
    assert printable("a\n\tb\r\x1b", keep="\n\t") == "a\n\tb\\r\\x1b"


def test_json_text_replaces_non_finite_numbers_with_null():
    text = json_text({"loss": math.nan, "rows": [(1.5, -math.inf)], "name": "kᵀ"}, indent=None)
    assert text == '{"loss": null, "rows": [[1.5, null]], "name": "k\\u1d40"}'


def test_json_text_is_printable_and_round_trips():
    """It contains no character that the standard streams would escape."""
    everything = "".join(map(chr, range(0x300)))
    text = json_text([everything])
    assert printable(text, keep="\n") == text
    assert json.loads(text) == [everything]
