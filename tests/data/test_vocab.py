import hashlib
import subprocess
import sys
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.data import vocab
from clearhead.data.vocab import (
    BOS,
    BYTES,
    EOS,
    IGNORE_INDEX,
    MAX_WORD_LENGTH,
    PAD,
    SPECIAL_TOKENS,
    Vocabulary,
    group_by_word,
    load_word_list,
    parse_entries,
    read_cmudict,
    read_dictionary,
    read_text,
    read_words,
    spelling_hash,
    split_test,
    split_validation,
    text_to_tokens,
    text_vocab,
    tokens_to_text,
)

LETTERS = Vocabulary.with_special_tokens("cab")


def test_special_tokens_come_first_and_tokens_are_sorted():
    assert LETTERS.tokens == (*SPECIAL_TOKENS, "a", "b", "c")
    assert (LETTERS.tokens[PAD], LETTERS.tokens[BOS], LETTERS.tokens[EOS]) == SPECIAL_TOKENS
    assert IGNORE_INDEX not in range(len(LETTERS))


@given(st.lists(st.sampled_from("abc")))
def test_decode_inverts_encode(tokens):
    assert LETTERS.decode(LETTERS.encode(tokens)) == tokens
    assert LETTERS.decode([BOS, *LETTERS.encode(tokens), EOS, 4, PAD]) == tokens


def test_without_special_tokens_every_id_is_decoded():
    plain = Vocabulary(("x", "y", "z"))
    assert not plain.has_special_tokens
    assert plain.decode([0, 1, 2]) == ["x", "y", "z"]


@pytest.mark.parametrize(
    ("vocabulary", "tokens", "message"),
    [
        (LETTERS, "abx", "unknown token 'x' in 'abx'; the vocabulary is 'abc'"),
        (
            Vocabulary.with_special_tokens(["AA", "B"]),
            ["AA", "ZZ"],
            "token 'ZZ' in AA ZZ; the vocabulary is AA B",
        ),
        (Vocabulary(("a",)), "<", "unknown token '<' in '<'; the vocabulary is 'a'"),
    ],
)
def test_an_unknown_token_error_shows_the_vocabulary(vocabulary, tokens, message):
    with pytest.raises(LookupError, match=message):
        vocabulary.encode(tokens)


def test_the_error_truncates_a_long_vocabulary():
    vocabulary = Vocabulary(tuple(map(chr, range(0x4E00, 0x5E00))))
    with pytest.raises(LookupError, match=r"unknown token 'x' in '\u4e00+\.\.\.; the vocabulary is") as raised:
        vocabulary.encode("\u4e00" * 500 + "x")
    assert len(str(raised.value)) < 400


def test_importing_vocab_does_not_import_torch():
    code = "import sys, clearhead.data.vocab; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("level", ["character", "byte"])
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_tokens_to_text_inverts_text_to_tokens(level, text):
    tokens = text_to_tokens(text, level)
    assert tokens_to_text(tokens, level) == text
    assert set(tokens) <= set(text_vocab(tokens, level))


def test_byte_tokens_equal_byte_values(tmp_path):
    (tmp_path / "x").write_bytes(bytes(range(256)))
    assert tuple("".join(read_text(str(tmp_path / "x"), "byte"))) == BYTES == text_vocab("", "byte")
    assert tokens_to_text("\xc3", "byte") == "\ufffd"
    assert text_to_tokens(b"\xff".decode(errors="surrogateescape"), "byte") == "\xff"


def test_character_level_rejects_invalid_utf_8(tmp_path):
    (tmp_path / "x").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"must be text in UTF-8, got other bytes .*level=byte"):
        read_text(str(tmp_path / "x"), "character")


@pytest.mark.parametrize("level", ["character", "byte"])
@pytest.mark.parametrize(("text", "n"), [("", 0), ("aaa", 1)])
def test_a_text_needs_two_distinct_characters(tmp_path, level, text, n):
    (tmp_path / "x").write_text(text)
    with pytest.raises(ValueError, match=f"at least two different characters, got {n} in "):
        read_text(str(tmp_path / "x"), level)


def test_the_byte_order_mark_is_skipped_at_character_level(tmp_path):
    (tmp_path / "x").write_text("ab", "utf-8-sig")
    assert "".join(read_text(str(tmp_path / "x"), "character")) == "ab"
    assert len("".join(read_text(str(tmp_path / "x"), "byte"))) == 5


def test_the_embedded_word_list_contains_only_letters():
    words = load_word_list("")
    assert len(words) > 100_000
    assert "thorough" in words
    assert all(set(word) <= set("abcdefghijklmnopqrstuvwxyz") for word in words)


@given(st.lists(st.text("ab é", max_size=5)), st.sampled_from(["\n", "\r\n", "\r"]))
def test_a_word_list_is_its_unique_lines(tmp_path_factory, lines, end):
    path = tmp_path_factory.mktemp("list") / "words.txt"
    path.write_bytes(end.join(["first", *lines]).encode())
    assert read_words(str(path)) == list(dict.fromkeys(["first", *(line.strip() for line in lines if line.strip())]))


@pytest.mark.parametrize("text", ["", "\n \n", "\ufeff"])
def test_an_empty_word_list_is_rejected(tmp_path, text):
    (tmp_path / "words.txt").write_text(text, "utf-8")
    with pytest.raises(ValueError, match=r"one word per line, got no word in .*words\.txt"):
        read_words(str(tmp_path / "words.txt"))


