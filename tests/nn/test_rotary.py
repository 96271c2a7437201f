import math
from itertools import pairwise

import pytest
import torch

from clearhead.nn import masks
from clearhead.nn.attention import MultiHeadAttention
from clearhead.nn.cache import KVCache
from clearhead.nn.positions import alibi_bias, alibi_slopes, apply_rotary, rotary_angles, rotary_angles_2d


def test_angles_are_place_times_a_falling_frequency():
    angles = rotary_angles(torch.tensor([0, 1, 7]), 4)
    torch.testing.assert_close(angles, torch.tensor([[0, 0], [1, 0.01], [7, 0.07]]))
    torch.testing.assert_close(rotary_angles(torch.tensor([3]), 4, base=4.0), torch.tensor([[3.0, 1.5]]))


def test_a_pair_is_turned_by_its_angle():
    quarter = torch.tensor([[math.pi / 2, 0.0]])
    x = torch.tensor([[1.0, 5.0, 0.0, 7.0]])  # pairs: (1, 0) is turned by a quarter, (5, 7) stays
    torch.testing.assert_close(apply_rotary(x, quarter), torch.tensor([[0.0, 5.0, 1.0, 7.0]]))


def scores(q, k, angles):
    """The same query and the same key at every place: (L,D/2) -> (L,L)"""
    places = len(angles)
    return apply_rotary(q.expand(places, -1), angles) @ apply_rotary(k.expand(places, -1), angles).T


def test_a_rotary_score_depends_on_the_distance_alone():
    q, k = torch.randn(2, 1, 8, dtype=torch.float64)
    table = scores(q, k, rotary_angles(torch.arange(12), 8))
    for distance in range(-5, 6):
        diagonal = table.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-5)
    assert table[0].std() > 0.1, "and it does depend on it"
    torch.testing.assert_close(table[0, 0], (q @ k.T)[0, 0])


def test_attention_with_rotary_positions_does_not_know_where_the_sequence_starts():
    attention, x = MultiHeadAttention(8, 2), torch.randn(2, 6, 8)
    here, there = (attention(x, rotary_angles=rotary_angles(torch.arange(start, start + 6), 4)) for start in (0, 9))
    torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(here, attention(x), atol=1e-3)


def test_rotation_keeps_norms():
    x = torch.randn(2, 3, 6, 8)
    turned = apply_rotary(x, rotary_angles(torch.arange(6), 8))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert not torch.allclose(turned[:, :, 1:], x[:, :, 1:], atol=1e-2)


def test_a_rotary_score_on_a_grid_depends_on_the_offset_alone():
    rows, columns = 3, 4
    q, k = torch.randn(2, 1, 8, dtype=torch.float64)
    table = scores(q, k, rotary_angles_2d(rows, columns, 8)).reshape(rows, columns, rows, columns)
    seen = {}
    for r, c, r2, c2 in torch.cartesian_prod(*map(torch.arange, table.shape)).tolist():
        seen.setdefault((r2 - r, c2 - c), []).append(table[r, c, r2, c2].item())
    assert all(max(same) - min(same) < 1e-5 for same in seen.values())
    means = sorted(sum(same) / len(same) for same in seen.values())
    assert len(seen) == (2 * rows - 1) * (2 * columns - 1)
    assert min(b - a for a, b in pairwise(means)) > 1e-4, "each offset has a score of its own"


def test_alibi_is_minus_slope_times_distance():
    torch.testing.assert_close(alibi_slopes(8), torch.tensor([2.0**-i for i in range(1, 9)]))
    bias = alibi_bias(2, 3, 3)
    distance = torch.tensor([[0.0, 1, 2], [1, 0, 1], [2, 1, 0]])
    torch.testing.assert_close(bias, torch.stack([-distance / 16, -distance / 256]))
    torch.testing.assert_close(alibi_bias(2, 2, 5), alibi_bias(2, 5, 5)[:, -2:])


@pytest.mark.parametrize("kind", ["rotary", "alibi"])
def test_with_a_cache_places_go_on_where_they_stopped(kind):
    attention, x = MultiHeadAttention(8, 2).double(), torch.randn(2, 6, 8, dtype=torch.float64)

    def positions(start, end):
        if kind == "rotary":
            return {"rotary_angles": rotary_angles(torch.arange(start, end), 4)}
        return {"logit_bias": alibi_bias(2, end - start, end).double()}

    with torch.no_grad():
        whole = attention(x, mask=masks.causal(6), **positions(0, 6))
        cache, parts = KVCache(), []
        for start, end in [(0, 2), (2, 3), (3, 6)]:
            mask = masks.causal(end - start, end)
            parts.append(attention(x[:, start:end], mask=mask, cache=cache, **positions(start, end)))
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    without = attention(x, mask=masks.causal(6))
    assert not torch.allclose(whole, without, atol=1e-3)
