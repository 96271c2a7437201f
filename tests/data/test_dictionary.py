import hashlib
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.data import vocab
from clearhead.data.vocab import (
    group_by_word,
    parse_entries,
    read_cmudict,
    read_dictionary,
    spelling_hash,
    split_test,
    split_validation,
)

FORMS = """\
;;; a remark of the old form
word W ER1 D
word(2) W ER0 D # another way
Tab\tT AE B\t

'tis(1)  T IH1 Z
"""


def read(text, *, stress=True):
    return group_by_word(parse_entries(text.split("\n"), "some.dict", stress=stress))


def test_both_forms_are_read_and_variants_belong_to_their_word():
    assert read(FORMS) == {
        "word": (("W", "ER1", "D"), ("W", "ER0", "D")),
        "tab": (("T", "AE", "B"),),
        "'tis": (("T", "IH1", "Z"),),
    }


def test_without_stress_pronunciations_that_differ_in_nothing_else_are_one():
    assert read(FORMS, stress=False)["word"] == (("W", "ER", "D"),)


@pytest.mark.parametrize(
    "line",
    [
        "word",
        "word(2)",
        "word W ER3 D",
        "word W-ER",
        "word W1ER",
        "a b é",
        "x 1",
        "New York\tN UW Y AO R K",
        f"{'x' * 101} B",
        f"x{' B' * 101}",
        "new york N UW Y AO R K",
        "ship S I p",
        "\tK AE T",
        " \tK AE T",
    ],
)
def test_a_malformed_line_is_named_with_its_file_and_number(line):
    with pytest.raises(ValueError, match=r"a word and its phones, as in .* in line 2 of some\.dict"):
        read(f"fine F AY1 N\n{line}\n")


PHONE = st.sampled_from(["AA0", "AE1", "B", "CH", "ER2"])
WORD = st.text("abcxyz'.-", min_size=1, max_size=8)


@given(st.lists(st.tuples(WORD, st.lists(PHONE, min_size=1, max_size=5), st.booleans(), st.sampled_from(" \t"))))
def test_what_is_written_down_is_read_again(rows):
    lines = [f"{word}{'(2)' * twice}{gap}{' '.join(phones)}" for word, phones, twice, gap in rows]
    expected = {}
    for word, phones, _, _ in rows:
        known = expected.setdefault(word, [])
        if tuple(phones) not in known:
            known.append(tuple(phones))
    assert read("\n".join(lines)) == {word: tuple(known) for word, known in expected.items()}


@given(st.text("aZ0(2)#;é \t\n\r\x85\u2028\ufeff", max_size=40))
def test_any_text_is_read_or_answered_in_one_line(text):
    try:
        words = read(text)
    except ValueError as error:
        assert "of some.dict" in str(error)  # noqa: PT017
        return
    assert all(word and all(known) for word, known in words.items())


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "x.dict").write_bytes(b"caf\xe9 K AE F EY")
    with pytest.raises(ValueError, match=r"x\.dict must be text in UTF-8, got other bytes"):
        read_dictionary(tmp_path / "x.dict", stress=True)


@pytest.mark.parametrize("text", ["", "\n\n", ";;; nothing but a remark\n# and another\n"])
def test_a_dictionary_without_an_entry_is_refused(tmp_path, text):
    (tmp_path / "x.dict").write_text(text)
    with pytest.raises(ValueError, match=r"a word and its phones on each line, got no entry in .*x\.dict"):
        read_dictionary(tmp_path / "x.dict", stress=True)


def test_the_embedded_dictionary_is_whole():
    words = read_cmudict(stress=True)
    assert len(words) == 126_052
    assert sum(len(known) for known in words.values()) == 135_166 - 2  # those are in it twice
    assert ("TH", "ER1", "OW0") in words["thorough"]
    assert len(vocab.letters_in(words)) == 29
    assert len(vocab.phones_in(words)) == 69
    assert len(vocab.phones_in(read_cmudict(stress=False))) == 39


def test_changed_bytes_are_noticed(monkeypatch):
    monkeypatch.setattr(vocab.gzip, "decompress", lambda packed: b"word W ER1 D")
    with pytest.raises(ValueError, match=r"cmudict.dict does not match its SHA-256 digest"):
        read_cmudict.__wrapped__(stress=True)


def test_the_licence_is_beside_the_data():
    text = files("clearhead.data").joinpath("files/cmudict/LICENCE.txt").read_text()
    assert "Carnegie Mellon University" in text
    assert "Redistribution and use in source and binary forms" in text


@given(st.sets(WORD, min_size=3), st.data())
def test_parts_have_no_common_word_and_miss_none(words, data):
    learned, test = split_test(words)
    assert sorted(learned + test) == sorted(words)
    assert all((spelling_hash(word) % vocab.TEST_EVERY == 0) == (word in test) for word in words)
    n = data.draw(st.integers(0, len(words) - 1))
    rest, held = split_validation(words, n)
    assert sorted(rest + held) == sorted(words)
    assert len(held) == n
    if held:
        assert max(map(spelling_hash, held)) < min(map(spelling_hash, rest))


def test_the_hash_is_the_stated_one():
    assert spelling_hash("é") == int(hashlib.sha256(b"\xc3\xa9").hexdigest(), 16)


def test_a_word_stays_in_its_part_whatever_the_others_are():
    words = [f"w{i}" for i in range(200)]
    _, held = split_validation(words, 20)
    _, again = split_validation([word for i, word in enumerate(words) if word in held or i % 2], 20)
    assert held == again


def test_some_words_must_be_left_to_learn():
    with pytest.raises(ValueError, match=r"no words are left to train on: validation=3, got 3 .*; try validation=0"):
        split_validation(["a", "b", "c"], 3)
    with pytest.raises(ValueError, match=r"validation=0, got 0 .*; add words that are not in the test"):
        split_validation([], 0)
