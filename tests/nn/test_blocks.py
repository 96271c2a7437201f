"""Encoder and decoder blocks (pre-norm, post-norm, no norm), dropout, stochastic depth, and the MLP."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from clearhead.nn import masks
from clearhead.nn.attention import LayerScale, MultiHeadAttention, RMSNorm
from clearhead.nn.blocks import ACTIVATIONS, MLP, DecoderBlock, EncoderBlock, SwiGLU, drop_path

WIDTH = 8
NORMS = {"pre": {}, "post": {"norm_first": False}, "none": {"norm_layer": nn.Identity}}
EVERY_NORM = pytest.mark.parametrize("norm", NORMS)


def randomized(module):
    """Every parameter is random so that no gain of 1 and no bias of 0 hides a mistake."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.double()


def encoder_block(norm="pre", **options):
    block = EncoderBlock(MultiHeadAttention(WIDTH, 2), MLP(WIDTH, 16), width=WIDTH, **NORMS[norm] | options)
    return randomized(block)


def decoder_block(norm="pre", **options):
    parts = MultiHeadAttention(WIDTH, 2), MultiHeadAttention(WIDTH, 2), MLP(WIDTH, 16)
    return randomized(DecoderBlock(*parts, width=WIDTH, **NORMS[norm] | options))


def tokens(length=5):
    return torch.randn(3, length, WIDTH, dtype=torch.float64)


def zero_linear_layers(module):
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.zeros_(part.weight)
            nn.init.zeros_(part.bias)


def layer_norm(norm, x, eps=1e-5):
    centered = x - x.mean(-1, keepdim=True)
    scale = torch.sqrt(centered.square().mean(-1, keepdim=True) + eps)
    return centered / scale * norm.weight + norm.bias


def residual(kind, norm, x, f):
    """Pre-norm, post-norm and no norm, written out."""
    if kind == "pre":
        return x + f(layer_norm(norm, x))
    if kind == "post":
        return layer_norm(norm, x + f(x))
    return x + f(x)


@EVERY_NORM
def test_encoder_block_matches_its_formula(norm):
    block, x, mask = encoder_block(norm), tokens(), masks.causal(5)
    expected = residual(norm, block.norm1, x, lambda h: block.attn(h, mask=mask))
    expected = residual(norm, block.norm2, expected, block.mlp)
    torch.testing.assert_close(block(x, mask=mask), expected)
    assert not torch.allclose(block(x), expected), "the mask matters"


@EVERY_NORM
def test_decoder_block_matches_its_formula(norm):
    block, x, memory = decoder_block(norm), tokens(5), tokens(4)
    mask, memory_mask = masks.causal(5), masks.padding(torch.tensor([4, 2, 1]))
    expected = residual(norm, block.norm1, x, lambda h: block.self_attn(h, mask=mask))
    expected = residual(norm, block.norm2, expected, lambda h: block.cross_attn(h, memory, mask=memory_mask))
    expected = residual(norm, block.norm3, expected, block.mlp)
    torch.testing.assert_close(block(x, memory, mask=mask, memory_mask=memory_mask), expected)
    assert not torch.allclose(block(x, memory, mask=mask), expected), "memory_mask matters"
    assert not torch.allclose(block(x, memory, memory_mask=memory_mask), expected), "mask matters"


@pytest.mark.parametrize("block", [encoder_block, decoder_block])
def test_rotary_angles_and_logit_bias_reach_the_attention(block):
    block, x = block(), tokens()
    others = (tokens(4),) if isinstance(block, DecoderBlock) else ()
    plain = block(x, *others)
    assert not torch.allclose(block(x, *others, rotary_angles=torch.rand(5, 2)), plain)
    assert not torch.allclose(block(x, *others, logit_bias=torch.rand(2, 5, 5, dtype=torch.float64)), plain)


