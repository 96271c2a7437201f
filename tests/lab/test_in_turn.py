import torch

from clearhead.lab.lstm import TRANSFORMER
from clearhead.lab.sequential_depth import decoder_passes, sequential_operations, untrained_models

DEEP = 3_000


def test_each_operation_after_another_counts_and_those_side_by_side_once():
    x = torch.ones(2, requires_grad=True)
    one = sequential_operations(x.exp())
    assert sequential_operations(x.exp().sin()) == one + 1
    assert sequential_operations(x.exp() + x.sin()) == one + 1
    assert sequential_operations(x.exp().sin().cos() + x) == one + 3


def test_a_chain_may_be_longer_than_python_may_nest():
    y = torch.ones(1, requires_grad=True)
    for _ in range(DEEP):
        y = y * 1.0 + y
    assert sequential_operations(y) >= 2 * DEEP


def test_generation_takes_a_decoder_pass_for_each_token():
    model = untrained_models(16, 1.0, seed=0)[TRANSFORMER]
    assert [decoder_passes(model, length) for length in (3, 9)] == [3, 9]
