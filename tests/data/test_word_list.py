import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.data.word_list import MOST, read_words, words_of


def test_the_dictionarys_words_have_letters_only():
    words = words_of("")
    assert len(words) > 100_000
    assert "thorough" in words
    assert all(set(word) <= set("abcdefghijklmnopqrstuvwxyz") for word in words)


@given(st.lists(st.text("ab é", max_size=5)))
def test_own_words_are_the_lines_each_once(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("list") / "words.txt"
    path.write_text("\r\n".join(lines), "utf-8")
    assert read_words(str(path)) == list(dict.fromkeys(line.strip() for line in lines if line.strip()))


def test_a_text_is_no_list_of_words(tmp_path):
    (tmp_path / "text.txt").write_text(f"word\n{'long ' * MOST}")
    with pytest.raises(ValueError, match=r"at most 100 letters, got 'long .* in line 2 of .*train the recipe text"):
        read_words(str(tmp_path / "text.txt"))
    (tmp_path / "text.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="must be text in UTF-8"):
        read_words(str(tmp_path / "text.txt"))
