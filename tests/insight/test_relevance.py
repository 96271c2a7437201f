import pytest
import torch
from torch import nn

from clearhead.insight.attribution import relevance, relevance_encoder_decoder, weight_gradient
from clearhead.insight.heads import edit
from clearhead.insight.trace import look
from clearhead.nn.attention import MultiHeadAttention


class Stack(nn.Module):
    """Self-attention with a residual path, a few times; then a pooling query, or the mean, and logits of 3 classes."""

    def __init__(self, depth=3, pools=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(MultiHeadAttention(8, 2) for _ in range(depth))
        self.pool = MultiHeadAttention(8, 2) if pools else None
        self.query = nn.Parameter(torch.randn(1, 1, 8))
        self.head = nn.Linear(8, 3)
        self.double()

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        if self.pool is not None:
            return self.head(self.pool(self.query.expand(len(x), 1, 8), x)[:, 0])
        return self.head(x.mean(1))


def slow_contributions(model, *inputs, score):
    """relu(A * dA), with explicit weights and their own gradients, by name."""
    kept = {}
    parts = {name: part for name, part in model.named_modules() if isinstance(part, MultiHeadAttention)}
    for name, part in parts.items():

        def attend(q, k, v, *_, name=name, **__):
            kept[name] = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
            kept[name].retain_grad()
            return kept[name] @ v

        part.attend = attend
    score(model(*inputs)).sum().backward()
    return {name: (A * A.grad).clamp(min=0).mean(1) for name, A in kept.items()}


@pytest.mark.parametrize("pools", [False, True])
@pytest.mark.parametrize("answer", [0, 2])
def test_relevance_equals_the_slow_path(pools, answer):
    model, x = Stack(pools=pools), torch.randn(2, 5, 8, dtype=torch.double)
    trace = look(model, x)
    found = relevance(trace, trace.output[:, answer])
    slow = slow_contributions(model, x, score=lambda output: output[:, answer])
    expected = torch.eye(5, dtype=torch.double).expand(2, 5, 5)
    for i in range(3):
        expected = expected + slow[f"layers.{i}"] @ expected
    if pools:
        expected = slow["pool"] @ expected
    assert torch.allclose(found, expected, atol=1e-6)
    assert (found - torch.eye(5)).abs().max() > 1e-3  # something has been added


def test_classes_have_relevances_of_their_own_one_after_the_other():
    model, x = Stack(), torch.randn(2, 5, 8, dtype=torch.double)
    trace = look(model, x)
    first, second = (relevance(trace, trace.output[:, c]) for c in (0, 1))
    assert not torch.allclose(first, second)
    assert torch.equal(relevance(trace, trace.output[:, 0]), first)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not first.requires_grad


def test_examples_of_a_batch_do_not_mix():
    model, x = Stack(), torch.randn(2, 5, 8, dtype=torch.double)
    both = look(model, x)
    one = look(model, x[1:])
    assert torch.allclose(relevance(both, both.output[:, 1])[1:], relevance(one, one.output[:, 1]))


def test_layers_may_be_chosen():
    model, x = Stack(), torch.randn(2, 5, 8, dtype=torch.double)
    trace = look(model, x)
    slow = slow_contributions(model, x, score=lambda output: output[:, 0])
    last = relevance(trace, trace.output[:, 0], ["layers.2"])
    assert torch.allclose(last, torch.eye(5) + slow["layers.2"], atol=1e-6)


def test_of_a_layer_that_the_score_does_not_depend_on_nothing_is_added():
    model, x = Stack(depth=1), torch.randn(1, 5, 8, dtype=torch.double)
    trace = look(model, x)
    score = (trace["layers.0"].q * 2).sum()  # before its attention
    assert torch.equal(relevance(trace, score)[0], torch.eye(5, dtype=torch.double))


class Pair(Stack):
    def forward(self, source, target):
        encoder, own_1, cross_1, own_2, cross_2 = self.layers
        source = source + encoder(source)
        for own, cross in ((own_1, cross_1), (own_2, cross_2)):
            target = target + own(target)
            target = target + cross(target, source)
        return self.head(target)


def test_relevance_across_an_encoder_decoder():
    model = Pair(depth=5)
    source, target = torch.randn(2, 4, 8, dtype=torch.double), torch.randn(2, 6, 8, dtype=torch.double)
    trace = look(model, source, target)
    encoder, *rest = list(trace)
    to_target, to_source = relevance_encoder_decoder(
        trace, trace.output[:, -1, 1], encoder=[encoder], decoder=rest[::2], cross=rest[1::2]
    )
    slow = slow_contributions(model, source, target, score=lambda output: output[:, -1, 1])
    C = {
        name: slow[f"layers.{i}"] for i, name in enumerate(("encoder", "decoder.0", "cross.0", "decoder.1", "cross.1"))
    }
    encoded = torch.eye(4) + C["encoder"]
    expected = C["cross.0"] @ encoded
    expected = expected + C["decoder.1"] @ expected + C["cross.1"] @ encoded
    assert torch.allclose(to_source, expected, atol=1e-6)
    assert torch.allclose(to_target, (torch.eye(6) + C["decoder.1"]) @ (torch.eye(6) + C["decoder.0"]), atol=1e-6)
    assert to_source[:, -1].max() > 0


def test_a_pass_without_gradients_cannot_be_explained():
    model, x = Stack(), torch.randn(1, 5, 8, dtype=torch.double)
    trace = look(model, x)
    with pytest.raises(ValueError, match=r"score must be computed from trace\.output"):
        relevance(trace, trace.output[:, 0].detach())
    with torch.no_grad():
        trace = look(model, x)
    with pytest.raises(ValueError, match=r"needs a pass with gradients, got none for layers\.0"):
        relevance(trace, trace.output[:, 0])


def test_on_any_model_the_gradient_is_what_a_change_of_the_weights_does(kind):
    """Without autograd: the weights are changed by hand, a little."""
    model, inputs = kind[0].double(), [x.double() for x in kind[1]]

    def score(output):
        first = output[0] if isinstance(output, tuple) else output
        return (first * torch.arange(first.numel()).view_as(first).sin()).sum()

    trace = look(model, *inputs)
    for name in trace:
        layer = trace[name]
        (d_out,) = torch.autograd.grad(score(trace.output), layer.call.raw_out, retain_graph=True)
        change = torch.randn_like(layer.weights()) * 1e-6
        outputs = []
        for sign in (1, -1):
            with torch.no_grad(), edit(model, name, pattern=lambda weights, sign=sign: weights + sign * change):  # noqa: B023
                outputs.append(score(model(*inputs)).item())
        expected = (weight_gradient(layer, d_out) * change).sum().item()
        assert (outputs[0] - outputs[1]) / 2 == pytest.approx(expected, rel=1e-4, abs=1e-11)
        assert abs(expected) > 1e-8
