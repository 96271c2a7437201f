import torch

from clearhead.insight.doctor.call_plan import call
from clearhead.insight.doctor.padding import Dependency, dependency, roughly_changed


def test_a_causal_model_moves_forwards_only(ward):
    subject = call(ward.GPT(), None, None).subject
    found = dependency(subject, subject.draw(0))
    assert torch.equal(found.amounts > 0, torch.ones(7, 7, dtype=torch.bool).tril())
    assert found.is_finite
    assert not found.later.any()
    assert found.earlier.any()


def test_some_places_of_one_sequence(ward):
    subject = call(ward.Annotated(), None, None).subject
    assert dependency(subject, subject.draw(0), name="src", places=[0, 8]).amounts.shape == (7, 2)


def test_the_pair_that_moves_most_is_named():
    amounts = torch.zeros(3, 3)
    amounts[0, 2] = 0.25
    found = Dependency(amounts, True)
    assert found.worst(found.later) == "output 0 moves by 0.25 when token 2 is changed"


def test_float32_inside_is_no_movement_where_sums_have_another_order():
    x = torch.rand(5, 7, 3, dtype=torch.float64)
    assert not roughly_changed(x, x + 1e-7).any()
    assert roughly_changed(x, x + 1e-3).all()
