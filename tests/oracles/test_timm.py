"""timm as the oracle of layer scale, SwiGLU and register tokens: same weights, same outputs."""

import pytest
import torch
from torch import nn

from clearhead import VisionTransformer
from clearhead.nn.attention import LayerScale
from clearhead.nn.blocks import SwiGLU


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def randomize(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return module.double().eval()


@torch.no_grad()
def test_layer_scale_and_swiglu_equal_timms():
    from timm.layers import SwiGLU as TimmSwiGLU
    from timm.models.vision_transformer import LayerScale as TimmLayerScale

    x = torch.randn(2, 5, 6)
    scale, theirs = LayerScale(6, 0.3), TimmLayerScale(6, init_values=0.3)
    assert torch.equal(scale(x), theirs(x))
    nn.init.normal_(scale.gamma)
    theirs.load_state_dict(scale.state_dict())
    assert torch.equal(scale(x), theirs(x))
    net, other = SwiGLU(6, 9), TimmSwiGLU(6, 9)
    names = {"gate_proj": "fc1_g", "up_proj": "fc1_x", "down_proj": "fc2"}
    for name, their_name in names.items():
        other.get_submodule(their_name).load_state_dict(net.get_submodule(name).state_dict())
    torch.testing.assert_close(net(x), other(x))


BLOCK = {"norm1": "norm1", "attn.proj": "attn.out_proj", "norm2": "norm2", "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}
LAYER_SCALE = {"ls1": "ls1", "ls2": "ls2"}
QK_NORM = {"attn.q_norm": "attn.q_norm", "attn.k_norm": "attn.k_norm"}


@torch.no_grad()
def ours(theirs, **fields):
    """timm adds a learned position to the patches only (no_embed_class), as we do."""
    model = VisionTransformer(
        image_size=16,
        patch_size=4,
        num_classes=5,
        width=24,
        depth=2,
        num_heads=3,
        norm_eps=1e-6,
        layer_scale=0.1,
        qk_norm=True,
        **fields,
    ).double()
    model.patch_embed.proj.weight.copy_(theirs.patch_embed.proj.weight.flatten(1))
    model.patch_embed.proj.bias.copy_(theirs.patch_embed.proj.bias)
    model.pos_embed.table.copy_(theirs.pos_embed[0])
    if theirs.cls_token is not None:
        model.pool.cls_token.copy_(theirs.cls_token[0, 0])
    model.registers.tokens.copy_(theirs.reg_token[0])
    for block, layer in zip(model.blocks, theirs.blocks, strict=True):
        for name, our_name in (BLOCK | LAYER_SCALE | QK_NORM).items():
            block.get_submodule(our_name).load_state_dict(layer.get_submodule(name).state_dict())
        weights, biases = layer.attn.qkv.weight.chunk(3), layer.attn.qkv.bias.chunk(3)
        for part, weight, bias in zip("qkv", weights, biases, strict=True):
            projection = block.attn.get_submodule(f"{part}_proj")
            projection.weight.copy_(weight)
            projection.bias.copy_(bias)
    model.norm.load_state_dict(theirs.norm.state_dict())
    model.head.load_state_dict(theirs.head.state_dict())
    return model.eval()


@pytest.mark.parametrize(("pooling", "global_pool"), [("cls", "token"), ("mean", "avg")])
@torch.no_grad()
def test_a_vit_with_registers_layer_scale_and_qk_norm_equals_timms(pooling, global_pool):
    from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer

    theirs = randomize(
        TimmVisionTransformer(
            img_size=16,
            patch_size=4,
            num_classes=5,
            embed_dim=24,
            depth=2,
            num_heads=3,
            reg_tokens=3,
            init_values=0.1,
            qk_norm=True,
            no_embed_class=True,
            class_token=pooling == "cls",
            global_pool=global_pool,
            fc_norm=False,
        )
    )
    model, images = ours(theirs, pooling=pooling, num_register_tokens=3), torch.randn(2, 3, 16, 16).double()
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in theirs.parameters())
    torch.testing.assert_close(model(images), theirs(images), rtol=0, atol=1e-10)
    model.registers.tokens.zero_()
    assert (model(images) - theirs(images)).abs().max() > 1e-5, "the register tokens matter"