def test_post_norm_output_is_normalized_and_identity_norm_has_no_layer_norm():
    block = encoder_block("post")
    nn.init.ones_(block.norm2.weight)
    nn.init.zeros_(block.norm2.bias)
    out = block(100 * tokens())
    torch.testing.assert_close(out.mean(-1), torch.zeros(3, 5, dtype=torch.float64))
    torch.testing.assert_close(out.var(-1, correction=0), torch.ones(3, 5, dtype=torch.float64), rtol=1e-3, atol=1e-3)
    assert not any(isinstance(part, nn.LayerNorm) for part in encoder_block("none").modules())


def test_each_sublayer_has_its_own_norm():
    norms = [part for part in decoder_block().modules() if isinstance(part, nn.LayerNorm)]
    assert len({id(part) for part in norms}) == 3


def test_any_norm_layer_can_be_passed_in():
    block = decoder_block(norm_layer=partial(nn.LayerNorm, eps=0.5))
    assert {part.eps for part in block.modules() if isinstance(part, nn.LayerNorm)} == {0.5}
    block, x = encoder_block(norm_layer=RMSNorm), tokens()
    h = x + block.attn(F.rms_norm(x, (WIDTH,), block.norm1.weight, 1e-5))
    torch.testing.assert_close(block(x), h + block.mlp(F.rms_norm(h, (WIDTH,), block.norm2.weight, 1e-5)))


@EVERY_NORM
def test_training_equals_evaluation_only_without_dropout(norm):
    x, memory = tokens(), tokens(4)
    for rates in ({"dropout": 0.0}, {"dropout": 0.5}, {"drop_path": 0.5}):
        for block, others in [(encoder_block(norm, **rates), ()), (decoder_block(norm, **rates), (memory,))]:
            trained = block.train()(x, *others)
            evaluated = block.eval()(x, *others)
            assert torch.equal(block(x, *others), evaluated)
            assert torch.equal(trained, evaluated) == (not any(rates.values()))


def test_dropout_applies_to_the_branch_before_the_residual_sum():
    block = encoder_block("none", dropout=0.5)
    zero_linear_layers(block)
    block.mlp.fc2.bias.data.fill_(1.0)  # the branch is 1 everywhere
    out = block(torch.full((4, 50, WIDTH), 10.0, dtype=torch.float64))
    assert out.unique().tolist() == [10.0, 12.0], "dropped, or kept and doubled; x itself is never dropped"


@pytest.mark.parametrize("rate", [0.0, 0.25, 0.8])
def test_drop_path_drops_whole_examples_and_preserves_the_mean(rate):
    n = 10_000
    out = drop_path(torch.ones(n, 2, 3), rate)
    kept = out[:, 0, 0] != 0
    assert torch.equal(out, (kept.float() / (1 - rate))[:, None, None].expand(n, 2, 3))
    assert abs(kept.float().mean() - (1 - rate)) < 5 * math.sqrt(rate * (1 - rate) / n) + 1e-9


def test_drop_path_at_rate_one_drops_everything():
    assert (drop_path(torch.ones(5, 2), 1.0) == 0).all()


def test_a_dropped_example_skips_the_sublayer():
    block, x = encoder_block("none", drop_path=0.5), torch.randn(200, 3, WIDTH, dtype=torch.float64)
    zero_linear_layers(block.attn)
    out = block(x)
    skipped = (out == x).flatten(1).all(1)
    assert 60 < skipped.sum() < 140
    torch.testing.assert_close(out[~skipped], (x + 2 * block.mlp(x))[~skipped])


@pytest.mark.parametrize("attention", [MultiHeadAttention(8, 2, input_width=5), MultiHeadAttention(4, 2)])
def test_attention_of_another_width_is_rejected(attention):
    """x + attention(x) needs one width."""
    sizes = f"{attention.q_proj.in_features} to {attention.q_proj.out_features}"
    with pytest.raises(ValueError, match=f"attn must map .* got width=8 and attention from {sizes}"):
        EncoderBlock(attention, MLP(8, 16), width=8)
    with pytest.raises(ValueError, match=f"cross_attn must map .* got width=8 and attention from {sizes}"):
        DecoderBlock(MultiHeadAttention(8, 2), attention, MLP(8, 16), width=8)


