"""Models that must not see padding: by a mask that they are given, or by the ids themselves."""

import torch
from torch import nn

from . import CONTEXT, HEADS, N_IDS, WIDTH
from .attention import Attention, Block


class Encoder(nn.Module):
    """ids (B,L), attention_mask (B,L) with 1 = real -> (B,L,E)."""

    def __init__(self, attention=Attention, positions=True):
        super().__init__()
        self.tokens, self.places = nn.Embedding(N_IDS, WIDTH), nn.Embedding(CONTEXT, WIDTH) if positions else None
        self.blocks = nn.ModuleList(Block(attention) for _ in range(2))

    def hidden(self, attention_mask):
        return attention_mask[:, None, None, :] == 0

    def forward(self, input_ids, attention_mask=None):
        x = self.tokens(input_ids)
        if self.places is not None:
            x = x + self.places(torch.arange(x.shape[1]))
        hidden = None if attention_mask is None else self.hidden(attention_mask)
        for block in self.blocks:
            x = block(x, hidden)
        return x


class InvertedPadding(Encoder):
    def hidden(self, attention_mask):
        return attention_mask[:, None, None, :] == 1


class RowsHidden(Encoder):
    """Hides queries instead of keys."""

    def hidden(self, attention_mask):
        return attention_mask[:, None, :, None] == 0


class DroppedPadding(Encoder):
    def hidden(self, attention_mask):
        return None


class Pooled(Encoder):
    """One answer for all tokens, padding among them."""

    def forward(self, input_ids, attention_mask=None):
        return super().forward(input_ids, attention_mask).mean(1)


class PooledRightly(Encoder):
    def forward(self, input_ids, attention_mask=None):
        x = super().forward(input_ids, attention_mask)
        if attention_mask is None:
            return x.mean(1)
        real = attention_mask[:, :, None].to(x.dtype)
        return (x * real).sum(1) / real.sum(1).clamp(min=1)


class ByPaddingId(nn.Module):
    """The mask is made of the ids themselves."""

    def __init__(self, masked=True):
        super().__init__()
        self.tokens, self.places = nn.Embedding(N_IDS, WIDTH, padding_idx=0), nn.Embedding(CONTEXT, WIDTH)
        self.block, self.masked = Block(), masked

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        return self.block(x, (ids == 0)[:, None, None, :] if self.masked else None)


class Annotated(nn.Module):
    """Source, target and two masks, all required; True = may attend."""

    def __init__(self, leaks=False):
        super().__init__()
        self.tokens, self.places = nn.Embedding(N_IDS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.reader, self.writer, self.across = Block(), Block(), Attention()
        self.leaks = leaks

    def forward(self, src, tgt, src_mask, tgt_mask):
        memory, x = (self.tokens(ids) + self.places(torch.arange(ids.shape[1])) for ids in (src, tgt))
        memory = self.reader(memory, (src_mask == 0)[:, None])
        x = self.writer(x, (tgt_mask == 0)[:, None])
        joined = torch.cat([memory, x], 1)
        n = memory.shape[1]
        hidden = torch.zeros(len(x), 1, joined.shape[1], joined.shape[1], dtype=torch.bool)
        hidden[..., n:] = ~torch.eye(joined.shape[1], dtype=torch.bool)[:, n:]
        if not self.leaks:
            hidden[..., :n] |= (src_mask == 0)[:, None]
        return x + self.across(joined, hidden)[:, n:]


class OfPairs(nn.Module):
    """Source, target and masks (B,K), True = hidden: `passed` says which of them get through."""

    def __init__(self, passed=("source", "memory")):
        super().__init__()
        self.inner, self.passed = nn.Transformer(WIDTH, HEADS, 1, 1, 16, batch_first=True), passed

    def forward(self, source, target, source_mask=None, target_mask=None, memory_mask=None):
        hidden = {
            f"{'src' if what == 'source' else what}_key_padding_mask": mask
            for what, mask in (("source", source_mask), ("memory", memory_mask))
            if what in self.passed
        }
        return self.inner(source, target, tgt_mask=target_mask, **hidden)


class Reading(nn.Module):
    """A decoder that is given its memory; memory_mask is (Q,K), True = hidden."""

    def __init__(self, passed=True):
        super().__init__()
        self.inner, self.passed = nn.TransformerDecoderLayer(WIDTH, HEADS, 16, batch_first=True), passed

    def forward(self, x, memory, mask=None, memory_mask=None):
        return self.inner(x, memory, tgt_mask=mask, memory_mask=memory_mask if self.passed else None)


class KeepsPaddingId(ByPaddingId):
    """The table does not say which id is padding; an attribute does."""

    def __init__(self, attention=Attention, masked=True, pad_idx=3):
        super().__init__(masked)
        self.tokens, self.block, self.pad_idx = nn.Embedding(N_IDS, WIDTH), Block(attention), pad_idx

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        hidden = (ids == self.pad_idx)[:, None, None, :]
        return self.block(x, hidden if self.masked else None)
