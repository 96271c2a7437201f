"""Causal models of ids: a mistake is another mask, or another forward()."""

import torch
import torch.nn.functional as F
from torch import nn

from . import CONTEXT, N_IDS, WIDTH
from .attention import Attention, Block


class GPT(nn.Module):
    """ids (B,L) -> logits (B,L,V): right, unless `hides` or a part says otherwise."""

    def __init__(self, attention=Attention, depth=2, block=None):
        super().__init__()
        self.tokens, self.places = nn.Embedding(N_IDS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(block() if block else Block(attention) for _ in range(depth))
        self.head = nn.Linear(WIDTH, N_IDS)

    def hides(self, n):
        """(L,L), True = hidden"""
        return torch.ones(n, n, dtype=torch.bool).triu(1)

    def forward(self, idx):
        x = self.tokens(idx) + self.places(torch.arange(idx.shape[1]))
        hidden = self.hides(idx.shape[1])
        for block in self.blocks:
            x = block(x, hidden)
        return self.head(x)


class Dropped(GPT):
    def hides(self, n):
        return None


class OneTooFar(GPT):
    def hides(self, n):
        return torch.ones(n, n, dtype=torch.bool).triu(2)


class NotItself(GPT):
    def hides(self, n):
        return torch.ones(n, n, dtype=torch.bool).triu(0)


class Inverted(GPT):
    def hides(self, n):
        return torch.ones(n, n, dtype=torch.bool).tril()


class NoPlaces(GPT):
    def __init__(self, attention=Attention, depth=2):
        super().__init__(attention, depth)
        self.places = None

    def forward(self, idx):
        x = self.tokens(idx)
        for block in self.blocks:
            x = block(x, self.hides(idx.shape[1]))
        return self.head(x)


class DroppedInOne(GPT):
    def forward(self, idx):
        x = self.tokens(idx) + self.places(torch.arange(idx.shape[1]))
        x = self.blocks[1](self.blocks[0](x, self.hides(idx.shape[1])))
        return self.head(x)


class NanoGPT(GPT):
    """Answers about the last token only, unless there are targets; then flat, and with a loss."""

    def forward(self, idx, targets=None):
        logits = super().forward(idx)
        if targets is None:
            return logits[:, [-1]], None
        return logits.flatten(0, 1), F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class AlwaysDropping(GPT):
    def forward(self, idx):
        return F.dropout(super().forward(idx), 0.5)


class Unreached(GPT):
    def __init__(self):
        super().__init__()
        self.forgotten = nn.Linear(WIDTH, 3)

    def forward(self, idx):
        return super().forward(idx)


class Detached(GPT):
    def forward(self, idx):
        x = self.tokens(idx).detach() + self.places(torch.arange(idx.shape[1]))
        return self.head(self.blocks[1](self.blocks[0](x, self.hides(idx.shape[1])), self.hides(idx.shape[1])))


class ZeroInit(GPT):
    """Starts with blocks that add nothing, as many do."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            nn.init.zeros_(block.attention.out.weight)
            nn.init.zeros_(block.mlp[2].weight)


class ZeroInitDropped(ZeroInit):
    def hides(self, n):
        return None


class PlainTensor(GPT):
    def __init__(self):
        super().__init__()
        self.mask = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).triu(1)

    def hides(self, n):
        return self.mask[:n, :n]


class LengthFirst(nn.Module):
    """ids (L,B) -> logits (L,B,V), by a model of (B,L)."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, idx):
        return self.inner(idx.T).transpose(0, 1)


class ByDefault(GPT):
    """Takes a mask (L,L), True = hidden, and makes its own where there is none, as torch's tutorial does."""

    def forward(self, idx, mask=None):
        x = self.tokens(idx) + self.places(torch.arange(idx.shape[1]))
        for block in self.blocks:
            x = block(x, self.hides(idx.shape[1]) if mask is None else mask)
        return self.head(x)
