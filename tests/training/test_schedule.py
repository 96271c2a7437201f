import math

import pytest

from clearhead.training.config import OptimizerConfig
from clearhead.training.loop import lr_multiplier


def at(step, **fields):
    return lr_multiplier(step, 110, OptimizerConfig(warmup=10, **fields))


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_the_warm_up_rises_in_equal_steps_to_1(schedule):
    assert [at(step, schedule=schedule) for step in range(10)] == [(step + 1) / 10 for step in range(10)]
    assert at(10, schedule=schedule) == 1


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
@pytest.mark.parametrize("final", [0.0, 0.1])
def test_it_ends_at_the_final_share_and_never_rises_on_the_way(schedule, final):
    values = [at(step, schedule=schedule, final_lr_fraction=final) for step in range(10, 111)]
    assert values[-1] == pytest.approx(final)
    assert values == sorted(values, reverse=True)
    assert values[50] == pytest.approx((1 + final) / 2)
    assert at(500, schedule=schedule, final_lr_fraction=final) == pytest.approx(final)


def test_closed_forms():
    assert at(35, schedule="cosine") == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    assert at(35, schedule="linear") == pytest.approx(0.75)
    assert at(35, schedule="constant", final_lr_fraction=0.1) == 1


def test_a_warm_up_as_long_as_training_is_no_division_by_zero():
    assert lr_multiplier(4, 5, OptimizerConfig(warmup=5)) == 1
    assert lr_multiplier(0, 1, OptimizerConfig()) == 1
