import subprocess
import sys

import pytest
import torch

from clearhead.nn.attention import MultiHeadAttention
from clearhead.nn.positions import RotaryPosEmbed, RotaryPosEmbed2d, rotary_angles
from clearhead.validation import check_heads, check_rotary_width


@pytest.mark.parametrize(("width", "num_heads", "advice"), [(130, 4, 128), (7, 2, 8), (3, 5, 5)])
def test_num_heads_must_divide_width_and_the_suggested_width_is_valid(width, num_heads, advice):
    with pytest.raises(
        ValueError, match=f"multiple of num_heads, got width={width}, num_heads={num_heads}; try width={advice}"
    ):
        MultiHeadAttention(width, num_heads)
    check_heads(advice, num_heads)


@pytest.mark.parametrize(("width", "num_heads"), [(8, 0), (8, -2), (0, 2), (-4, 2)])
def test_num_heads_and_width_must_be_positive(width, num_heads):
    with pytest.raises(ValueError, match=f"got width={width}, num_heads={num_heads}"):
        MultiHeadAttention(width, num_heads)


def test_rotary_head_dim_must_be_a_multiple_of_2_or_4():
    message = "head_dim .* multiple of {} .*got {}; change width or num_heads"
    with pytest.raises(ValueError, match=message.format(2, 5)):
        RotaryPosEmbed(5)
    with pytest.raises(ValueError, match=message.format(2, 5)):
        rotary_angles(torch.arange(3), 5)
    with pytest.raises(ValueError, match=message.format(4, 6)):
        RotaryPosEmbed2d(6)
    check_rotary_width(8, 4)


def test_validation_does_not_import_torch():
    program = "import sys, clearhead.validation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
