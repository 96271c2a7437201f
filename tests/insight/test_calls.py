"""Attention calls return the requested heads and rows; layouts bring any order of axes to (B,H,...)."""

from dataclasses import replace

import pytest
import torch

from clearhead.insight.axes import einsum_layout
from clearhead.insight.calls import SDPACall, repeat_kv_heads, select_heads
from clearhead.insight.products import matmul_as_einsum


def test_grouped_query_heads_share_their_keys():
    x = torch.randn(2, 2, 3, 4)
    assert torch.equal(select_heads(x, [0, 1, 2, 3], 4), repeat_kv_heads(x, 4))
    assert torch.equal(select_heads(x, [3], 4), x[:, 1:])
    assert select_heads(x, [3], 4).untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert select_heads(x, [0, 1], 2) is x
    assert repeat_kv_heads(x, 2) is x


def test_half_precision_scores_are_accumulated_in_float32():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 4, 64).bfloat16()
    call = SDPACall(q, k, v, None, 0.0, False, 0.125, v)
    exact = (0.125 * q.double() @ k.double().mT).softmax(-1)
    weights = call.weights([0, 1], slice(None))
    assert weights.dtype == torch.bfloat16
    torch.testing.assert_close(weights.double(), exact, rtol=2**-8, atol=1e-3)


def test_replaced_heads_keep_the_memory_layout_of_the_output():
    """The model may take a view of the output that depends on its strides."""
    out = torch.randn(2, 4, 3, 5).transpose(1, 2)
    call = SDPACall(out, out, out, None, 0.0, False, 1.0, out)
    new = call.replace_heads([2], torch.zeros(2, 1, 4, 5))
    assert new.stride() == out.stride()
    assert new[:, 2].count_nonzero() == 0
    assert torch.equal(new[:, :2], out[:, :2])
    assert out[:, 2].count_nonzero() > 0


EQUATIONS = {
    "bhqk,bhkd->bhqd": (2, 3),
    "b h i j, b j d -> b h i d": (2, 3),
    "ijbh,jbhd->ibhd": (2, 3),
    "bij,bjd->bdi": (2, 1),
    "ij,jd->id": (1, 1),
    "...ij,...jd->...id": (2, 3),
    "bwhij,bwhjd->bwhid": (8, 3),
}
SIZES = {"b": 2, "h": 3, "q": 4, "i": 4, "k": 5, "j": 5, "d": 6, "w": 4}


def operand(term):
    return torch.randn([SIZES[letter] for letter in term.replace(" ", "").replace("...", "bh")])


@pytest.mark.parametrize("equation", EQUATIONS)
@pytest.mark.parametrize("weights_first", [True, False])
def test_arranged_weights_and_values_give_the_arranged_output(equation, weights_first):
    left, right = equation.partition("->")[0].split(",")
    weights, values = operand(left), operand(right)
    out = torch.einsum(equation, weights, values)
    if not weights_first:
        equation = f"{right},{left}->{equation.partition('->')[2]}"
    layout = einsum_layout(equation, weights_first, weights.dim(), values.dim())
    ours = layout.arrange_weights(weights, out) @ layout.arrange_values(values, out)
    torch.testing.assert_close(ours, layout.arrange_out(out))
    assert ours.shape == (
        *EQUATIONS[equation if weights_first else f"{left},{right}->{equation.partition('->')[2]}"],
        4,
        6,
    )
    view = layout.head_view(out)
    view[..., 0, :, :] = 0
    assert layout.arrange_out(out)[:, 0].count_nonzero() == 0


@pytest.mark.parametrize(
    "equation",
    ["bhij,bhij->bhij", "bhij,bhjd->bhd", "bij,bjd", "bii,bid->bd"],
)
def test_einsum_layout_rejects_products_that_are_not_weighted_sums(equation):
    left, right = equation.partition("->")[0].split(",")
    assert einsum_layout(equation, True, len(left), len(right)) is None


def test_products_with_tokens_as_rows_and_as_columns():
    weights, values = torch.rand(2, 3, 4, 5), torch.rand(3, 5, 6)
    out = weights @ values
    layout = einsum_layout(matmul_as_einsum(4, 3), True, 4, 3)
    torch.testing.assert_close(layout.arrange_weights(weights, out) @ layout.arrange_values(values, out), out)
    assert layout.arrange_out(out) is out  # no copy, so autograd still tracks it
    columns = values.mT @ weights.mT
    layout = einsum_layout(matmul_as_einsum(3, 4), False, 4, 3)
    torch.testing.assert_close(layout.arrange_out(columns), out)


def test_merged_heads_are_split():
    weights, values = torch.rand(6, 4, 5), torch.rand(6, 5, 2)
    layout = replace(einsum_layout(matmul_as_einsum(3, 3), True, 3, 3), merged_heads=3)
    out = weights @ values
    assert torch.equal(layout.arrange_out(out), out.view(2, 3, 4, 2))
