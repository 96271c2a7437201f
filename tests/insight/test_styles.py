"""Attention as people write it: in every style `look` records the weights of the formula, or says what it lost.

A style is a function of scores (B,H,Q,K) and values (B,H,K,D) that returns the weighted sum (B,H,Q,D).
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from clearhead.insight.heads import edit
from clearhead.insight.trace import look

B, H, Q, K, D = 2, 3, 4, 5, 6


class Style(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, s, v):
        return self.function(s, v)


def formula(s):
    return s.softmax(-1)


def exp(s):
    return (s - s.amax(-1, keepdim=True)).exp()


def masked(w):
    return torch.where(torch.arange(K) == 1, 0.0, w)


def set_item(w, index, value):
    w[index] = value
    return w


def in_place(x, function):
    function(x)
    return x


def write(function, *shape):
    out = torch.empty(*shape)
    function(out)
    return out


# How the softmax is written: weights as a function of the scores
SOFTMAXES = {
    "Tensor.softmax": lambda s: s.softmax(-1),
    "Tensor.softmax by name": lambda s: s.softmax(dim=3),
    "F.softmax": lambda s: F.softmax(s, dim=-1),
    "F.softmax by name": lambda s: F.softmax(input=s, dim=-1),
    "torch.softmax": lambda s: torch.softmax(s, -1),
    "torch.special.softmax": lambda s: torch.special.softmax(s, -1),
    "nn.Softmax": lambda s: nn.Softmax(-1)(s),
    "in float64": lambda s: F.softmax(s, -1, dtype=torch.float64).float(),
    "of columns": lambda s: s.mT.softmax(-2).mT,
    "of merged heads": lambda s: s.flatten(0, 1).softmax(-1).unflatten(0, (B, H)),
    "minus the maximum": lambda s: (s - s.amax(-1, keepdim=True)).softmax(-1),
    "log_softmax and exp": lambda s: s.log_softmax(-1).exp(),
    "F.log_softmax and exp": lambda s: torch.exp(F.log_softmax(s, dim=-1)),
    "nn.LogSoftmax and exp": lambda s: nn.LogSoftmax(-1)(s).exp(),
    "log_softmax, cast and exp": lambda s: s.log_softmax(-1).double().exp().float(),
    "exp over sum": lambda s: (e := exp(s)) / torch.sum(e, -1, True),
    "exp twice": lambda s: exp(s) / exp(s).sum(-1, keepdim=True),
    "one exp over its sum": lambda s: (e := s.exp()) / e.sum(-1, keepdim=True),
    "exp over sum, unsqueezed": lambda s: (e := exp(s)) / e.sum(-1).unsqueeze(-1),
    "exp over sum, indexed": lambda s: (e := exp(s)) / e.sum(-1)[..., None],
    "exp over clamped sum": lambda s: (e := exp(s)) / e.sum(-1, keepdim=True).clamp(min=1e-9),
    "exp over sum plus epsilon": lambda s: (e := exp(s)) / (e.sum(-1, keepdim=True) + 1e-20),
    "torch.exp over torch.sum": lambda s: torch.div(e := torch.exp(s), torch.sum(e, dim=-1, keepdim=True)),
    "exp divided in place": lambda s: in_place(exp(s), lambda e: e.div_(e.sum(-1, keepdim=True))),
    "exp minus logsumexp": lambda s: (s - s.logsumexp(-1, keepdim=True)).exp(),
    "exp minus torch.logsumexp": lambda s: torch.exp(s - torch.logsumexp(s, dim=-1, keepdim=True)),
    "softmax with out": lambda s: torch.softmax(s, -1, out=torch.empty_like(s)),
}

# What happens to the weights before they multiply values: (step, the same step by the formula)
STEPS = {
    "eval dropout": lambda w: F.dropout(w, 0.5, training=False),
    "nn.Identity": lambda w: nn.Identity()(w),
    "cast there and back": lambda w: w.double().float(),
    "to": lambda w: w.to(torch.float64).to(w),
    "type_as": lambda w: w.type_as(w),
    "contiguous": lambda w: w.transpose(1, 2).contiguous().transpose(1, 2),
    "clone": lambda w: w.clone(),
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "masked_fill": lambda w: w.masked_fill(torch.arange(K) == 1, 0.0),
    "masked_fill in place": lambda w: w.masked_fill_(torch.arange(K) == 1, 0.0),
    "where": lambda w: torch.where(torch.arange(K) == 1, 0.0, w),
    "times a mask": lambda w: w * (torch.arange(K) != 1),
    "times a float mask": lambda w: w * (torch.arange(K) != 1).float(),
    "times a mask in place": lambda w: w.mul_((torch.arange(K) != 1).float()),
    "set item": lambda w: set_item(w, (..., 1), 0.0),
    "set item by a mask": lambda w: set_item(w, w < 0.1, 0.0),
    "nan_to_num": lambda w: w.nan_to_num(0.0),
    "clamp": lambda w: w.clamp(min=0.1),
    "clipped softmax": lambda w: (1.2 * w - 0.1).clamp(0, 1),
    "renormalized": lambda w: masked(w) / masked(w).sum(-1, keepdim=True),
    "renormalized with L1": lambda w: F.normalize(masked(w), p=1, dim=-1),
    "renormalized in place": lambda w: in_place(masked(w), lambda x: x.div_(x.sum(-1, keepdim=True))),
    "scaled": lambda w: 0.5 * w,
    "scaled by a learned factor per head": lambda w: w * torch.linspace(0.5, 1, H)[:, None, None],
    "plus a constant": lambda w: w + 0.01,
    "plus a bias": lambda w: w + torch.linspace(0, 1, K),
    "minus a mean": lambda w: w - 1 / K,
    "sum of two": lambda w: 0.5 * w + 0.5 * w.flip(1),
    "difference of two": lambda w: w - 0.3 * w.roll(1, 1),
    "powers": lambda w: w.pow(2),
    "times a dense tensor": lambda w: w * torch.linspace(0.5, 1, B * H * Q * K).view(B, H, Q, K),
    "lower triangle": lambda w: w.tril(),
    "merged and split heads": lambda w: w.flatten(0, 1).view(B, H, Q, K),
    "permuted twice": lambda w: w.permute(0, 2, 3, 1).permute(0, 3, 1, 2),
    "einops style": lambda w: w.reshape(B, 1, H, Q, K)[:, 0],
    "chunks of queries": lambda w: torch.cat(w.chunk(2, dim=2), dim=2),
    "split heads": lambda w: torch.cat(w.split(1, dim=1), dim=1),
    "unbind and stack": lambda w: torch.stack(w.unbind(1), dim=1),
    "sink column": lambda w: torch.cat([w, w[..., :1]], -1)[..., :-1],
    "padded keys": lambda w: F.pad(w, (0, 1))[..., :K],
    "gathered heads": lambda w: w.index_select(1, torch.tensor([2, 0, 1])),
    "gather": lambda w: w.gather(1, torch.tensor([2, 0, 1]).view(1, H, 1, 1).expand_as(w)),
    "flipped heads": lambda w: w.flip(1),
    "repeated": lambda w: w[:, :1].repeat(1, H, 1, 1),
    "expanded": lambda w: w[:, :1].expand(B, H, Q, K),
    "mean over heads": lambda w: w.mean(1, keepdim=True).expand(B, H, Q, K),
    "mixed heads by einsum": lambda w: torch.einsum("bhqk,hg->bgqk", w, torch.eye(H) + 0.5),
    "mixed heads by linear": lambda w: F.linear(w.permute(0, 2, 3, 1), torch.eye(H) + 0.5).permute(0, 3, 1, 2),
    "mixed heads by conv": lambda w: F.conv2d(w, (torch.eye(H) + 0.5)[:, :, None, None]),
    "layer norm over heads": lambda w: F.layer_norm(w.permute(0, 2, 3, 1), (H,)).permute(0, 3, 1, 2),
    "copied into a buffer": lambda w: torch.empty_like(w).copy_(w),
    "added to a buffer": lambda w: torch.zeros_like(w).add_(w),
    "squeezed": lambda w: w.unsqueeze(1).squeeze(1),
}

# How the values are multiplied
PRODUCTS = {
    "@": lambda w, v: w @ v,
    "torch.matmul": lambda w, v: torch.matmul(w, v),
    "matmul by name": lambda w, v: torch.matmul(input=w, other=v),
    "Tensor.matmul": lambda w, v: w.matmul(v),
    "bmm": lambda w, v: torch.bmm(w.flatten(0, 1), v.flatten(0, 1)).unflatten(0, (B, H)),
    "matmul with out": lambda w, v: write(lambda out: torch.matmul(w, v, out=out), B, H, Q, D),
    "columns": lambda w, v: (v.mT @ w.mT).mT,
    "einsum": lambda w, v: torch.einsum("bhqk,bhkd->bhqd", w, v),
    "einsum with dots": lambda w, v: torch.einsum("...qk,...kd->...qd", w, v),
    "einsum, values first": lambda w, v: torch.einsum("bhkd,bhqk->bqhd", v, w).transpose(1, 2),
    "einsum of a list": lambda w, v: torch.einsum("bhqk,bhkd->bhqd", [w, v]),
    "einsum with two widths": lambda w, v: torch.einsum("bhqk,bhkxy->bhqxy", w, v.unflatten(-1, (2, 3))).flatten(-2),
    "baddbmm": lambda w, v: torch.baddbmm(torch.zeros(B * H, Q, D), w.flatten(0, 1), v.flatten(0, 1), beta=0).unflatten(
        0, (B, H)
    ),
    "weights * values, summed": lambda w, v: (w[..., None] * v[:, :, None]).sum(-2),
    "values * weights, summed": lambda w, v: (v[:, :, None] * w.unsqueeze(-1)).sum(dim=3),
    "torch.mul and torch.sum": lambda w, v: torch.sum(torch.mul(w.unsqueeze(-1), v.unsqueeze(2)), dim=3),
    "expanded weights, summed": lambda w, v: (w[..., None].expand(B, H, Q, K, D) * v[:, :, None]).sum(3),
    "summed with keepdim": lambda w, v: (w[..., None] * v[:, :, None]).sum(3, keepdim=True).squeeze(3),
    "output unsqueezed in place": lambda w, v: (w @ v).unsqueeze_(0).squeeze_(0),
    "output changed in place": lambda w, v: (w @ v).mul_(1.0),
}


def check(function, expected):
    torch.manual_seed(0)
    s, v = torch.randn(B, H, Q, K), torch.randn(B, H, K, D)
    model = Style(function)
    plain = function(s.clone(), v.clone())
    trace = look(model, s.clone(), v.clone())
    assert torch.equal(trace.output, plain)
    assert trace.unresolved == []
    assert list(trace) == ["Style"]
    torch.testing.assert_close(trace["Style"].weights(), expected(s), rtol=1e-5, atol=1e-6)
    assert max(trace.verify().values(), default=0.0) < 1e-5
    with edit(model, "Style", head=trace["Style"].num_heads // 2, pattern="zero"):
        edited = model(s.clone(), v.clone())
    return plain, edited


@pytest.mark.parametrize("softmax", SOFTMAXES.values(), ids=SOFTMAXES)
def test_every_softmax_is_recorded(softmax):
    plain, edited = check(lambda s, v: softmax(s) @ v, formula)
    assert edited[:, 1].count_nonzero() == 0
    torch.testing.assert_close(edited[:, [0, 2]], plain[:, [0, 2]])


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_every_step_between_softmax_and_values_is_followed(step):
    check(lambda s, v: step(s.softmax(-1)) @ v, lambda s: step(formula(s)))


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_every_product_is_recorded_and_can_be_edited(product):
    plain, edited = check(lambda s, v: product(s.softmax(-1), v), formula)
    assert edited[:, 1].count_nonzero() == 0
    torch.testing.assert_close(edited[:, [0, 2]], plain[:, [0, 2]])


# Weighted sums of another shape: (function of scores and values, weights by the formula)
OTHERS = {
    "pooling by einsum": (
        lambda s, v: torch.einsum("bhk,bhkd->bhd", s[:, :, 0].softmax(-1), v),
        lambda s: formula(s)[:, :, :1],
    ),
    "pooling by a sum": (lambda s, v: (s[:, :, 0].softmax(-1)[..., None] * v).sum(2), lambda s: formula(s)[:, :, :1]),
    "one sequence": (lambda s, v: s[0, 0].softmax(-1) @ v[0, 0], lambda s: formula(s)[:1, :1]),
    "einsum without output": (
        lambda s, v: torch.einsum("ij,jk", s[0, 0].softmax(-1), v[0, 0]),
        lambda s: formula(s)[:1, :1],
    ),
    "mm": (lambda s, v: torch.mm(s[0, 0].softmax(-1), v[0, 0]), lambda s: formula(s)[:1, :1]),
    "addmm": (
        lambda s, v: torch.addmm(torch.ones(Q, D), s[0, 0].softmax(-1), v[0, 0]),
        lambda s: formula(s)[:1, :1],
    ),
    "tensordot": (lambda s, v: torch.tensordot(s[0, 0].softmax(-1), v[0, 0], dims=1), lambda s: formula(s)[:1, :1]),
    "linear": (lambda s, v: F.linear(s[0, 0].softmax(-1), v[0, 0].mT.contiguous()), lambda s: formula(s)[:1, :1]),
    "mv": (lambda s, v: torch.mv(s[0, 0].softmax(-1), v[0, 0, :, 0]), lambda s: formula(s)[:1, :1]),
    "sink": (
        lambda s, v: torch.cat([s, s[..., :1]], -1).softmax(-1)[..., :-1] @ v,
        lambda s: torch.cat([s, s[..., :1]], -1).softmax(-1)[..., :-1],
    ),
    "quiet softmax": (
        lambda s, v: (e := s.exp()) / (1 + e.sum(-1, keepdim=True)) @ v,
        lambda s: s.exp() / (1 + s.exp().sum(-1, keepdim=True)),
    ),
    "sigmoid": (lambda s, v: torch.sigmoid(s) @ v, torch.sigmoid),
    "sigmoid with a bias": (lambda s, v: (s - math.log(K)).sigmoid() @ v, lambda s: (s - math.log(K)).sigmoid()),
    "normalized over queries": (lambda s, v: s.softmax(-2) @ v, lambda s: s.softmax(-2)),
    "slots, renormalized": (
        lambda s, v: (w := s.softmax(-2)) / w.sum(-1, keepdim=True) @ v,
        lambda s: s.softmax(-2) / s.softmax(-2).sum(-1, keepdim=True),
    ),
}


@pytest.mark.parametrize(("function", "expected"), OTHERS.values(), ids=OTHERS)
def test_weighted_sums_of_other_shapes_are_recorded(function, expected):
    check(function, expected)


def write_slices(w):
    buffer = torch.zeros(B, H, Q, K)
    for i in range(Q):
        buffer[:, :, i] = w[:, :, i]
    return buffer


# What cannot be followed exactly is named
LOST = {
    "top-k": (lambda s, v: s.softmax(-1).topk(2).values @ v[:, :, :2], "topk"),
    "sorted": (lambda s, v: s.softmax(-1).sort(-1).values @ v, "sort"),
    "split keys": (lambda s, v: s[..., :4].softmax(-1).unflatten(-1, (2, 2)).sum(-1) @ v[:, :, :2], "unflatten"),
    "windows": (lambda s, v: s.softmax(-1).unfold(-1, 3, 1)[..., 0] @ v[:, :, :3], "unfold"),
    "as_strided": (lambda s, v: (w := s.softmax(-1)).as_strided(w.shape, w.stride()) @ v, "as_strided"),
    "written in slices": (lambda s, v: write_slices(s.softmax(-1)) @ v, "__setitem__"),
    "mixed keys": (lambda s, v: F.linear(s.softmax(-1), torch.eye(K)) @ v, "linear"),
    "normalized keys": (lambda s, v: F.layer_norm(s.softmax(-1), (K,)) @ v, "layer_norm"),
    "fourier": (lambda s, v: torch.fft.fft(s.softmax(-1)).real @ v, "fft"),
    "three operands": (lambda s, v: torch.einsum("bhqk,bhkd,bhkd->bhqd", s.softmax(-1), v, v), "einsum"),
    "divided after the product": (lambda s, v: (s.exp() @ v) / s.exp().sum(-1, keepdim=True), "matmul"),
    "one exp, divided after the product": (lambda s, v: ((e := s.exp()) @ v) / e.sum(-1, keepdim=True), "matmul"),
    "cumulative": (lambda s, v: s.softmax(-1).cumprod(-1) @ v, "cumprod"),
}


@pytest.mark.parametrize(("function", "operation"), LOST.values(), ids=LOST)
def test_what_is_lost_is_unresolved(function, operation):
    torch.manual_seed(0)
    with pytest.raises(LookupError, match=f"no attention was found in Style.*unresolved.*Style: .*{operation}"):
        look(Style(function), torch.randn(B, H, Q, K), torch.randn(B, H, K, D))


# Not attention
NOT = {
    "classifier": lambda s, v: s.softmax(-1).sum(-1) + v.sum(),
    "router": lambda s, v: s.softmax(-1).topk(2).values.sum(-1, keepdim=True) * v[:, :, :4],
    "gate": lambda s, v: F.linear(torch.sigmoid(s) * s, torch.ones(D, K)),
    "weights of features": lambda s, v: F.linear(s.softmax(-1) * s, torch.ones(D, K)),
    "temperature": lambda s, v: F.linear(s.exp(), torch.ones(D, K)),
}


@pytest.mark.parametrize("function", NOT.values(), ids=NOT)
def test_other_uses_of_a_softmax_are_not_attention(function):
    with pytest.raises(LookupError, match="no attention was found") as error:
        look(Style(function), torch.randn(B, H, Q, K), torch.randn(B, H, K, D))
    assert "unresolved" not in str(error.value)


def test_a_product_of_two_softmaxes_is_recorded_once_and_the_other_is_unresolved():
    s, v = torch.randn(B, H, Q, Q), torch.randn(B, H, Q, D)
    trace = look(Style(lambda s, v: s.softmax(-1) @ s.mT.softmax(-1) @ v), s, v)
    torch.testing.assert_close(trace["Style"].weights(), formula(s))
    assert [item.operation for item in trace.unresolved] == ["softmax"]


def test_there_are_a_hundred_styles():
    assert sum(map(len, (SOFTMAXES, STEPS, PRODUCTS, OTHERS, LOST, NOT))) >= 100
