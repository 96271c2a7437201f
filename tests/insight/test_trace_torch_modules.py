"""nn.MultiheadAttention, its fast paths and compiled models are captured for one pass and left unchanged."""

import pytest
import torch
from torch import nn

from clearhead.insight.trace import look


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batched", [True, False])
def test_recorded_weights_equal_those_of_torch_multihead_attention(need_weights, batched):
    model = nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True)
    x = torch.randn(2, 5, 8) if batched else torch.randn(5, 8)
    mask = torch.ones(5, 5).triu(1).bool()
    trace = look(model, x, x, x, need_weights=need_weights, attn_mask=mask)
    expected = model(x, x, x, average_attn_weights=False, attn_mask=mask)[1]
    torch.testing.assert_close(trace["MultiheadAttention"].weights(), expected if batched else expected[None])
    assert trace["MultiheadAttention"].kernel == "nn.MultiheadAttention"


def test_the_torch_fast_path_is_disabled_during_look_and_noted(models):
    model, x = models.encoder().eval(), models.tokens()
    with torch.no_grad():
        trace = look(model, x)
        torch.testing.assert_close(trace.output, model(x), rtol=0, atol=1e-5)
    assert list(trace) == ["layers.0.self_attn", "layers.1.self_attn"]
    assert repr(trace).count("without its fast path") == 2
    assert "fast path" not in repr(look(model, x))  # the fast path is not used with gradients
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            assert "fast path" not in repr(look(model, x))
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_nested_tensor_padding_is_recorded_as_masked():
    """Without gradients, nn.TransformerEncoder converts such a batch to a nested tensor, but not during `look`."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 1).eval(), torch.randn(2, 5, 8)
    padding = torch.arange(5) >= torch.tensor([[5], [3]])
    with torch.no_grad():
        trace = look(model, x, src_key_padding_mask=padding)
    assert trace["layers.0.self_attn"].weights()[1, ..., 3:].count_nonzero() == 0
    assert trace["layers.0.self_attn"].weights()[0, ..., 3:].count_nonzero() > 0
    assert trace.verify()["layers.0.self_attn"] < 1e-6


@pytest.mark.parametrize("compilation", ["torch.compile(model)", "model.compile()", "one block"])
def test_compiled_models_run_eagerly_during_look_and_are_noted(models, compilation):
    model, x = models.small_vit().eval(), torch.randn(2, 1, 8, 8)
    plain = model(x)
    calls = []

    def backend(graph, _):
        calls.append(graph)
        return graph.forward

    if compilation == "torch.compile(model)":
        compiled = torch.compile(model, backend=backend)
    else:
        compiled = model
        (model if compilation == "model.compile()" else model.blocks[1]).compile(backend=backend)
    trace = look(compiled, x)
    assert not calls
    assert list(trace) == ["blocks.0.attn", "blocks.1.attn"]
    assert repr(trace).count("compiled, ran eagerly") == (1 if compilation == "one block" else 2)
    torch.testing.assert_close(trace.output, plain, rtol=0, atol=1e-5)
    with torch.no_grad():
        compiled(x)
    assert calls  # compiled again after look
