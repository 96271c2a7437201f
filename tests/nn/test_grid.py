import pytest
import torch

from clearhead.nn.positions import (
    LearnedPosEmbed2d,
    NoPosEmbed2d,
    RotaryPosEmbed2d,
    SinusoidalPosEmbed2d,
    interpolate,
    rotary_angles,
    rotary_angles_2d,
    sinusoidal,
    sinusoidal_2d,
)


def test_the_same_grid_gives_the_table_itself():
    table = torch.randn(12, 5)
    assert interpolate(table, (3, 4), (3, 4)) is table
    assert interpolate(table, (3, 4), (4, 3)) is not table


@pytest.mark.parametrize("new", [(1, 1), (4, 3), (6, 8), (7, 2)])
def test_another_grid_has_its_own_size_and_keeps_what_is_constant(new):
    rows, columns = new
    table = torch.arange(5.0).expand(12, 5)
    torch.testing.assert_close(interpolate(table, (3, 4), new), torch.arange(5.0).expand(rows * columns, 5))
    by_row = torch.arange(3.0).repeat_interleave(4)[:, None]  # varies from row to row, not from column to column
    image = interpolate(by_row, (3, 4), new).reshape(rows, columns)
    torch.testing.assert_close(image, image[:, :1].expand(rows, columns))
    assert (image[1:] > image[:-1]).all(), "rows stay in order"


def test_sinusoids_on_a_grid_tell_row_and_column():
    table = sinusoidal_2d(3, 4, 8).reshape(3, 4, 8)
    torch.testing.assert_close(table[..., :4], sinusoidal(torch.arange(3), 4)[:, None].expand(3, 4, 4))
    torch.testing.assert_close(table[..., 4:], sinusoidal(torch.arange(4), 4).expand(3, 4, 4))
    assert len(table.reshape(12, 8).unique(dim=0)) == 12
    with pytest.raises(ValueError, match=r"multiple of 4 .*got 6"):
        sinusoidal_2d(3, 4, 6)


def test_rotary_on_a_grid_turns_half_by_the_row_half_by_the_column():
    angles = rotary_angles_2d(3, 4, 8).reshape(3, 4, 4)
    torch.testing.assert_close(angles[..., :2], rotary_angles(torch.arange(3), 4)[:, None].expand(3, 4, 2))
    torch.testing.assert_close(angles[..., 2:], rotary_angles(torch.arange(4), 4).expand(3, 4, 2))


def test_each_kind_on_its_grid():
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


def test_a_learned_table_serves_another_grid_and_learns_from_it():
    learned, x = LearnedPosEmbed2d((3, 4), 8), torch.randn(2, 30, 8)
    out = learned(x, (5, 6))
    torch.testing.assert_close(out - x, interpolate(learned.table, (3, 4), (5, 6)).expand(2, 30, 8))
    out.sum().backward()
    assert learned.table.grad.all()