def test_cross_attention_accepts_a_memory_of_another_width():
    cross_attention = MultiHeadAttention(8, 2, key_input_width=5, value_input_width=5)
    block = DecoderBlock(MultiHeadAttention(8, 2), cross_attention, MLP(8, 16), width=8)
    assert block(torch.randn(2, 4, 8), torch.randn(2, 6, 5)).shape == (2, 4, 8)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_mlp_matches_its_formula(name):
    net = MLP(4, 7, ACTIVATIONS[name], out_features=3)
    for linear in (net.fc1, net.fc2):
        torch.nn.init.normal_(linear.bias)
    x = torch.randn(2, 5, 4)
    hidden = x @ net.fc1.weight.T + net.fc1.bias
    hidden = {"relu": hidden.clamp(min=0), "gelu": hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))}[name]
    torch.testing.assert_close(net(x), hidden @ net.fc2.weight.T + net.fc2.bias)
    assert net(x).shape == (2, 5, 3)


def test_mlp_equals_two_pointwise_convolutions():
    """The same network is applied at each position."""
    net = MLP(4, 7, F.relu)
    x = torch.randn(2, 5, 4)
    hidden = F.conv1d(x.mT, net.fc1.weight[..., None], net.fc1.bias).relu()
    torch.testing.assert_close(net(x), F.conv1d(hidden, net.fc2.weight[..., None], net.fc2.bias).mT)


