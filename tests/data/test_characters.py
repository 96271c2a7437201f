import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.data.vocab import BYTES, read_text, text_to_tokens, text_vocab, tokens_to_text


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
