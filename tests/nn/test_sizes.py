import subprocess
import sys

import pytest
import torch

from clearhead.nn.attention import MultiHeadAttention
from clearhead.nn.grid import RotaryGrid
from clearhead.nn.positions import RotaryPositions
from clearhead.nn.rotary import rotary_angles
from clearhead.nn.sizes import check_even, check_heads


@pytest.mark.parametrize(("width", "n_heads", "advice"), [(130, 4, 128), (7, 2, 8), (3, 5, 5)])
def test_heads_must_divide_the_width_and_the_advice_does(width, n_heads, advice):
    with pytest.raises(
        ValueError, match=f"multiple of n_heads, got width={width}, n_heads={n_heads}; try width={advice}"
    ):
        MultiHeadAttention(width, n_heads)
    check_heads(advice, n_heads)


@pytest.mark.parametrize(("width", "n_heads"), [(8, 0), (8, -2), (0, 2), (-4, 2)])
def test_heads_and_width_must_be_positive(width, n_heads):
    with pytest.raises(ValueError, match=f"got width={width}, n_heads={n_heads}"):
        MultiHeadAttention(width, n_heads)


def test_rotary_head_widths_come_in_pairs():
    message = "head width .* multiple of {}, got {}; change width or n_heads"
    with pytest.raises(ValueError, match=message.format(2, 5)):
        RotaryPositions(5)
    with pytest.raises(ValueError, match=message.format(2, 5)):
        rotary_angles(torch.arange(3), 5)
    with pytest.raises(ValueError, match=message.format(4, 6)):
        RotaryGrid(6)
    check_even(8, 4)


def test_sizes_needs_no_torch():
    program = "import sys, clearhead.nn.sizes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
