import math

import pytest
import torch

from clearhead import masks
from clearhead.insight.doctor.module_under_test import (
    LENGTHS,
    MEANINGS,
    OF_PAIRS,
    SHAPES,
    MaskConvention,
    is_turned,
    mask_conventions,
)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("meaning", MEANINGS)
def test_every_way_to_write_a_mask_says_the_same(shape, meaning):
    """Read back with our own rules, and spread over (B,Q,K)."""
    if "B" in shape and "Q" not in shape:
        seen = (torch.arange(4) < torch.tensor([[4], [2], [3]]))[:, None].expand(3, 4, 4)
    else:
        seen = masks.causal(4)[None].expand(3, 4, 4) if "B" not in shape else torch.rand(3, 4, 4) > 0.5
    written = MaskConvention(shape, meaning).write(seen, torch.float64)
    read = {
        "may": lambda: written,
        "hidden": lambda: ~written,
        "ones": lambda: written == 1,
        "added": lambda: masks.from_additive(written),
    }[meaning]()
    read = read.reshape(3, 1, 4) if shape == "(B,K)" else read.squeeze(1) if read.dim() == 4 else read
    assert torch.equal(read.expand(3, 4, 4), seen)
    assert not seen.all()


def test_a_mask_that_is_added_has_the_dtype_of_the_scores():
    written = MaskConvention("(Q,K)", "added").write(torch.ones(2, 3, 3, dtype=torch.bool).tril(), torch.float64)
    assert written.dtype == torch.float64
    assert written[0, 1] == -math.inf


def test_lengths_count_what_may_be_seen():
    seen = masks.padding([3, 1], 4)[:, 0].expand(2, 4, 4)
    assert LENGTHS.write(seen, torch.float32).tolist() == [3, 1]


def test_all_are_tried():
    assert len(set(mask_conventions(OF_PAIRS))) == len(OF_PAIRS) * len(MEANINGS)


def test_some_names_promise_which_way_round_they_are():
    assert is_turned("attention_mask", "hidden")
    assert is_turned("src_key_padding_mask", "may")
    for name, meaning in [
        ("attention_mask", "ones"),
        ("key_padding_mask", "hidden"),
        ("mask", "hidden"),
        ("mask", "may"),
    ]:
        assert not is_turned(name, meaning)
