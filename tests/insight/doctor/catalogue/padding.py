"""Padding: masked tokens that affect other outputs, pooling over padding, and rows without any visible key."""

import math

import torch
from torch import nn

from .parts import (
    CONTEXT,
    GPT,
    HEADS,
    VOCAB,
    WIDTH,
    Attention,
    Block,
    Control,
    Encoder,
    Fault,
    later,
    linear,
    padded,
    variant,
)


def encoder(attention=None, block=Block, **methods):
    return lambda: variant(Encoder, **methods)(attention or Attention, block)


def attending(**methods):
    return encoder(variant(Attention, **methods))


def real(x, mask):
    """(B,L,1): 1 for real tokens."""
    return torch.ones_like(x[..., :1]) if mask is None else mask[..., None].to(x)


def masked_mean(self, x, mask):
    return (x * real(x, mask)).sum(1) / real(x, mask).sum(1).clamp(min=1)


def mean_over_full_length(self, x, mask):
    return (x * real(x, mask)).mean(1)


def zeroed_max(self, x, mask):
    """Padding of 0 wins where all real tokens are negative."""
    return (x * real(x, mask)).amax(1)


def masked_max(self, x, mask):
    return (x if mask is None else x.masked_fill(mask[..., None] == 0, -1e9)).amax(1)


def last_token(self, x, mask):
    """The last position, whether it is padding or not."""
    return x[:, -1]


def last_real(self, x, mask):
    last = torch.full((len(x),), x.shape[1] - 1) if mask is None else mask.long().sum(1) - 1
    return x[torch.arange(len(x)), last.clamp(min=0)]


def last_real_off_by_one(self, x, mask):
    last = torch.full((len(x),), x.shape[1] - 1) if mask is None else mask.long().sum(1)
    return x[torch.arange(len(x)), last.clamp(max=x.shape[1] - 1)]


def attention_pool(self, x, mask, apply=True):
    scores = x @ x.mean((0, 1)) * 0 + x.sum(-1)
    scores = scores.masked_fill(mask == 0, -1e9) if apply and mask is not None else scores
    return (scores.softmax(1)[..., None] * x).sum(1)


def unmasked_attention_pool(self, x, mask):
    return attention_pool(self, x, mask, apply=False)


def normalized_over_length(self, x, mask):
    return x / (1 + x.abs().sum(1, keepdim=True))


def positions_from_end(self, ids):
    return self.tok_embed(ids) + self.pos_embed(torch.arange(ids.shape[1]).flip(0))


def first_block_only(self, x, masked):
    return self.blocks[1](self.blocks[0](x, masked))


def second_block_only(self, x, masked):
    return self.blocks[1](self.blocks[0](x), masked)


class PaddingMask(nn.Module):
    """x (B,L,E) features, with a mask called `name` in forward()."""

    def __init__(self, invert=False):
        super().__init__()
        self.block, self.invert, self.position = Block(), invert, nn.Parameter(torch.randn(CONTEXT, WIDTH))

    def embedded(self, x):
        return x + self.position[: x.shape[1]]

    def hidden(self, mask):
        return None if mask is None else (~mask if self.invert else mask)[:, None, None]


class KeyPaddingMask(PaddingMask):
    def forward(self, x, key_padding_mask=None):
        return self.block(self.embedded(x), self.hidden(key_padding_mask))


class SourceMask(PaddingMask):
    """A mask (B,1,L), True = may attend, of the Annotated Transformer."""

    def forward(self, x, src_mask=None):
        return self.block(self.embedded(x), None if src_mask is None else (src_mask == 0)[:, None])


class AdditivePadding(PaddingMask):
    def forward(self, x, attention_mask=None):
        masked = None if attention_mask is None else (1.0 - attention_mask.to(x))[:, None, None] * -1e4 < -1
        return self.block(self.embedded(x), masked)


class Lengths(PaddingMask):
    """The number of real tokens as an argument."""

    extra = 0

    def forward(self, x, lengths=None):
        masked = None
        if lengths is not None:
            masked = (torch.arange(x.shape[1]) >= lengths[:, None] + self.extra)[:, None, None]
        return self.block(self.embedded(x), masked)


