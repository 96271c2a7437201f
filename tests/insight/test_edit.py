"""An edited head speaks with other weights, and the model's output follows."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from clearhead.insight.heads import edit
from clearhead.insight.trace import look


def first(output):
    return output[0] if isinstance(output, tuple) else output


def test_the_same_weights_give_the_same_output(kind):
    model, inputs = kind
    plain = first(model(*inputs))
    for name in look(model, *inputs):
        with edit(model, name, pattern=lambda weights: weights):
            torch.testing.assert_close(first(model(*inputs)), plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize("to", ["zero", "uniform"])
def test_the_edited_head_changes_and_the_others_are_bit_identical(kind, to):
    model, inputs = kind
    name = next(iter(look(model, *inputs)))
    before = look(model, *inputs)
    with edit(model, name, head=1, pattern=to):
        after = look(model, *inputs)
    assert torch.equal(after[name].out[:, 0], before[name].out[:, 0])
    assert not torch.allclose(after[name].out[:, 1], before[name].out[:, 1])
    assert not torch.allclose(first(after.output), first(before.output))
    if to == "zero":
        assert after[name].out[:, 1].count_nonzero() == 0
    again = look(model, *inputs)
    assert torch.equal(first(again.output), first(before.output))


def test_attention_by_hand_is_edited_in_every_order_of_axes(by_hand, written):
    model, x = by_hand().eval(), written.tokens()
    name = by_hand.__name__
    trace = look(model, x)[name]
    new = torch.rand(2, 1, 5, 5)
    with edit(model, name, head=1, pattern=new):
        edited = look(model, x)[name]
    torch.testing.assert_close(edited.out[:, 1:], new @ trace.v[:, 1:])
    assert torch.equal(edited.out[:, :1], trace.out[:, :1])


class Kernel(nn.Module):
    def forward(self, *args, **options):
        return F.scaled_dot_product_attention(*args, **options)


MASKS = {
    "bool": torch.ones(4, 6).tril().bool(),
    "-inf": torch.zeros(4, 6).masked_fill(torch.ones(4, 6).triu(1).bool(), float("-inf")),
    "lowest number": torch.zeros(4, 6).masked_fill(torch.ones(4, 6).triu(1).bool(), torch.finfo(torch.float32).min),
}


@pytest.mark.parametrize(
    "options", [{"is_causal": True}, *({"attn_mask": m} for m in MASKS.values())], ids=["flag", *MASKS]
)
def test_uniform_weights_cover_the_visible_keys(options):
    q, k, v = 100 * torch.randn(2, 4, 4, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 3)
    with edit(model := Kernel(), "Kernel", head=[0, 3], pattern="uniform"):
        out = model(q, k, v, **options, enable_gqa=True)
    v = v.repeat_interleave(2, 1)
    for head in (0, 3):
        for row in range(4):
            torch.testing.assert_close(out[:, head, row], v[:, head, : row + 1].mean(1))
    plain = model(q, k, v[:, ::2], **options, enable_gqa=True)
    assert torch.equal(out[:, 1:3], plain[:, 1:3])


def test_gradients_flow_through_an_edited_head(written):
    model, x = written.small_vit(), torch.randn(2, 1, 8, 8)
    with edit(model, "blocks.0.attn", head=0, pattern=lambda weights: weights**2):
        model(x).sum().backward()
    assert model.blocks[0].attn.q_proj.weight.grad.count_nonzero() > 0


def test_compiled_models_and_the_fast_path_are_edited_too(written):
    model, x = written.encoder().eval(), written.tokens()
    with torch.no_grad():
        plain = model(x)
        with edit(model, "layers.1.self_attn", pattern="zero"):
            assert not torch.allclose(model(x), plain)
        compiled = torch.compile(model, backend="eager")
        with edit(compiled, "layers.1.self_attn", pattern="zero"):
            assert not torch.allclose(compiled(x), plain)


def test_two_edits_combine_and_leave_other_models_unchanged(written):
    model, other, x = written.ByHand().eval(), written.ByHand().eval(), written.tokens()
    with edit(model, "ByHand", head=0), edit(model, "ByHand", head=1):
        torch.testing.assert_close(model(x), model.out.bias.expand(2, 5, 8))
        changed = other(x)
    assert torch.equal(changed, other(x))


def refused(model, inputs, *args, **options):
    with edit(model, *args, **options):
        model(inputs)


def test_edit_errors_name_the_valid_values(written):
    model, x, first_one = written.small_vit(), torch.randn(2, 1, 8, 8), "blocks.0.attn"
    with pytest.raises(LookupError, match=r"no module named 'blocks.7.attn'; did you mean 'blocks.\d.attn"):
        refused(model, x, "blocks.7.attn")
    with pytest.raises(LookupError, match=r"no attention named 'embed_norm'.* blocks.0.attn, "):
        refused(model, x, "embed_norm")
    with pytest.raises(LookupError, match=r"no attention named 'blocks.0.attn#2'"):
        refused(model, x, f"{first_one}#2")
    with pytest.raises(LookupError, match=r"no attention was found; looked for scaled_dot_product"):
        refused(written.Classifier(), written.tokens(), "Classifier")
    with pytest.raises(LookupError, match=r"from 0 to 1 for 'blocks.0.attn', got 2"):
        refused(model, x, first_one, head=2)
    with pytest.raises(
        ValueError, match=r"new weights must broadcast to \(B,heads,Q,K\) = \(2, 1, 5, 5\), got \(3, 3\)"
    ):
        refused(model, x, first_one, head=1, pattern=torch.ones(3, 3))
    with pytest.raises(ValueError, match=r'pattern must be "uniform", "zero", a tensor or a function, got \'none\''):
        refused(model, x, first_one, pattern="none")
    with pytest.raises(ValueError, match=r"edit needs an nn\.Module, got Tensor"):
        refused(x, x, "a")
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def test_a_repeated_name_is_edited_by_its_number(written):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = written.ByHand()

        def forward(self, x):
            return self.attention(self.attention(x))

    model, x = Twice(), written.tokens()
    with edit(model, "attention#2", pattern="zero"):
        for _ in range(2):  # counted anew in every pass
            torch.testing.assert_close(model(x), model.attention.out.bias.expand(2, 5, 8))
