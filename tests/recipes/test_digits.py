import pytest
import torch

from clearhead.models.config import build_model
from clearhead.recipes import config_of
from clearhead.tasks.objectives import BinaryClassification, Classification, Regression


@pytest.mark.parametrize(
    ("question", "objective"),
    [("most-common", Classification), ("repeat", BinaryClassification), ("sum", Regression)],
)
def test_objective_and_head_follow_the_question(question, objective):
    config = config_of("digits", {"data.question": question})
    assert type(config.task.objective) is objective
    data = config.data.load(0)
    ids, targets = data.test.get_batch(torch.arange(6))
    assert ids.shape == (6, config.data.context_length)
    from clearhead.data.batches import Batch

    outputs = build_model(config.model)(ids)
    batch = Batch(ids, targets, None, None, 6)
    assert objective().correct(outputs, batch).shape == (6,)
    assert objective().loss(outputs, batch).isfinite()


def test_the_repeat_question_defaults_to_8_digits_and_rejects_16():
    assert config_of("digits", {"data.question": "repeat"}).data.context_length == 8
    assert config_of("digits", {"data.question": "repeat", "data.length": 5}).model.context_length == 5
    with pytest.raises(ValueError, match="2 to 10 digits"):
        config_of("digits", {"data.question": "repeat", "data.length": 16})


def test_length_zero_raises():
    with pytest.raises(ValueError, match="length must be"):
        config_of("digits", {"data.length": 0})


def test_an_unknown_question_raises():
    with pytest.raises(ValueError, match="question must be one of most-common, repeat, sum, got 'largest'"):
        config_of("digits", {"data.question": "largest"})
