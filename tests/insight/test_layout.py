"""Weights, values and output are brought to (B,H,...) from any order, and parts of the output can be written back."""

import pytest
import torch

from clearhead.insight.calls import einsum_layout, matmul_layout

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
def test_a_product_has_the_same_result_in_our_order(equation, weights_first):
    left, right = equation.partition("->")[0].split(",")
    weights, values = operand(left), operand(right)
    out = torch.einsum(equation, weights, values)
    if not weights_first:
        equation = f"{right},{left}->{equation.partition('->')[2]}"
    layout = einsum_layout(equation, weights_first, weights.dim(), values.dim())
    ours = layout.of_weights(weights, out) @ layout.of_values(values, out)
    torch.testing.assert_close(ours, layout.of_out(out))
    assert ours.shape == (
        *EQUATIONS[equation if weights_first else f"{left},{right}->{equation.partition('->')[2]}"],
        4,
        6,
    )
    view = layout.heads_of(out)
    view[..., 0, :, :] = 0
    assert layout.of_out(out)[:, 0].count_nonzero() == 0


@pytest.mark.parametrize(
    "equation",
    ["bhij,bhij->bhij", "bhij,bhjd->bhd", "bhij,bhj->bhi", "bij,bjde->bide", "bij,bjd", "bii,bid->bd"],
)
def test_other_products_are_no_weighted_sums(equation):
    left, right = equation.partition("->")[0].split(",")
    assert einsum_layout(equation, True, len(left), len(right)) is None


def test_products_of_matrices_in_both_conventions():
    weights, values = torch.rand(2, 3, 4, 5), torch.rand(3, 5, 6)
    out = weights @ values
    layout = matmul_layout(4, 3, weights_first=True)
    torch.testing.assert_close(layout.of_weights(weights, out) @ layout.of_values(values, out), out)
    assert layout.of_out(out) is out  # no copy, and its place in the graph
    columns = values.mT @ weights.mT
    layout = matmul_layout(4, 3, weights_first=False)
    torch.testing.assert_close(layout.of_out(columns), out)
    assert matmul_layout(2, 1, weights_first=True) is None


def test_joined_heads_are_taken_apart():
    weights, values = torch.rand(6, 4, 5), torch.rand(6, 5, 2)
    layout = matmul_layout(3, 3, weights_first=True, n_joined=3)
    out = weights @ values
    assert torch.equal(layout.of_out(out), out.view(2, 3, 4, 2))
