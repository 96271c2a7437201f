"""Head statistics, head importance, and `edit`, which replaces the weights of single heads."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clearhead
from clearhead.insight.heads import (
    class_token_mass,
    diagonality,
    distance,
    edit,
    entropy,
    head_importance,
    pairwise_distances,
)
from clearhead.insight.trace import look
from clearhead.nn.attention import MultiHeadAttention


def test_entropy_of_uniform_weights_is_log_n_and_of_one_hot_weights_zero():
    weights = torch.stack([torch.full((4, 8), 1 / 8), torch.eye(8)[:4]])[None]  # two heads
    assert torch.allclose(entropy(weights), torch.tensor([math.log(8), 0.0]))


def test_fully_masked_rows_are_ignored():
    weights = torch.full((1, 1, 3, 4), 0.25)
    weights[..., 0, :] = 0
    assert entropy(weights).item() == pytest.approx(math.log(4))
    assert class_token_mass(weights).item() == pytest.approx(0.25)
    assert entropy(torch.zeros(1, 1, 2, 2)).item() == 0


def test_distance_in_one_dimension():
    shifted = torch.eye(6).roll(2, dims=1)[:4].unsqueeze(0)
    both = torch.stack([torch.eye(6), torch.cat([shifted[0], torch.zeros(2, 6)])])[None]  # distance 0 and distance 2
    assert torch.equal(distance(both), torch.tensor([0.0, 2.0]))


def test_distance_on_a_grid_is_euclidean():
    steps = pairwise_distances(12, (3, 4))
    assert steps[0, 11] == pytest.approx(math.hypot(2, 3))
    assert steps[1, 5] == 1
    assert pairwise_distances(12)[0, 11] == 11


def test_distance_excludes_the_class_token():
    patches = torch.eye(4).roll(1, dims=0)
    weights = torch.zeros(1, 1, 5, 5)
    weights[0, 0, 0] = 0.2
    weights[0, 0, 1:, 0] = 0.9  # the remaining weights are renormalized
    weights[0, 0, 1:, 1:] = 0.1 * patches
    assert distance(weights, (2, 2), class_token=True).item() == pytest.approx(
        (pairwise_distances(4, (2, 2)) * patches).sum(-1).mean().item()
    )
    with pytest.raises(ValueError, match=r"2 x 2 has 4 patches, got 5 tokens; .*class_token=True"):
        distance(weights, (2, 2))
    with pytest.raises(ValueError, match="got 3 queries and 5 keys"):
        distance(weights[..., :3, :])


def test_diagonality_of_diagonal_antidiagonal_and_uniform_weights():
    weights = torch.stack([torch.eye(5), torch.eye(5).flip(-1), torch.full((5, 5), 0.2)])[None]
    assert torch.allclose(diagonality(weights), torch.tensor([1.0, 0.2, 0.2]))
    assert torch.allclose(diagonality(weights.flip(-1)), torch.tensor([0.2, 1.0, 0.2]))
    assert diagonality(weights, within=1)[2].item() == pytest.approx((2 + 3 * 3 + 2) / 25)


def test_diagonality_of_cross_attention_follows_the_rescaled_diagonal():
    aligned = torch.zeros(1, 1, 3, 5)
    for query, key in enumerate((0, 2, 4)):
        aligned[..., query, key] = 1
    assert diagonality(aligned).item() == 1
    assert diagonality(aligned.flip(-1)).item() == pytest.approx(1 / 3)


def test_class_token_mass_is_the_weight_of_its_key():
    weights = torch.tensor([[[[0.5, 0.5], [0.3, 0.7]]]])
    assert class_token_mass(weights).item() == pytest.approx(0.4)
    assert class_token_mass(weights, index=1).item() == pytest.approx(0.6)


class Heads(nn.Module):
    """A layer of four heads and one of two; the output weights of the first layer's third head are zero."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = MultiHeadAttention(8, 4), MultiHeadAttention(8, 2)
        with torch.no_grad():
            self.first.out_proj.weight[:, 4:6] = 0

    def forward(self, x, scale=1.0):
        x = x + self.first(x)
        return (x + self.second(x)) * scale


def test_a_head_with_zero_output_weights_has_zero_importance():
    changes = head_importance(Heads(), torch.randn(2, 5, 8), lambda output: output.square().mean())
    assert changes.shape == (2, 4)
    assert changes[0, 2] == 0
    assert (changes[0, [0, 1, 3]].abs() > 1e-4).all()
    assert changes[1, :2].abs().min() > 1e-4
    assert changes[1, 2:].isnan().all()  # the second layer has only two heads


def test_importance_is_the_score_without_the_head_minus_the_score_with_it():
    model, x = Heads(), torch.randn(2, 5, 8)
    score = lambda output: output.square().mean()  # noqa: E731
    found = clearhead.head_importance(model, (x, 3.0), score, pattern="uniform", names=["second"])
    with torch.no_grad(), edit(model, "second", head=1, pattern="uniform"):
        without = score(model(x, 3.0))
    assert found.shape == (1, 2)
    assert found[0, 1].item() == pytest.approx((without - score(model(x, 3.0))).item(), abs=1e-6)


