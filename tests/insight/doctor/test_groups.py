from torch import nn

from clearhead.insight.doctor.call_plan import call
from clearhead.insight.doctor.padding import groups


def grouped(module):
    return [(group.sequence, group.names) for group in groups(call(module, None, None))]


def test_masks_of_one_sequence_belong_together(ward):
    assert grouped(nn.Transformer(8, 2, 1, 1, 16, batch_first=True)) == [
        ("src", ("src_key_padding_mask", "memory_key_padding_mask")),
        ("tgt", ("tgt_key_padding_mask",)),
    ]
    assert grouped(ward.OfPairs()) == [("source", ("source_mask", "memory_mask")), ("target", ("target_mask",))]


def test_a_mask_of_a_memory_stands_alone_where_the_memory_is_given(ward):
    assert grouped(ward.Reading()) == [("memory", ("memory_mask",)), ("x", ("mask",))]


def test_no_mask_no_group(ward):
    assert grouped(ward.GPT()) == []
