"""The parts that the modules of the catalogue are assembled from. `variant` replaces methods, one per planted fault.

Shapes: B batch, L length, H heads, E width, V vocabulary.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

VOCAB, WIDTH, HEADS, CONTEXT = 11, 8, 2, 24


class Fault(NamedTuple):
    """A module with one fault, and the finding that must name it."""

    name: str
    build: Callable[[], nn.Module]
    check: str
    word: str
    """a word of the finding's text: the cause, or the module where it happens"""
    causal: bool = True
    options: Mapping[str, Any] = {}


class Control(NamedTuple):
    """A right module: no fault may be reported, and no warning but those of the checks in `warnings`."""

    name: str
    build: Callable[[], nn.Module]
    causal: bool = True
    warnings: tuple[str, ...] = ()
    options: Mapping[str, Any] = {}


def variant(base, **methods):
    """A subclass with other methods."""
    return type(f"Other{base.__name__}", (base,), methods)


def linear(in_features=WIDTH, out_features=WIDTH, bias=True):
    return nn.Linear(in_features, out_features, bias=bias)


def later(length):
    """(L,L): True at later keys, which a causal model masks."""
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def padded(mask):
    """(B,L), 1 = real, to (B,1,1,L), True = masked."""
    return None if mask is None else (mask == 0)[:, None, None]


class Attention(nn.Module):
    """x (B,L,E) -> (B,L,E); masked is broadcastable to (B,H,Q,K), True = masked."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = linear(), linear(bias=False), linear(), linear()

    def split(self, x):
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def merge(self, x):
        return x.transpose(1, 2).flatten(2)

    def project(self, x, memory):
        return self.split(self.query(x)), self.split(self.key(memory)), self.split(self.value(memory))

    def scores(self, q, k):
        return q @ k.mT / math.sqrt(q.shape[-1])

    def hide(self, scores, masked):
        return scores.masked_fill(masked, torch.finfo(scores.dtype).min)

    def normalize(self, scores):
        return scores.softmax(-1)

    def mix(self, weights, v):
        return weights @ v

    def forward(self, x, masked=None, memory=None):
        q, k, v = self.project(x, x if memory is None else memory)
        scores = self.scores(q, k)
        weights = self.normalize(scores if masked is None else self.hide(scores, masked))
        return self.out(self.merge(self.mix(weights, v)))


class Block(nn.Module):
    def __init__(self, attention=Attention):
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(WIDTH), attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(linear(WIDTH, 16), nn.GELU(), linear(16, WIDTH))

    def forward(self, x, masked=None):
        x = x + self.attn(self.norm1(x), masked)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """ids (B,L) -> logits (B,L,V), with learned positions."""

    def __init__(self, attention=Attention, block=Block, depth=2):
        super().__init__()
        self.tok_embed, self.pos_embed = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(block(attention) for _ in range(depth))
        self.norm, self.lm_head = nn.LayerNorm(WIDTH), linear(WIDTH, VOCAB)
        self.build()

    def build(self):
        """More parts of a variant."""

    def embed(self, ids):
        return self.tok_embed(ids) + self.pos_embed(torch.arange(ids.shape[1]))

    def mask(self, length):
        return later(length)

    def run(self, x, masked):
        for block in self.blocks:
            x = block(x, masked)
        return x

    def logits(self, x):
        return self.lm_head(self.norm(x))

    def forward(self, ids):
        return self.logits(self.run(self.embed(ids), self.mask(ids.shape[1])))


class Encoder(nn.Module):
    """input_ids (B,L), attention_mask (B,L), 1 = may attend -> (B,L,E), or (B,E) if `pool` is overridden."""

    def __init__(self, attention=Attention, block=Block, depth=2):
        super().__init__()
        self.tok_embed, self.pos_embed = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(block(attention) for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.build()

    def build(self):
        """More parts of a variant."""

    def embed(self, ids):
        return self.tok_embed(ids) + self.pos_embed(torch.arange(ids.shape[1]))

    def masked(self, mask, length):
        return padded(mask)

    def run(self, x, masked):
        for block in self.blocks:
            x = block(x, masked)
        return x

    def pool(self, x, mask):
        return x

    def forward(self, input_ids, attention_mask=None):
        masked = self.masked(attention_mask, input_ids.shape[1])
        return self.pool(self.norm(self.run(self.embed(input_ids), masked)), attention_mask)


class DecoderBlock(nn.Module):
    def __init__(self, attention=Attention):
        super().__init__()
        self.norm1, self.self_attn = nn.LayerNorm(WIDTH), attention()
        self.norm2, self.cross_attn = nn.LayerNorm(WIDTH), attention()

    def forward(self, x, memory, masked, memory_masked):
        x = x + self.self_attn(self.norm1(x), masked)
        return x + self.cross_attn(self.norm2(x), memory_masked, memory)


class Translator(nn.Module):
    """src (B,S), tgt (B,L), src_padding_mask (B,S), True = masked -> logits (B,L,V)."""

    def __init__(self, attention=Attention):
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.encoder, self.decoder, self.head = Block(attention), DecoderBlock(attention), linear(WIDTH, VOCAB)

    def embedded(self, ids):
        return self.embed(ids) + self.positions(torch.arange(ids.shape[1]))

    def encode(self, src, masked):
        return self.encoder(self.embedded(src), masked)

    def decode(self, tgt, memory, masked):
        return self.decoder(self.embedded(tgt), memory, later(tgt.shape[1]), masked)

    def forward(self, src, tgt, src_padding_mask=None):
        masked = None if src_padding_mask is None else src_padding_mask[:, None, None]
        return self.head(self.decode(tgt, self.encode(src, masked), masked))


class ViT(nn.Module):
    """images (B,3,16,16) in patches of 4 x 4 -> logits (B,5)."""

    def __init__(self, attention=Attention, block=Block):
        super().__init__()
        self.proj = linear(3 * 4 * 4, WIDTH)
        self.pos_embed = nn.Parameter(torch.randn(1, 17, WIDTH))
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.blocks = nn.ModuleList(block(attention) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), linear(WIDTH, 5)
        self.build()

    def build(self):
        """More parts of a variant."""

    def patches(self, images):
        x = images.unfold(2, 4, 4).unfold(3, 4, 4)  # (B,3,4,4,4,4)
        return x.permute(0, 2, 3, 1, 4, 5).reshape(len(images), 16, -1)

    def tokens(self, images):
        x = self.proj(self.patches(images))
        return torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed

    def pool(self, x):
        return x[:, 0]

    def forward(self, images):
        x = self.tokens(images)
        for block in self.blocks:
            x = block(x)
        return self.head(self.pool(self.norm(x)))
