"""The three wirings, written out by hand, and the two kinds of dropout around a sublayer."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from clearhead.nn import masks
from clearhead.nn.attention import MultiHeadAttention
from clearhead.nn.blocks import MLP, NORMS, DecoderBlock, EncoderBlock, Residual, drop_path

WIDTH = 8
EVERY_NORM = pytest.mark.parametrize("norm", NORMS)


def scrambled(module):
    """Every parameter random, so that no gain of 1 and no bias of 0 hides a mistake."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.double()


def encoder_block(norm="pre", **options):
    block = EncoderBlock(MultiHeadAttention(WIDTH, 2), MLP(WIDTH, 16), width=WIDTH, norm=norm, **options)
    return scrambled(block)


def decoder_block(norm="pre", **options):
    parts = MultiHeadAttention(WIDTH, 2), MultiHeadAttention(WIDTH, 2), MLP(WIDTH, 16)
    return scrambled(DecoderBlock(*parts, width=WIDTH, norm=norm, **options))


def tokens(length=5):
    return torch.randn(3, length, WIDTH, dtype=torch.float64)


def layer_norm(residual, x, eps=1e-5):
    centred = x - x.mean(-1, keepdim=True)
    scale = torch.sqrt(centred.square().mean(-1, keepdim=True) + eps)
    return centred / scale * residual.norm.weight + residual.norm.bias


def wired(norm, residual, x, f):
    """The three formulas."""
    if norm == "pre":
        return x + f(layer_norm(residual, x))
    if norm == "post":
        return layer_norm(residual, x + f(x))
    return x + f(x)


@EVERY_NORM
def test_encoder_block_is_its_formula(norm):
    block, x, mask = encoder_block(norm), tokens(), masks.causal(5)
    expected = wired(norm, block.around_attention, x, lambda h: block.attention(h, mask=mask))
    expected = wired(norm, block.around_feedforward, expected, block.feedforward)
    torch.testing.assert_close(block(x, mask=mask), expected)
    assert not torch.allclose(block(x), expected), "the mask is passed on"


@EVERY_NORM
def test_decoder_block_is_its_formula(norm):
    block, x, memory = decoder_block(norm), tokens(5), tokens(4)
    mask, memory_mask = masks.causal(5), masks.padding(torch.tensor([4, 2, 1]))
    expected = wired(norm, block.around_attention, x, lambda h: block.attention(h, mask=mask))
    expected = wired(
        norm, block.around_cross_attention, expected, lambda h: block.cross_attention(h, memory, mask=memory_mask)
    )
    expected = wired(norm, block.around_feedforward, expected, block.feedforward)
    torch.testing.assert_close(block(x, memory, mask=mask, memory_mask=memory_mask), expected)
    assert not torch.allclose(block(x, memory, mask=mask), expected), "the memory's mask is passed on"
    assert not torch.allclose(block(x, memory, memory_mask=memory_mask), expected), "and the mask"


@pytest.mark.parametrize("block", [encoder_block, decoder_block])
def test_positions_inside_attention_are_passed_on(block):
    block, x = block(), tokens()
    others = (tokens(4),) if isinstance(block, DecoderBlock) else ()
    plain = block(x, *others)
    assert not torch.allclose(block(x, *others, angles=torch.rand(5, 2)), plain)
    assert not torch.allclose(block(x, *others, logit_bias=torch.rand(2, 5, 5, dtype=torch.float64)), plain)


def test_post_norm_leaves_normalised_tokens_and_none_has_no_norm():
    block = encoder_block("post")
    nn.init.ones_(block.around_feedforward.norm.weight)
    nn.init.zeros_(block.around_feedforward.norm.bias)
    out = block(100 * tokens())
    torch.testing.assert_close(out.mean(-1), torch.zeros(3, 5, dtype=torch.float64))
    torch.testing.assert_close(out.var(-1, correction=0), torch.ones(3, 5, dtype=torch.float64), rtol=1e-3, atol=1e-3)
    assert not any(isinstance(part, nn.LayerNorm) for part in encoder_block("none").modules())


