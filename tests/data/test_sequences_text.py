import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.data import user_files
from clearhead.data.sequences import encode_text
from clearhead.data.user_files import MAX_SYMBOLS
from clearhead.data.vocab import BOS, EOS, IGNORE_INDEX, PAD, Vocabulary, read_text
from clearhead.tasks.language import Text, Words

TEXT = "".join(chr(97 + i * i % 7) for i in range(500)) + "é\n"


@pytest.fixture
def file(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT, "utf-8")
    return str(tmp_path / "text.txt")


def text_of(data, ids):
    return "".join(data.vocab[i] for i in ids.tolist())


def test_targets_are_the_next_characters(file):
    data = Text(file=file, length=10).load(0)
    inputs, targets = data.train.get_batch(torch.arange(len(data.train)))
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    for start in (0, 7, len(data.train) - 1):
        assert text_of(data, inputs[start]) + text_of(data, targets[start, -1:]) == TEXT[start : start + 11]


def test_the_end_of_the_text_is_the_validation_split(file):
    data = Text(file=file, length=10).load(0)
    n_train = len(TEXT) * 9 // 10
    _, last = data.train.get_batch(torch.tensor([len(data.train) - 1]))
    assert text_of(data, last[0]) == TEXT[n_train - 10 : n_train]
    inputs, _ = data.validation.get_batch(torch.arange(len(data.validation)))
    assert text_of(data, inputs.flatten()) == TEXT[n_train : n_train + 50]
    assert len(data.test) == 0


def test_validation_limits_the_number_of_windows(file):
    data = Text(file=file, length=10, validation=2, limit=7).load(0)
    assert (len(data.train), len(data.validation)) == (7, 2)
    inputs, targets = data.validation.get_batch(torch.arange(2))
    assert text_of(data, inputs.flatten()) + text_of(data, targets[1, -1:]) == TEXT[-21:]
    assert len(Text(file=file, validation=0).load(0).validation) == 0


def test_byte_level_has_256_tokens(file):
    data = Text(file=file, length=10, level="byte").load(0)
    assert len(data.vocab) == 256
    assert data.train.get_batch(torch.tensor([0]))[0][0, 0] == ord(TEXT[0])


@pytest.mark.parametrize(("validation", "least"), [(1, 161), (1000, 161), (0, 17)])
def test_the_minimum_text_length_is_enforced(tmp_path, validation, least):
    config = Text(file=str(tmp_path / "short.txt"), length=16, validation=validation)
    (tmp_path / "short.txt").write_text(TEXT[: least - 1])
    with pytest.raises(ValueError, match=f"at least {least} characters for length=16, got {least - 1} in"):
        config.load(0)
    (tmp_path / "short.txt").write_text(TEXT[:least])
    assert len(config.load(0).train) >= 1


@given(st.lists(st.text()))
def test_ids_index_the_vocabulary(pieces):
    text = "".join(pieces)
    symbols = tuple(sorted(set(text)))
    assert [symbols[i] for i in encode_text(pieces, symbols).tolist()] == list(text)
    assert pieces == []


@pytest.mark.parametrize(
    ("n", "kind"), [(256, torch.uint8), (257, torch.int16), (32768, torch.int16), (32769, torch.int32)]
)
def test_ids_use_the_smallest_integer_dtype(n, kind):
    symbols = tuple(map(chr, range(0x10000, 0x10000 + n)))
    ids = encode_text(["".join(symbols)], symbols)
    assert ids.dtype == kind
    assert ids.long().equal(torch.arange(n))


def test_reading_in_chunks_preserves_multibyte_characters(tmp_path, monkeypatch):
    """Multibyte characters that cross a chunk boundary stay intact."""
    text = "aé€\N{GRINNING FACE}\r\n" * 50 + "€"
    (tmp_path / "x").write_text(text, "utf-8-sig", newline="")
    unchunked = read_text(str(tmp_path / "x"), "character")
    monkeypatch.setattr(user_files, "CHUNK_BYTES", 3)
    pieces = read_text(str(tmp_path / "x"), "character")
    assert "".join(pieces) == "".join(unchunked) == text
    assert len(pieces) > len(unchunked)
    data = (tmp_path / "x").read_bytes()
    (tmp_path / "x").write_bytes(data[:-1])  # in the middle of a character
    with pytest.raises(ValueError, match="must be text in UTF-8, got other bytes"):
        read_text(str(tmp_path / "x"), "character")


def test_too_many_distinct_characters_are_rejected(tmp_path):
    (tmp_path / "x").write_text("".join(map(chr, range(0x10000, 0x10000 + MAX_SYMBOLS + 1))), "utf-8")
    with pytest.raises(ValueError, match=r"at most 65,536 different characters, got 65,537 in .*x; try level=byte"):
        read_text(str(tmp_path / "x"), "character")


@pytest.fixture
def data(tmp_path):
    (tmp_path / "names.txt").write_text(
        "\n".join(f"{a}{b}{c}"[: 2 + (c == "k")] for a in "abc" for b in "xyz" for c in "kl")
    )
    return Words(file=str(tmp_path / "names.txt"), validation=2).load(0)


def test_word_targets_are_the_inputs_shifted_by_one(data):
    inputs, targets = data.train.get_batch(torch.arange(len(data.train)))
    assert (inputs[:, 0] == BOS).all()
    for row, target in zip(inputs.tolist(), targets.tolist(), strict=True):
        word = [i for i in row[1:] if i != PAD]
        assert [i for i in target if i != IGNORE_INDEX] == [*word, EOS]
    assert torch.equal(data.train.lengths[:, 0], (inputs != PAD).sum(1))


def test_word_splits_are_disjoint(data):
    known = Vocabulary(data.vocab)
    seen = [
        "".join(known.decode(row))
        for part in (data.train, data.validation, data.test)
        for row in part.get_batch(torch.arange(len(part)))[0].tolist()
    ]
    assert len(seen) == len(set(seen)) == 18
    assert len(data.validation) == 2
    assert data.vocab == data.classes == Vocabulary.with_special_tokens("abckxyz").tokens


def test_without_a_file_the_embedded_word_list_is_used():
    data = Words(limit=100).load(0)
    assert (len(data.train), len(data.validation)) == (100, 1000)
    assert len(data.vocab) == 29
