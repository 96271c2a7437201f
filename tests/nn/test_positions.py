import math
from itertools import pairwise

import pytest
import torch

from clearhead.nn import masks
from clearhead.nn.attention import MultiHeadAttention, attend_fused, attend_reference
from clearhead.nn.cache import KVCache
from clearhead.nn.positions import (
    AlibiPosEmbed,
    LearnedPosEmbed,
    LearnedPosEmbed2d,
    NoPosEmbed,
    NoPosEmbed2d,
    RotaryPosEmbed,
    RotaryPosEmbed2d,
    SinusoidalPosEmbed,
    SinusoidalPosEmbed2d,
    alibi_bias,
    alibi_slopes,
    apply_rotary,
    interpolate,
    rotary_angles,
    rotary_angles_2d,
    sinusoidal,
    sinusoidal_2d,
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


def test_sinusoidal_matches_hand_computed_values():
    """Width 4: frequencies 1 and 1/100."""
    expected = [[math.sin(p), math.cos(p), math.sin(p / 100), math.cos(p / 100)] for p in (0, 1, 50)]
    torch.testing.assert_close(sinusoidal(torch.tensor([0, 1, 50]), 4), torch.tensor(expected))


def test_sinusoidal_follows_the_formula_at_any_width():
    table = sinusoidal(torch.arange(7), 10).double()
    for position in range(7):
        for i in range(5):
            angle = position / 10_000 ** (2 * i / 10)
            torch.testing.assert_close(table[position, 2 * i].item(), math.sin(angle), rtol=0, atol=1e-6)
            torch.testing.assert_close(table[position, 2 * i + 1].item(), math.cos(angle), rtol=0, atol=1e-6)


def test_sinusoidal_rejects_an_odd_width():
    with pytest.raises(ValueError, match=r"multiple of 2 .*got 5; try width=6"):
        sinusoidal(torch.arange(3), 5)
    with pytest.raises(ValueError, match=r"multiple of 2 .*got 5"):
        SinusoidalPosEmbed()(torch.zeros(1, 3, 5))


@EVERY_KIND
def test_start_offsets_equal_a_slice_of_the_longer_sequence(make):
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
def test_each_encoding_acts_on_inputs_or_attention_and_only_none_is_permutation_equivariant(make):
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


def test_sequences_longer_than_the_learned_table_are_rejected():
    positions = LearnedPosEmbed(4, WIDTH)
    x = torch.randn(2, 4, WIDTH)
    torch.testing.assert_close(positions(x), x + positions.table)
    with pytest.raises(ValueError, match="must fit the learned position table of 4 rows, got length 5; shorten it"):
        positions(torch.randn(2, 5, WIDTH))
    with pytest.raises(ValueError, match="4 rows, got length 6"):
        positions(x, start=2)


def test_only_used_rows_of_the_learned_table_get_gradients():
    positions = LearnedPosEmbed(5, WIDTH)
    positions(torch.randn(2, 2, WIDTH), start=1).sum().backward()
    assert positions.table.grad.any(-1).tolist() == [False, True, True, False, False]


@pytest.mark.parametrize("attend", [attend_reference, attend_fused])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_with_alibi_matches_its_formula(attend, is_causal):
    """softmax(q kᵀ / sqrt(D) - slope * distance) v, written out."""
    B, L = 2, 6
    q, k, v = (torch.randn(B, N_HEADS, L, HEAD_WIDTH, dtype=torch.float64) for _ in range(3))
    _, bias = AlibiPosEmbed(N_HEADS).attention_inputs(torch.zeros(B, L, WIDTH, dtype=torch.float64))
    indices = torch.arange(L)
    distance = (indices[:, None] - indices).abs()
    logits = q @ k.mT / math.sqrt(HEAD_WIDTH) - alibi_slopes(N_HEADS).double()[:, None, None] * distance
    mask = masks.causal(L) if is_causal else None
    if is_causal:
        logits = logits.masked_fill(indices > indices[:, None], -math.inf)
    out = attend(q, k, v, mask, logit_bias=bias)
    out = out[0] if isinstance(out, tuple) else out
    torch.testing.assert_close(out, torch.softmax(logits, -1) @ v)


def test_interpolating_to_the_same_grid_returns_the_table():
    table = torch.randn(12, 5)
    assert interpolate(table, (3, 4), (3, 4)) is table
    assert interpolate(table, (3, 4), (4, 3)) is not table


@pytest.mark.parametrize("new", [(1, 1), (4, 3), (6, 8), (7, 2)])
def test_interpolation_preserves_constants_and_row_order(new):
    rows, columns = new
    table = torch.arange(5.0).expand(12, 5)
    torch.testing.assert_close(interpolate(table, (3, 4), new), torch.arange(5.0).expand(rows * columns, 5))
    by_row = torch.arange(3.0).repeat_interleave(4)[:, None]  # varies by row only
    image = interpolate(by_row, (3, 4), new).reshape(rows, columns)
    torch.testing.assert_close(image, image[:, :1].expand(rows, columns))
    assert (image[1:] > image[:-1]).all(), "rows stay in order"


def test_sinusoidal_2d_encodes_row_and_column():
    table = sinusoidal_2d(3, 4, 8).reshape(3, 4, 8)
    torch.testing.assert_close(table[..., :4], sinusoidal(torch.arange(3), 4)[:, None].expand(3, 4, 4))
    torch.testing.assert_close(table[..., 4:], sinusoidal(torch.arange(4), 4).expand(3, 4, 4))
    assert len(table.reshape(12, 8).unique(dim=0)) == 12
    with pytest.raises(ValueError, match=r"multiple of 4 .*got 6"):
        sinusoidal_2d(3, 4, 6)


def test_rotary_angles_2d_encode_row_and_column():
    angles = rotary_angles_2d(3, 4, 8).reshape(3, 4, 4)
    torch.testing.assert_close(angles[..., :2], rotary_angles(torch.arange(3), 4)[:, None].expand(3, 4, 2))
    torch.testing.assert_close(angles[..., 2:], rotary_angles(torch.arange(4), 4).expand(3, 4, 2))


def test_each_2d_encoding_acts_on_its_grid():
    grid, x = (3, 4), torch.randn(2, 12, 8)
    none, waves, learned, rotary = (
        NoPosEmbed2d(),
        SinusoidalPosEmbed2d(),
        LearnedPosEmbed2d(grid, 8),
        RotaryPosEmbed2d(8),
    )
    assert torch.equal(none(x, grid), x)
    torch.testing.assert_close(waves(x, grid), x + sinusoidal_2d(3, 4, 8))
    torch.testing.assert_close(learned(x, grid), x + learned.table)
    assert torch.equal(rotary(x, grid), x)
    assert torch.equal(rotary.rotary_angles(grid, x.device), rotary_angles_2d(3, 4, 8))
    for positions in (none, waves, learned):
        assert positions.rotary_angles(grid, x.device) is None
    for dtype in (torch.float64, torch.bfloat16):
        assert waves(x.to(dtype), grid).dtype == dtype


def test_a_learned_table_is_interpolated_with_gradients():
    learned, x = LearnedPosEmbed2d((3, 4), 8), torch.randn(2, 30, 8)
    out = learned(x, (5, 6))
    torch.testing.assert_close(out - x, interpolate(learned.table, (3, 4), (5, 6)).expand(2, 30, 8))
    out.sum().backward()
    assert learned.table.grad.all()


def test_rotary_angles_are_position_times_frequency():
    angles = rotary_angles(torch.tensor([0, 1, 7]), 4)
    torch.testing.assert_close(angles, torch.tensor([[0, 0], [1, 0.01], [7, 0.07]]))
    torch.testing.assert_close(rotary_angles(torch.tensor([3]), 4, base=4.0), torch.tensor([[3.0, 1.5]]))


def test_apply_rotary_rotates_each_pair_by_its_angle():
    quarter = torch.tensor([[math.pi / 2, 0.0]])
    x = torch.tensor([[1.0, 5.0, 0.0, 7.0]])  # pairs: (1, 0) is rotated by a quarter turn, (5, 7) stays
    torch.testing.assert_close(apply_rotary(x, quarter), torch.tensor([[0.0, 5.0, 1.0, 7.0]]))


def scores(q, k, angles):
    """Scores of the same query and the same key at every position: (L,D/2) -> (L,L)"""
    length = len(angles)
    return apply_rotary(q.expand(length, -1), angles) @ apply_rotary(k.expand(length, -1), angles).T


def test_rotary_scores_depend_only_on_relative_position():
    q, k = torch.randn(2, 1, 8, dtype=torch.float64)
    table = scores(q, k, rotary_angles(torch.arange(12), 8))
    for distance in range(-5, 6):
        diagonal = table.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-5)
    assert table[0].std() > 0.1, "and they do depend on it"
    torch.testing.assert_close(table[0, 0], (q @ k.T)[0, 0])


