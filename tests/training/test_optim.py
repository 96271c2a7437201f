import hashlib
import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from clearhead.models.config import LanguageConfig, PredictorConfig, VisionConfig, build_model
from clearhead.recipes import config_of
from clearhead.training import optim
from clearhead.training.config import OptimizerConfig
from clearhead.training.optim import (
    Muon,
    Optimizers,
    WeightEMA,
    eval_weights,
    newton_schulz,
    orthogonalize,
    param_groups,
)

VISION = VisionConfig(
    width=8, depth=1, num_heads=2, image_size=8, patch_size=4, in_channels=1, num_classes=3, patch_embed="conv"
)


def names(model, weights):
    by_weight = {weight: name for name, weight in model.named_parameters()}
    return {by_weight[weight] for weight in weights}


def test_param_groups_of_a_vision_transformer():
    model = build_model(VISION)
    hidden, decayed, kept = (names(model, weights) for weights in param_groups(model, "muon"))
    block = "blocks.0"
    assert hidden == {
        "patch_embed.stages.0.weight",
        "patch_embed.stages.1.weight",
        *(f"{block}.attn.{part}.weight" for part in ("q_proj", "k_proj", "v_proj", "out_proj")),
        f"{block}.mlp.fc1.weight",
        f"{block}.mlp.fc2.weight",
    }
    assert decayed == {"head.weight"}
    assert {"pool.cls_token", "pos_embed.table", "norm.weight", "head.bias"} < kept
    assert hidden | decayed | kept == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (LanguageConfig(width=8, depth=1, num_heads=2, vocab_size=5), {"tok_embed.weight", "pos_embed.table"}),
        (PredictorConfig(width=8, depth=1, num_heads=2, in_features=5, out_features=2), {"embed.weight", "embed.bias"}),
    ],
)
def test_embeddings_have_no_weight_decay(config, kept):
    model = build_model(config)
    hidden, decayed, free = param_groups(model, "adamw")
    assert not hidden
    assert kept < names(model, free)
    assert all(weight.dim() == 2 for weight in decayed)


def backward(model):
    model(torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))).square().sum().backward()


def steps(model, optimizers, n):
    for _ in range(n):
        backward(model)
        optimizers.step(0.5)
        optimizers.zero_grad()


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_restored_optimizer_state_continues_bit_for_bit(kind):
    config = OptimizerConfig(name=kind, weight_decay=0.1)
    torch.manual_seed(0)
    whole, first = build_model(VISION), build_model(VISION)
    first.load_state_dict(whole.state_dict())
    steps(whole, Optimizers(whole, config), 4)
    optimizers = Optimizers(first, config)
    steps(first, optimizers, 2)
    saved = {name: tensor.clone() for name, tensor in optimizers.state_tensors().items()}
    again = Optimizers(first, config)
    again.load_state_tensors(saved)
    steps(first, again, 2)
    for name, weight in whole.named_parameters():
        assert torch.equal(weight, first.get_parameter(name)), name


def test_lr_multiplier_scales_every_learning_rate():
    model = build_model(VISION)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizers = Optimizers(model, OptimizerConfig(name="muon", lr=0.1, muon_lr=0.2))
    backward(model)
    optimizers.step(0.0)
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    assert {group["lr"] for member in optimizers.optimizers for group in member.param_groups} == {0.0}
    optimizers.step(0.5)
    assert {group["lr"] for member in optimizers.optimizers for group in member.param_groups} == {0.05, 0.1}


def test_gradient_norm_and_clipping_equal_torch():
    torch.manual_seed(0)
    ours, theirs = build_model(VISION), build_model(VISION)
    theirs.load_state_dict(ours.state_dict())
    backward(ours)
    backward(theirs)
    optimizers = Optimizers(ours, OptimizerConfig())
    norm = optimizers.squared_norm().sqrt().item()
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1).item()
    assert expected > 0.1
    assert norm == pytest.approx(expected, rel=1e-6)
    optimizers.scale_grads_(0.1 / norm)
    for name, weight in theirs.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name).grad, weight.grad)


def test_muon_without_hidden_matrices_uses_adamw_only():
    model = torch.nn.Linear(2, 2)
    assert len(Optimizers(model, replace(OptimizerConfig(), name="muon")).optimizers) == 1


