import hashlib
import json
from dataclasses import replace

import pytest
import torch

from clearhead.models.config import LanguageConfig, PredictorConfig, VisionConfig, build_model
from clearhead.recipes.registry import config_of
from clearhead.training.config import OptimizerConfig
from clearhead.training.optim import Optimizers, param_groups

VISION = VisionConfig(
    width=8, depth=1, num_heads=2, image_size=8, patch_size=4, in_channels=1, num_classes=3, patch_embed="conv"
)


def names(model, weights):
    by_weight = {weight: name for name, weight in model.named_parameters()}
    return {by_weight[weight] for weight in weights}


def test_which_weights_go_where():
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
def test_embeddings_are_not_pulled_to_zero(config, kept):
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
def test_state_to_tensors_and_back_goes_on_exactly(kind):
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


def test_the_multiplier_scales_every_learning_rate():
    model = build_model(VISION)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizers = Optimizers(model, OptimizerConfig(name="muon", lr=0.1, muon_lr=0.2))
    backward(model)
    optimizers.step(0.0)
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    assert {group["lr"] for member in optimizers.optimizers for group in member.param_groups} == {0.0}
    optimizers.step(0.5)
    assert {group["lr"] for member in optimizers.optimizers for group in member.param_groups} == {0.05, 0.1}


def test_norm_and_shortening_are_those_of_torch():
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


def test_a_muon_run_without_blocks_is_adamw_alone():
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
"""digests of the groups, in order, before modules got the names of timm and PyTorch"""


@pytest.mark.parametrize("recipe", PARAM_GROUPS)
def test_the_groups_of_a_recipe_and_their_order_stay_the_same(recipe):
    """The order decides in which order gradient norms are summed, and so the last bit of every loss."""
    with torch.device("meta"):
        model = build_model(config_of(recipe).model)
    index = {weight: i for i, weight in enumerate(model.parameters())}
    groups = {
        kind: [[[index[weight], *weight.shape] for weight in group] for group in param_groups(model, kind)]
        for kind in ("muon", "adamw")
    }
    assert hashlib.sha256(json.dumps(groups).encode()).hexdigest()[:12] == PARAM_GROUPS[recipe]
