"""Layers that MultiHeadAttention can represent, with weights constructed by hand.

Besides its features x, each token carries its position y on a grid, |y|² and the number 1. With q = (2 (y + offset),
-1) and k = (y', |y'|²) the score is |y + offset|² - |y + offset - y'|²: it is largest for the key at the offset, and
lower by at least 1 for all others. So each head selects one offset, more sharply for larger beta. Its values are the
features, and its block of W_O is the kernel's weight matrix at that offset.
Dims: B batch, L length, C channels, H heads (one for each offset), D head width, E model width.
"""

from collections.abc import Callable, Sequence
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.nn.attention import MultiHeadAttention, attend_fused, softargmax
from clearhead.nn.blocks import MLP

LARGE_BETA = 50.0
"""default inverse temperature of the constructions"""


class OffsetAttention(nn.Module):
    """out_y = bias + sum over heads of taps[h] x_{y + offsets[h]}, with zeros beyond the border. (B,L,C) -> (B,L,C')

    taps (H,C',C), offsets (H,n) on a grid of n axes, with positions in row-major order.
    """

    def __init__(
        self, taps: Tensor, offsets: Tensor, grid: Sequence[int], bias: Tensor | None = None, beta: float = LARGE_BETA
    ):
        super().__init__()
        num_heads, self.out_channels, in_channels = taps.shape
        offsets = offsets.to(taps)
        positions = torch.tensor(list(product(*map(range, grid)))).to(taps)  # (L,n)
        self.positions = torch.cat(
            [positions, positions.square().sum(1, keepdim=True), torch.ones_like(positions[:, :1])], dim=1
        )
        num_axes = positions.shape[1]
        token_width = in_channels + num_axes + 2
        head_dim = max(in_channels, num_axes + 1, -(-max(token_width, self.out_channels) // num_heads))  # rounded up
        target = positions + offsets[:, None]  # (H,L,n)
        inside = ((target >= 0) & (target < torch.tensor(grid).to(taps))).all(-1)
        self.mask = inside[..., None]  # (H,L,1): a head that points beyond the border is masked and returns zeros
        self.attention = MultiHeadAttention(num_heads * head_dim, num_heads, beta=beta).to(taps)
        self.set_weights(taps, offsets, bias)

    @torch.no_grad()
    def set_weights(self, taps: Tensor, offsets: Tensor, bias: Tensor | None) -> None:
        num_heads, out_channels, in_channels = taps.shape
        num_axes = offsets.shape[1]
        square, one = in_channels + num_axes, in_channels + num_axes + 1
        for parameter in self.attention.parameters():
            parameter.zero_()
        output = self.attention.out_proj
        assert isinstance(output, nn.Linear)
        layers = (self.attention.q_proj, self.attention.k_proj, self.attention.v_proj)
        w_q, w_k, w_v = (layer.weight.unflatten(0, (num_heads, -1)) for layer in layers)  # (H,D,E)
        w_o = output.weight.unflatten(1, (num_heads, -1))  # (E,H,D)
        for axis in range(num_axes):
            w_q[:, axis, in_channels + axis] = 2
            w_q[:, axis, one] = 2 * offsets[:, axis]
            w_k[:, axis, in_channels + axis] = 1
        w_q[:, num_axes, one] = -1
        w_k[:, num_axes, square] = 1
        w_v[:, :in_channels, :in_channels] = torch.eye(in_channels).to(taps)
        w_o[:out_channels, :, :in_channels] = taps.transpose(0, 1)
        if bias is not None:
            output.bias[:out_channels] = bias

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([x, self.positions.expand(len(x), -1, -1)], dim=-1)
        tokens = F.pad(tokens, (0, self.attention.q_proj.in_features - tokens.shape[-1]))
        return self.attention(tokens, mask=self.mask)[..., : self.out_channels]


def convolution(weight: Tensor, bias: Tensor | None, grid: Sequence[int], beta: float = LARGE_BETA) -> OffsetAttention:
    """Attention that computes conv1d or conv2d with this kernel, stride 1 and "same" zero padding.

    weight (C',C,k) for a sequence of `grid` = (length,), (C',C,k,k') for an image of (rows, columns).
    """
    sizes = weight.shape[2:]
    if len(sizes) != len(grid):
        raise ValueError(
            f"kernel and grid must have the same number of axes, got kernel sizes {tuple(sizes)} and grid {tuple(grid)}"
        )
    if not all(size % 2 for size in sizes):
        raise ValueError(f"kernel sizes must be odd, got {tuple(sizes)}")
    middle = torch.tensor([size // 2 for size in sizes])
    offsets = torch.tensor(list(product(*map(range, sizes)))) - middle
    return OffsetAttention(weight.flatten(2).movedim(2, 0), offsets, grid, bias, beta)


def pointwise(weight: Tensor, bias: Tensor | None, length: int, beta: float = LARGE_BETA) -> OffsetAttention:
    """Attention whose weights are the identity: a linear layer (C',C) at each position, a 1×1 convolution."""
    return convolution(weight[..., None], bias, (length,), beta)


def identity(width: int, length: int, beta: float = LARGE_BETA, dtype: torch.dtype = torch.float64) -> OffsetAttention:
    """Attention that returns its input."""
    return pointwise(torch.eye(width, dtype=dtype), None, length, beta)


def permutation(x: Tensor, order: Tensor, beta: float = LARGE_BETA) -> Tensor:
    """Attention that moves token order[i] to position i: query i is the one-hot key of token order[i].

    x (B,L,E), order (L,) -> x[:, order] in the limit of large beta.
    """
    positions = torch.eye(x.shape[1]).to(x)
    queries, keys = (rows.expand(len(x), -1, -1) for rows in (positions[order], positions))
    return attend_fused(queries, keys, x, beta=beta)


def message_passing(x: Tensor, scores: Tensor, edges: Tensor | None = None) -> Tensor:
    """Each node sums its neighbors' messages, weighted by the softargmax of its scores over its edges.

    x (n,E), scores (n,n), edges (n,n) bool with edges[i, j] = True if i receives from j; None is the complete
    graph. A node without edges receives zeros. Computed node by node; equal to attention with the edges as the mask.
    """
    outputs = []
    for node in range(len(x)):
        neighbors = torch.arange(len(x)) if edges is None else edges[node].nonzero()[:, 0]
        weights = softargmax(scores[node, neighbors])
        outputs.append((weights[:, None] * x[neighbors]).sum(0))
    return torch.stack(outputs)


def feedforward_as_convolutions(net: MLP) -> nn.Sequential:
    """Two 1×1 convolutions with the activation between them and the weights of the MLP. (B,E,L) -> (B,E,L)"""
    layers = []
    for linear in (net.fc1, net.fc2):
        conv = nn.Conv1d(linear.in_features, linear.out_features, 1, bias=linear.bias is not None).to(linear.weight)
        conv.load_state_dict({name: p.unsqueeze(-1) if p.dim() == 2 else p for name, p in linear.state_dict().items()})
        layers.append(conv)
    return nn.Sequential(layers[0], Lambda(net.activation), layers[1])


class Lambda(nn.Module):
    """Wraps a function of one tensor as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)
