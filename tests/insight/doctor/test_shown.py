import pytest
import torch

from clearhead.insight.doctor.call_plan import call
from clearhead.insight.doctor.scores import AttentionPattern, check_rows, patterns

ONES = torch.ones(5, 5)


def with_pattern(sees, late=False):
    weights = torch.rand(2, 2, 5, 5) + 0.1
    weights = (weights / weights.sum(-1, keepdim=True)) * sees
    return AttentionPattern(
        "a", weights if late else weights / weights.sum(-1, keepdim=True).clamp(min=1e-9), False, True
    )


@pytest.mark.parametrize(
    ("sees", "reach"),
    [
        (ONES.tril(), "causal"),
        (ONES.tril(1), "one too far"),
        (ONES.tril(-1), "not itself"),
        (ONES.tril(-1) + ONES * (torch.arange(5)[:, None] == 0), "not itself"),
        (ONES.triu(), "inverted"),
        (ONES.triu(1), "inverted"),
        (ONES, "open"),
        (torch.eye(5), "other"),
    ],
)
def test_how_far_weights_reach(sees, reach):
    assert with_pattern(sees).reach == reach


def test_a_mask_after_the_softmax_leaves_holes_in_the_sum():
    assert with_pattern(ONES.tril(), late=True).is_masked_late
    assert not with_pattern(ONES.tril()).is_masked_late
    assert not with_pattern(ONES).is_masked_late
    mixed = AttentionPattern("a", torch.rand(1, 1, 5, 5) / 5, False, True)  # sums are off, and nothing is hidden
    assert not mixed.is_masked_late


def test_rows_that_see_nothing_do_not_count():
    shows = with_pattern(ONES.tril(-1))
    assert shows.sums == pytest.approx((1.0, 1.0))


def test_the_weights_of_every_layer_are_seen(ward):
    layers = patterns(call(ward.GPT(), None, None).subject)
    assert [layer.address for layer in layers] == ["blocks.0.attention", "blocks.1.attention"]
    assert {layer.reach for layer in layers} == {"causal"}
    assert all(layer.is_finite and not layer.is_torch_nn for layer in layers)
    assert patterns(call(ward.GPT(ward.Unseen), None, None).subject) == []


@pytest.mark.parametrize(
    ("attention", "verdict"), [("Attention", "fine"), ("LateMask", "fault"), ("Unseen", "not checked")]
)
def test_rows_must_sum_to_one(ward, attention, verdict):
    assert check_rows(call(ward.GPT(getattr(ward, attention)), None, None).subject).verdict == verdict


def test_other_sums_are_a_warning(ward):
    class Doubled(ward.Attention):
        def weights(self, scores, hidden):
            return 2 * super().weights(scores, hidden)

    finding = check_rows(call(ward.GPT(Doubled), None, None).subject)
    assert finding.verdict == "warning"
    assert "sum to 2.00 to 2.00, not 1" in finding.text