class PaddingId(nn.Module):
    """The mask is made of the ids."""

    def __init__(self, pad=0):
        super().__init__()
        self.embed, self.pos = nn.Embedding(VOCAB, WIDTH, padding_idx=pad), nn.Embedding(CONTEXT, WIDTH)
        self.block, self.pad = Block(), pad

    def padding(self, ids):
        return ids == self.pad

    def pool(self, x, ids):
        return x

    def forward(self, ids):
        x = self.embed(ids) + self.pos(torch.arange(ids.shape[1]))
        return self.pool(self.block(x, self.padding(ids)[:, None, None]), ids)


def sum_of_ids(self, x, ids):
    keep = (ids != self.pad)[..., None].to(x)
    return (x * keep).sum(1) / keep.sum(1).clamp(min=1)


class CausalWithPadding(GPT):
    """A decoder with a padding mask (B,L), 1 = real."""

    combine = staticmethod(lambda causal, padding: causal | padding)

    def forward(self, input_ids, attention_mask=None):
        masked = later(input_ids.shape[1])
        if attention_mask is not None:
            masked = self.combine(masked, (attention_mask == 0)[:, None, None])
        return self.logits(self.run(self.embed(input_ids), masked))


class TorchEncoder(nn.Module):
    def __init__(self, apply=True):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True)
        self.embed, self.pos = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.inner, self.apply_mask = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), apply

    def forward(self, ids, src_key_padding_mask=None):
        x = self.embed(ids) + self.pos(torch.arange(ids.shape[1]))
        return self.inner(x, src_key_padding_mask=src_key_padding_mask if self.apply_mask else None)


class ClassToken(Encoder):
    """A class token before the sequence, whose mask is extended by one."""

    extension = 1

    def build(self):
        self.cls = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.head = linear()

    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1)
        if attention_mask is not None:
            first = torch.full_like(attention_mask[:, :1], self.extension)
            attention_mask = torch.cat([first, attention_mask], 1)
        return self.pool(self.norm(self.run(x, padded(attention_mask))), attention_mask)


def cls_output(self, x, mask):
    return self.head(x[:, 0])


class Registers(ClassToken):
    """Four more tokens at the end, all of which are returned."""

    def build(self):
        self.cls = nn.Parameter(torch.randn(1, 4, WIDTH))

    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids)
        x = torch.cat([x, self.cls.expand(len(x), -1, -1)], 1)
        if attention_mask is not None:
            attention_mask = torch.cat([attention_mask, torch.ones_like(attention_mask[:, :4])], 1)
        return self.norm(self.run(x, padded(attention_mask)))


class Convolution(Encoder):
    """Mixes neighbors after the attention; padding must be zeroed before."""

    zeroes = True

    def build(self):
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def pool(self, x, mask):
        return self.conv((x * real(x, mask) if self.zeroes else x).mT).mT


def nan_rows(self, scores, masked):
    return scores.masked_fill(masked, -math.inf)


class NanGradient(Attention):
    def forward(self, x, masked=None, memory=None):
        self.masked = masked
        return super().forward(x, masked, memory)

    def hide(self, scores, masked):
        return scores + torch.zeros_like(scores).masked_fill(masked, -math.inf)

    def normalize(self, scores):
        return scores.softmax(-1).nan_to_num()


class ZeroedWeights(NanGradient):
    """The mask is applied after the softmax."""

    def hide(self, scores, masked):
        return scores

    def normalize(self, scores):
        weights = scores.softmax(-1)
        return weights if self.masked is None else weights.masked_fill(self.masked, 0.0)


def unclamped_mean(self, x, mask):
    return (x * real(x, mask)).sum(1) / real(x, mask).sum(1)


