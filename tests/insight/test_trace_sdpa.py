"""Weights are recomputed on demand from the inputs of scaled_dot_product_attention."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from clearhead.insight.calls import SDPACall
from clearhead.insight.trace import AttentionRecord, look


class Kernel(nn.Module):
    def forward(self, *args, **options):
        return F.scaled_dot_product_attention(*args, **options)


Q, K = 4, 6
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 2.0},
    "bool mask": {"attn_mask": torch.rand(Q, K, generator=torch.Generator().manual_seed(0)) > 0.4},
    "mask per head": {"attn_mask": torch.rand(4, Q, K, generator=torch.Generator().manual_seed(0)) > 0.4},
    "additive mask": {"attn_mask": torch.linspace(-3, 3, Q * K).view(Q, K)},
    "additive mask, -inf": {
        "attn_mask": torch.zeros(2, 1, Q, K).masked_fill(torch.ones(Q, K).triu(1).bool(), float("-inf"))
    },
    "key padding mask": {"attn_mask": torch.arange(K).expand(2, 1, 1, K) < 3},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("n_groups", [4, 2, 1])
def test_masks_scales_and_grouped_heads_are_respected(options, n_groups):
    q, k, v = torch.randn(2, 4, Q, 8), torch.randn(2, n_groups, K, 8), torch.randn(2, n_groups, K, 3)
    trace = look(Kernel(), q, k, v, **options, enable_gqa=n_groups != 4)["Kernel"]
    weights = trace.weights()
    torch.testing.assert_close(weights @ v.repeat_interleave(4 // n_groups, 1), trace.out)
    if "attn_mask" in options and options["attn_mask"].dtype == torch.bool:
        masked = ~options["attn_mask"].expand(2, 4, Q, K)
        assert masked.any()
        assert (weights[masked] == 0).all()
    if "is_causal" in options:
        assert weights.triu(1).count_nonzero() == 0
    for head in range(4):  # a selection equals the same part of the full weights
        torch.testing.assert_close(trace.weights(head, [2, 0]), weights[:, [head]][:, :, [2, 0]])
    torch.testing.assert_close(trace.weights([3, 1], slice(1, 3)), weights[:, [3, 1], 1:3])
    assert trace.k.shape == (2, 4, K, 8)
    assert trace.v.shape == (2, 4, K, 3)


def test_fully_masked_queries_have_zero_weights():
    q, k, v = torch.randn(3, 1, 2, 3, 4)
    mask = torch.tensor([[True, True, False], [False, False, False], [True, False, False]])
    trace = look(Kernel(), q, k, v, attn_mask=mask)
    assert trace["Kernel"].weights(rows=[1]).count_nonzero() == 0
    assert trace.verify()["Kernel"] < 1e-6


@pytest.mark.parametrize(
    ("shape", "expected"), [((3, 4), (1, 1, 3, 3)), ((2, 3, 4), (2, 1, 3, 3)), ((2, 2, 5, 3, 4), (4, 5, 3, 3))]
)
def test_sdpa_inputs_of_any_rank_are_recorded(shape, expected):
    trace = look(Kernel(), *torch.randn(3, *shape), attn_mask=torch.ones(3, 3).tril().bool())
    assert trace["Kernel"].weights().shape == expected
    assert trace.verify()["Kernel"] < 1e-6


class AllocatedBytes(TorchDispatchMode):
    """Counts the bytes of all newly allocated tensors; views of existing tensors do not count."""

    def __init__(self, *existing):
        super().__init__()
        self.storages = {x.untyped_storage().data_ptr() for x in existing}
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.storages:
                self.bytes += x.untyped_storage().nbytes()
        return out


@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=["plain", "causal"])
def test_one_row_of_one_head_allocates_one_row(options):
    n = 16_384
    q, k, v = torch.randn(1, 2, n, 4), torch.randn(1, 2, n, 4), torch.randn(1, 2, n, 4)
    out = torch.empty(
        1, 2, n, 4
    )  # what the kernel would give takes seconds at this length, and no weights depend on it
    layer = AttentionRecord("", "sdpa", "", SDPACall(q, k, v, None, 0.0, bool(options), 0.5, out))
    with AllocatedBytes(q, k, v, out) as allocated:
        weights = layer.weights(head=1, rows=[n - 1])
    assert weights.shape == (1, 1, 1, n)
    assert 4 * n <= allocated.bytes < 50e6
    expected = (0.5 * q[:, 1:, -1:] @ k[:, 1:].mT).softmax(-1)
    torch.testing.assert_close(weights, expected)


def test_large_weights_are_computed_in_chunks(monkeypatch):
    q, k, v = torch.randn(3, 2, 3, 7, 4)
    trace = look(Kernel(), q, k, v, is_causal=True)
    full, difference = trace["Kernel"].weights(), trace.verify()
    monkeypatch.setattr("clearhead.insight.trace.CHUNK", 2 * 3 * 7 * 2)  # two rows
    torch.testing.assert_close(trace["Kernel"].weights(), full)
    assert trace.verify()["Kernel"] == pytest.approx(difference["Kernel"], abs=1e-6)
