"""Looking leaves a model as it is, and shows what it really did."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from clearhead import MultiHeadAttention, Seq2Seq, attend_reference, masks
from clearhead.insight.calls import Fused
from clearhead.insight.look import look
from clearhead.insight.seen import SeenLayer
from clearhead.models.config import Seq2SeqConfig


def leaves(output):
    return [x for x in (output if isinstance(output, tuple) else (output,)) if x is not None]


def test_the_output_is_bit_identical_and_weights_explain_it(kind):
    model, inputs = kind
    plain, seen = model(*inputs), look(model, *inputs)
    assert all(torch.equal(a, b) for a, b in zip(leaves(seen.output), leaves(plain), strict=True))
    assert max(seen.verify().values()) < 1e-5
    for address in seen:
        layer = seen[address]
        assert layer.weights().shape == (layer.batch, layer.n_heads, layer.n_queries, layer.n_keys)
        torch.testing.assert_close(layer.weights().sum(-1), torch.ones(layer.out.shape[:3]))
        assert layer.n_heads == 2


def state_of(model):
    hooks = [
        (dict(m._forward_hooks), dict(m._forward_pre_hooks), dict(m._forward_hooks_always_called), m.training)
        for m in model.modules()
    ]
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    switches = torch.backends.mha.get_fastpath_enabled(), torch.is_grad_enabled()
    return hooks, grads, switches, torch.get_rng_state().tolist()


def test_the_state_is_untouched(kind):
    model, inputs = kind
    model.register_forward_hook(lambda *_: None)
    next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
    before = state_of(model)
    look(model, *inputs)
    after = state_of(model)
    assert str(before) == str(after)
    assert before[0] == after[0]


def test_the_state_is_untouched_when_the_pass_raises(written):
    model, x = written.Raises(), written.tokens()
    before = state_of(model)
    with pytest.raises(RuntimeError, match="in the middle of it"):
        look(model, x)
    assert before == state_of(model)
    assert torch.overrides._len_torch_function_stack() == 0


def test_training_goes_on_as_without_it(kind):
    """The same random numbers are drawn and the same gradients come out, with dropout at work."""
    model, inputs = kind
    model.train()
    results = []
    for run in (model, lambda *x: look(model, *x).output):
        torch.manual_seed(1)
        model.zero_grad()
        sum(x.sum() for x in leaves(run(*inputs))).backward()
        results.append([torch.get_rng_state(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("grad", [True, False])
def test_the_grad_mode_is_the_callers(kind, grad):
    model, inputs = kind
    with torch.set_grad_enabled(grad):
        seen = look(model, *inputs)
    for address in seen:
        assert seen[address].out.requires_grad == seen[address].weights().requires_grad == grad


def test_attention_by_hand_is_seen_in_every_order_of_axes(by_hand, written):
    model, x = by_hand().eval(), written.tokens()
    seen = look(model, x)
    assert list(seen) == [by_hand.__name__]
    layer = seen[by_hand.__name__]
    torch.testing.assert_close(layer.weights(), model.weights)
    assert seen.verify()[by_hand.__name__] < 1e-6
    assert layer.n_heads == 2


@pytest.mark.parametrize("name", ["ByHand", "Functional", "Einsum", "OwnDropout"])
def test_weights_are_those_before_dropout(written, name):
    model, x = getattr(written, name)(dropout=0.5).train(), written.tokens()
    seen = look(model, x)
    torch.testing.assert_close(seen[name].weights(), model.weights)
    assert seen.verify() == {}
    assert "dropout 0.5, not verified" in repr(seen)


def test_dropout_in_the_kernel_is_not_verified_either(written):
    model = MultiHeadAttention(8, 2, dropout=0.25).train()
    seen = look(model, written.tokens())
    assert seen.verify() == {}
    assert "dropout 0.25, not verified" in repr(seen)
    assert seen["MultiHeadAttention"].weights().count_nonzero() == seen["MultiHeadAttention"].weights().numel()


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
    "numbers": {"attn_mask": torch.linspace(-3, 3, Q * K).view(Q, K)},
    "numbers, -inf": {"attn_mask": torch.zeros(2, 1, Q, K).masked_fill(torch.ones(Q, K).triu(1).bool(), float("-inf"))},
    "row of the mask": {"attn_mask": torch.arange(K).expand(2, 1, 1, K) < 3},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("n_groups", [4, 2, 1])
def test_masks_scales_and_groups_of_heads_are_respected(options, n_groups):
    q, k, v = torch.randn(2, 4, Q, 8), torch.randn(2, n_groups, K, 8), torch.randn(2, n_groups, K, 3)
    seen = look(Kernel(), q, k, v, **options, enable_gqa=n_groups != 4)["Kernel"]
    weights = seen.weights()
    torch.testing.assert_close(weights @ v.repeat_interleave(4 // n_groups, 1), seen.out)
    if "attn_mask" in options and options["attn_mask"].dtype == torch.bool:
        hidden = ~options["attn_mask"].expand(2, 4, Q, K)
        assert hidden.any()
        assert (weights[hidden] == 0).all()
    if "is_causal" in options:
        assert weights.triu(1).count_nonzero() == 0
    for head in range(4):  # what is asked in part is a part of the whole
        torch.testing.assert_close(seen.weights(head, [2, 0]), weights[:, [head]][:, :, [2, 0]])
    torch.testing.assert_close(seen.weights([3, 1], slice(1, 3)), weights[:, [3, 1], 1:3])
    assert seen.k.shape == (2, 4, K, 8)
    assert seen.v.shape == (2, 4, K, 3)


def test_a_query_that_may_see_nothing_has_no_weights():
    q, k, v = torch.randn(3, 1, 2, 3, 4)
    mask = torch.tensor([[True, True, False], [False, False, False], [True, False, False]])
    seen = look(Kernel(), q, k, v, attn_mask=mask)
    assert seen["Kernel"].weights(rows=[1]).count_nonzero() == 0
    assert seen.verify()["Kernel"] < 1e-6


@pytest.mark.parametrize(
    ("shape", "expected"), [((3, 4), (1, 1, 3, 3)), ((2, 3, 4), (2, 1, 3, 3)), ((2, 2, 5, 3, 4), (4, 5, 3, 3))]
)
def test_the_kernel_is_seen_with_fewer_and_more_axes(shape, expected):
    seen = look(Kernel(), *torch.randn(3, *shape), attn_mask=torch.ones(3, 3).tril().bool())
    assert seen["Kernel"].weights().shape == expected
    assert seen.verify()["Kernel"] < 1e-6


def test_the_weights_of_our_formula_are_seen(written):
    q, k, v = torch.randn(3, 2, 2, 5, 4)
    mask = masks.causal(5)

    class Formula(nn.Module):
        def forward(self):
            return attend_reference(q, k, v, mask)

    seen = look(Formula())
    assert torch.equal(seen["Formula"].weights(), seen.output[1])


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batched", [True, False])
def test_torch_nn_gives_its_own_weights(need_weights, batched):
    model = nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True)
    x = torch.randn(2, 5, 8) if batched else torch.randn(5, 8)
    mask = torch.ones(5, 5).triu(1).bool()
    seen = look(model, x, x, x, need_weights=need_weights, attn_mask=mask)
    own = model(x, x, x, average_attn_weights=False, attn_mask=mask)[1]
    torch.testing.assert_close(seen["MultiheadAttention"].weights(), own if batched else own[None])
    assert seen["MultiheadAttention"].kernel == "nn.MultiheadAttention"


def test_the_fast_path_of_torch_nn_is_left_for_the_pass_and_the_table_says_so(written):
    model, x = written.encoder().eval(), written.tokens()
    with torch.no_grad():
        seen = look(model, x)
        torch.testing.assert_close(seen.output, model(x), rtol=0, atol=1e-5)
    assert list(seen) == ["layers.0.self_attn", "layers.1.self_attn"]
    assert repr(seen).count("without its fast path") == 2
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
        seen = look(model, x, src_key_padding_mask=padding)
    assert seen["layers.0.self_attn"].weights()[1, ..., 3:].count_nonzero() == 0
    assert seen["layers.0.self_attn"].weights()[0, ..., 3:].count_nonzero() > 0
    assert seen.verify()["layers.0.self_attn"] < 1e-6


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_it_works_in_other_modes_of_torch(kind, mode):
    model, inputs = kind
    with mode():
        seen = look(model, *inputs)
        plain = model(*inputs)
        for address in seen:
            assert seen[address].weights().shape[-2:] == (seen[address].n_queries, seen[address].n_keys)
    torch.testing.assert_close(leaves(seen.output)[0], leaves(plain)[0], rtol=0, atol=1e-5)
    assert max(seen.verify().values()) < 0.02


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
        (model if how == "model.compile()" else model.encoder.blocks[1]).compile(backend=backend)
    seen = look(compiled, x)
    assert not calls
    assert list(seen) == ["encoder.blocks.0.attention", "encoder.blocks.1.attention"]
    assert repr(seen).count("compiled, ran eagerly") == (1 if how == "one block" else 2)
    torch.testing.assert_close(seen.output, plain, rtol=0, atol=1e-5)
    with torch.no_grad():
        compiled(x)
    assert calls  # afterwards it is compiled as before


def test_cross_attention_of_our_encoder_decoder():
    config = Seq2SeqConfig(width=8, depth=1, n_heads=2, hidden=16, n_source=9, n_target=9)
    model = Seq2Seq(config).eval()
    source, target = torch.randint(0, 9, (2, 6)), torch.randint(0, 9, (2, 4))
    seen = look(model, source, target)
    assert [(layer.n_queries, layer.n_keys) for layer in map(seen.__getitem__, seen)] == [(6, 6), (4, 4), (4, 6)]
    own = list(seen)[1]
    assert seen[own].weights().triu(1).count_nonzero() == 0  # no token sees a later one
    assert max(seen.verify().values()) < 1e-5


def test_a_classifiers_softmax_does_not_count(written):
    seen = look(written.OneHead(), written.tokens())
    assert list(seen) == ["OneHead"]
    assert seen["OneHead"].weights().shape == (2, 1, 5, 5)


def test_a_model_without_attention_is_an_error_that_says_what_was_looked_for(written):
    with pytest.raises(
        LookupError, match=r"no attention was seen in Classifier; looked for scaled_dot.*multiplies values"
    ):
        look(written.Classifier(), written.tokens())
    with pytest.raises(ValueError, match=r"look needs an nn\.Module and its inputs, got Tensor"):
        look(torch.ones(1))


def test_a_repeated_address_is_counted(written):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = written.ByHand()

        def forward(self, x):
            return self.attention(self.attention(x))

    model, x = Twice(), written.tokens()
    for _ in range(2):
        assert list(look(model, x)) == ["attention", "attention#2"]


def test_keep_bounds_what_is_kept(written):
    model, x = written.small_vit(), torch.randn(2, 1, 8, 8)
    first, last = look(model, x)
    assert list(look(model, x, keep="last")) == [last]
    seen = look(model, x, keep=[first])
    assert len(seen) == 1
    assert first in seen
    assert repr(seen).endswith("and 1 more, not kept")
    with pytest.raises(LookupError, match=rf"'{last}' was not kept, only {first}; look with keep=\['{last}'\]"):
        seen[last]
    with pytest.raises(LookupError, match=rf"no attention at 'encoder.blocks.0.atention'; did you mean '{first}'\?"):
        look(model, x, keep=["encoder.blocks.0.atention"])
    with pytest.raises(ValueError, match=r'keep must be "all", "last" or a list'):
        look(model, x, keep="first")


class Made(TorchDispatchMode):
    """The bytes of all tensors that are made, views of what was there not counted."""

    def __init__(self, *there):
        super().__init__()
        self.storages = {x.untyped_storage().data_ptr() for x in there}
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.storages:
                self.bytes += x.untyped_storage().nbytes()
        return out


@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=["plain", "causal"])
def test_one_row_of_one_head_takes_memory_for_one_row(options):
    n = 16_384
    q, k, v = torch.randn(1, 2, n, 4), torch.randn(1, 2, n, 4), torch.randn(1, 2, n, 4)
    out = torch.empty(
        1, 2, n, 4
    )  # what the kernel would give takes seconds at this length, and no weights depend on it
    layer = SeenLayer("", "sdpa", "", Fused(q, k, v, None, 0.0, bool(options), 0.5, out))
    with Made(q, k, v, out) as made:
        weights = layer.weights(head=1, rows=[n - 1])
    assert weights.shape == (1, 1, 1, n)
    assert 4 * n <= made.bytes < 50e6
    expected = (0.5 * q[:, 1:, -1:] @ k[:, 1:].mT).softmax(-1)
    torch.testing.assert_close(weights, expected)


def test_long_answers_are_computed_in_pieces(monkeypatch):
    q, k, v = torch.randn(3, 2, 3, 7, 4)
    seen = look(Kernel(), q, k, v, is_causal=True)
    whole, difference = seen["Kernel"].weights(), seen.verify()
    monkeypatch.setattr("clearhead.insight.seen.PIECE", 2 * 3 * 7 * 2)  # two rows
    torch.testing.assert_close(seen["Kernel"].weights(), whole)
    assert seen.verify()["Kernel"] == pytest.approx(difference["Kernel"], abs=1e-6)
