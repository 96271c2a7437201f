from dataclasses import replace

import pytest
import torch

import clearhead
from clearhead import VisionTransformer
from clearhead.models.config import VisionConfig

CONFIG = VisionConfig(width=8, depth=2, num_heads=2, image_size=(8, 12), patch_size=4, num_classes=3, in_channels=2)


def build(**fields):
    torch.manual_seed(0)
    return VisionTransformer.from_config(replace(CONFIG, **fields)).double()


@pytest.fixture
def images():
    return torch.randn(2, 2, 8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("pooling", ["cls", "mean", "attention"])
@pytest.mark.parametrize("pos_embed", ["learned", "sinusoidal", "rotary", "none"])
@pytest.mark.parametrize("patch_embed", ["patch", "conv", "conv-stem"])
def test_images_of_any_divisible_size_give_logits(pooling, pos_embed, patch_embed):
    model = build(pooling=pooling, pos_embed=pos_embed, patch_embed=patch_embed)
    for height, width in ((8, 12), (4, 4), (16, 8)):
        assert model(torch.randn(2, 2, height, width, dtype=torch.float64)).shape == (2, 3)


@pytest.mark.parametrize("pos_embed", ["learned", "sinusoidal", "rotary"])
def test_positions_make_the_order_of_the_patches_matter(pos_embed):
    model = build(pos_embed=pos_embed)
    if pos_embed == "learned":
        with torch.no_grad():
            model.pos_embed.table.mul_(50)
    patches = torch.randn(2, 6, 8, dtype=torch.float64)
    change = model(inputs_embeds=patches) - model(inputs_embeds=patches[:, [5, 4, 3, 2, 1, 0]])
    assert change.abs().max() > 1e-4


def test_without_positions_the_logits_are_patch_permutation_invariant(images):
    model = build(pos_embed="none")
    patches = model.patch_embed(images)
    torch.testing.assert_close(model(inputs_embeds=patches), model(inputs_embeds=patches[:, [5, 4, 3, 2, 1, 0]]))


def test_inputs_embeds_equal_patch_embed(images):
    model = build()
    torch.testing.assert_close(model(inputs_embeds=model.patch_embed(images)), model(images))


@pytest.mark.parametrize("pos_embed", ["learned", "sinusoidal", "rotary", "none"])
def test_inputs_embeds_may_include_the_class_token(images, pos_embed):
    """Passing the model's own class token gives the same logits; another token does not."""
    model = build(pos_embed=pos_embed)
    patches = model.patch_embed(images)
    own = torch.cat([model.pool.cls_token.expand(2, 1, -1), patches], dim=1)
    logits = model(inputs_embeds=own, includes_cls_token=True)
    torch.testing.assert_close(logits, model(images))
    other = torch.cat([torch.ones(2, 1, 8, dtype=torch.float64), patches], dim=1)
    assert not torch.allclose(model(inputs_embeds=other, includes_cls_token=True), logits)


@pytest.mark.parametrize("pooling", ["mean", "attention"])
def test_includes_cls_token_requires_cls_pooling(pooling):
    model = build(pooling=pooling)
    with pytest.raises(ValueError, match=f"needs a model with pooling='cls', got pooling='{pooling}'"):
        model(inputs_embeds=torch.zeros(1, 7, 8).double(), includes_cls_token=True)
    with pytest.raises(ValueError, match=r"must have 6 tokens \(2 x 3 patches\), got 7$"):
        model(inputs_embeds=torch.zeros(1, 7, 8).double())


@pytest.mark.parametrize("norm", ["pre", "post", "none"])
@pytest.mark.parametrize("pooling", ["cls", "mean", "attention"])
def test_features_pooling_and_head_compose_to_the_model(images, pooling, norm):
    model = build(pooling=pooling, norm=norm, embed_norm=True, head_mlp_dim=4)
    features = model.features(images)
    assert features.shape == (2, 6 + (pooling == "cls"), 8)
    assert torch.equal(model.head(model.pool(features)), model(images))
    torch.testing.assert_close(model.features(inputs_embeds=model.patch_embed(images)), features)


@pytest.mark.parametrize("norm", ["pre", "post", "none"])
def test_all_layers_returns_the_block_inputs_and_the_features(images, norm):
    model, block_inputs = build(norm=norm), []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, args: block_inputs.append(args[0]))
    states = model.features(images, all_layers=True)
    assert len(states) == 1 + model.config.depth
    for state, x in zip(states, block_inputs, strict=False):
        assert torch.equal(state, x)
    assert torch.equal(states[-1], model.features(images))
    cls_token, patches = model.pool.cls_token.expand(2, 1, -1), model.patch_embed(images)
    with_cls_token = model.features(
        inputs_embeds=torch.cat([cls_token, patches], dim=1), includes_cls_token=True, all_layers=True
    )
    for state, other in zip(states, with_cls_token, strict=True):
        torch.testing.assert_close(state, other)