def test_rotary_attention_is_translation_invariant():
    attention, x = MultiHeadAttention(8, 2), torch.randn(2, 6, 8)
    first, shifted = (attention(x, rotary_angles=rotary_angles(torch.arange(start, start + 6), 4)) for start in (0, 9))
    torch.testing.assert_close(shifted, first, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(first, attention(x), atol=1e-3)


def test_rotation_preserves_norms():
    x = torch.randn(2, 3, 6, 8)
    rotated = apply_rotary(x, rotary_angles(torch.arange(6), 8))
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1))
    assert not torch.allclose(rotated[:, :, 1:], x[:, :, 1:], atol=1e-2)


def test_rotary_2d_scores_depend_only_on_the_relative_offset():
    rows, columns = 3, 4
    q, k = torch.randn(2, 1, 8, dtype=torch.float64)
    table = scores(q, k, rotary_angles_2d(rows, columns, 8)).reshape(rows, columns, rows, columns)
    seen = {}
    for r, c, r2, c2 in torch.cartesian_prod(*map(torch.arange, table.shape)).tolist():
        seen.setdefault((r2 - r, c2 - c), []).append(table[r, c, r2, c2].item())
    assert all(max(values) - min(values) < 1e-5 for values in seen.values())
    means = sorted(sum(values) / len(values) for values in seen.values())
    assert len(seen) == (2 * rows - 1) * (2 * columns - 1)
    assert min(b - a for a, b in pairwise(means)) > 1e-4, "each offset has a distinct score"


