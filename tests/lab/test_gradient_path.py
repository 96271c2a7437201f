import pytest
import torch
from torch import nn

from clearhead.lab.lstm import VOCAB_SIZE, MODEL_NAMES, LSTM
from clearhead.lab.sequential_depth import input_gradient_norm, gradient_ratios, untrained_models


class OneInput(nn.Module):
    """Logits that depend on a single input, by a share that falls with the length."""

    def __init__(self, place):
        super().__init__()
        self.place = place

    def forward(self, source, target, *, inputs_embeds):
        logits = inputs_embeds[:, self.place, :VOCAB_SIZE] / inputs_embeds.shape[1]
        return logits[:, None].expand(-1, target.shape[1], -1)


def test_what_reaches_the_first_input_is_measured_and_nothing_else():
    random = torch.Generator()
    assert input_gradient_norm(OneInput(0), 5, VOCAB_SIZE, random.manual_seed(0)) > 0
    assert input_gradient_norm(OneInput(1), 5, VOCAB_SIZE, random.manual_seed(0)) == 0


def test_a_share_of_one_nth_is_found_as_such():
    one, tenth = gradient_ratios(OneInput(0), (100, 1000), VOCAB_SIZE, seed=0)  # logits so small that all answers are as likely
    assert one == 1
    assert tenth == pytest.approx(0.1, rel=0.02)


def test_each_further_token_costs_the_lstm_alone_a_factor():
    model = untrained_models(16, 1.0, seed=0)[LSTM]
    _, once, twice, four_times = gradient_ratios(model, (8, 16, 32, 64), 16, seed=0)
    assert twice < once**1.5
    assert four_times < twice**1.5


def test_gates_that_are_held_open_let_the_gradient_through():
    closed, opened = (gradient_ratios(untrained_models(16, forget_bias, 0)[LSTM], (4, 64), 16, 0)[-1] for forget_bias in (1.0, 8.0))
    assert opened > 0.1 > 1000 * closed


def test_the_seed_decides():
    one, same, other = (untrained_models(16, 1.0, seed)[MODEL_NAMES[0]].state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert not all(torch.equal(one[key], other[key]) for key in one)
