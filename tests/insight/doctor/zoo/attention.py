"""Attention and blocks; a faulty one overrides a single method."""

import math

import torch
from torch import nn

from . import NUM_HEADS, WIDTH


class Attention(nn.Module):
    """x (B,L,E); masked, True = masked, broadcastable to (B,H,L,L), or None."""

    key_bias = False

    def __init__(self):
        super().__init__()
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.out = nn.Linear(WIDTH, WIDTH, bias=self.key_bias), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, masked=None):
        projections = (self.query, self.key, self.value)
        q, k, v = (layer(x).unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2) for layer in projections)
        weights = self.weights(self.scores(q, k), masked)
        return self.out((weights @ v).transpose(1, 2).flatten(2))

    def scores(self, q, k):
        return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])

    def weights(self, scores, masked):
        return (scores if masked is None else scores.masked_fill(masked, -1e9)).softmax(-1)


class MaskAfterSoftmax(Attention):
    def weights(self, scores, masked):
        weights = scores.softmax(-1)
        return weights if masked is None else weights.masked_fill(masked, 0.0)


class InfiniteMask(Attention):
    """NaN where a query may attend to no key."""

    def weights(self, scores, masked):
        return (scores if masked is None else scores.masked_fill(masked, -math.inf)).softmax(-1)


class SafeMask(InfiniteMask):
    """Zeros where a query may attend to no key, and a finite gradient."""

    def weights(self, scores, masked):
        if masked is None:
            return scores.softmax(-1)
        return scores.masked_fill(masked, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(masked, 0.0)


class NanGradient(Attention):
    """A finite output with a NaN gradient where a query may attend to no key."""

    def weights(self, scores, masked):
        if masked is None:
            return scores.softmax(-1)
        return (scores + torch.zeros_like(scores).masked_fill(masked, -math.inf)).softmax(-1).nan_to_num()


class Unscaled(Attention):
    def scores(self, q, k):
        return q @ k.transpose(-2, -1)


class ScaledQueries(Attention):
    def scores(self, q, k):
        return torch.einsum("bhqd,bhkd->bhqk", q * q.shape[-1] ** -0.5, k)


class SwappedQueryKey(Attention):
    def scores(self, q, k):
        return k @ q.mT / math.sqrt(q.shape[-1])


class KeyBias(Attention):
    key_bias = True


class CustomSoftmax(Attention):
    """A softmax that clearhead.look does not recognize."""

    def weights(self, scores, masked):
        scores = scores if masked is None else scores.masked_fill(masked, -1e9)
        exponentials = (scores - scores.amax(-1, keepdim=True)).exp()
        return exponentials / exponentials.sum(-1, keepdim=True)


class WrongView(Attention):
    """Splits heads by view() without transpose(), so that a head is a part of the sequence."""

    def forward(self, x, masked=None):
        q, k, v = (layer(x).view(len(x), NUM_HEADS, x.shape[1], -1) for layer in (self.query, self.key, self.value))
        return self.out((self.weights(self.scores(q, k), masked) @ v).transpose(1, 2).flatten(2))


class WrongAxis(Attention):
    def weights(self, scores, masked):
        return (scores if masked is None else scores.masked_fill(masked, -1e9)).softmax(-2)


class Block(nn.Module):
    def __init__(self, attention=Attention):
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))

    def forward(self, x, masked=None):
        x = x + self.attention(self.norm1(x), masked)
        return x + self.mlp(self.norm2(x))


class SharedNorm(Block):
    def __init__(self):
        super().__init__()
        self.norm2 = self.norm1
