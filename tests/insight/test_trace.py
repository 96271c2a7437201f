"""A trace is indexed by module name, head and row; it can be plotted and saved."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from clearhead.insight.trace import check_heads, check_rows, look


@pytest.fixture
def trace(written):
    return look(written.small_vit(), torch.randn(2, 1, 8, 8))


def test_repr_is_a_table(trace):
    assert repr(trace).splitlines() == [
        "name           kernel  heads  queries x keys  note",
        "blocks.0.attn  sdpa        2           5 x 5",
        "blocks.1.attn  sdpa        2           5 x 5",
    ]
    assert repr(trace["blocks.1.attn"]) == "blocks.1.attn: sdpa, 2 heads, 5 x 5"
    assert len(trace) == 2


def test_errors_name_the_valid_values(trace):
    with pytest.raises(LookupError, match=r"no attention named 'blocks.0.attention'; did you mean 'blocks.0.attn'\?"):
        trace["blocks.0.attention"]
    layer = trace["blocks.0.attn"]
    with pytest.raises(LookupError, match=r"head must be from 0 to 1 for 'blocks.0.attn', got 2"):
        layer.weights(head=2)
    with pytest.raises(LookupError, match=r"head must be .* got -1"):
        layer.weights(head=[0, -1])
    with pytest.raises(LookupError, match=r"rows .* from 0 to 4 .* got 5"):
        layer.weights(rows=[0, 5])


def test_heads_and_rows_accept_integers_sequences_and_slices():
    assert check_heads(None, 2, "") == [0, 1]
    assert check_heads(1, 2, "") == [1]
    assert check_heads((1, 0), 2, "") == [1, 0]
    assert check_heads(np.int64(1), 2, "") == [1]
    assert check_rows(None, 3, "") == [0, 1, 2]
    assert check_rows([-1, 0], 3, "") == [2, 0]
    assert check_rows(torch.tensor([1]), 3, "") == [1]
    assert check_rows(slice(None, None, -1), 3, "") == [2, 1, 0]
    with pytest.raises(LookupError, match="head must be 0 for '', got 1"):
        check_heads(1, 1, "")


def test_rows_may_be_in_any_order(trace):
    layer = trace["blocks.0.attn"]
    whole = layer.weights()
    torch.testing.assert_close(layer.weights(rows=[-1, 0, 2]), whole[:, :, [-1, 0, 2]])
    assert layer.weights(rows=[]).shape == (2, 2, 0, 5)


def test_the_gradient_of_the_output_times_the_values_is_that_of_the_weights(kind):
    """d score / d weights = (d score / d out) vᵀ, checked against the change that a small edit makes."""
    from clearhead.insight.heads import edit

    model, inputs = (x.double() if not isinstance(x, tuple) else tuple(y.double() for y in x) for x in kind)

    def score(output):
        return (output[0] if isinstance(output, tuple) else output).square().sum()

    trace = look(model, *inputs)
    layer = trace[next(iter(trace))]
    assert torch.is_grad_enabled()
    gradient = layer.gradient(score(trace.output)) @ layer.v.mT
    step = 1e-6 * torch.randn_like(gradient)
    with edit(model, layer.name, pattern=lambda weights: weights + step):
        moved = score(model(*inputs)) - score(trace.output)
    torch.testing.assert_close(moved, (gradient * step).sum(), rtol=1e-3, atol=1e-9)


class Kernel(nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


def test_verify_reports_nan():
    q, k, v = torch.randn(3, 1, 2, 4, 3)
    assert look(Kernel(), q, k, v).verify()["Kernel"] < 1e-5
    v[0, 1, 2, 0] = torch.nan
    assert math.isnan(look(Kernel(), q, k, v).verify()["Kernel"])


def test_plot_shows_all_layers_one_layer_or_one_head(trace):
    first, second = trace
    assert len([a for a in trace.plot().axes if a.get_images()]) == 4
    assert len([a for a in trace.plot(second).axes if a.get_images()]) == 2
    figure = trace.plot(first, head=1, example=1, queries=list("abcde"))
    (image,) = figure.axes[0].get_images()
    np.testing.assert_allclose(image.get_array(), trace[first].weights(1)[1, 0].detach())
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == list("abcde")
    assert f"{first}, head 1" in figure.get_suptitle().replace("\n", " ")
    with pytest.raises(ValueError, match="name of a layer"):
        trace.plot(head=1)


def test_save_writes_the_weights_by_name(trace, tmp_path):
    first, second = trace
    saved = load_file(trace.save(tmp_path / "new" / "all.safetensors"))
    assert list(saved) == [first, second]
    assert torch.equal(saved[second], trace[second].weights())
    assert list(load_file(trace.save(str(tmp_path / "one.safetensors"), [first]))) == [first]
    with pytest.raises(ValueError, match=r"\.safetensors, got 'all\.npz'"):
        trace.save(tmp_path / "all.npz")
    with pytest.raises(LookupError, match="no attention named 'third'"):
        trace.save(tmp_path / "all.safetensors", ["third"])
