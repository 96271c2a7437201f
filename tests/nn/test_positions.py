import math

import pytest
import torch

from clearhead.nn import masks
from clearhead.nn.attention import MultiHeadAttention, attend_fused, attend_reference
from clearhead.nn.positions import (
    AlibiPosEmbed,
    LearnedPosEmbed,
    NoPosEmbed,
    RotaryPosEmbed,
    SinusoidalPosEmbed,
    alibi_slopes,
    sinusoidal,
)

WIDTH, N_HEADS, HEAD_WIDTH = 8, 2, 4
KINDS = [
    NoPosEmbed,
    SinusoidalPosEmbed,
    lambda: LearnedPosEmbed(10, WIDTH),
    lambda: RotaryPosEmbed(HEAD_WIDTH),
    lambda: AlibiPosEmbed(N_HEADS),
]
EVERY_KIND = pytest.mark.parametrize("make", KINDS, ids=["none", "sinusoidal", "learned", "rotary", "alibi"])


def test_sinusoidal_by_hand():
    """Width 4: frequencies 1 and 1/100."""
    expected = [[math.sin(p), math.cos(p), math.sin(p / 100), math.cos(p / 100)] for p in (0, 1, 50)]
    torch.testing.assert_close(sinusoidal(torch.tensor([0, 1, 50]), 4), torch.tensor(expected))


def test_sinusoidal_follows_the_formula_at_any_width():
    table = sinusoidal(torch.arange(7), 10).double()
    for place in range(7):
        for i in range(5):
            angle = place / 10_000 ** (2 * i / 10)
            torch.testing.assert_close(table[place, 2 * i].item(), math.sin(angle), rtol=0, atol=1e-6)
            torch.testing.assert_close(table[place, 2 * i + 1].item(), math.cos(angle), rtol=0, atol=1e-6)


def test_sinusoidal_refuses_an_odd_width():
    with pytest.raises(ValueError, match=r"multiple of 2 .*got 5; try width=6"):
        sinusoidal(torch.arange(3), 5)
    with pytest.raises(ValueError, match=r"multiple of 2 .*got 5"):
        SinusoidalPosEmbed()(torch.zeros(1, 3, 5))


@EVERY_KIND
def test_a_later_start_is_a_slice_of_the_longer_sequence(make):
    positions, x, start = make(), torch.randn(2, 9, WIDTH), 4
    assert torch.equal(positions(x[:, start:], start), positions(x)[:, start:])
    angles, bias = positions.attention_inputs(x)
    later_angles, later_bias = positions.attention_inputs(x[:, start:], start)
    assert (angles is None, bias is None) == (later_angles is None, later_bias is None)
    if angles is not None:
        assert torch.equal(later_angles, angles[start:])
    if bias is not None:
        assert torch.equal(later_bias, bias[:, start:])


@EVERY_KIND
def test_each_kind_acts_in_one_place_and_only_none_leaves_a_set(make):
    positions, x = make(), torch.randn(2, 5, WIDTH)
    adds = not torch.equal(positions(x), x)
    acts_inside = any(part is not None for part in positions.attention_inputs(x))
    assert adds + acts_inside == (0 if isinstance(positions, NoPosEmbed) else 1)
    attention, order = MultiHeadAttention(WIDTH, N_HEADS), torch.tensor([4, 2, 0, 1, 3])

    def attended(tokens):
        angles, bias = positions.attention_inputs(tokens)
        return attention(positions(tokens), rotary_angles=angles, logit_bias=bias)

    equivariant = torch.allclose(attended(x[:, order]), attended(x)[:, order], atol=1e-6)
    assert equivariant == isinstance(positions, NoPosEmbed)


@EVERY_KIND
def test_positions_keep_the_dtype_of_the_tokens(make):
    for dtype in (torch.float64, torch.bfloat16):
        x = torch.randn(2, 5, WIDTH, dtype=dtype)
        positions, attention = make().to(dtype), MultiHeadAttention(WIDTH, N_HEADS).to(dtype)
        assert positions(x).dtype == dtype
        angles, bias = positions.attention_inputs(x)
        assert attention(x, rotary_angles=angles, logit_bias=bias).dtype == dtype


def test_a_sequence_beyond_the_learned_table_is_refused():
    positions = LearnedPosEmbed(4, WIDTH)
    x = torch.randn(2, 4, WIDTH)
    torch.testing.assert_close(positions(x), x + positions.table)
    with pytest.raises(ValueError, match="must fit the learned position table of 4 rows, got length 5; shorten it"):
        positions(torch.randn(2, 5, WIDTH))
    with pytest.raises(ValueError, match="4 rows, got length 6"):
        positions(x, start=2)


def test_learned_rows_get_a_gradient_where_they_are_used():
    positions = LearnedPosEmbed(5, WIDTH)
    positions(torch.randn(2, 2, WIDTH), start=1).sum().backward()
    assert positions.table.grad.any(-1).tolist() == [False, True, True, False, False]


@pytest.mark.parametrize("attend", [attend_reference, attend_fused])
@pytest.mark.parametrize("is_causal", [False, True])
def test_alibi_lowers_the_logits_by_slope_times_distance_at_the_default_beta(attend, is_causal):
    """softmax(q kᵀ / sqrt(D) - slope * distance) v, written out."""
    B, L = 2, 6
    q, k, v = (torch.randn(B, N_HEADS, L, HEAD_WIDTH, dtype=torch.float64) for _ in range(3))
    _, bias = AlibiPosEmbed(N_HEADS).attention_inputs(torch.zeros(B, L, WIDTH, dtype=torch.float64))
    places = torch.arange(L)
    distance = (places[:, None] - places).abs()
    logits = q @ k.mT / math.sqrt(HEAD_WIDTH) - alibi_slopes(N_HEADS).double()[:, None, None] * distance
    mask = masks.causal(L) if is_causal else None
    if is_causal:
        logits = logits.masked_fill(places > places[:, None], -math.inf)
    out = attend(q, k, v, mask, logit_bias=bias)
    out = out[0] if isinstance(out, tuple) else out
    torch.testing.assert_close(out, torch.softmax(logits, -1) @ v)
