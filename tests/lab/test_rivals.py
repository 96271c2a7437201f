import pytest
import torch

from clearhead.lab.lstm import MODEL_NAMES, build_seq2seq, spread


@pytest.mark.parametrize("width", [16, 32, 64])
@pytest.mark.parametrize(("src_vocab_size", "tgt_vocab_size"), [(13, 13), (32, 42)])
def test_all_three_are_of_one_size(width, src_vocab_size, tgt_vocab_size):
    assert 1 <= spread([build_seq2seq(name, width, src_vocab_size, tgt_vocab_size) for name in MODEL_NAMES]) < 1.05


def test_models_of_different_sizes_are_told_apart():
    assert spread([build_seq2seq(name, width) for name, width in zip(MODEL_NAMES, (16, 32, 32), strict=True)]) > 2


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_each_answers_for_every_target_token(name):
    torch.manual_seed(0)
    source, target = torch.randint(13, (2, 5)), torch.randint(9, (2, 4))
    assert build_seq2seq(name, 16, 13, 9)(source, target).shape == (2, 4, 9)
