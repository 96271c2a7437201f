"""Causal models of token ids; a faulty one has another mask or another forward()."""

import torch
import torch.nn.functional as F
from torch import nn

from . import CONTEXT_LENGTH, VOCAB_SIZE, WIDTH
from .attention import Attention, Block


class GPT(nn.Module):
    """ids (B,L) -> logits (B,L,V). Correct, unless masked_keys() or a part is not."""

    def __init__(self, attention=Attention, depth=2, block=None):
        super().__init__()
        self.tok_embed, self.pos_embed = nn.Embedding(VOCAB_SIZE, WIDTH), nn.Embedding(CONTEXT_LENGTH, WIDTH)
        self.blocks = nn.ModuleList(block() if block else Block(attention) for _ in range(depth))
        self.head = nn.Linear(WIDTH, VOCAB_SIZE)

    def masked_keys(self, length):
        """(L,L), True = masked"""
        return torch.ones(length, length, dtype=torch.bool).triu(1)

    def forward(self, idx):
        x = self.tok_embed(idx) + self.pos_embed(torch.arange(idx.shape[1]))
        masked = self.masked_keys(idx.shape[1])
        for block in self.blocks:
            x = block(x, masked)
        return self.head(x)


class MaskDropped(GPT):
    def masked_keys(self, length):
        return None


class SeesNextToken(GPT):
    def masked_keys(self, length):
        return torch.ones(length, length, dtype=torch.bool).triu(2)


class ExcludesSelf(GPT):
    def masked_keys(self, length):
        return torch.ones(length, length, dtype=torch.bool).triu(0)


class InvertedMask(GPT):
    def masked_keys(self, length):
        return torch.ones(length, length, dtype=torch.bool).tril()


class NoPositions(GPT):
    def __init__(self, attention=Attention, depth=2):
        super().__init__(attention, depth)
        self.pos_embed = None

    def forward(self, idx):
        x = self.tok_embed(idx)
        for block in self.blocks:
            x = block(x, self.masked_keys(idx.shape[1]))
        return self.head(x)


class MaskDroppedInOneLayer(GPT):
    def forward(self, idx):
        x = self.tok_embed(idx) + self.pos_embed(torch.arange(idx.shape[1]))
        x = self.blocks[1](self.blocks[0](x, self.masked_keys(idx.shape[1])))
        return self.head(x)


class NanoGPT(GPT):
    """Returns the last token's logits; with targets, all logits, flattened, and the loss."""

    def forward(self, idx, targets=None):
        logits = super().forward(idx)
        if targets is None:
            return logits[:, [-1]], None
        return logits.flatten(0, 1), F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class AlwaysDropout(GPT):
    def forward(self, idx):
        return F.dropout(super().forward(idx), 0.5)


class UnusedParameter(GPT):
    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(WIDTH, 3)

    def forward(self, idx):
        return super().forward(idx)


class DetachedEmbedding(GPT):
    def forward(self, idx):
        x = self.tok_embed(idx).detach() + self.pos_embed(torch.arange(idx.shape[1]))
        masked = self.masked_keys(idx.shape[1])
        return self.head(self.blocks[1](self.blocks[0](x, masked), masked))


class ZeroInit(GPT):
    """Every block starts as the identity."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            nn.init.zeros_(block.attention.out.weight)
            nn.init.zeros_(block.mlp[2].weight)


class ZeroInitMaskDropped(ZeroInit):
    def masked_keys(self, length):
        return None


class PlainTensor(GPT):
    def __init__(self):
        super().__init__()
        self.mask = torch.ones(CONTEXT_LENGTH, CONTEXT_LENGTH, dtype=torch.bool).triu(1)

    def masked_keys(self, length):
        return self.mask[:length, :length]


class LengthFirst(nn.Module):
    """ids (L,B) -> logits (L,B,V), from a model of (B,L)."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, idx):
        return self.inner(idx.T).transpose(0, 1)


class OptionalMask(GPT):
    """Takes a mask (L,L), True = masked; without one, it makes its own."""

    def forward(self, idx, mask=None):
        x = self.tok_embed(idx) + self.pos_embed(torch.arange(idx.shape[1]))
        for block in self.blocks:
            x = block(x, self.masked_keys(idx.shape[1]) if mask is None else mask)
        return self.head(x)
