import pytest
import torch

from clearhead.data.datasets import DataConfig, load_dataset
from clearhead.data.vocab import BOS, EOS, IGNORE_INDEX, PAD, Vocabulary


@pytest.fixture
def data(tmp_path):
    (tmp_path / "names.txt").write_text(
        "\n".join(f"{a}{b}{c}"[: 2 + (c == "k")] for a in "abc" for b in "xyz" for c in "kl")
    )
    return load_dataset(DataConfig(name="words", file=str(tmp_path / "names.txt"), validation=2), seed=0)


def test_targets_are_the_inputs_shifted_by_one(data):
    inputs, targets = data.train.get_batch(torch.arange(len(data.train)))
    assert (inputs[:, 0] == BOS).all()
    for given, asked in zip(inputs.tolist(), targets.tolist(), strict=True):
        word = [i for i in given[1:] if i != PAD]
        assert [i for i in asked if i != IGNORE_INDEX] == [*word, EOS]
    assert torch.equal(data.train.lengths[:, 0], (inputs != PAD).sum(1))


def test_parts_have_no_common_word(data):
    known = Vocabulary(data.vocab)
    seen = [
        "".join(known.decode(row))
        for part in (data.train, data.validation, data.test)
        for row in part.get_batch(torch.arange(len(part)))[0].tolist()
    ]
    assert len(seen) == len(set(seen)) == 18
    assert len(data.validation) == 2
    assert data.vocab == data.classes == Vocabulary.with_special_tokens("abckxyz").tokens


def test_the_embedded_words_are_there_without_a_file():
    data = load_dataset(DataConfig(name="words", limit=100), seed=0)
    assert (len(data.train), len(data.validation)) == (100, 1000)
    assert len(data.vocab) == 29
