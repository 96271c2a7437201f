"""Encoder, Decoder and EncoderDecoder: padding is ignored, causality holds, caching does not change the output."""

import pytest
import torch
from torch import nn

from clearhead.nn import masks
from clearhead.nn.attention import MultiHeadAttention
from clearhead.nn.blocks import MLP, Decoder, DecoderBlock, Encoder, EncoderBlock, EncoderDecoder
from clearhead.nn.cache import DecoderCache
from clearhead.nn.positions import AlibiPosEmbed, NoPosEmbed, RotaryPosEmbed

WIDTH, N_HEADS, DEPTH = 8, 2, 2
EVERY_NORM = pytest.mark.parametrize("norm", ["pre", "post"])


def attention():
    return MultiHeadAttention(WIDTH, N_HEADS)


def encoder(norm="pre"):
    blocks = [EncoderBlock(attention(), MLP(WIDTH, 16), width=WIDTH, norm_first=norm == "pre") for _ in range(DEPTH)]
    return Encoder(blocks, nn.LayerNorm(WIDTH)).double()


def decoder(norm="pre"):
    mlps = [MLP(WIDTH, 16) for _ in range(DEPTH)]
    blocks = [DecoderBlock(attention(), attention(), f, width=WIDTH, norm_first=norm == "pre") for f in mlps]
    return Decoder(blocks, nn.LayerNorm(WIDTH)).double()


def tokens(length):
    return torch.randn(2, length, WIDTH, dtype=torch.float64)


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_stacks_apply_blocks_in_order_and_the_norm_last():
    stack, x, memory = encoder(), tokens(5), tokens(4)
    expected = x
    for block in stack.blocks:
        expected = block(expected, mask=masks.causal(5))
    assert_same(stack(x, mask=masks.causal(5)), stack.norm(expected))
    assert_same(Encoder(stack.blocks)(x, mask=masks.causal(5)), expected)
    stack, expected = decoder(), x
    for block in stack.blocks:
        expected = block(expected, memory)
    assert_same(stack(x, memory), stack.norm(expected))
    assert_same(Decoder(stack.blocks)(x, memory), expected)


def test_encoder_decoder_composes_encoder_and_decoder():
    pair = EncoderDecoder(encoder(), decoder())
    source, target = tokens(5), tokens(4)
    source_mask, target_mask = masks.padding(torch.tensor([5, 2])), masks.causal(4)
    full = pair(source, target, source_mask=source_mask, target_mask=target_mask, memory_mask=source_mask)
    memory = pair.encoder(source, mask=source_mask)
    assert_same(full, pair.decoder(target, memory, mask=target_mask, memory_mask=source_mask))
    for left_out in ("source_mask", "target_mask", "memory_mask"):
        kwargs = {"source_mask": source_mask, "target_mask": target_mask, "memory_mask": source_mask, left_out: None}
        assert not torch.allclose(pair(source, target, **kwargs), full), f"{left_out} matters"


@EVERY_NORM
def test_padding_does_not_change_valid_positions(norm):
    lengths = torch.tensor([3, 5])
    mask = masks.padding(lengths, 6)
    valid = mask[:, 0, 0]
    x = tokens(6)
    other = torch.where(valid[..., None], x, 10 * torch.randn_like(x))
    stack = encoder(norm)
    assert_same(stack(other, mask=mask)[valid], stack(x, mask=mask)[valid])
    assert not torch.allclose(stack(other)[valid], stack(x)[valid]), "without the mask padding matters"
    for b, length in enumerate(lengths.tolist()):
        alone = stack(x[b : b + 1, :length])
        assert_same(stack(x, mask=mask)[b : b + 1, :length], alone)


@EVERY_NORM
def test_memory_padding_does_not_change_the_decoder_output(norm):
    mask = masks.padding(torch.tensor([2, 3]), 4)
    x, memory = tokens(5), tokens(4)
    other = torch.where(mask[:, 0, 0, :, None], memory, 10 * torch.randn_like(memory))
    stack = decoder(norm)
    assert_same(stack(x, other, memory_mask=mask), stack(x, memory, memory_mask=mask))
    assert not torch.allclose(stack(x, other), stack(x, memory))


@EVERY_NORM
def test_a_causal_prefix_does_not_depend_on_its_suffix(norm):
    x, memory = tokens(6), tokens(4)
    other = x.clone()
    other[:, 4:] = 10 * torch.randn(2, 2, WIDTH, dtype=torch.float64)
    for stack, others in [(encoder(norm), ()), (decoder(norm), (memory,))]:
        before, after = stack(x, *others, mask=masks.causal(6)), stack(other, *others, mask=masks.causal(6))
        assert_same(after[:, :4], before[:, :4])
        assert not torch.allclose(after[:, 4:], before[:, 4:])
        assert not torch.allclose(stack(other, *others)[:, :4], stack(x, *others)[:, :4]), (
            "without the mask the suffix matters"
        )


@pytest.mark.parametrize("positions", [NoPosEmbed(), RotaryPosEmbed(4), AlibiPosEmbed(N_HEADS)], ids=repr)
@pytest.mark.parametrize("steps", [[1, 1, 1, 1, 1], [3, 2]], ids=str)
@EVERY_NORM
def test_cached_decoding_equals_the_full_forward_pass(norm, steps, positions):
    x, memory = tokens(5), tokens(4)
    memory_mask = masks.padding(torch.tensor([4, 2]))
    for stack, others, options in [
        (encoder(norm), (), {}),
        (decoder(norm), (memory,), {"memory_mask": memory_mask}),
    ]:
        angles, bias = positions.attention_inputs(x)
        with torch.no_grad():
            full = stack(x, *others, mask=masks.causal(5), rotary_angles=angles, logit_bias=bias, **options)
            cache, parts = DecoderCache(DEPTH), []
            for new in steps:
                start = cache.length
                part = x[:, start : start + new]
                angles, bias = positions.attention_inputs(part, start)
                mask = masks.causal(new, start + new)
                parts.append(
                    stack(part, *others, mask=mask, rotary_angles=angles, logit_bias=bias, cache=cache, **options)
                )
        assert_same(torch.cat(parts, 1), full)
        assert cache.length == 5


def test_a_selected_cache_continues_with_the_selected_rows():
    stack, x, memory = decoder(), tokens(5), tokens(4)
    memory = memory[:1].expand(2, -1, -1)  # two beams of one example share their memory
    rows, cache = torch.tensor([1, 1]), DecoderCache(DEPTH)
    with torch.no_grad():
        stack(x[:, :4], memory, mask=masks.causal(4), cache=cache)
        cache.select(rows)
        last = stack(x[rows, 4:], memory, mask=masks.causal(1, 5), cache=cache)
        assert_same(last, stack(x, memory, mask=masks.causal(5))[rows, 4:])


@EVERY_NORM
def test_all_layers_returns_the_input_and_every_block_output_with_the_last_one_normalized(norm):
    stack, x, seen = encoder(norm), tokens(5), []
    for block in stack.blocks:
        block.register_forward_hook(lambda module, args, out: seen.append(out))
    states = stack(x, mask=masks.causal(5), all_layers=True)
    assert len(states) == DEPTH + 1
    assert states[0] is x
    for state, out in zip(states[1:], [*seen[:-1], stack.norm(seen[-1])], strict=True):
        assert torch.equal(state, out)
    assert torch.equal(states[-1], stack(x, mask=masks.causal(5)))
