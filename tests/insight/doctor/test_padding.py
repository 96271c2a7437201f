import pytest
import torch
import torch.nn.functional as F
from torch import nn

from clearhead import examine
from clearhead.insight.doctor.call_plan import prepare
from clearhead.insight.doctor.padding import (
    check_fully_masked_rows,
    check_padding,
    find_convention,
    mask_groups,
    with_required_masks,
)


def padding_findings(module):
    module = with_required_masks(prepare(module, None, None))
    return check_padding(module, [find_convention(module, group) for group in mask_groups(module)])


def worst(module):
    findings = padding_findings(module)
    return next((finding for finding in findings if finding.verdict == "fault"), findings[0])


@pytest.mark.parametrize("attention", ["Attention", "InfiniteMask", "SafeMask", "CustomSoftmax"])
def test_working_mask_is_fine_and_its_convention_is_reported(zoo, attention):
    finding = worst(zoo.Encoder(getattr(zoo, attention)))
    assert finding.verdict == "fine"
    assert "(attention_mask: (B,K), True = may attend)" in finding.text


def test_convention_of_torch_nn_is_found(zoo):
    assert "(key_padding_mask: (B,K), True = masked)" in worst(zoo.TorchAttention()).text


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("InvertedPaddingMask", "attention_mask is inverted: by convention it means 1 = may attend"),
        ("MasksQueries", "mask keys (columns)"),
        ("PaddingMaskDropped", "no effect of attention_mask"),
        ("MeanPooled", "output 0 changes by"),
    ],
)
def test_faulty_padding_masks_are_found(zoo, model, text):
    finding = worst(getattr(zoo, model)())
    assert finding.verdict == "fault"
    assert text in finding.text


def test_leak_names_the_output_and_the_masked_token(zoo):
    assert worst(zoo.MasksQueries()).text.startswith("output ")
    assert "when the masked token " in worst(zoo.MasksQueries()).text


def test_mask_after_softmax_is_found(zoo):
    assert "the mask is applied after the softmax" in worst(zoo.Encoder(zoo.MaskAfterSoftmax)).text


def test_masked_mean_is_fine(zoo):
    assert worst(zoo.MaskedMeanPooled()).verdict == "fine"


def test_source_padding_must_be_masked_in_cross_attention(zoo):
    assert {finding.verdict for finding in padding_findings(zoo.SourceTargetMasks())} == {"fine"}
    assert "output" in worst(zoo.SourceTargetMasks(leaks=True)).text


def test_source_and_memory_masks_work_together(zoo):
    assert {finding.verdict for finding in padding_findings(zoo.MaskedTransformer())} == {"fine"}
    for applied in (("source",), ("memory",)):
        finding = worst(zoo.MaskedTransformer(applied))
        assert finding.verdict == "fault"
        assert "padding leaks through source_mask and memory_mask" in finding.text
    assert "no effect of source_mask and memory_mask" in worst(zoo.MaskedTransformer(())).text


def test_memory_mask_of_a_decoder_is_checked_alone(zoo):
    (finding,) = [finding for finding in padding_findings(zoo.MemoryDecoder()) if "memory" in finding.text]
    assert finding.text.endswith("(memory_mask: (Q,K), True = masked)")
    assert "no effect of memory_mask" in worst(zoo.MemoryDecoder(applies_mask=False)).text


def test_memory_mask_beside_an_unmasked_encoder_is_a_warning(zoo):
    class CrossAttentionOnly(zoo.MaskedTransformer):
        def forward(self, source, target, memory_mask=None):
            return super().forward(source, target, memory_mask=memory_mask)

    assert "is memory_mask not meant for padding?" in padding_findings(CrossAttentionOnly())[0].text
    assert {finding.verdict for finding in padding_findings(CrossAttentionOnly())} == {"warning"}
    assert worst(CrossAttentionOnly(())).verdict == "fault"


def test_source_without_a_mask_is_not_checked(zoo):
    class Unmasked(zoo.MemoryDecoder):
        def forward(self, x, memory, mask=None):
            return super().forward(x, memory, mask)

    assert [(finding.verdict, "found for memory" in finding.text) for finding in padding_findings(Unmasked())] == [
        ("fine", False),
        ("not checked", True),
    ]


