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


def test_marks_come_first_and_symbols_are_sorted():
    assert LETTERS.tokens == (*SPECIAL_TOKENS, "a", "b", "c")
    assert (LETTERS.tokens[PAD], LETTERS.tokens[BOS], LETTERS.tokens[EOS]) == SPECIAL_TOKENS
    assert IGNORE_INDEX not in range(len(LETTERS))


@given(st.lists(st.sampled_from("abc")))
def test_ids_read_back_as_the_symbols(symbols):
    assert LETTERS.decode(LETTERS.encode(symbols)) == symbols
    assert LETTERS.decode([BOS, *LETTERS.encode(symbols), EOS, 4, PAD]) == symbols


def test_without_marks_every_id_is_a_symbol():
    plain = Vocabulary(("x", "y", "z"))
    assert not plain.has_special_tokens
    assert plain.decode([0, 1, 2]) == ["x", "y", "z"]


@pytest.mark.parametrize(
    ("known", "symbols", "message"),
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
def test_an_unknown_symbol_is_named_beside_the_known_ones(known, symbols, message):
    with pytest.raises(LookupError, match=message):
        known.encode(symbols)


def test_of_very_many_symbols_the_first_are_named():
    known = Vocabulary(tuple(map(chr, range(0x4E00, 0x5E00))))
    with pytest.raises(LookupError, match=r"unknown token 'x' in '\u4e00+\.\.\.; the vocabulary is") as raised:
        known.encode("\u4e00" * 500 + "x")
    assert len(str(raised.value)) < 400


def test_tokens_and_dictionaries_need_no_torch():
    code = "import sys, clearhead.data.vocab, clearhead.data.vocab, clearhead.data.vocab"
    code += ", clearhead.data.vocab; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("level", ["character", "byte"])
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_what_a_user_writes_comes_back(level, text):
    symbols = text_to_tokens(text, level)
    assert tokens_to_text(symbols, level) == text
    assert set(symbols) <= set(text_vocab(symbols, level))


def test_a_byte_is_a_symbol_of_its_own_number(tmp_path):
    (tmp_path / "x").write_bytes(bytes(range(256)))
    assert tuple("".join(read_text(str(tmp_path / "x"), "byte"))) == BYTES == text_vocab("", "byte")
    assert tokens_to_text("\xc3", "byte") == "\ufffd"
    assert text_to_tokens(b"\xff".decode(errors="surrogateescape"), "byte") == "\xff"


def test_characters_need_a_text(tmp_path):
    (tmp_path / "x").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"must be text in UTF-8, got other bytes .*level=byte"):
        read_text(str(tmp_path / "x"), "character")


@pytest.mark.parametrize("level", ["character", "byte"])
@pytest.mark.parametrize(("text", "n"), [("", 0), ("aaa", 1)])
def test_a_text_has_different_characters(tmp_path, level, text, n):
    (tmp_path / "x").write_text(text)
    with pytest.raises(ValueError, match=f"at least two different characters, got {n} in "):
        read_text(str(tmp_path / "x"), level)


def test_a_byte_order_mark_is_no_character(tmp_path):
    (tmp_path / "x").write_text("ab", "utf-8-sig")
    assert "".join(read_text(str(tmp_path / "x"), "character")) == "ab"
    assert len("".join(read_text(str(tmp_path / "x"), "byte"))) == 5


def test_the_dictionarys_words_have_letters_only():
    words = load_word_list("")
    assert len(words) > 100_000
    assert "thorough" in words
    assert all(set(word) <= set("abcdefghijklmnopqrstuvwxyz") for word in words)


@given(st.lists(st.text("ab é", max_size=5)), st.sampled_from(["\n", "\r\n", "\r"]))
def test_own_words_are_the_lines_each_once(tmp_path_factory, lines, end):
    path = tmp_path_factory.mktemp("list") / "words.txt"
    path.write_bytes(end.join(["first", *lines]).encode())
    assert read_words(str(path)) == list(dict.fromkeys(["first", *(line.strip() for line in lines if line.strip())]))


@pytest.mark.parametrize("text", ["", "\n \n", "\ufeff"])
def test_a_list_without_a_word_is_refused(tmp_path, text):
    (tmp_path / "words.txt").write_text(text, "utf-8")
    with pytest.raises(ValueError, match=r"one word per line, got no word in .*words\.txt"):
        read_words(str(tmp_path / "words.txt"))


def test_a_text_is_no_list_of_words(tmp_path):
    (tmp_path / "text.txt").write_text(f"word\n{'long ' * MAX_WORD_LENGTH}")
    with pytest.raises(ValueError, match=r"at most 100 letters.*, got 'long .* in line 2 of .*use the recipe text"):
        read_words(str(tmp_path / "text.txt"))
    (tmp_path / "text.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="must be text in UTF-8"):
        read_words(str(tmp_path / "text.txt"))


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