FAULTS = [
    Fault("padding mask ignored", encoder(masked=lambda self, m, n: None), "padding", "no effect", False),
    Fault(
        "padding mask inverted",
        encoder(masked=lambda self, m, n: None if m is None else padded(1 - m.long())),
        "padding",
        "inverted",
        False,
    ),
    Fault(
        "queries masked instead of keys",
        encoder(masked=lambda self, m, n: None if m is None else (m == 0)[:, None, :, None]),
        "padding",
        "keys",
        False,
    ),
    Fault(
        "mask added as 0 and 1", attending(hide=lambda self, s, m: s + (~m).to(s)), "padding", "padding leaks", False
    ),
    Fault(
        "fill value of -3", attending(hide=lambda self, s, m: s.masked_fill(m, -3.0)), "padding", "padding leaks", False
    ),
    Fault("weights of padding zeroed", encoder(ZeroedWeights), "padding", "after the softmax", False),
    Fault("padding masked in the first block only", encoder(run=first_block_only), "padding", "blocks.1", False),
    Fault("padding masked in the second block only", encoder(run=second_block_only), "padding", "blocks.0", False),
    Fault("mean over padding", encoder(pool=lambda self, x, m: x.mean(1)), "padding", "pooling", False),
    Fault("masked sum over the full length", encoder(pool=mean_over_full_length), "padding", "more padding", False),
    Fault("maximum over zeroed padding", encoder(pool=zeroed_max), "padding", "more padding", False),
    Fault("the last position as the output", encoder(pool=last_token), "padding", "more padding", False),
    Fault("the last real token, off by one", encoder(pool=last_real_off_by_one), "padding", "padding", False),
    Fault("attention pooling over padding", encoder(pool=unmasked_attention_pool), "padding", "pooling", False),
    Fault("normalized over the length", encoder(pool=normalized_over_length), "padding", "padding", False),
    Fault(
        "positions counted from the end of the padding",
        encoder(embed=positions_from_end),
        "padding",
        "more padding",
        False,
    ),
    Fault("key_padding_mask inverted", lambda: KeyPaddingMask(invert=True), "padding", "inverted", False),
    Fault("lengths off by one", lambda: variant(Lengths, extra=1)(), "padding", "lengths", False),
    Fault(
        "padding id ignored",
        lambda: variant(PaddingId, padding=lambda self, ids: torch.zeros_like(ids) > 0)(),
        "padding",
        "padding leaks",
        False,
    ),
    Fault(
        "padding id inverted",
        lambda: variant(PaddingId, padding=lambda self, ids: ids != self.pad)(),
        "padding",
        "padding",
        False,
    ),
    Fault(
        "mean over the padding id",
        lambda: variant(PaddingId, pool=lambda self, x, ids: x.mean(1))(),
        "padding",
        "padding",
        False,
    ),
    Fault(
        "padding replaces the causal mask",
        lambda: variant(CausalWithPadding, combine=staticmethod(lambda c, p: p.expand(-1, -1, c.shape[0], -1)))(),
        "causality",
        "attention_mask",
    ),
    Fault(
        "padding and causal mask combined by &",
        lambda: variant(CausalWithPadding, combine=staticmethod(lambda c, p: c & p))(),
        "padding",
        "padding",
    ),
    Fault("mask not passed to nn.TransformerEncoder", lambda: TorchEncoder(apply=False), "padding", "no effect", False),
    Fault("convolution over padding", lambda: variant(Convolution, zeroes=False)(), "padding", "conv", False),
    Fault("rows of -inf only", attending(hide=nan_rows), "fully masked rows", "NaN", False),
    Fault("NaN hidden by nan_to_num", encoder(NanGradient), "fully masked rows", "gradient", False),
    Fault("mean of no tokens", encoder(pool=unclamped_mean), "fully masked rows", "mean", False),
]

CONTROLS = [
    Control("encoder, attention_mask", encoder(), False),
    Control("masked mean", encoder(pool=masked_mean), False),
    Control("masked maximum", encoder(pool=masked_max), False),
    Control("last real token", encoder(pool=last_real), False),
    Control("masked attention pooling", encoder(pool=attention_pool), False),
    Control("features, key_padding_mask", lambda: KeyPaddingMask(), False),
    Control("features, src_mask (B,1,L)", lambda: SourceMask(), False),
    Control("features, float mask", lambda: AdditivePadding(), False),
    Control("lengths", lambda: Lengths(), False),
    Control("padding id", lambda: PaddingId(), False),
    Control("padding id 3, masked mean", lambda: variant(PaddingId, pool=sum_of_ids)(3), False),
    Control("decoder with padding", lambda: CausalWithPadding()),
    Control("nn.TransformerEncoder", lambda: TorchEncoder(), False),
    Control("class token", lambda: variant(ClassToken, pool=cls_output)(), False),
    Control("class token, all outputs", lambda: variant(ClassToken, pool=lambda self, x, m: self.head(x))(), False),
    Control("four registers", lambda: Registers(), False),
    Control("convolution over zeroed padding", lambda: Convolution(), False),
]