def test_lengths_are_checked_like_masks():
    class Lengths(nn.Module):
        """The mean over real tokens; with the fault, the sum includes padding."""

        def __init__(self, correct=True):
            super().__init__()
            self.linear, self.correct = nn.Linear(4, 4), correct

        def forward(self, x, lengths=None):
            x = self.linear(x)
            if lengths is None:
                return x.mean(1)
            real = (x.new_ones(x.shape[:2]).cumsum(1) <= lengths[:, None])[..., None]
            return (x * real).sum(1) / lengths[:, None] if self.correct else x.sum(1) / lengths[:, None]

    assert "(lengths: number of real tokens)" in worst(Lengths()).text
    finding = worst(Lengths(correct=False))
    assert finding.verdict == "fault"
    assert "when the masked token" in finding.text


def test_extra_padding_tokens_must_not_change_outputs(zoo):
    assert worst(zoo.PaddingIdMask()).verdict == "fine"
    assert "padding leaks; mask the keys where ids == 0" in worst(zoo.PaddingIdMask(use_mask=False)).text


def test_extra_padding_tokens_of_a_source_must_not_change_outputs(zoo):
    class SourcePadding(nn.Module):
        def __init__(self, use_mask):
            super().__init__()
            self.inner, self.use_mask = zoo.SourceTargetMasks(), use_mask
            self.inner.tok_embed = nn.Embedding(11, 8, padding_idx=0)

        def forward(self, src, tgt):
            real = (src != 0 if self.use_mask else torch.ones_like(src).bool())[:, None]
            return self.inner(src, tgt, real, torch.ones(len(tgt), tgt.shape[1], tgt.shape[1]).tril())

    (finding,) = [finding for finding in padding_findings(SourcePadding(True)) if "in src" in finding.text]
    assert "in src changes no output" in finding.text
    assert worst(SourcePadding(False)).verdict == "fault"


def test_sum_over_zero_rows_of_padding_is_fine():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.tok_embed, self.head = nn.Embedding(11, 8, padding_idx=0), nn.Linear(8, 3)

        def forward(self, ids):
            return self.head(self.tok_embed(ids).sum(1))

    assert worst(Bag()).verdict == "fine"


def test_model_without_mask_and_padding_id_is_not_checked(zoo):
    assert worst(zoo.GPT()).verdict == "not checked"


def polarities(module):
    plan = with_required_masks(prepare(module, None, None)).plan
    return {convention.polarity for convention in plan.masks.values()}


def test_required_masks_get_the_right_polarity(zoo):
    assert polarities(zoo.SourceTargetMasks()) == {"attend"}


def test_required_masks_after_softmax_get_a_polarity_that_shows_tokens(zoo):
    class Required(zoo.MaskedBlock):
        def forward(self, x, mask):
            return super().forward(x, mask.clone())

    assert polarities(Required(zoo.MaskAfterSoftmax)) <= {"attend", "ones"}
    report = examine(Required(zoo.MaskAfterSoftmax))
    assert "gradient" not in {finding.check for finding in report.faults}
    assert "after the softmax" in report["causality"].text


def test_fully_masked_queries_must_stay_finite(zoo):
    class MasksQueriesAndKeys(zoo.Encoder):
        def masked_keys(self, attention_mask):
            return (attention_mask[:, None, None, :] == 0) | (attention_mask[:, None, :, None] == 0)

    assert worst(MasksQueriesAndKeys()).verdict == "fine"
    assert "return zeros for such rows" in worst(MasksQueriesAndKeys(zoo.InfiniteMask)).text


@pytest.mark.parametrize("sides", [(1, 0), (0, 1)])
def test_added_tokens_shift_the_outputs(zoo, sides):
    """A class token before or after the others."""

    class ClassToken(zoo.Encoder):
        def forward(self, input_ids, attention_mask=None):
            real = None if attention_mask is None else F.pad(attention_mask, sides, value=1)
            return super().forward(F.pad(input_ids, sides, value=1), real)

    class Leaking(ClassToken):
        masked_keys = zoo.MasksQueries.masked_keys

    assert worst(ClassToken()).verdict == "fine"
    assert worst(Leaking()).verdict == "fault"


def test_attention_mask_without_batch_axis_is_accepted():
    class SharedMask(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x, mask=None):
            return x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]

    assert "mask: (Q,K), True = masked" in worst(SharedMask()).text