def test_running_text_is_rejected_as_a_word_list(tmp_path):
    (tmp_path / "text.txt").write_text(f"word\n{'long ' * MAX_WORD_LENGTH}")
    with pytest.raises(ValueError, match=r"at most 100 letters.*, got 'long .* in line 2 of .*use the recipe text"):
        read_words(str(tmp_path / "text.txt"))
    (tmp_path / "text.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="must be text in UTF-8"):
        read_words(str(tmp_path / "text.txt"))


BOTH_FORMATS = """\
;;; a remark of the old form
word W ER1 D
word(2) W ER0 D # another way
Tab\tT AE B\t

'tis(1)  T IH1 Z
"""


def read(text, *, stress=True):
    return group_by_word(parse_entries(text.split("\n"), "some.dict", stress=stress))


def test_both_dictionary_formats_are_parsed_and_variants_are_grouped():
    assert read(BOTH_FORMATS) == {
        "word": (("W", "ER1", "D"), ("W", "ER0", "D")),
        "tab": (("T", "AE", "B"),),
        "'tis": (("T", "IH1", "Z"),),
    }


def test_without_stress_equal_pronunciations_are_merged():
    assert read(BOTH_FORMATS, stress=False)["word"] == (("W", "ER", "D"),)


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
def test_a_malformed_line_error_names_file_and_line_number(line):
    with pytest.raises(ValueError, match=r"a word and its phones, as in .* in line 2 of some\.dict"):
        read(f"fine F AY1 N\n{line}\n")


PHONE = st.sampled_from(["AA0", "AE1", "B", "CH", "ER2"])
WORD = st.text("abcxyz'.-", min_size=1, max_size=8)


@given(st.lists(st.tuples(WORD, st.lists(PHONE, min_size=1, max_size=5), st.booleans(), st.sampled_from(" \t"))))
def test_parsing_inverts_formatting(rows):
    lines = [f"{word}{'(2)' * twice}{gap}{' '.join(phones)}" for word, phones, twice, gap in rows]
    expected = {}
    for word, phones, _, _ in rows:
        variants = expected.setdefault(word, [])
        if tuple(phones) not in variants:
            variants.append(tuple(phones))
    assert read("\n".join(lines)) == {word: tuple(variants) for word, variants in expected.items()}


@given(st.text("aZ0(2)#;é \t\n\r\x85\u2028\ufeff", max_size=40))
def test_arbitrary_text_is_parsed_or_raises_value_error(text):
    try:
        words = read(text)
    except ValueError as error:
        assert "of some.dict" in str(error)  # noqa: PT017
        return
    assert all(word and all(variants) for word, variants in words.items())


def test_a_dictionary_with_invalid_utf_8_is_rejected(tmp_path):
    (tmp_path / "x.dict").write_bytes(b"caf\xe9 K AE F EY")
    with pytest.raises(ValueError, match=r"x\.dict must be text in UTF-8, got other bytes"):
        read_dictionary(tmp_path / "x.dict", stress=True)


@pytest.mark.parametrize("text", ["", "\n\n", ";;; nothing but a remark\n# and another\n"])
def test_an_empty_dictionary_is_rejected(tmp_path, text):
    (tmp_path / "x.dict").write_text(text)
    with pytest.raises(ValueError, match=r"a word and its phones on each line, got no entry in .*x\.dict"):
        read_dictionary(tmp_path / "x.dict", stress=True)


def test_the_embedded_dictionary_is_complete():
    words = read_cmudict(stress=True)
    assert len(words) == 126_052
    assert sum(len(variants) for variants in words.values()) == 135_166 - 2  # two are listed twice
    assert ("TH", "ER1", "OW0") in words["thorough"]
    assert len(vocab.letters_in(words)) == 29
    assert len(vocab.phones_in(words)) == 69
    assert len(vocab.phones_in(read_cmudict(stress=False))) == 39


def test_a_modified_embedded_dictionary_raises(monkeypatch):
    monkeypatch.setattr(vocab.gzip, "decompress", lambda packed: b"word W ER1 D")
    with pytest.raises(ValueError, match=r"cmudict.dict does not match its SHA-256 digest"):
        read_cmudict.__wrapped__(stress=True)


def test_the_license_is_shipped_with_the_data():
    text = files("clearhead.data").joinpath("files/cmudict/LICENCE.txt").read_text()
    assert "Carnegie Mellon University" in text
    assert "Redistribution and use in source and binary forms" in text


@given(st.sets(WORD, min_size=3), st.data())
def test_splits_are_disjoint_and_complete(words, data):
    learned, test = split_test(words)
    assert sorted(learned + test) == sorted(words)
    assert all((spelling_hash(word) % vocab.TEST_EVERY == 0) == (word in test) for word in words)
    n = data.draw(st.integers(0, len(words) - 1))
    rest, held = split_validation(words, n)
    assert sorted(rest + held) == sorted(words)
    assert len(held) == n
    if held:
        assert max(map(spelling_hash, held)) < min(map(spelling_hash, rest))


def test_spelling_hash_is_sha256():
    assert spelling_hash("é") == int(hashlib.sha256(b"\xc3\xa9").hexdigest(), 16)


def test_the_split_of_a_word_does_not_depend_on_the_other_words():
    words = [f"w{i}" for i in range(200)]
    _, held = split_validation(words, 20)
    _, again = split_validation([word for i, word in enumerate(words) if word in held or i % 2], 20)
    assert held == again


def test_validation_must_leave_training_words():
    with pytest.raises(ValueError, match=r"no words are left to train on: validation=3, got 3 .*; try validation=0"):
        split_validation(["a", "b", "c"], 3)
    with pytest.raises(ValueError, match=r"validation=0, got 0 .*; add words that are not in the test"):
        split_validation([], 0)
