"""Masks: True = may attend. The lazy causal mask stores no tensor and reaches the kernel as a flag."""

import copy
import math
import operator

import numpy as np
import pytest
import torch
from torch import nn

from clearhead.models.config import LanguageConfig
from clearhead.models.language import LanguageModel
from clearhead.nn import masks
from clearhead.nn.attention import attend_fused

DENSE = torch.tensor([[True, False, False], [True, True, False], [True, True, True]])


def test_causal_mask_of_five_tokens_in_additive_form():
    expected = [
        [0, -10000, -10000, -10000, -10000],
        [0, 0, -10000, -10000, -10000],
        [0, 0, 0, -10000, -10000],
        [0, 0, 0, 0, -10000],
        [0, 0, 0, 0, 0],
    ]
    assert masks.to_additive(masks.causal(5), low=-10000).tolist() == expected


def test_causal_with_fewer_queries_is_the_last_rows():
    assert torch.equal(masks.causal(2, 5), masks.causal(5)[-2:])
    assert masks.causal(1, 4).tolist() == [[True] * 4]
    assert masks.causal(0, 4).shape == (0, 4)


def test_causal_allocates_no_memory():
    huge = masks.causal(1_000_000)
    assert huge.shape == (1_000_000, 1_000_000)
    assert huge.to("meta").dense().shape == huge.shape


@pytest.mark.parametrize(("num_queries", "num_keys"), [(4, 3), (-1, 3)])
def test_causal_rejects_more_queries_than_keys(num_queries, num_keys):
    with pytest.raises(ValueError, match=f"0 <= num_queries <= num_keys, got {num_queries} and {num_keys}"):
        masks.causal(num_queries, num_keys)


# --- the causal mask stores no tensor and acts as a bool tensor -------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda m: m & torch.tensor([True, False, True]),
        lambda m: torch.tensor([True, False, True]) & m,
        lambda m: m | torch.tensor([True, False, True]),
        lambda m: torch.tensor([True, False, True]) | m,
        lambda m: m & masks.padding(torch.tensor([1, 3])),
        lambda m: masks.padding(torch.tensor([1, 3])) & m,
        lambda m: m & m,
        operator.invert,
        lambda m: m[1],
        lambda m: m[:, 1:],
        lambda m: m[None, None],
        lambda m: m[torch.tensor([2, 0])],
        lambda m: torch.stack([m, m]),
        lambda m: torch.cat([m, ~m]),
        lambda m: torch.where(m, 0.0, -math.inf),
        lambda m: torch.zeros(3, 3).masked_fill(~m, -1.0),
        lambda m: torch.zeros(3, 3).masked_fill(m, -1.0),
        lambda m: torch.triu(m, 1),
        lambda m: torch.clone(input=m),
        lambda m: torch.stack(list(m)),
    ],
)
def test_operations_on_a_causal_mask_return_ordinary_tensors(use):
    actual, expected = use(masks.causal(3)), use(DENSE.clone())
    assert type(actual) is torch.Tensor
    assert actual.dtype == expected.dtype
    assert torch.equal(actual, expected)


def test_a_causal_mask_can_be_inspected():
    mask = masks.causal(3)
    assert (mask.shape, mask.dtype, mask.device, mask.dim(), len(mask)) == ((3, 3), torch.bool, DENSE.device, 2, 3)
    assert mask.tolist() == np.asarray(mask).tolist() == DENSE.tolist()
    assert torch.equal(mask.dense(), DENSE)
    assert torch.equal(mask, DENSE)
    assert torch.equal(DENSE, mask)
    assert not torch.equal(mask, ~DENSE)
    assert repr(masks.causal(2, 3)) == "CausalMask(num_queries=2, num_keys=3, device='cpu')"


def test_a_causal_mask_moves_and_copies_without_becoming_dense():
    mask = masks.causal(2, 3)
    assert mask.to("meta").device.type == masks.causal(2, device="meta").device.type == "meta"
    with torch.device("meta"):
        assert masks.causal(2).device.type == "meta"
    for other in (copy.copy(mask), copy.deepcopy(mask), mask.to("cpu")):
        assert isinstance(other, masks.CausalMask)
        assert other.tolist() == mask.tolist()


def test_a_causal_mask_is_immutable():
    mask = masks.causal(3)
    with pytest.raises(TypeError):
        mask[0, 2] = True
    joined = mask
    joined &= torch.eye(3, dtype=torch.bool)
    assert torch.equal(joined, torch.eye(3, dtype=torch.bool))
    assert torch.equal(mask, DENSE), "the mask itself is unchanged"


LANGUAGE = LanguageConfig(width=8, depth=1, num_heads=2, vocab_size=11, pos_embed="rotary")


@pytest.mark.slow
def test_a_compiled_causal_model_calls_sdpa_with_is_causal_and_no_mask():
    """One graph serves all lengths; a dense mask would rule out flash attention on a GPU."""
    model, graphs = LanguageModel.from_config(LANGUAGE).eval(), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for length in (5, 7, 9):
        ids = torch.randint(11, (2, length))
        torch.testing.assert_close(compiled(ids), model(ids))
    (graph,) = graphs
    (call,) = [node for node in graph.graph.nodes if "scaled_dot_product_attention" in str(node.target)]
    assert (call.kwargs["attn_mask"], call.kwargs["is_causal"]) == (None, True)
    assert not [node for node in graph.graph.nodes if "tril" in str(node.target)]


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_causal_model_calls_sdpa_with_is_causal_and_no_mask(strict):
    model, length = LanguageModel.from_config(LANGUAGE).eval(), torch.export.Dim("length", min=2, max=64)
    exported = torch.export.export(model, (torch.randint(11, (2, 5)),), dynamic_shapes=({1: length},), strict=strict)
    ids = torch.randint(11, (2, 9))
    torch.testing.assert_close(exported.module()(ids), model(ids))
    (call,) = [node for node in exported.graph.nodes if "scaled_dot_product_attention" in str(node.target)]
    assert call.args[3:] == (None, 0.0, True)


