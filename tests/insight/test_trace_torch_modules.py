"""nn.MultiheadAttention, its fast paths and compiled models are captured for one pass and left unchanged."""

import pytest
import torch
from torch import nn

from clearhead.insight.trace import look


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batched", [True, False])
def test_torch_nn_gives_its_own_weights(need_weights, batched):
    model = nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True)
    x = torch.randn(2, 5, 8) if batched else torch.randn(5, 8)
    mask = torch.ones(5, 5).triu(1).bool()
    trace = look(model, x, x, x, need_weights=need_weights, attn_mask=mask)
    own = model(x, x, x, average_attn_weights=False, attn_mask=mask)[1]
    torch.testing.assert_close(trace["MultiheadAttention"].weights(), own if batched else own[None])
    assert trace["MultiheadAttention"].kernel == "nn.MultiheadAttention"


def test_the_fast_path_of_torch_nn_is_left_for_the_pass_and_the_table_says_so(written):
    model, x = written.encoder().eval(), written.tokens()
    with torch.no_grad():
        trace = look(model, x)
        torch.testing.assert_close(trace.output, model(x), rtol=0, atol=1e-5)
    assert list(trace) == ["layers.0.self_attn", "layers.1.self_attn"]
    assert repr(trace).count("without its fast path") == 2
    assert "fast path" not in repr(look(model, x))  # with gradients it would not have been taken
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            assert "fast path" not in repr(look(model, x))
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_padding_that_torch_nn_would_cut_out_is_seen_as_masked():
    """Without gradients, its encoder turns such a batch into a nested tensor, unless someone looks."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 1).eval(), torch.randn(2, 5, 8)
    padding = torch.arange(5) >= torch.tensor([[5], [3]])
    with torch.no_grad():
        trace = look(model, x, src_key_padding_mask=padding)
    assert trace["layers.0.self_attn"].weights()[1, ..., 3:].count_nonzero() == 0
    assert trace["layers.0.self_attn"].weights()[0, ..., 3:].count_nonzero() > 0
    assert trace.verify()["layers.0.self_attn"] < 1e-6


@pytest.mark.parametrize("how", ["torch.compile(model)", "model.compile()", "one block"])
def test_compiled_models_run_eagerly_for_the_pass_and_the_table_says_so(written, how):
    model, x = written.small_vit().eval(), torch.randn(2, 1, 8, 8)
    plain = model(x)
    calls = []

    def backend(graph, _):
        calls.append(graph)
        return graph.forward

    if how == "torch.compile(model)":
        compiled = torch.compile(model, backend=backend)
    else:
        compiled = model
        (model if how == "model.compile()" else model.blocks[1]).compile(backend=backend)
    trace = look(compiled, x)
    assert not calls
    assert list(trace) == ["blocks.0.attn", "blocks.1.attn"]
    assert repr(trace).count("compiled, ran eagerly") == (1 if how == "one block" else 2)
    torch.testing.assert_close(trace.output, plain, rtol=0, atol=1e-5)
    with torch.no_grad():
        compiled(x)
    assert calls  # afterwards it is compiled as before