def test_alibi_is_minus_slope_times_distance():
    torch.testing.assert_close(alibi_slopes(8), torch.tensor([2.0**-i for i in range(1, 9)]))
    bias = alibi_bias(2, 3, 3)
    distance = torch.tensor([[0.0, 1, 2], [1, 0, 1], [2, 1, 0]])
    torch.testing.assert_close(bias, torch.stack([-distance / 16, -distance / 256]))
    torch.testing.assert_close(alibi_bias(2, 2, 5), alibi_bias(2, 5, 5)[:, -2:])


@pytest.mark.parametrize("kind", ["rotary", "alibi"])
def test_cached_positions_continue_after_the_cached_tokens(kind):
    attention, x = MultiHeadAttention(8, 2).double(), torch.randn(2, 6, 8, dtype=torch.float64)

    def positions(start, end):
        if kind == "rotary":
            return {"rotary_angles": rotary_angles(torch.arange(start, end), 4)}
        return {"logit_bias": alibi_bias(2, end - start, end).double()}

    with torch.no_grad():
        full = attention(x, mask=masks.causal(6), **positions(0, 6))
        cache, parts = KVCache(), []
        for start, end in [(0, 2), (2, 3), (3, 6)]:
            mask = masks.causal(end - start, end)
            parts.append(attention(x[:, start:end], mask=mask, cache=cache, **positions(start, end)))
    torch.testing.assert_close(torch.cat(parts, 1), full)
    without = attention(x, mask=masks.causal(6))
    assert not torch.allclose(full, without, atol=1e-3)
