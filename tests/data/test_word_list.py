import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.data.vocab import MAX_WORD_LENGTH, load_word_list, read_words


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