def test_norm_eps_reaches_every_layer_norm():
    for norm in ("pre", "post"):
        model = build(norm=norm, norm_eps=1e-3, embed_norm=True)
        found = [module.eps for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]
        assert found == [1e-3] * (5 + (norm == "pre"))


def test_linear_and_convolutional_patch_embeddings_are_equal(images):
    model = build()
    convolved = model.patch_embed.as_convolution()(images).flatten(2).transpose(1, 2)
    torch.testing.assert_close(model(inputs_embeds=convolved), model(images))


def test_embed_norm_is_applied_before_the_blocks(images):
    model = build(embed_norm=True)
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(images)
    assert seen[0].mean(-1).abs().max() < 1e-6


def test_every_parameter_gets_a_gradient(images):
    for pooling in ("cls", "mean", "attention"):
        model = build(pooling=pooling, head_mlp_dim=4, embed_norm=True)
        model(images).square().sum().backward()
        assert not [name for name, p in model.named_parameters() if p.grad is None]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(torch.zeros(1, 2, 9, 12)), "must be multiples of the patch size, got 9 x 12, patch size 4"),
        (lambda m: m(torch.zeros(1, 3, 8, 12)), "with 2 channels, got shape"),
        (lambda m: m(torch.zeros(2, 8, 12)), r"images must be \(batch, channels, height, width\)"),
        (lambda m: m(inputs_embeds=torch.zeros(1, 5, 8)), r"must have 6 tokens \(2 x 3 patches\), got 5$"),
        (
            lambda m: m(inputs_embeds=torch.zeros(1, 7, 8)),
            r"must have 6 tokens \(2 x 3 patches\), got 7; pass includes_cls_token=True if the first",
        ),
        (
            lambda m: m(inputs_embeds=torch.zeros(1, 6, 8), includes_cls_token=True),
            r"must have 7 tokens \(the class token and 2 x 3 patches\), got 6; leave out includes_cls_token",
        ),
        (lambda m: m(inputs_embeds=torch.zeros(1, 8, 8), includes_cls_token=True), "must have 7 tokens .*, got 8$"),
        (lambda m: m.features(inputs_embeds=torch.zeros(1, 5, 8)), "must have 6 tokens .*, got 5$"),
        (lambda m: m(torch.zeros(1, 2, 8, 12), includes_cls_token=True), "is for inputs_embeds, got images"),
        (lambda m: m(inputs_embeds=torch.zeros(6, 8)), r"inputs_embeds must be \(batch, length, width\)"),
        (lambda m: m(torch.zeros(1, 2, 8, 12, dtype=torch.uint8)), "images must be floating point, got torch.uint8"),
    ],
)
def test_invalid_inputs_raise_one_line_errors(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call(build())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("pooling", ["cls", "mean", "attention"])
@pytest.mark.parametrize("pos_embed", ["learned", "rotary"])
def test_register_tokens_change_neither_patches_nor_the_position_of_the_class_token(pooling, pos_embed, images):
    model = build(pooling=pooling, pos_embed=pos_embed, num_register_tokens=3)
    plain = build(pooling=pooling, pos_embed=pos_embed)
    n_tokens = 6 + (pooling == "cls")
    trace = clearhead.look(model, images)
    assert trace["blocks.0.attn"].weights().shape == (2, 2, n_tokens + 3, n_tokens + 3)
    assert torch.equal(model.head(model.pool(model.features(images))), model(images))
    states, expected = (one.features(images, all_layers=True) for one in (model, plain))
    assert [state.shape for state in states] == [state.shape for state in expected] == [(2, n_tokens, 8)] * 3
    model.load_state_dict(plain.state_dict() | {"registers.tokens": model.registers.tokens.detach()})
    assert torch.equal(model.features(images, all_layers=True)[0], plain.features(images, all_layers=True)[0])
    before = model(images)
    torch.nn.init.normal_(model.registers.tokens, std=2)
    assert not torch.allclose(model(images), before, atol=1e-3), "they take part in attention"


def test_register_tokens_that_nobody_attends_to_change_nothing(images):
    """Without blocks between them and the output, they are removed before pooling without a trace."""
    model, plain = build(num_register_tokens=3), build()
    model.load_state_dict(plain.state_dict() | {"registers.tokens": torch.zeros(3, 8)})
    for one in (model, plain):
        for block in one.blocks:
            torch.nn.init.zeros_(block.attn.out_proj.weight)
    torch.testing.assert_close(model(images), plain(images))


def test_register_tokens_follow_a_class_token_that_is_passed_in(images):
    model = build(num_register_tokens=2)
    patches = model.patch_embed(images)
    with_cls = torch.cat([model.pool.cls_token.expand(2, 1, -1), patches], dim=1)
    torch.testing.assert_close(model(inputs_embeds=with_cls, includes_cls_token=True), model(images))
    with pytest.raises(ValueError, match="num_register_tokens must be a non-negative integer, got -1"):
        build(num_register_tokens=-1)
