import pytest
import torch
import torch.nn.functional as F
from torch import nn

from clearhead import examine
from clearhead.insight.doctor.call_plan import call
from clearhead.insight.doctor.padding import check_padding, groups, solve, with_required_masks


def found_in(module):
    called = with_required_masks(call(module, None, None))
    return check_padding(called, [solve(called, group) for group in groups(called)])


def worst(module):
    findings = found_in(module)
    return next((finding for finding in findings if finding.verdict == "fault"), findings[0])


@pytest.mark.parametrize("attention", ["Attention", "Infinite", "Safe", "Unseen"])
def test_a_mask_that_hides_is_fine_and_its_polarity_is_told(ward, attention):
    found = worst(ward.Encoder(getattr(ward, attention)))
    assert found.verdict == "fine"
    assert "(attention_mask: (B,K), True = may attend)" in found.text


def test_torch_nn_means_the_opposite(ward):
    assert "(key_padding_mask: (B,K), True = hidden)" in worst(ward.OfTorch()).text


@pytest.mark.parametrize(
    ("model", "what"),
    [
        ("InvertedPadding", "inverted: by its name attention_mask means 1 = may attend"),
        ("RowsHidden", "hide keys (columns)"),
        ("DroppedPadding", "attention_mask changes nothing"),
        ("Pooled", "output 0 moves by"),
    ],
)
def test_each_planted_fault_is_found(ward, model, what):
    found = worst(getattr(ward, model)())
    assert found.verdict == "fault"
    assert what in found.text


def test_the_hidden_token_and_the_output_are_named(ward):
    assert worst(ward.RowsHidden()).text.startswith("output ")
    assert "when the hidden token " in worst(ward.RowsHidden()).text


def test_a_mask_after_the_softmax_is_told(ward):
    assert "the mask comes after the softmax" in worst(ward.Encoder(ward.LateMask)).text


def test_pooling_without_the_padding_is_fine(ward):
    assert worst(ward.PooledRightly()).verdict == "fine"


def test_an_encoders_padding_must_be_hidden_from_the_decoder_too(ward):
    assert {finding.verdict for finding in found_in(ward.Annotated())} == {"fine"}
    assert "output" in worst(ward.Annotated(leaks=True)).text


def test_masks_of_pairs_hide_a_source_together(ward):
    assert {finding.verdict for finding in found_in(ward.OfPairs())} == {"fine"}
    for passed in (("source",), ("memory",)):
        found = worst(ward.OfPairs(passed))
        assert found.verdict == "fault"
        assert "padding leaks through source_mask and memory_mask" in found.text
    assert "source_mask and memory_mask changes nothing" in worst(ward.OfPairs(())).text


def test_a_mask_of_a_memory_is_tried_by_itself(ward):
    (found,) = [finding for finding in found_in(ward.Reading()) if "memory" in finding.text]
    assert found.text.endswith("(memory_mask: (Q,K), True = hidden)")
    assert "memory_mask changes nothing" in worst(ward.Reading(passed=False)).text


def test_a_mask_of_a_memory_may_mean_something_else_where_the_encoder_has_none(ward):
    class Across(ward.OfPairs):
        def forward(self, source, target, memory_mask=None):
            return super().forward(source, target, memory_mask=memory_mask)

    assert "or is memory_mask not meant for padding?" in found_in(Across())[0].text
    assert {finding.verdict for finding in found_in(Across())} == {"warning"}
    assert worst(Across(())).verdict == "fault"


def test_a_source_without_a_mask_is_told(ward):
    class Unmasked(ward.Reading):
        def forward(self, x, memory, mask=None):
            return super().forward(x, memory, mask)

    assert [(found.verdict, "no mask of memory" in found.text) for found in found_in(Unmasked())] == [
        ("fine", False),
        ("not checked", True),
    ]


