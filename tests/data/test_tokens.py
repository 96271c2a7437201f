import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.data.vocab import BOS, EOS, IGNORE_INDEX, PAD, SPECIAL_TOKENS, Vocabulary

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
