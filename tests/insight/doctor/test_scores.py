import pytest
import torch
from torch import nn

from clearhead.insight.doctor.call_plan import call
from clearhead.insight.doctor.scores import check_scores


def found_in(module):
    return check_scores(call(module, None, None).subject)


@pytest.mark.parametrize("attention", ["Attention", "ScaledQueries"])
def test_the_usual_scale_is_fine_wherever_it_is_applied(ward, attention):
    (found,) = found_in(ward.GPT(getattr(ward, attention)))
    assert found.verdict == "fine"


def test_a_missing_scale_is_a_warning(ward):
    (found,) = found_in(ward.GPT(ward.Unscaled))
    assert found.verdict == "warning"
    assert "multiplied by 1, not by 1/sqrt(4) = 0.5" in found.text


def test_the_scale_of_the_kernel_is_seen():
    class Kernel(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.linear, self.scale = nn.Linear(8, 24), scale

        def forward(self, x):
            q, k, v = self.linear(x)[:, None].chunk(3, -1)
            return nn.functional.scaled_dot_product_attention(q, k, v, scale=self.scale)[:, 0]

    assert found_in(Kernel(None))[0].verdict == "fine"
    assert "multiplied by 0.1," in found_in(Kernel(0.1))[0].text


def test_keys_in_the_place_of_queries_are_a_warning(ward):
    (found,) = found_in(ward.GPT(ward.Swapped, depth=1))
    assert (found.check, found.verdict) == ("keys and queries", "warning")
    assert "what blocks.0.attention.key makes asks, and blocks.0.attention.query answers" in found.text


def test_a_softmax_over_classes_is_none_of_its_business(ward):
    class Classifier(ward.GPT):
        def forward(self, idx):
            return (super().forward(idx) @ torch.ones(11, 11)).softmax(-1)

    (found,) = found_in(Classifier())
    assert found.verdict == "fine"


def test_what_is_not_seen_is_not_judged(ward):
    assert found_in(ward.GPT(ward.Unseen))[0].verdict == "not checked"


@pytest.mark.parametrize(("scale", "verdict"), [(1.0, "fine"), (None, "warning")])
def test_queries_that_are_scaled_before_the_kernel_count(scale, verdict):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = self.linear(x)[:, None].chunk(3, -1)
            return nn.functional.scaled_dot_product_attention(q * 8**-0.5, k, v, scale=scale)[:, 0]

    assert found_in(Scaled())[0].verdict == verdict