def test_lengths_are_a_mask_as_well():
    class Lengths(nn.Module):
        """The mean of the tokens, without padding or with it."""

        def __init__(self, right=True):
            super().__init__()
            self.linear, self.right = nn.Linear(4, 4), right

        def forward(self, x, lengths=None):
            x = self.linear(x)
            if lengths is None:
                return x.mean(1)
            real = (x.new_ones(x.shape[:2]).cumsum(1) <= lengths[:, None])[..., None]
            return (x * real).sum(1) / lengths[:, None] if self.right else x.sum(1) / lengths[:, None]

    assert "(lengths: real tokens)" in worst(Lengths()).text
    found = worst(Lengths(right=False))
    assert found.verdict == "fault"
    assert "when the hidden token" in found.text


def test_a_padding_id_promises_that_it_means_nothing(ward):
    assert worst(ward.ByPaddingId()).verdict == "fine"
    assert "padding leaks; hide the keys where ids == 0" in worst(ward.ByPaddingId(masked=False)).text


def test_a_padding_id_of_a_source(ward):
    class Written(nn.Module):
        def __init__(self, masked):
            super().__init__()
            self.inner, self.masked = ward.Annotated(), masked
            self.inner.tokens = nn.Embedding(11, 8, padding_idx=0)

        def forward(self, src, tgt):
            real = (src != 0 if self.masked else torch.ones_like(src).bool())[:, None]
            return self.inner(src, tgt, real, torch.ones(len(tgt), tgt.shape[1], tgt.shape[1]).tril())

    assert "in src moves no output" in next(found.text for found in found_in(Written(True)) if "in src" in found.text)
    assert worst(Written(False)).verdict == "fault"


def test_without_a_mask_there_is_nothing_to_check(ward):
    assert worst(ward.GPT()).verdict == "not checked"


def test_required_masks_are_written_as_the_module_means_them(ward):
    called = with_required_masks(call(ward.Annotated(), None, None))
    assert {encoding.meaning for encoding in called.subject.plan.masks.values()} == {"may"}


def test_a_required_mask_is_written_so_that_tokens_are_seen_even_if_it_comes_late(ward):
    class Required(ward.Generic):
        def forward(self, x, mask):
            return super().forward(x, mask.clone())

    called = with_required_masks(call(Required(ward.LateMask), None, None))
    assert {encoding.meaning for encoding in called.subject.plan.masks.values()} <= {"may", "ones"}
    report = examine(Required(ward.LateMask))
    assert "gradient" not in {finding.check for finding in report.faults}
    assert "after the softmax" in report["causality"].text


def test_a_query_that_sees_nothing_is_told_with_a_cure(ward):
    class Both(ward.Encoder):
        """Hides rows and columns."""

        def hidden(self, attention_mask):
            return (attention_mask[:, None, None, :] == 0) | (attention_mask[:, None, :, None] == 0)

    assert worst(Both()).verdict == "fine"
    assert "give such rows zeros" in worst(Both(ward.Infinite)).text


@pytest.mark.parametrize("sides", [(1, 0), (0, 1)])
def test_a_token_that_is_added_moves_the_outputs_of_hidden_ones(ward, sides):
    """As a class token does, before the others or behind them."""

    class Added(ward.Encoder):
        def forward(self, input_ids, attention_mask=None):
            real = None if attention_mask is None else F.pad(attention_mask, sides, value=1)
            return super().forward(F.pad(input_ids, sides, value=1), real)

    class Leaking(Added):
        hidden = ward.RowsHidden.hidden

    assert worst(Added()).verdict == "fine"
    assert worst(Leaking()).verdict == "fault"


def test_a_mask_of_pairs_for_all_examples_will_do():
    class OfPairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x, mask=None):
            return x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]

    assert "mask: (Q,K), True = hidden" in worst(OfPairs()).text


def test_a_sum_may_rely_on_rows_of_zeros():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.head = nn.Embedding(11, 8, padding_idx=0), nn.Linear(8, 3)

        def forward(self, ids):
            return self.head(self.tokens(ids).sum(1))

    assert worst(Bag()).verdict == "fine"
