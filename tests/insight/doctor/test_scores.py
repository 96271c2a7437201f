import pytest
import torch
from torch import nn

from clearhead.insight.doctor.call_plan import prepare
from clearhead.insight.doctor.scores import AttentionPattern, attention_patterns, check_scale, check_weights

ONES = torch.ones(5, 5)


def pattern_of(visible, masked_after_softmax=False):
    weights = torch.rand(2, 2, 5, 5) + 0.1
    weights = (weights / weights.sum(-1, keepdim=True)) * visible
    if not masked_after_softmax:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)
    return AttentionPattern("a", weights, False, True)


@pytest.mark.parametrize(
    ("visible", "visibility"),
    [
        (ONES.tril(), "causal"),
        (ONES.tril(1), "sees next"),
        (ONES.tril(-1), "excludes self"),
        (ONES.tril(-1) + ONES * (torch.arange(5)[:, None] == 0), "excludes self"),
        (ONES.triu(), "inverted"),
        (ONES.triu(1), "inverted"),
        (ONES, "full"),
        (torch.eye(5), "other"),
    ],
)
def test_visibility_is_read_from_the_weights(visible, visibility):
    assert pattern_of(visible).visibility == visibility


def test_mask_after_softmax_lowers_the_row_sums():
    assert pattern_of(ONES.tril(), masked_after_softmax=True).is_masked_after_softmax
    assert not pattern_of(ONES.tril()).is_masked_after_softmax
    assert not pattern_of(ONES).is_masked_after_softmax
    mixed = AttentionPattern("a", torch.rand(1, 1, 5, 5) / 5, False, True)  # low sums, but no key is masked
    assert not mixed.is_masked_after_softmax


def test_row_sums_ignore_fully_masked_rows():
    assert pattern_of(ONES.tril(-1)).row_sums == pytest.approx((1.0, 1.0))


def test_patterns_of_every_layer_are_found(zoo):
    patterns = attention_patterns(prepare(zoo.GPT(), None, None))
    assert [pattern.name for pattern in patterns] == ["blocks.0.attention", "blocks.1.attention"]
    assert {pattern.visibility for pattern in patterns} == {"causal"}
    assert all(pattern.is_finite and not pattern.is_torch_nn for pattern in patterns)
    assert len(attention_patterns(prepare(zoo.GPT(zoo.CustomSoftmax), None, None))) == 2


@pytest.mark.parametrize(
    ("attention", "verdict"), [("Attention", "fine"), ("MaskAfterSoftmax", "fault"), ("CustomSoftmax", "fine")]
)
def test_rows_must_sum_to_one(zoo, attention, verdict):
    assert check_weights(prepare(zoo.GPT(getattr(zoo, attention)), None, None)).verdict == verdict


def test_other_row_sums_are_a_warning(zoo):
    class Doubled(zoo.Attention):
        def weights(self, scores, masked):
            return 2 * super().weights(scores, masked)

    finding = check_weights(prepare(zoo.GPT(Doubled), None, None))
    assert finding.verdict == "warning"
    assert "sum to 2.00 to 2.00" in finding.text


def scale_findings(module):
    return check_scale(prepare(module, None, None))


class Kernel(nn.Module):
    def __init__(self, query_scale=1.0, scale=None):
        super().__init__()
        self.linear, self.query_scale, self.scale = nn.Linear(8, 24), query_scale, scale

    def forward(self, x):
        q, k, v = self.linear(x)[:, None].chunk(3, -1)
        q = q if self.query_scale == 1 else q * self.query_scale
        return nn.functional.scaled_dot_product_attention(q, k, v, scale=self.scale)[:, 0]


@pytest.mark.parametrize("attention", ["Attention", "ScaledQueries"])
def test_usual_scale_is_fine_wherever_it_is_applied(zoo, attention):
    (finding,) = scale_findings(zoo.GPT(getattr(zoo, attention)))
    assert finding.verdict == "fine"


def test_missing_scale_is_a_warning(zoo):
    (finding,) = scale_findings(zoo.GPT(zoo.Unscaled))
    assert finding.verdict == "warning"
    assert "multiplied by 1, not by 1/sqrt(4) = 0.5" in finding.text


def test_scale_argument_of_sdpa_is_read():
    assert scale_findings(Kernel())[0].verdict == "fine"
    assert "multiplied by 0.1," in scale_findings(Kernel(scale=0.1))[0].text


@pytest.mark.parametrize(("scale", "verdict"), [(1.0, "fine"), (None, "warning")])
def test_queries_scaled_before_sdpa_count(scale, verdict):
    assert scale_findings(Kernel(query_scale=8**-0.5, scale=scale))[0].verdict == verdict


def test_swapped_keys_and_queries_are_a_warning(zoo):
    (finding,) = scale_findings(zoo.GPT(zoo.SwappedQueryKey, depth=1))
    assert (finding.check, finding.verdict) == ("keys and queries", "warning")
    assert "output of blocks.0.attention.key is used as queries" in finding.text
    assert "that of blocks.0.attention.query as keys" in finding.text


def test_softmax_over_classes_is_ignored(zoo):
    class Classifier(zoo.GPT):
        def forward(self, idx):
            return (super().forward(idx) @ torch.ones(11, 11)).softmax(-1)

    (finding,) = scale_findings(Classifier())
    assert finding.verdict == "fine"


def test_scale_of_an_unrecognized_softmax_is_not_checked(zoo):
    assert scale_findings(zoo.GPT(zoo.CustomSoftmax))[0].verdict == "not checked"
