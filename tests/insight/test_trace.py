"""`look` leaves the model unchanged and records its real attention weights, indexed by module, head and row."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from clearhead import MultiHeadAttention, Seq2Seq, attend_reference, masks
from clearhead.insight.trace import check_heads, check_rows, look
from clearhead.models.config import Seq2SeqConfig
from clearhead.viewer import Description


def leaves(output):
    return [x for x in (output if isinstance(output, tuple) else (output,)) if x is not None]


def test_the_output_is_bit_identical_and_weights_reproduce_it(model_and_inputs):
    model, inputs = model_and_inputs
    plain, trace = model(*inputs), look(model, *inputs)
    assert all(torch.equal(a, b) for a, b in zip(leaves(trace.output), leaves(plain), strict=True))
    assert max(trace.verify().values()) < 1e-5
    for name in trace:
        layer = trace[name]
        assert layer.weights().shape == (layer.batch, layer.num_heads, layer.num_queries, layer.num_keys)
        torch.testing.assert_close(layer.weights().sum(-1), torch.ones(layer.out.shape[:3]))
        assert layer.num_heads == 2


def state_of(model):
    hooks = [
        (dict(m._forward_hooks), dict(m._forward_pre_hooks), dict(m._forward_hooks_always_called), m.training)
        for m in model.modules()
    ]
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    switches = torch.backends.mha.get_fastpath_enabled(), torch.is_grad_enabled()
    return hooks, grads, switches, torch.get_rng_state().tolist()


def test_model_state_is_unchanged(model_and_inputs):
    model, inputs = model_and_inputs
    model.register_forward_hook(lambda *_: None)
    next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
    before = state_of(model)
    look(model, *inputs)
    after = state_of(model)
    assert str(before) == str(after)
    assert before[0] == after[0]


def test_model_state_is_unchanged_when_the_forward_pass_raises(models):
    model, x = models.Raises(), models.tokens()
    before = state_of(model)
    with pytest.raises(RuntimeError, match="raised during the forward pass"):
        look(model, x)
    assert before == state_of(model)
    assert torch.overrides._len_torch_function_stack() == 0


def test_look_preserves_random_draws_and_gradients_in_training(model_and_inputs):
    """With active dropout, random draws and gradients are the same."""
    model, inputs = model_and_inputs
    model.train()
    results = []
    for run in (model, lambda *x: look(model, *x).output):
        torch.manual_seed(1)
        model.zero_grad()
        sum(x.sum() for x in leaves(run(*inputs))).backward()
        results.append([torch.get_rng_state(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("grad", [True, False])
def test_look_keeps_the_grad_mode(model_and_inputs, grad):
    model, inputs = model_and_inputs
    with torch.set_grad_enabled(grad):
        trace = look(model, *inputs)
    for name in trace:
        assert trace[name].out.requires_grad == trace[name].weights().requires_grad == grad


def test_manual_attention_is_recorded_for_every_axis_order(manual_class, models):
    model, x = manual_class().eval(), models.tokens()
    trace = look(model, x)
    assert list(trace) == [manual_class.__name__]
    layer = trace[manual_class.__name__]
    torch.testing.assert_close(layer.weights(), model.weights)
    assert trace.verify()[manual_class.__name__] < 1e-6
    assert layer.num_heads == 2


@pytest.mark.parametrize("name", ["ManualAttention", "Functional", "Einsum", "ManualDropout"])
def test_recorded_weights_are_those_before_dropout(models, name):
    model, x = getattr(models, name)(dropout=0.5).train(), models.tokens()
    trace = look(model, x)
    torch.testing.assert_close(trace[name].weights(), model.weights)
    assert trace.verify() == {}
    assert "dropout 0.5, not verified" in repr(trace)


def test_sdpa_dropout_is_not_verified(models):
    model = MultiHeadAttention(8, 2, dropout=0.25).train()
    trace = look(model, models.tokens())
    assert trace.verify() == {}
    assert "dropout 0.25, not verified" in repr(trace)
    assert trace["MultiHeadAttention"].weights().count_nonzero() == trace["MultiHeadAttention"].weights().numel()


def test_attend_reference_weights_are_recorded(models):
    q, k, v = torch.randn(3, 2, 2, 5, 4)
    mask = masks.causal(5)

    class Formula(nn.Module):
        def forward(self):
            return attend_reference(q, k, v, mask)

    trace = look(Formula())
    assert torch.equal(trace["Formula"].weights(), trace.output[1])


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_look_works_in_inference_mode_and_autocast(model_and_inputs, mode):
    model, inputs = model_and_inputs
    with mode():
        trace = look(model, *inputs)
        plain = model(*inputs)
        for name in trace:
            assert trace[name].weights().shape[-2:] == (trace[name].num_queries, trace[name].num_keys)
    torch.testing.assert_close(leaves(trace.output)[0], leaves(plain)[0], rtol=0, atol=1e-5)
    assert max(trace.verify().values()) < 0.02


def test_seq2seq_cross_attention_is_recorded():
    config = Seq2SeqConfig(width=8, depth=1, num_heads=2, mlp_dim=16, src_vocab_size=9, tgt_vocab_size=9)
    model = Seq2Seq.from_config(config).eval()
    source, target = torch.randint(0, 9, (2, 6)), torch.randint(0, 9, (2, 4))
    trace = look(model, source, target)
    assert [(layer.num_queries, layer.num_keys) for layer in map(trace.__getitem__, trace)] == [(6, 6), (4, 4), (4, 6)]
    self_attn = list(trace)[1]
    assert trace[self_attn].weights().triu(1).count_nonzero() == 0  # causal
    assert max(trace.verify().values()) < 1e-5


def test_a_classifier_softmax_is_not_recorded(models):
    trace = look(models.SingleHead(), models.tokens())
    assert list(trace) == ["SingleHead"]
    assert trace["SingleHead"].weights().shape == (2, 1, 5, 5)


def test_a_model_without_attention_raises(models):
    with pytest.raises(
        LookupError, match=r"no attention was found in Classifier; looked for scaled_dot.*multiplies values"
    ):
        look(models.Classifier(), models.tokens())
    with pytest.raises(ValueError, match=r"look needs an nn\.Module and its inputs, got Tensor"):
        look(torch.ones(1))


def test_repeated_calls_are_numbered(models):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = models.ManualAttention()

        def forward(self, x):
            return self.attention(self.attention(x))

    model, x = Twice(), models.tokens()
    for _ in range(2):
        assert list(look(model, x)) == ["attention", "attention#2"]


def test_keep_limits_the_recorded_layers(models):
    model, x = models.small_vit(), torch.randn(2, 1, 8, 8)
    first, last = look(model, x)
    assert list(look(model, x, keep="last")) == [last]
    trace = look(model, x, keep=[first])
    assert len(trace) == 1
    assert first in trace
    assert "and 1 more, not kept" in repr(trace).splitlines()
    with pytest.raises(LookupError, match=rf"'{last}' was not kept, only {first}; use look\(keep=\['{last}'\]"):
        trace[last]
    with pytest.raises(LookupError, match=rf"no attention named 'encoder.blocks.0.atention'; did you mean '{first}'\?"):
        look(model, x, keep=["encoder.blocks.0.atention"])
    with pytest.raises(ValueError, match=r'keep must be "all", "last" or a list'):
        look(model, x, keep="first")


@pytest.fixture
def trace(models):
    return look(models.small_vit(), torch.randn(2, 1, 8, 8))


def test_repr_is_a_table_of_layers(trace):
    assert repr(trace).splitlines() == [
        "name           kernel  heads  queries x keys  note",
        "blocks.0.attn  sdpa        2           5 x 5",
        "blocks.1.attn  sdpa        2           5 x 5",
        "operators not counted",
    ]
    assert repr(trace["blocks.1.attn"]) == "blocks.1.attn: sdpa, 2 heads, 5 x 5"
    assert len(trace) == 2


def test_index_errors_name_the_valid_values(trace):
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


def test_rows_may_be_selected_in_any_order(trace):
    layer = trace["blocks.0.attn"]
    full = layer.weights()
    torch.testing.assert_close(layer.weights(rows=[-1, 0, 2]), full[:, :, [-1, 0, 2]])
    assert layer.weights(rows=[]).shape == (2, 2, 0, 5)


def test_output_gradient_times_values_is_the_weight_gradient(model_and_inputs):
    """d score / d weights = (d score / d out) vᵀ, compared with a small edit."""
    from clearhead.insight.heads import edit

    model, inputs = (x.double() if not isinstance(x, tuple) else tuple(y.double() for y in x) for x in model_and_inputs)

    def score(output):
        return (output[0] if isinstance(output, tuple) else output).square().sum()

    trace = look(model, *inputs)
    layer = trace[next(iter(trace))]
    assert torch.is_grad_enabled()
    gradient = layer.gradient(score(trace.output)) @ layer.v.mT
    step = 1e-6 * torch.randn_like(gradient)
    with edit(model, layer.name, pattern=lambda weights: weights + step):
        change = score(model(*inputs)) - score(trace.output)
    torch.testing.assert_close(change, (gradient * step).sum(), rtol=1e-3, atol=1e-9)


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


def test_layers_that_changed_in_place_or_have_another_batch_are_left_out_of_the_viewer():
    class Odd(nn.Module):
        def forward(self, x):
            q = torch.randn(2, 1, 3, 4)
            return F.scaled_dot_product_attention(q, q, q).sum() + F.scaled_dot_product_attention(x, x, x).sum()

    def missing(trace):
        shown, _ = trace.view(Description(kind="trace", title="Attention", source="trace"), 10**6)
        assert "<table>" in trace._repr_html_()
        assert [layer.heads for layer in shown.layers] == [1]
        return " ".join(shown.unresolved)

    x = torch.randn(3, 1, 3, 4)
    trace = look(Odd(), x)
    assert "batch is 3, not 2" in missing(trace)
    x = torch.randn(2, 1, 3, 4)
    trace = look(Odd(), x)
    x.add_(1)
    assert "in place" in missing(trace)