def group_names(module):
    return [(group.sequence, group.names) for group in mask_groups(prepare(module, None, None))]


def test_masks_of_one_sequence_form_a_group(zoo):
    assert group_names(nn.Transformer(8, 2, 1, 1, 16, batch_first=True)) == [
        ("src", ("src_key_padding_mask", "memory_key_padding_mask")),
        ("tgt", ("tgt_key_padding_mask",)),
    ]
    assert group_names(zoo.MaskedTransformer()) == [
        ("source", ("source_mask", "memory_mask")),
        ("target", ("target_mask",)),
    ]
    assert group_names(zoo.MemoryDecoder()) == [("memory", ("memory_mask",)), ("x", ("mask",))]
    assert group_names(zoo.GPT()) == []


def fully_masked(module):
    module = prepare(module, None, None)
    groups = [find_convention(module, group)[0] for group in mask_groups(module)]
    return check_fully_masked_rows(module, [group for group in groups if group.convention])


@pytest.mark.parametrize("attention", ["Attention", "SafeMask"])
def test_finite_fully_masked_rows_are_fine(zoo, attention):
    assert fully_masked(zoo.Encoder(getattr(zoo, attention))).verdict == "fine"


@pytest.mark.parametrize(
    ("attention", "text"),
    [("InfiniteMask", "the output is NaN when all tokens"), ("NanGradient", "a gradient is NaN")],
)
def test_nan_in_outputs_and_gradients_is_found(zoo, attention, text):
    finding = fully_masked(zoo.Encoder(getattr(zoo, attention)))
    assert finding.verdict == "fault"
    assert text in finding.text
    assert "(attention_mask)" in finding.text


def test_single_fully_masked_query_is_tried(zoo):
    assert fully_masked(zoo.AdditiveMask()).verdict == "fault"


def test_example_of_padding_ids_only_is_tried(zoo):
    assert fully_masked(zoo.PaddingIdMask()).verdict == "fine"
    model = zoo.PaddingIdMask()
    model.block = zoo.Block(zoo.InfiniteMask)
    assert "when an example is only padding (id 0)" in fully_masked(model).text


@pytest.mark.parametrize(("attention", "verdict"), [("Attention", "fine"), ("InfiniteMask", "fault")])
def test_source_of_padding_ids_only_is_tried(zoo, attention, verdict):
    class Translator(nn.Module):
        def __init__(self):
            super().__init__()
            self.src_embed, self.tgt_embed = nn.Embedding(11, 8, padding_idx=0), nn.Embedding(11, 8)
            self.attention = getattr(zoo, attention)()

        def forward(self, src, tgt):
            x = self.attention(self.src_embed(src), (src == 0)[:, None, None, :])
            return self.tgt_embed(tgt) + x.mean(1, keepdim=True)

    finding = fully_masked(Translator())
    assert finding.verdict == verdict
    assert ("NaN when src of an example is only padding (id 0)" in finding.text) == (verdict == "fault")


def test_mean_over_no_tokens_is_distinguished_from_an_empty_softmax(zoo):
    class MeanOfReal(zoo.PaddingIdMask):
        def forward(self, ids):
            real = (ids != 0)[..., None]
            return (super().forward(ids) * real).sum(1) / real.sum(1)

    finding = fully_masked(MeanOfReal())
    assert finding.verdict == "fault"
    assert "a mean over no tokens? Divide by their number with clamp(min=1)" in finding.text


def test_nan_of_torch_attention_is_a_warning(zoo):
    finding = fully_masked(zoo.TorchAttention())
    assert finding.verdict == "warning"
    assert "need_weights=False" in finding.text
    assert fully_masked(zoo.TorchAttention(need_weights=False)).verdict == "fine"
    assert fully_masked(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)).verdict == "fine"


def test_nan_of_torch_attention_with_a_mask_from_ids_is_a_warning(zoo):
    class MaskFromIds(nn.Module):
        def __init__(self):
            super().__init__()
            self.tok_embed, self.inner = nn.Embedding(11, 8, padding_idx=0), zoo.TorchAttention()

        def forward(self, ids):
            return self.inner(self.tok_embed(ids), key_padding_mask=ids == 0)

    assert fully_masked(MaskFromIds()).verdict == "warning"


def test_model_without_mask_has_no_fully_masked_rows(zoo):
    assert fully_masked(zoo.GPT()).verdict == "not checked"