def test_mlp_acts_on_each_position_independently():
    net, x = MLP(4, 7), torch.randn(1, 5, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(net(x)[0, 2].sum(), x)
    assert gradient[0].any(-1).tolist() == [False, False, True, False, False]


def test_mlp_dropout_is_active_only_in_training_mode_and_bias_is_optional():
    net, x = MLP(4, 64, dropout=0.5, bias=False), torch.randn(1, 5, 4)
    assert not torch.equal(net(x), net(x))
    net.eval()
    assert torch.equal(net(x), net(x))
    assert (net(torch.zeros(1, 4)) == 0).all()
    assert [name for name, _ in net.named_parameters()] == ["fc1.weight", "fc2.weight"]


def test_mlp_dropout_is_between_the_two_layers():
    net = MLP(4, 10, F.relu, dropout=0.5, out_features=1)
    for linear, weight, bias in [(net.fc1, 0.0, 1.0), (net.fc2, 1.0, 0.0)]:  # sums ten hidden units of value 1
        torch.nn.init.constant_(linear.weight, weight)
        torch.nn.init.constant_(linear.bias, bias)
    out = net(torch.zeros(2000, 4))
    assert set(out.flatten().tolist()) <= set(range(0, 21, 2)), "each hidden unit is dropped, or kept and doubled"
    assert len(out.unique()) > 5, "units are dropped independently"
    assert abs(out.mean() - 10) < 0.4


@pytest.mark.parametrize("activation", [F.gelu, F.relu, F.silu])
def test_mlp_without_gradients_gives_the_same_output_and_does_not_modify_its_input(activation):
    net, x = MLP(4, 8, activation), torch.randn(2, 3, 4)
    before = x.clone()
    expected = net(x)
    with torch.no_grad():
        torch.testing.assert_close(net(x), expected)
        assert torch.equal(x, before)


def test_in_place_activation_does_not_modify_hooked_outputs():
    """The activation may work in place, but not on a tensor that a hook has seen."""
    net, x, seen = MLP(4, 8), torch.randn(2, 3, 4), []
    net.fc1.register_forward_hook(lambda module, args, out: seen.append(out))
    with torch.no_grad():
        net(x)
        assert torch.equal(seen[0], F.linear(x, net.fc1.weight, net.fc1.bias))


def test_mlp_norm_is_between_the_first_layer_and_the_activation():
    norm = torch.nn.LayerNorm(7)
    torch.nn.init.normal_(norm.weight)
    net, x = MLP(4, 7, F.relu, out_features=3, norm=norm), torch.randn(2, 5, 4)
    expected = net.fc2(F.relu(F.layer_norm(net.fc1(x), (7,), norm.weight, norm.bias)))
    torch.testing.assert_close(net(x), expected)
    with torch.no_grad():
        torch.testing.assert_close(net(x), expected)
    assert "norm" not in dict(MLP(4, 7).named_modules())


@pytest.mark.parametrize("bias", [True, False])
def test_swiglu_matches_its_formula(bias):
    net = randomized(SwiGLU(4, 7, out_features=3, bias=bias))
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    gate, up = F.linear(x, *net.gate_proj.parameters()), F.linear(x, *net.up_proj.parameters())
    expected = F.linear(gate / (1 + torch.exp(-gate)) * up, *net.down_proj.parameters())
    torch.testing.assert_close(net(x), expected)
    assert len(list(net.parameters())) == (6 if bias else 3)
    with pytest.raises(ValueError, match=r"last dimension of x must be 4, got shape \(1, 5\)"):
        net(torch.ones(1, 5))


def test_swiglu_with_a_closed_gate_is_zero_and_with_an_open_one_is_linear():
    net, x = randomized(SwiGLU(4, 7)), torch.randn(2, 5, 4, dtype=torch.float64)
    nn.init.zeros_(net.gate_proj.weight)
    nn.init.constant_(net.gate_proj.bias, -1e4)
    assert torch.equal(net(x), net.down_proj.bias.expand(2, 5, 4))
    nn.init.constant_(net.gate_proj.bias, 1e4)  # silu(x) = x for large x
    torch.testing.assert_close(net(x), net.down_proj(1e4 * net.up_proj(x)))


def test_swiglu_drops_hidden_units_in_training_only():
    net, x = SwiGLU(4, 64, dropout=0.5), torch.randn(2, 5, 4)
    assert not torch.equal(net(x), net(x))
    assert torch.equal(net.eval()(x), net(x))


@pytest.mark.parametrize("norm", ["pre", "none"])
def test_layer_scale_of_zero_makes_a_block_the_identity(norm):
    zero = partial(LayerScale, init=0.0)
    x, memory = tokens(), tokens(4)
    attn = [MultiHeadAttention(WIDTH, 2).double() for _ in range(3)]
    nets = [SwiGLU(WIDTH, 16).double() for _ in range(2)]
    encoder = EncoderBlock(attn[0], nets[0], width=WIDTH, layer_scale=zero, **NORMS[norm]).double()
    decoder = DecoderBlock(attn[1], attn[2], nets[1], width=WIDTH, layer_scale=zero, **NORMS[norm]).double()
    assert torch.equal(encoder(x), x)
    assert torch.equal(decoder(x, memory), x)
    for scale in (encoder.ls1, encoder.ls2, decoder.ls1, decoder.ls2, decoder.ls3):
        nn.init.ones_(scale.gamma)
        assert not torch.allclose(encoder(x) + decoder(x, memory), 2 * x), "each of them scales a sublayer"
        nn.init.zeros_(scale.gamma)


@EVERY_NORM
def test_layer_scale_equals_scaled_rows_of_the_last_linear_layer(norm):
    block, x = encoder_block(norm, layer_scale=LayerScale), tokens()
    folded = encoder_block(norm)
    state = block.state_dict()
    for scale, layer in (("ls1", "attn.out_proj"), ("ls2", "mlp.fc2")):
        gamma = state.pop(f"{scale}.gamma")
        state[f"{layer}.weight"] = gamma[:, None] * state[f"{layer}.weight"]
        state[f"{layer}.bias"] = gamma * state[f"{layer}.bias"]
    folded.load_state_dict(state)
    torch.testing.assert_close(block(x), folded(x))
