"""What `look` cannot record exactly is an error or is listed: stale tensors, scripted code, vmapped tensors."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from clearhead import insight
from clearhead.insight.heads import edit
from clearhead.insight.trace import look

B, H, L, D = 2, 2, 5, 4


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def sdpa_then(change):
    def function(q, k, v):
        out = F.scaled_dot_product_attention(q, k, v)
        change(q, k, v, out)
        return out

    return function


def manual_then(change):
    def function(q, k, v):
        weights = (q @ k.mT).softmax(-1)
        out = weights @ v
        change(weights, v, out)
        return out

    return function


def qkv():
    return [torch.randn(B, H, L, D) for _ in range(3)]


def reads(record):
    return {"weights": record.weights, "v": lambda: record.v, "out": lambda: record.out, "verify": record.verify}


STALE = {
    "queries": (sdpa_then(lambda q, k, v, out: q.zero_()), {"weights", "verify"}),
    "keys": (sdpa_then(lambda q, k, v, out: k.mul_(2)), {"weights", "verify"}),
    "values": (sdpa_then(lambda q, k, v, out: v.add_(1)), {"v", "verify"}),
    "output": (sdpa_then(lambda q, k, v, out: out.add_(1)), {"out", "verify"}),
    "a view of the output": (sdpa_then(lambda q, k, v, out: out[0].zero_()), {"out", "verify"}),
    "shape of the output": (sdpa_then(lambda q, k, v, out: out.unsqueeze_(0)), {"out", "verify"}),
    "weights": (manual_then(lambda w, v, out: w.zero_()), {"weights", "verify"}),
    "one weight": (manual_then(lambda w, v, out: w.select(0, 0).fill_(1)), {"weights", "verify"}),
    "manual values": (manual_then(lambda w, v, out: v.exp_()), {"v", "verify"}),
    "manual output": (manual_then(lambda w, v, out: out.relu_()), {"out", "verify"}),
}


@pytest.mark.parametrize(("function", "stale"), STALE.values(), ids=STALE)
def test_a_tensor_that_changed_in_place_is_an_error_not_another_number(function, stale):
    q, k, v = qkv()
    expected = ((q @ k.mT) / (D**0.5 if "sdpa" in function.__qualname__ else 1)).softmax(-1)
    trace = look(Function(function), q, k, v)
    record = trace["Function"]
    assert record.num_heads == H
    for name, read in reads(record).items():
        if name in stale:
            with pytest.raises(RuntimeError, match="changed in place after it was recorded"):
                read()
        elif name == "weights":
            torch.testing.assert_close(read(), expected)
        else:
            read()
    assert trace.verify() == {}


@torch.inference_mode()
def test_inference_tensors_are_copied():
    q, k, v = qkv()
    expected = (q @ k.mT / D**0.5).softmax(-1)
    trace = look(Function(sdpa_then(lambda q, k, v, out: (q.zero_(), out.zero_()))), q, k, v)
    torch.testing.assert_close(trace["Function"].weights(), expected)
    assert trace.verify()["Function"] < 1e-5
    assert trace.output.count_nonzero() == 0


@pytest.mark.parametrize(
    "drop",
    [
        lambda w: w * (torch.rand_like(w) > 0.5),
        lambda w: w.masked_fill(torch.rand(w.shape) < 0.5, 0.0),
        lambda w: torch.where(torch.rand_like(w) < 0.5, w, 0.0),
        lambda w: w * torch.bernoulli(torch.full_like(w, 0.5)),
    ],
)
def test_dropout_by_a_random_mask_is_recognized(drop):
    q, k, v = qkv()
    trace = look(Function(lambda q, k, v: drop((q @ k.mT).softmax(-1)) @ v), q, k, v)
    torch.testing.assert_close(trace["Function"].weights(), (q @ k.mT).softmax(-1))
    assert "dropout" in trace["Function"].note
    assert trace.verify() == {}


@pytest.mark.parametrize("bias", [causal_lower_right, causal_upper_left])
def test_causal_biases_are_masks(bias):
    q, k, v = qkv()
    trace = look(
        Function(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=bias(3, L))), q[:, :, :3], k, v
    )
    assert trace.verify()["Function"] < 1e-5
    offset = L - 3 if bias is causal_lower_right else 0
    assert torch.equal(trace["Function"].weights() > 0, torch.ones(B, H, 3, L).tril(offset).bool())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:.*prototype")
def test_flex_attention_with_a_score_and_a_mask_function():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def score_mod(score, b, h, q_index, k_index):
        return score + (k_index - q_index) * 0.1 * (h + 1)

    def causal(b, h, q_index, k_index):
        return q_index >= k_index

    q, k, v = qkv()
    mask = create_block_mask(causal, B, H, L, L, device="cpu")
    model = Function(lambda q, k, v: flex_attention(q, k, v, score_mod=score_mod, block_mask=mask))
    trace = look(model, q, k, v)
    torch.testing.assert_close(trace.output, model(q, k, v))
    record = trace["Function"]
    assert record.kernel == "flex_attention"
    assert record.verify() < 1e-5
    assert torch.equal(record.weights() > 0, torch.ones(B, H, L, L).tril().bool())
    torch.testing.assert_close(record.weights(head=1, rows=[3]), record.weights()[:, 1:, 3:4])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_nested_tensors_are_recorded_with_padding():
    lengths = [3, 5]
    x = torch.nested.nested_tensor([torch.randn(n, H, D) for n in lengths], layout=torch.jagged).transpose(1, 2)
    trace = look(Function(lambda x: F.scaled_dot_product_attention(x, x, x)), x)
    record = trace["Function"]
    assert record.verify() < 1e-5
    for i, n in enumerate(lengths):
        part = x.unbind()[i]
        expected = (part @ part.mT / D**0.5).softmax(-1)
        torch.testing.assert_close(record.weights()[i, :, :n, :n], expected)
        assert record.weights()[i, :, n:].count_nonzero() == 0


def test_exported_programs_are_recorded():
    def function(x):
        return (x @ x.mT).softmax(-1) @ x + F.scaled_dot_product_attention(x, x, x)

    x = torch.randn(B, H, L, D)
    model = torch.export.export(Function(function), (x,)).module()
    trace = look(model, x)
    assert sorted(record.kernel for record in trace.values()) == ["sdpa", "softmax"]
    assert max(trace.verify().values()) < 1e-5


class Scripted(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x.mT, -1) @ x


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_scripted_attention_is_counted_and_unresolved():
    scripted = torch.jit.script(Scripted())
    with pytest.raises(LookupError, match=r"unresolved.*aten\._softmax.*torch\.jit"):
        look(nn.Sequential(scripted), torch.randn(B, L, D))
    trace = look(nn.Sequential(scripted, Scripted()), torch.randn(B, L, D))
    assert trace.is_counted
    assert list(trace) == ["1"]
    assert len(trace.unresolved) == 1
    assert "unresolved" in repr(trace)
    assert "unresolved" in trace._repr_html_()


def test_counting_finds_nothing_more_in_an_ordinary_model(model_and_inputs):
    model, inputs = model_and_inputs
    trace = look(model, *inputs, count=True)
    assert trace.unresolved == []
    assert trace.is_counted
    assert "not counted" not in repr(trace)


def test_vmap_is_refused():
    with pytest.raises(ValueError, match=r"torch\.vmap"):
        look(Function(lambda x: torch.vmap(lambda y: (y @ y.mT).softmax(-1) @ y)(x)), torch.randn(B, L, D))


def test_an_edited_matmul_with_out_writes_its_buffer():
    def function(q, k, v):
        out = torch.empty(B, H, L, D)
        torch.matmul((q @ k.mT).softmax(-1), v, out=out)
        return out

    with edit(model := Function(function), "Function", head=0, pattern="zero"):
        out = model(*qkv())
    assert out[:, 0].count_nonzero() == 0
    assert out[:, 1].count_nonzero() > 0


class Partly(nn.Module):
    """One layer that is recorded and one that is lost."""

    def forward(self, x):
        x = F.scaled_dot_product_attention(x, x, x)
        weights = (x @ x.mT).softmax(-1)
        return weights.as_strided(weights.shape, weights.stride()) @ x


@pytest.mark.parametrize("aggregate", [insight.rollout, insight.mean_attention, insight.max_attention])
def test_aggregates_refuse_an_incomplete_trace(aggregate):
    trace = look(Partly(), torch.randn(B, H, L, D))
    assert [item.reason for item in trace.unresolved] == ["lost at as_strided"]
    with pytest.raises(ValueError, match=r"unresolved.*Partly.*incomplete=True"):
        aggregate(trace)
    assert aggregate(trace, incomplete=True).shape == (B, L, L)


class Windows(nn.Module):
    """Attention inside windows of three tokens, as in Swin."""

    def forward(self, x):
        for _ in range(2):
            windows = x.unflatten(1, (-1, 3)).flatten(0, 1)
            x = F.scaled_dot_product_attention(windows, windows, windows).view_as(x)
        return x


def test_aggregates_refuse_windows():
    trace = look(Windows(), torch.randn(2, 6, D))
    assert [record.batch for record in trace.values()] == [4, 4]
    with pytest.raises(ValueError, match=r"4 .*windows.*incomplete=True"):
        insight.rollout(trace)
    assert insight.rollout(trace, incomplete=True).shape == (4, 3, 3)