def test_each_sublayer_has_a_norm_of_its_own():
    """R2.3: the report shares one."""
    norms = [part for part in decoder_block().modules() if isinstance(part, nn.LayerNorm)]
    assert len({id(part) for part in norms}) == 3


def test_norm_eps_reaches_the_norm():
    residual, x = scrambled(Residual(WIDTH, norm_eps=0.5)), tokens()
    torch.testing.assert_close(residual(x, torch.zeros_like), x)
    torch.testing.assert_close(residual(x, lambda h: h) - x, layer_norm(residual, x, eps=0.5))
    block = decoder_block(norm_eps=0.5)
    assert {part.eps for part in block.modules() if isinstance(part, nn.LayerNorm)} == {0.5}


def test_an_unknown_norm_is_refused():
    with pytest.raises(ValueError, match="norm must be one of pre, post, none, got 'middle'; 'pre' is"):
        encoder_block("middle")


@EVERY_NORM
def test_without_dropout_training_equals_evaluation_and_with_it_does_not(norm):
    x, memory = tokens(), tokens(4)
    for rates in ({"dropout": 0.0}, {"dropout": 0.5}, {"drop_path": 0.5}):
        for block, others in [(encoder_block(norm, **rates), ()), (decoder_block(norm, **rates), (memory,))]:
            trained = block.train()(x, *others)
            evaluated = block.eval()(x, *others)
            assert torch.equal(block(x, *others), evaluated)
            assert torch.equal(trained, evaluated) == (not any(rates.values()))


def test_dropout_acts_on_the_branch_before_the_residual_is_added():
    residual = Residual(WIDTH, "none", dropout=0.5)
    x = torch.full((4, 50, WIDTH), 10.0)
    out = residual(x, torch.ones_like)
    assert out.unique().tolist() == [10.0, 12.0], "dropped, or kept and doubled; x itself is never dropped"


@pytest.mark.parametrize("rate", [0.0, 0.25, 0.8])
def test_stochastic_depth_drops_whole_examples_and_keeps_the_mean(rate):
    n = 10_000
    out = drop_path(torch.ones(n, 2, 3), rate)
    kept = out[:, 0, 0] != 0
    assert torch.equal(out, (kept.float() / (1 - rate))[:, None, None].expand(n, 2, 3))
    assert abs(kept.float().mean() - (1 - rate)) < 5 * math.sqrt(rate * (1 - rate) / n) + 1e-9


def test_stochastic_depth_at_rate_one_drops_everything():
    assert (drop_path(torch.ones(5, 2), 1.0) == 0).all()


def test_an_example_that_is_dropped_passes_by_the_sublayer():
    residual, x = Residual(WIDTH, "none", drop_path=0.5), torch.randn(200, 3, WIDTH)
    out = residual(x, lambda h: F.relu(h) + 1)
    passed = (out == x).flatten(1).all(1)
    assert 60 < passed.sum() < 140
    torch.testing.assert_close(out[~passed], (x + 2 * (x.relu() + 1))[~passed])


@pytest.mark.parametrize("attention", [MultiHeadAttention(8, 2, input_width=5), MultiHeadAttention(4, 2)])
def test_attention_that_does_not_fit_the_residual_connection_is_refused(attention):
    """x + attention(x) needs one width."""
    sizes = f"{attention.query.in_features} to {attention.query.out_features}"
    with pytest.raises(ValueError, match=f"attention must map .* got width=8 and attention from {sizes}"):
        EncoderBlock(attention, MLP(8, 16), width=8)
    with pytest.raises(ValueError, match=f"cross_attention must map .* got width=8 and attention from {sizes}"):
        DecoderBlock(MultiHeadAttention(8, 2), attention, MLP(8, 16), width=8)


def test_a_memory_of_another_width_fits():
    cross_attention = MultiHeadAttention(8, 2, key_input_width=5, value_input_width=5)
    block = DecoderBlock(MultiHeadAttention(8, 2), cross_attention, MLP(8, 16), width=8)
    assert block(torch.randn(2, 4, 8), torch.randn(2, 6, 5)).shape == (2, 4, 8)
