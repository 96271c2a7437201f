"""The data and the two models of `modern-parts`."""

import torch

from clearhead.data.vocab import BOS, EOS, IGNORE_INDEX
from clearhead.lab import learning
from clearhead.models.language import LanguageModel


def test_words_begin_with_bos_end_with_eos_and_have_no_loss_after_it():
    inputs, targets = learning.word_tensors(["cab", "abbreviation", "bee"])
    assert inputs.shape == (2, learning.WORD_LENGTH), "a word that does not fit is left out"
    c, a, b = learning.VOCAB.encode("cab")
    assert inputs[0, :5].tolist() == [BOS, c, a, b, EOS]
    assert targets[0, :5].tolist() == [c, a, b, EOS, IGNORE_INDEX]
    assert (targets[0, 4:] == IGNORE_INDEX).all()


def test_test_words_are_not_trained_on():
    (train, _), (test, _) = learning.word_data()
    assert len(test) > 1_000
    assert not {tuple(row) for row in train.tolist()} & {tuple(row) for row in test.tolist()}


def test_both_models_have_the_same_size_at_every_width():
    for width in (32, 64, 128):
        with torch.device("meta"):
            models = [
                LanguageModel.from_config(learning.model_config(name, width))
                for name in (learning.CLASSIC, learning.MODERN)
            ]
        assert learning.size_ratio(models) < 1.05


def test_an_untrained_model_is_about_as_good_as_guessing():
    torch.manual_seed(0)
    model = LanguageModel.from_config(learning.model_config(learning.MODERN, 32))
    assert 3.0 < learning.loss_on_test_words(model) < 4.5  # ln 29 = 3.37
