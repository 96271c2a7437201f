import pytest
from torch import nn

from clearhead.insight.doctor.call_plan import call
from clearhead.insight.doctor.causality import check_empty_rows
from clearhead.insight.doctor.padding import groups, solve


def found_in(module):
    called = call(module, None, None)
    solved = [solve(called, group)[0] for group in groups(called)]
    return check_empty_rows(called.subject, [group for group in solved if group.encoding])


@pytest.mark.parametrize("attention", ["Attention", "Safe"])
def test_finite_rows_are_fine(ward, attention):
    assert found_in(ward.Encoder(getattr(ward, attention))).verdict == "fine"


@pytest.mark.parametrize(
    ("attention", "what"),
    [("Infinite", "the answer has NaN when attention_mask"), ("NanBackwards", "a gradient is NaN")],
)
def test_nan_is_found_forwards_and_backwards(ward, attention, what):
    found = found_in(ward.Encoder(getattr(ward, attention)))
    assert found.verdict == "fault"
    assert what in found.text


def test_one_query_that_sees_nothing_is_enough(ward):
    assert found_in(ward.Additive()).verdict == "fault"


def test_an_example_of_padding_only_is_tried_where_ids_make_the_mask(ward):
    assert found_in(ward.ByPaddingId()).verdict == "fine"
    model = ward.ByPaddingId()
    model.block = ward.Block(ward.Infinite)
    assert "when an example is padding only (id 0)" in found_in(model).text


@pytest.mark.parametrize(("attention", "verdict"), [("Attention", "fine"), ("Infinite", "fault")])
def test_a_source_of_padding_only_is_tried_too(ward, attention, verdict):
    class Translator(nn.Module):
        def __init__(self):
            super().__init__()
            self.source, self.target = nn.Embedding(11, 8, padding_idx=0), nn.Embedding(11, 8)
            self.attention = getattr(ward, attention)()

        def forward(self, src, tgt):
            x = self.attention(self.source(src), (src == 0)[:, None, None, :])
            return self.target(tgt) + x.mean(1, keepdim=True)

    found = found_in(Translator())
    assert found.verdict == verdict
    assert ("NaN when src of an example is padding only (id 0)" in found.text) == (verdict == "fault")


def test_a_mean_over_no_tokens_is_told_from_a_softmax_over_none(ward):
    class Pooled(ward.ByPaddingId):
        def forward(self, ids):
            real = (ids != 0)[..., None]
            return (super().forward(ids) * real).sum(1) / real.sum(1)

    found = found_in(Pooled())
    assert found.verdict == "fault"
    assert "a mean over no tokens? divide by their number, clamp(min=1)" in found.text


def test_torch_nn_is_a_warning_with_a_way_out(ward):
    found = found_in(ward.OfTorch())
    assert found.verdict == "warning"
    assert "need_weights=False" in found.text
    assert found_in(ward.OfTorch(need_weights=False)).verdict == "fine"
    assert found_in(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)).verdict == "fine"


def test_torch_nn_is_told_where_ids_make_the_mask(ward):
    class ByIds(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.inner = nn.Embedding(11, 8, padding_idx=0), ward.OfTorch()

        def forward(self, ids):
            return self.inner(self.tokens(ids), key_padding_mask=ids == 0)

    assert found_in(ByIds()).verdict == "warning"


def test_without_a_mask_it_is_not_judged(ward):
    assert found_in(ward.GPT()).verdict == "not checked"