PARAM_GROUPS = {
    "reverse": "e77cc46f2d09",
    "reverse-uva": "dd6069e7d39e",
    "digits": "426da1987895",
    "odd-one-out": "8195bbd5b628",
    "mnist": "cd0c0ed910d0",
    "mnist-plain": "7fcf632f610d",
    "cifar10-fast": "8a0c762eebfb",
    "cifar10-vit": "52a55e7e5a46",
    "cifar10-bert": "d8e6fd844f42",
    "fashion-mnist": "cd0c0ed910d0",
    "pronounce": "a58a522cfc49",
    "pronounce-fast": "74800126da0c",
    "words": "3295762f9d5f",
}
"""digests of the ordered groups, recorded before the modules were renamed"""


@pytest.mark.parametrize("recipe", PARAM_GROUPS)
def test_param_groups_of_each_recipe_keep_their_order(recipe):
    """The order decides in which order gradient norms are summed, and so the last bit of every loss."""
    with torch.device("meta"):
        model = build_model(config_of(recipe).model)
    index = {weight: i for i, weight in enumerate(model.parameters())}
    groups = {
        kind: [[[index[weight], *weight.shape] for weight in group] for group in param_groups(model, kind)]
        for kind in ("muon", "adamw")
    }
    assert hashlib.sha256(json.dumps(groups).encode()).hexdigest()[:12] == PARAM_GROUPS[recipe]


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 8, 32), (1, 1, 5)])
def test_newton_schulz_sets_singular_values_near_1_and_keeps_directions(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 1e-3
    u, s, v = torch.linalg.svd(matrices, full_matrices=False)
    result = newton_schulz(matrices)
    kept = torch.diagonal(u.mT @ result @ v.mT, dim1=-2, dim2=-1)
    larger = kept[s > 0.02 * s.amax(dim=-1, keepdim=True)]  # five steps do not reach the very smallest
    assert larger.min() > 0.6
    assert larger.max() < 1.25
    assert not ((s > 0.6) & (s < 1.25)).any()  # the inputs had other singular values


def test_newton_schulz_of_zeros_is_zeros():
    assert torch.equal(newton_schulz(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))


def test_newton_schulz_is_scale_invariant():
    x = torch.randn(1, 6, 6)
    torch.testing.assert_close(newton_schulz(x * 1e-12), newton_schulz(x), atol=1e-4, rtol=1e-3)


def test_batched_orthogonalization_equals_one_at_a_time():
    shapes = [(8, 4), (4, 8), (8, 4), (6, 6), (8, 3, 2, 2), (2, 8, 3, 3), (6, 6)]
    updates = [torch.randn(shape) for shape in shapes]
    together = orthogonalize(updates)
    for update, result in zip(updates, together, strict=True):
        assert result.shape == update.shape
        torch.testing.assert_close(result, orthogonalize([update])[0], atol=1e-5, rtol=1e-4)


def test_matrices_of_one_shape_are_stacked(monkeypatch):
    calls = []
    monkeypatch.setattr(optim, "newton_schulz", lambda stack, dtype: calls.append(tuple(stack.shape)) or stack)
    orthogonalize([torch.ones(8, 4), torch.ones(4, 8), torch.ones(4, 4), torch.ones(4, 2, 2, 2)])
    assert sorted(calls) == [(1, 4, 4), (3, 4, 8)]


def test_tall_matrix_is_scaled_by_the_root_of_its_aspect_ratio():
    wide = torch.randn(3, 12)
    (flat,), (tall,) = orthogonalize([wide]), orthogonalize([wide.mT])
    torch.testing.assert_close(tall, flat.mT * (12 / 3) ** 0.5)


def test_convolution_kernel_is_flattened_per_output_channel():
    kernel = torch.randn(4, 3, 2, 2)
    torch.testing.assert_close(orthogonalize([kernel])[0].flatten(1), orthogonalize([kernel.flatten(1)])[0])


def test_muon_steps_match_the_formula():
    w = torch.nn.Parameter(torch.randn(4, 6))
    optimizer = Muon([w], lr=0.1, momentum=0.9, weight_decay=0.5)
    expected, momentum = w.detach().clone(), torch.zeros(4, 6)
    for _ in range(2):
        gradient = torch.randn(4, 6)
        w.grad = gradient.clone()
        optimizer.step()
        momentum = 0.9 * momentum + 0.1 * gradient
        ahead = 0.1 * gradient + 0.9 * momentum
        expected = expected * (1 - 0.1 * 0.5) - 0.1 * orthogonalize([ahead])[0]
        torch.testing.assert_close(w.detach(), expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(w.grad, gradient)  # unchanged


def test_muon_skips_parameters_without_gradient():
    w, idle = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2, 2))
    optimizer = Muon([w, idle], weight_decay=0.1)
    optimizer.step()
    w.grad = torch.eye(2)
    optimizer.step()
    assert torch.equal(idle.detach(), torch.ones(2, 2))
    assert not torch.equal(w.detach(), torch.ones(2, 2))


