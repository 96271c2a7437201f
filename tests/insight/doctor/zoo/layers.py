"""Modules of features, with masks of every kind."""

import math

import torch
from torch import nn

from . import NUM_HEADS, WIDTH
from .attention import Attention, Block


class MaskedBlock(nn.Module):
    """features (B,L,E) and a required attention mask (L,L), True = may attend."""

    def __init__(self, attention=Attention):
        super().__init__()
        self.block = Block(attention)

    def masked_keys(self, mask):
        return mask == 0

    def forward(self, x, mask):
        return self.block(x, None if mask is None else self.masked_keys(mask))


class MaskedBlockDropped(MaskedBlock):
    def masked_keys(self, mask):
        return None


class AdditiveMask(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, x, mask=None):
        q, k, v = (layer(x) for layer in (self.attention.query, self.attention.key, self.attention.value))
        scores = q @ k.mT / math.sqrt(WIDTH)
        return x + self.attention.out((scores if mask is None else scores + mask).softmax(-1) @ v)


class MixedBatch(nn.Module):
    """Passes (B,L,E) to a layer of (L,B,E)."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, NUM_HEADS, 16)

    def forward(self, x):
        x = self.layer(x)
        return x + x.roll(1, dims=1)


class HardcodedFloat32(MaskedBlock):
    def forward(self, x, mask=None):
        return super().forward(x.to(torch.float32), mask)


class UpcastOutput(MaskedBlock):
    def forward(self, x, mask=None):
        return super().forward(x, mask).float()


class TorchAttention(nn.Module):
    """nn.MultiheadAttention in a wrapper."""

    def __init__(self, **options):
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(WIDTH, NUM_HEADS, batch_first=True), nn.LayerNorm(WIDTH)
        self.options = options

    def forward(self, x, attn_mask=None, key_padding_mask=None):
        masks = {"attn_mask": attn_mask, "key_padding_mask": key_padding_mask}
        return self.norm(x + self.attention(x, x, x, **masks, **self.options)[0])


class UnknownParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, edges):
        return self.linear(x)
