"""Attention and blocks, right and wrong. What a mistake changes is a method."""

import math

import torch
from torch import nn

from . import HEADS, WIDTH


class Attention(nn.Module):
    """x (B,L,E), hidden to (B,H,L,L) or None. What a mistake changes is a method."""

    key_bias = False

    def __init__(self):
        super().__init__()
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.out = nn.Linear(WIDTH, WIDTH, bias=self.key_bias), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, hidden=None):
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        weights = self.weights(self.scores(q, k), hidden)
        return self.out((weights @ v).transpose(1, 2).flatten(2))

    def scores(self, q, k):
        return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])

    def weights(self, scores, hidden):
        return (scores if hidden is None else scores.masked_fill(hidden, -1e9)).softmax(-1)


class LateMask(Attention):
    def weights(self, scores, hidden):
        weights = scores.softmax(-1)
        return weights if hidden is None else weights.masked_fill(hidden, 0.0)


class Infinite(Attention):
    def weights(self, scores, hidden):
        return (scores if hidden is None else scores.masked_fill(hidden, -math.inf)).softmax(-1)


class Safe(Infinite):
    """A row that sees nothing gets zeros, and no NaN on the way back."""

    def weights(self, scores, hidden):
        if hidden is None:
            return scores.softmax(-1)
        return scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(hidden, 0.0)


class NanBackwards(Attention):
    """The answer is mended, the gradient is not."""

    def weights(self, scores, hidden):
        if hidden is None:
            return scores.softmax(-1)
        return (scores + torch.zeros_like(scores).masked_fill(hidden, -math.inf)).softmax(-1).nan_to_num()


class Unscaled(Attention):
    def scores(self, q, k):
        return q @ k.transpose(-2, -1)


class ScaledQueries(Attention):
    def scores(self, q, k):
        return torch.einsum("bhqd,bhkd->bhqk", q * q.shape[-1] ** -0.5, k)


class Swapped(Attention):
    def scores(self, q, k):
        return k @ q.mT / math.sqrt(q.shape[-1])


class WithKeyBias(Attention):
    key_bias = True


class Unseen(Attention):
    """A softmax that nobody recognises."""

    def weights(self, scores, hidden):
        scores = scores if hidden is None else scores.masked_fill(hidden, -1e9)
        exponentials = (scores - scores.amax(-1, keepdim=True)).exp()
        return exponentials / exponentials.sum(-1, keepdim=True)


class WrongView(Attention):
    """Heads by view() alone: what becomes a head is a piece of the sequence."""

    def forward(self, x, hidden=None):
        q, k, v = (layer(x).view(len(x), HEADS, x.shape[1], -1) for layer in (self.query, self.key, self.value))
        return self.out((self.weights(self.scores(q, k), hidden) @ v).transpose(1, 2).flatten(2))


class WrongAxis(Attention):
    def weights(self, scores, hidden):
        return (scores if hidden is None else scores.masked_fill(hidden, -1e9)).softmax(-2)


class Block(nn.Module):
    def __init__(self, attention=Attention):
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))

    def forward(self, x, hidden=None):
        x = x + self.attention(self.norm1(x), hidden)
        return x + self.mlp(self.norm2(x))


class SharedNorm(Block):
    def __init__(self):
        super().__init__()
        self.norm2 = self.norm1
