from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from clearhead.insight.relevance import relevance, relevance_across
from clearhead.nn.attention import attend_fused, attend_reference


@dataclass
class Layer:
    """What `look` keeps of a layer."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor

    @property
    def n_queries(self):
        return self.q.shape[-2]

    @property
    def n_keys(self):
        return self.k.shape[-2]

    def weights(self):
        return attend_reference(self.q, self.k, self.v)[1]


class Seen(dict):
    """What `look` returns: layers by their addresses."""

    output: Tensor


class Stack(nn.Module):
    """Self-attention with a residual path, a few times; then a pooling query, or the mean, and logits of 3 classes."""

    def __init__(self, depth=3, pools=False):
        super().__init__()
        torch.manual_seed(0)
        make = lambda: nn.ModuleList(nn.Linear(8, 8, dtype=torch.double) for _ in range(4))  # noqa: E731
        self.layers = nn.ModuleList(make() for _ in range(depth))
        self.pool, self.query = make(), nn.Parameter(torch.randn(1, 8, dtype=torch.double))
        self.head = nn.Linear(8, 3, dtype=torch.double)
        self.pools = pools

    def forward(self, x, attend):
        for i, parts in enumerate(self.layers):
            x = x + attention(parts, x, x, attend, f"layers.{i}")
        if self.pools:
            return self.head(attention(self.pool, self.query.expand(len(x), 1, 8), x, attend, "pool")[:, 0])
        return self.head(x.mean(1))


def attention(parts, x, memory, attend, address):
    query, key, value, output = parts
    q, k, v = (f(y).unflatten(-1, (2, 4)).transpose(1, 2) for f, y in ((query, x), (key, memory), (value, memory)))
    return output(attend(q, k, v, address).transpose(1, 2).flatten(-2))


def seen_of(run):
    """One pass with the fused kernel, which has no weights."""
    seen = Seen()

    def attend(q, k, v, address):
        seen[address] = Layer(q, k, v, attend_fused(q, k, v))
        return seen[address].out

    seen.output = run(attend)
    return seen


def slow_contributions(run, score):
    """relu(A * dA), with explicit weights and their own gradients."""
    kept = {}

    def attend(q, k, v, address):
        kept[address] = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        kept[address].retain_grad()
        return kept[address] @ v

    score(run(attend)).sum().backward()
    return {name: (A * A.grad).clamp(min=0).mean(1) for name, A in kept.items()}


@pytest.mark.parametrize("pools", [False, True])
@pytest.mark.parametrize("answer", [0, 2])
def test_relevance_equals_the_slow_path(pools, answer):
    model, x = Stack(pools=pools), torch.randn(2, 5, 8, dtype=torch.double)
    seen = seen_of(lambda attend: model(x, attend))
    slow = slow_contributions(lambda attend: model(x, attend), lambda output: output[:, answer])
    expected = torch.eye(5, dtype=torch.double).expand(2, 5, 5)
    for i in range(3):
        expected = expected + slow[f"layers.{i}"] @ expected
    if pools:
        expected = slow["pool"] @ expected
    found = relevance(seen, seen.output[:, answer])
    assert torch.allclose(found, expected, atol=1e-6)
    assert (found - torch.eye(5)).abs().max() > 1e-3  # something has been added


def test_classes_have_relevances_of_their_own_one_after_the_other():
    model, x = Stack(), torch.randn(2, 5, 8, dtype=torch.double)
    seen = seen_of(lambda attend: model(x, attend))
    first, second = (relevance(seen, seen.output[:, c]) for c in (0, 1))
    assert not torch.allclose(first, second)
    assert torch.equal(relevance(seen, seen.output[:, 0]), first)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not first.requires_grad


def test_examples_of_a_batch_do_not_mix():
    model, x = Stack(), torch.randn(2, 5, 8, dtype=torch.double)
    both = seen_of(lambda attend: model(x, attend))
    one = seen_of(lambda attend: model(x[1:], attend))
    assert torch.allclose(relevance(both, both.output[:, 1])[1:], relevance(one, one.output[:, 1]))


def test_layers_may_be_chosen():
    model, x = Stack(), torch.randn(2, 5, 8, dtype=torch.double)
    seen = seen_of(lambda attend: model(x, attend))
    slow = slow_contributions(lambda attend: model(x, attend), lambda output: output[:, 0])
    last = relevance(seen, seen.output[:, 0], ["layers.2"])
    assert torch.allclose(last, torch.eye(5) + slow["layers.2"], atol=1e-6)


def test_of_a_layer_that_the_score_does_not_depend_on_nothing_is_added():
    model, x = Stack(depth=1), torch.randn(1, 5, 8, dtype=torch.double)
    seen = seen_of(lambda attend: model(x, attend))
    score = (seen["layers.0"].q * 2).sum()  # before its attention
    assert torch.equal(relevance(seen, score)[0], torch.eye(5, dtype=torch.double))


class Pair(Stack):
    def forward(self, source, target, attend):
        source = source + attention(self.layers[0], source, source, attend, "encoder")
        for i, (own, cross) in enumerate(((1, 2), (3, 4))):
            target = target + attention(self.layers[own], target, target, attend, f"decoder.{i}")
            target = target + attention(self.layers[cross], target, source, attend, f"cross.{i}")
        return self.head(target)


def test_relevance_across_an_encoder_decoder():
    model = Pair(depth=5)
    source, target = torch.randn(2, 4, 8, dtype=torch.double), torch.randn(2, 6, 8, dtype=torch.double)
    seen = seen_of(lambda attend: model(source, target, attend))
    C = slow_contributions(lambda attend: model(source, target, attend), lambda output: output[:, -1, 1])
    names = {"encoder": ["encoder"], "decoder": ["decoder.0", "decoder.1"], "cross": ["cross.0", "cross.1"]}
    to_target, to_source = relevance_across(seen, seen.output[:, -1, 1], **names)
    encoded = torch.eye(4) + C["encoder"]
    expected = C["cross.0"] @ encoded
    expected = expected + C["decoder.1"] @ expected + C["cross.1"] @ encoded
    assert torch.allclose(to_source, expected, atol=1e-6)
    assert torch.allclose(to_target, (torch.eye(6) + C["decoder.1"]) @ (torch.eye(6) + C["decoder.0"]), atol=1e-6)
    assert to_source[:, -1].max() > 0


def test_a_pass_without_gradients_cannot_be_explained():
    model, x = Stack(), torch.randn(1, 5, 8, dtype=torch.double)
    seen = seen_of(lambda attend: model(x, attend))
    with pytest.raises(ValueError, match=r"the score must come from seen\.output, got one without a graph"):
        relevance(seen, seen.output[:, 0].detach())
    with torch.no_grad():
        seen = seen_of(lambda attend: model(x, attend))
    with pytest.raises(ValueError, match=r"needs a pass with gradients, got none for layers\.0; look again"):
        relevance(seen, seen.output[:, 0])
