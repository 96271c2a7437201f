"""Models with padding, which is masked by an argument or by the ids themselves."""

import torch
from torch import nn

from . import CONTEXT_LENGTH, NUM_HEADS, VOCAB_SIZE, WIDTH
from .attention import Attention, Block


class Encoder(nn.Module):
    """ids (B,L), attention_mask (B,L) with 1 = may attend -> (B,L,E)."""

    def __init__(self, attention=Attention, positions=True):
        super().__init__()
        self.tok_embed = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.pos_embed = nn.Embedding(CONTEXT_LENGTH, WIDTH) if positions else None
        self.blocks = nn.ModuleList(Block(attention) for _ in range(2))

    def masked_keys(self, attention_mask):
        return attention_mask[:, None, None, :] == 0

    def forward(self, input_ids, attention_mask=None):
        x = self.tok_embed(input_ids)
        if self.pos_embed is not None:
            x = x + self.pos_embed(torch.arange(x.shape[1]))
        masked = None if attention_mask is None else self.masked_keys(attention_mask)
        for block in self.blocks:
            x = block(x, masked)
        return x


class InvertedPaddingMask(Encoder):
    def masked_keys(self, attention_mask):
        return attention_mask[:, None, None, :] == 1


class MasksQueries(Encoder):
    """Masks queries instead of keys."""

    def masked_keys(self, attention_mask):
        return attention_mask[:, None, :, None] == 0


class PaddingMaskDropped(Encoder):
    def masked_keys(self, attention_mask):
        return None


class MeanPooled(Encoder):
    """The mean over all tokens, padding included."""

    def forward(self, input_ids, attention_mask=None):
        return super().forward(input_ids, attention_mask).mean(1)


class MaskedMeanPooled(Encoder):
    def forward(self, input_ids, attention_mask=None):
        x = super().forward(input_ids, attention_mask)
        if attention_mask is None:
            return x.mean(1)
        real = attention_mask[:, :, None].to(x.dtype)
        return (x * real).sum(1) / real.sum(1).clamp(min=1)


class PaddingIdMask(nn.Module):
    """Makes the mask from the ids."""

    def __init__(self, use_mask=True):
        super().__init__()
        self.tok_embed = nn.Embedding(VOCAB_SIZE, WIDTH, padding_idx=0)
        self.pos_embed = nn.Embedding(CONTEXT_LENGTH, WIDTH)
        self.block, self.use_mask = Block(), use_mask

    def forward(self, ids):
        x = self.tok_embed(ids) + self.pos_embed(torch.arange(ids.shape[1]))
        return self.block(x, (ids == 0)[:, None, None, :] if self.use_mask else None)


class PaddingIdAttribute(PaddingIdMask):
    """The padding id is an attribute, unknown to the embedding."""

    def __init__(self, attention=Attention, use_mask=True, pad_idx=3):
        super().__init__(use_mask)
        self.tok_embed, self.block, self.pad_idx = nn.Embedding(VOCAB_SIZE, WIDTH), Block(attention), pad_idx

    def forward(self, ids):
        x = self.tok_embed(ids) + self.pos_embed(torch.arange(ids.shape[1]))
        masked = (ids == self.pad_idx)[:, None, None, :]
        return self.block(x, masked if self.use_mask else None)


class SourceTargetMasks(nn.Module):
    """An encoder-decoder with two required masks, True = may attend."""

    def __init__(self, leaks=False):
        super().__init__()
        self.tok_embed, self.pos_embed = nn.Embedding(VOCAB_SIZE, WIDTH), nn.Embedding(CONTEXT_LENGTH, WIDTH)
        self.encoder, self.decoder, self.cross_attn = Block(), Block(), Attention()
        self.leaks = leaks

    def forward(self, src, tgt, src_mask, tgt_mask):
        memory, x = (self.tok_embed(ids) + self.pos_embed(torch.arange(ids.shape[1])) for ids in (src, tgt))
        memory = self.encoder(memory, (src_mask == 0)[:, None])
        x = self.decoder(x, (tgt_mask == 0)[:, None])
        joined = torch.cat([memory, x], 1)
        n = memory.shape[1]
        masked = torch.zeros(len(x), 1, joined.shape[1], joined.shape[1], dtype=torch.bool)
        masked[..., n:] = ~torch.eye(joined.shape[1], dtype=torch.bool)[:, n:]
        if not self.leaks:
            masked[..., :n] |= (src_mask == 0)[:, None]
        return x + self.cross_attn(joined, masked)[:, n:]


class MaskedTransformer(nn.Module):
    """nn.Transformer with padding masks (B,K), True = masked; only those in `applied` are passed on."""

    def __init__(self, applied=("source", "memory")):
        super().__init__()
        self.inner, self.applied = nn.Transformer(WIDTH, NUM_HEADS, 1, 1, 16, batch_first=True), applied

    def forward(self, source, target, source_mask=None, target_mask=None, memory_mask=None):
        masks = {
            f"{'src' if name == 'source' else name}_key_padding_mask": mask
            for name, mask in (("source", source_mask), ("memory", memory_mask))
            if name in self.applied
        }
        return self.inner(source, target, tgt_mask=target_mask, **masks)


class MemoryDecoder(nn.Module):
    """A decoder that takes its memory as an argument; memory_mask is (Q,K), True = masked."""

    def __init__(self, applies_mask=True):
        super().__init__()
        self.inner = nn.TransformerDecoderLayer(WIDTH, NUM_HEADS, 16, batch_first=True)
        self.applies_mask = applies_mask

    def forward(self, x, memory, mask=None, memory_mask=None):
        return self.inner(x, memory, tgt_mask=mask, memory_mask=memory_mask if self.applies_mask else None)