@pytest.mark.parametrize("order", ["causal first", "padding first"])
def test_masks_can_be_combined_inside_a_compiled_function(order):
    def self_attention(x, real):
        causal = masks.causal(x.shape[-2])
        return attend_fused(x, x, x, causal & real if order == "causal first" else real & causal)

    x, real = torch.randn(2, 2, 5, 4), masks.padding(torch.tensor([5, 3]))
    compiled = torch.compile(self_attention, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, real), self_attention(x, real))


# --- other masks ------------------------------------------------------------------------------------------------------


def test_window_is_a_band_and_combines_with_causal():
    band = masks.window(4, 1)
    assert band.int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]
    assert (band & masks.causal(4)).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert torch.equal(masks.window(4, 0), torch.eye(4, dtype=torch.bool))
    assert masks.window(4, 3).all()
    assert torch.equal(masks.window(2, 1, 4), band[-2:]), "fewer queries are the last rows"
    with pytest.raises(ValueError, match="window_size must be non-negative, got -1"):
        masks.window(4, -1)


def test_padding_allows_the_first_keys_of_each_sequence():
    mask = masks.padding(torch.tensor([2, 0, 3]))
    assert mask.shape == (3, 1, 1, 3)
    assert mask[:, 0, 0].int().tolist() == [[1, 1, 0], [0, 0, 0], [1, 1, 1]]
    assert masks.padding(torch.tensor([2]), 5).int().tolist() == [[[[1, 1, 0, 0, 0]]]]
    assert masks.padding(torch.tensor([], dtype=torch.long)).shape == (0, 1, 1, 0)


@pytest.mark.parametrize("lengths", [torch.tensor([1.0]), torch.tensor([True]), torch.tensor([[1]])])
def test_padding_rejects_invalid_lengths(lengths):
    with pytest.raises(ValueError, match=r"lengths must be integers of shape \(B,\), got .*real\[:, None, None"):
        masks.padding(lengths)


def test_padding_rejects_lengths_out_of_range():
    with pytest.raises(ValueError, match=r"lengths must be in .*\[0, 3\], got 4"):
        masks.padding(torch.tensor([4, 1]), 3)
    with pytest.raises(ValueError, match="got -1"):
        masks.padding([2, -1], 3)


def test_from_torch_converts_bool_and_additive_masks():
    blocked = nn.Transformer.generate_square_subsequent_mask(4)
    assert torch.equal(masks.from_torch(blocked), masks.causal(4))
    assert torch.equal(masks.from_torch(blocked.bool()), masks.causal(4)), "-inf is True, 0 is False"
    real = masks.padding(torch.tensor([2, 4]))
    is_padding = ~real[:, 0, 0]
    assert torch.equal(masks.from_torch(key_padding_mask=is_padding), real)
    numbers = torch.zeros(2, 4).masked_fill(is_padding, -math.inf)
    assert torch.equal(masks.from_torch(key_padding_mask=numbers), real)
    assert torch.equal(masks.from_torch(blocked, is_padding), masks.causal(4) & real)
    assert torch.equal(masks.from_torch(key_padding_mask=is_padding[0]), real[0])
    assert masks.from_torch() is None


def test_from_torch_unflattens_per_head_masks():
    B, H, Q, K = 2, 3, 4, 5
    ours = torch.rand(B, H, Q, K) > 0.5
    assert torch.equal(masks.from_torch(~ours.flatten(0, 1), num_heads=H), ours)
    both = masks.from_torch(~ours.flatten(0, 1), torch.tensor([[False] * 5, [True] * 5]), num_heads=H)
    assert torch.equal(both[0], ours[0])
    assert not both[1].any()
    with pytest.raises(ValueError, match=r"must be \(B\*num_heads,Q,K\), got \(6, 4, 5\) with num_heads=4"):
        masks.from_torch(ours.flatten(0, 1), num_heads=4)


@pytest.mark.parametrize("low", [-math.inf, -10_000.0, -1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_additive_round_trip_preserves_the_mask(low, dtype):
    mask = torch.rand(2, 1, 4, 5) > 0.5
    numbers = masks.to_additive(mask, low, dtype)
    assert numbers.dtype == dtype
    assert numbers.unique().tolist() == [torch.tensor(low, dtype=dtype).item(), 0.0]
    assert torch.equal(masks.from_additive(numbers), mask)


@pytest.mark.parametrize("number", [-1.0, 0.5, -9999.0, math.inf, math.nan])
def test_from_additive_rejects_intermediate_values(number):
    with pytest.raises(ValueError, match=f"0 or at most -10000, got {number:g}; .*logit_bias="):
        masks.from_additive(torch.tensor([[0.0, number]]))


def test_additive_conversions_reject_the_wrong_dtype():
    with pytest.raises(ValueError, match=r"must be floating point, got torch.bool; from_torch"):
        masks.from_additive(torch.tensor([True]))
    with pytest.raises(ValueError, match=r"a mask must be bool with True = may attend, got torch.float32"):
        masks.to_additive(torch.zeros(2, 2))