def test_score_must_be_a_single_number():
    with pytest.raises(ValueError, match=r"score must return a single number, got a tensor of shape \(2, 5, 8\)"):
        head_importance(Heads(), torch.randn(2, 5, 8), lambda output: output)


def first(output):
    return output[0] if isinstance(output, tuple) else output


def test_editing_with_identical_weights_keeps_the_output(model_and_inputs):
    model, inputs = model_and_inputs
    plain = first(model(*inputs))
    for name in look(model, *inputs):
        with edit(model, name, pattern=lambda weights: weights):
            torch.testing.assert_close(first(model(*inputs)), plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize("pattern", ["zero", "uniform"])
def test_the_edited_head_changes_and_the_others_are_bit_identical(model_and_inputs, pattern):
    model, inputs = model_and_inputs
    name = next(iter(look(model, *inputs)))
    before = look(model, *inputs)
    with edit(model, name, head=1, pattern=pattern):
        after = look(model, *inputs)
    assert torch.equal(after[name].out[:, 0], before[name].out[:, 0])
    assert not torch.allclose(after[name].out[:, 1], before[name].out[:, 1])
    assert not torch.allclose(first(after.output), first(before.output))
    if pattern == "zero":
        assert after[name].out[:, 1].count_nonzero() == 0
    again = look(model, *inputs)
    assert torch.equal(first(again.output), first(before.output))


def test_manual_attention_is_edited_for_every_axis_order(manual_class, models):
    model, x = manual_class().eval(), models.tokens()
    name = manual_class.__name__
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
    "finfo.min": torch.zeros(4, 6).masked_fill(torch.ones(4, 6).triu(1).bool(), torch.finfo(torch.float32).min),
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


def test_gradients_flow_through_an_edited_head(models):
    model, x = models.small_vit(), torch.randn(2, 1, 8, 8)
    with edit(model, "blocks.0.attn", head=0, pattern=lambda weights: weights**2):
        model(x).sum().backward()
    assert model.blocks[0].attn.q_proj.weight.grad.count_nonzero() > 0


def test_compiled_models_and_the_fast_path_are_edited(models):
    model, x = models.encoder().eval(), models.tokens()
    with torch.no_grad():
        plain = model(x)
        with edit(model, "layers.1.self_attn", pattern="zero"):
            assert not torch.allclose(model(x), plain)
        compiled = torch.compile(model, backend="eager")
        with edit(compiled, "layers.1.self_attn", pattern="zero"):
            assert not torch.allclose(compiled(x), plain)


def test_two_edits_combine_and_leave_other_models_unchanged(models):
    model, other, x = models.ManualAttention().eval(), models.ManualAttention().eval(), models.tokens()
    with edit(model, "ManualAttention", head=0), edit(model, "ManualAttention", head=1):
        torch.testing.assert_close(model(x), model.out.bias.expand(2, 5, 8))
        changed = other(x)
    assert torch.equal(changed, other(x))


def edit_and_run(model, inputs, *args, **options):
    with edit(model, *args, **options):
        model(inputs)


def test_edit_errors_name_the_valid_values(models):
    model, x, name = models.small_vit(), torch.randn(2, 1, 8, 8), "blocks.0.attn"
    with pytest.raises(LookupError, match=r"no module named 'blocks.7.attn'; did you mean 'blocks.\d.attn"):
        edit_and_run(model, x, "blocks.7.attn")
    with pytest.raises(LookupError, match=r"no attention named 'embed_norm'.* blocks.0.attn, "):
        edit_and_run(model, x, "embed_norm")
    with pytest.raises(LookupError, match=r"no attention named 'blocks.0.attn#2'"):
        edit_and_run(model, x, f"{name}#2")
    with pytest.raises(LookupError, match=r"no attention was found; looked for scaled_dot_product"):
        edit_and_run(models.Classifier(), models.tokens(), "Classifier")
    with pytest.raises(LookupError, match=r"from 0 to 1 for 'blocks.0.attn', got 2"):
        edit_and_run(model, x, name, head=2)
    with pytest.raises(
        ValueError, match=r"new weights must broadcast to \(B,heads,Q,K\) = \(2, 1, 5, 5\), got \(3, 3\)"
    ):
        edit_and_run(model, x, name, head=1, pattern=torch.ones(3, 3))
    with pytest.raises(ValueError, match=r'pattern must be "uniform", "zero", a tensor or a function, got \'none\''):
        edit_and_run(model, x, name, pattern="none")
    with pytest.raises(ValueError, match=r"edit needs an nn\.Module, got Tensor"):
        edit_and_run(x, x, "a")
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def test_a_repeated_call_is_edited_by_its_number(models):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = models.ManualAttention()

        def forward(self, x):
            return self.attention(self.attention(x))

    model, x = Twice(), models.tokens()
    with edit(model, "attention#2", pattern="zero"):
        for _ in range(2):  # numbering restarts in every pass
            torch.testing.assert_close(model(x), model.attention.out.bias.expand(2, 5, 8))