def test_muon_refuses_vectors():
    with pytest.raises(ValueError, match=r"got a parameter of shape \(3,\)"):
        Muon([torch.nn.Parameter(torch.ones(3))])


def test_ema_equals_the_exponentially_weighted_sum():
    """With a constant decay d: d^n w_0 + (1 - d) sum d^(n-i) w_i."""
    model = nn.Linear(2, 1, bias=False)
    average = WeightEMA(model, decay=0.05)  # below (1 + 0) / (10 + 0): constant from the first step
    seen = [model.weight.detach().clone()]
    for step in range(4):
        nn.init.normal_(model.weight)
        seen.append(model.weight.detach().clone())
        average.update(step)
    d, n = 0.05, 4
    expected = d**n * seen[0] + sum((1 - d) * d ** (n - i) * seen[i] for i in range(1, n + 1))
    torch.testing.assert_close(average.averages["weight"], expected)


def test_ema_decay_warms_up():
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    average = WeightEMA(model, decay=0.999)
    nn.init.ones_(model.weight)
    average.update(0)
    assert average.averages["weight"].item() == pytest.approx(1 - 1 / 10)
    late = WeightEMA(model, decay=0.999)
    nn.init.zeros_(model.weight)
    late.update(10**6)
    assert late.averages["weight"].item() == pytest.approx(0.999)


def test_average_parameters_restores_the_weights_after_an_error():
    model = nn.Linear(2, 2)
    average = WeightEMA(model, decay=0.9)
    own = {name: nn.init.normal_(weight).detach().clone() for name, weight in model.named_parameters()}
    average.update(0)
    with pytest.raises(KeyError), average.average_parameters():  # noqa: PT012
        assert all(torch.equal(w, average.averages[n]) for n, w in model.named_parameters())
        assert not torch.equal(model.weight, own["weight"])
        raise KeyError
    assert all(torch.equal(w, own[n]) for n, w in model.named_parameters())


def test_eval_weights_prefers_the_averages():
    model, average = {"w": torch.zeros(1), "buffer": torch.ones(1)}, torch.full((1,), 2.0)
    assert eval_weights(model, {"optim.w.exp_avg": average}) == model
    assert eval_weights(model, {"ema.w": average}) == {"w": average, "buffer": model["buffer"]}


def test_new_parts_are_grouped_by_what_they_are():
    """Matrices are decayed or go to Muon; gains of norms and of layer scale, and register tokens, are neither."""
    parts = {"num_kv_heads": 1, "qk_norm": True, "activation": "swiglu", "norm_layer": "rmsnorm", "layer_scale": 0.1}
    model = build_model(replace(VISION, **parts, num_register_tokens=2, bias=False))
    muon, decay, no_decay = (names(model, weights) for weights in param_groups(model, "muon"))
    attn, mlp = ("q_proj", "k_proj", "v_proj", "out_proj"), ("gate_proj", "up_proj", "down_proj")
    assert {name for name in muon if name.startswith("blocks.")} == {
        *(f"blocks.0.attn.{part}.weight" for part in attn),
        *(f"blocks.0.mlp.{part}.weight" for part in mlp),
    }
    assert decay == {"head.weight"}
    gains = {f"blocks.0.{name}" for name in ("norm1.weight", "norm2.weight", "ls1.gamma", "ls2.gamma")}
    assert gains | {"blocks.0.attn.q_norm.weight", "blocks.0.attn.k_norm.weight"} < no_decay
    assert {"registers.tokens", "pool.cls_token", "pos_embed.table", "norm.weight"} < no_decay
    muon, decay, _ = (names(model, weights) for weights in param_groups(model, "adamw"))
    assert not muon
    assert all(model.get_parameter(name).dim() > 1 for name in decay)
    assert "registers.tokens" not in decay
