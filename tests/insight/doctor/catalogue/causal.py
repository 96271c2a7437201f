"""Decoders: outputs that depend on later tokens, and encoders that do not."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from .parts import CONTEXT, GPT, HEADS, VOCAB, WIDTH, Attention, Block, Control, Encoder, Fault, later, linear, variant


def gpt(attention=None, block=Block, depth=2, **methods):
    """A builder of a GPT with other methods, in its attention or in itself."""
    return lambda: variant(GPT, **methods)(attention or Attention, block, depth)


def attending(**methods):
    return gpt(variant(Attention, **methods))


def add_penalty(penalty):
    return lambda self, scores, masked: scores + masked.to(scores) * penalty


def mask_first_head(self, scores, masked):
    masked = masked.expand_as(scores).clone()
    masked[:, 1:] = False
    return scores.masked_fill(masked, -1e9)


def masked_rows(self, scores, masked):
    return scores.masked_fill(masked.mT, -1e9)


class ConvolutionBlock(Block):
    """A depthwise convolution before the attention, padded on both sides."""

    def __init__(self, attention):
        super().__init__(attention)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)

    def forward(self, x, masked=None):
        return super().forward(x + self.conv(x.mT).mT, masked)


class CausalConvolutionBlock(ConvolutionBlock):
    def __init__(self, attention):
        super().__init__(attention)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH)

    def forward(self, x, masked=None):
        return Block.forward(self, x + self.conv(F.pad(x.mT, (2, 0))).mT, masked)


class GlobalContext(Block):
    """A squeeze-and-excitation gate from the mean over all tokens."""

    def __init__(self, attention):
        super().__init__(attention)
        self.gate = linear()

    def forward(self, x, masked=None):
        x = super().forward(x, masked)
        return x * self.gate(x.mean(1, keepdim=True)).sigmoid()


class LengthNorm(nn.Module):
    """Normalizes over the tokens instead of the features."""

    def forward(self, x):
        return (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-5)


class LengthNormBlock(Block):
    def __init__(self, attention):
        super().__init__(attention)
        self.norm2 = LengthNorm()


class LSTMModel(nn.Module):
    def __init__(self, bidirectional):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=bidirectional)
        self.head = linear(WIDTH * (1 + bidirectional), VOCAB)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


class TokenMixer(nn.Module):
    """An MLP-mixer over tokens, of a fixed length, as a language model."""

    def __init__(self, causal):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(VOCAB, WIDTH), linear(7, 7), linear(WIDTH, VOCAB)
        self.causal = causal

    def forward(self, ids):
        x = self.embed(ids)
        if not self.causal:
            return self.head(x + self.mix(x.mT).mT)
        return self.head(x + F.linear(x.mT, self.mix.weight.tril(), self.mix.bias).mT)


class KernelGPT(GPT):
    """scaled_dot_product_attention with its own causal mask."""

    def __init__(self, is_causal=True):
        super().__init__(depth=1)
        self.is_causal = is_causal

    def run(self, x, masked):
        q, k, v = self.blocks[0].attn.project(x, x)
        x = x + self.blocks[0].attn.out(
            self.blocks[0].attn.merge(F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal))
        )
        return self.blocks[0].norm1(x) + self.blocks[0].mlp(self.blocks[0].norm2(x))


class TorchGPT(nn.Module):
    """nn.TransformerEncoder with a mask from nn.Transformer."""

    def __init__(self, apply=True, **options):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True, **options)
        self.embed, self.pos = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.inner = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head, self.apply_mask = linear(WIDTH, VOCAB), apply

    def forward(self, ids):
        n = ids.shape[1]
        x = self.embed(ids) + self.pos(torch.arange(n))
        mask = nn.Transformer.generate_square_subsequent_mask(n, dtype=x.dtype) if self.apply_mask else None
        return self.head(self.inner(x, mask))


class Rotary(Attention):
    def project(self, x, memory):
        q, k, v = Attention.project(self, x, memory)
        return self.rotate(q), self.rotate(k), v

    def rotate(self, x):
        half = x.shape[-1] // 2
        angles = torch.arange(x.shape[-2])[:, None] * 0.1 ** torch.arange(half)
        cos, sin = angles.cos().to(x), angles.sin().to(x)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Alibi(Attention):
    def scores(self, q, k):
        distance = torch.arange(k.shape[-2]) - torch.arange(q.shape[-2])[:, None]
        slopes = torch.tensor([0.5, 0.25]).to(q)[:, None, None]
        return super().scores(q, k) + slopes * distance.to(q)


class GroupedQueries(Attention):
    """Two query heads share one head of keys and values."""

    def __init__(self):
        super().__init__()
        self.key, self.value = linear(WIDTH, WIDTH // HEADS, bias=False), linear(WIDTH, WIDTH // HEADS)

    def project(self, x, memory):
        k, v = self.key(memory)[:, None], self.value(memory)[:, None]
        return self.split(self.query(x)), k.expand(-1, HEADS, -1, -1), v.expand(-1, HEADS, -1, -1)


class Retention(Attention):
    """Linear attention in its recurrent form: no softmax."""

    def forward(self, x, masked=None, memory=None):
        q, k, v = self.project(x, x)
        state, rows = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
        for i in range(x.shape[1]):
            state = 0.9 * state + k[:, :, i, :, None] * v[:, :, i, None]
            rows.append((q[:, :, i, None] @ state)[:, :, 0])
        return self.out(self.merge(torch.stack(rows, 2)))


class SkipMaskInTraining(GPT):
    def run(self, x, masked):
        return super().run(x, None if self.training else masked)


class FlippedPositions(GPT):
    """Positions are counted from the end of the sequence."""

    def embed(self, ids):
        return self.tok_embed(ids) + self.pos_embed(torch.arange(ids.shape[1]).flip(0))


class Windowed(GPT):
    def __init__(self, window=3):
        super().__init__()
        self.window = window

    def mask(self, length):
        return later(length) | torch.ones(length, length, dtype=torch.bool).tril(-self.window)


class SymmetricWindow(Windowed):
    def mask(self, length):
        near = (torch.arange(length) - torch.arange(length)[:, None]).abs() < 2
        return ~near


def shift_by_roll(self, ids):
    """A token shift that wraps around: the first token sees the last."""
    x = GPT.embed(self, ids)
    return x + x.roll(1, 1)


def shift_by_padding(self, ids):
    x = GPT.embed(self, ids)
    return x + F.pad(x, (0, 0, 1, 0))[:, :-1]


def bag_of_words(self, ids):
    return GPT.embed(self, ids) + self.tok_embed(ids).mean(1, keepdim=True)


def causal_bag_of_words(self, ids):
    counts = torch.arange(1, ids.shape[1] + 1)[:, None]
    return GPT.embed(self, ids) + self.tok_embed(ids).cumsum(1) / counts


def centered(self, x):
    return self.lm_head(self.norm(x - x.mean(1, keepdim=True)))


def last_only(self, x, masked):
    return self.blocks[1](self.blocks[0](x, masked))


def first_only(self, x, masked):
    return self.blocks[1](self.blocks[0](x), masked)


def prefix_visible(self, length):
    """A prefix of half the sequence is visible to all, in a model without any prefix."""
    masked = later(length)
    masked[:, : length // 2] = False
    return masked


def batched_mask(self, length):
    """One mask for all queries, which hides everything but the first token."""
    return later(length).any(0)[None, None, None]


def triu_of_scores(self, scores, masked):
    return scores.triu()


def tril_of_scores(self, scores, masked):
    """Scores of 0 are not masked: their exponential is 1."""
    return scores.tril()


def reversed_output(self, x):
    return self.lm_head(self.norm(x.flip(1)))


FAULTS = [
    Fault("no mask at all", gpt(mask=lambda self, n: None), "causality", "missing"),
    Fault("mask missing in the last block", gpt(run=last_only), "causality", "blocks.1.attn"),
    Fault("mask missing in the first block", gpt(run=first_only), "causality", "blocks.0.attn"),
    Fault(
        "mask off by one, sees the next token", gpt(mask=lambda self, n: later(n).triu(2)), "causality", "off by one"
    ),
    Fault(
        "mask off by one, own token hidden", gpt(mask=lambda self, n: torch.ones(n, n).triu() > 0), "causality", "tril("
    ),
    Fault("mask inverted", gpt(mask=lambda self, n: ~later(n)), "causality", "inverted"),
    Fault("mask transposed", attending(hide=masked_rows), "causality", "inverted"),
    Fault("fill value of -1", attending(hide=add_penalty(-1.0)), "causality", "fill value"),
    Fault("fill value positive", attending(hide=add_penalty(1e4)), "causality", "inverted"),
    Fault("masked scores set to zero", attending(hide=tril_of_scores), "causality", "fill value"),
    Fault("triu instead of tril on scores", attending(hide=triu_of_scores), "causality", "fill value"),
    Fault("only the first head is masked", attending(hide=mask_first_head), "causality", "blocks.0.attn"),
    Fault("a prefix is visible to all", gpt(mask=prefix_visible), "causality", "blocks.0.attn"),
    Fault("a mask that broadcasts", gpt(mask=batched_mask), "causality", "token 0"),
    Fault("convolution padded on both sides", gpt(block=ConvolutionBlock), "causality", "blocks.0.conv"),
    Fault("gate from the mean of all tokens", gpt(block=GlobalContext), "causality", "blocks.0"),
    Fault("norm over the tokens", gpt(block=LengthNormBlock), "causality", "blocks.0.norm2"),
    Fault("bidirectional LSTM", lambda: LSTMModel(True), "causality", "rnn"),
    Fault("token mixer without a mask", lambda: TokenMixer(False), "causality", "mix"),
    Fault("is_causal=False", lambda: KernelGPT(False), "causality", "missing"),
    Fault("nn.TransformerEncoder without its mask", lambda: TorchGPT(apply=False), "causality", "missing"),
    Fault("window open to both sides", lambda: SymmetricWindow(), "causality", "next token"),
    Fault("token shift that wraps around", gpt(embed=shift_by_roll), "causality", "token 6"),
    Fault("mean of all embeddings is added", gpt(embed=bag_of_words), "causality", "(add"),
    Fault("mean of all tokens is subtracted", gpt(logits=centered), "causality", "(sub"),
    Fault("outputs in reverse order", gpt(logits=reversed_output), "causality", "(flip"),
    Fault("no mask in train() mode", lambda: SkipMaskInTraining(), "causality", "train()"),
    Fault("positions counted from the end", lambda: FlippedPositions(), "length", "shorter"),
    Fault("encoder that is causal by mistake", lambda: GPT(), "causality", "later", causal=False),
    Fault(
        "encoder with a causal mask beside its padding mask",
        lambda: variant(
            Encoder, masked=lambda self, m, n: later(n) if m is None else later(n) | (m == 0)[:, None, None]
        )(),
        "causality",
        "later",
        causal=False,
    ),
    Fault("one-sided recurrent encoder", lambda: LSTMModel(False), "causality", "later", causal=False),
]

CONTROLS = [
    Control("GPT", gpt()),
    Control("GPT, masked by -inf", attending(hide=lambda self, s, m: s.masked_fill(m, -math.inf))),
    Control("GPT, masked by addition", attending(hide=add_penalty(-1e9))),
    Control("GPT, masked by where", attending(hide=lambda self, s, m: torch.where(m, torch.finfo(s.dtype).min, s))),
    Control("GPT of SDPA", lambda: KernelGPT()),
    Control("GPT of torch.nn", lambda: TorchGPT()),
    Control("GPT of torch.nn, pre-norm", lambda: TorchGPT(norm_first=True, activation="gelu")),
    Control(
        "rotary positions",
        gpt(Rotary, embed=lambda self, ids: self.tok_embed(ids), build=lambda self: delattr(self, "pos_embed")),
    ),
    Control(
        "ALiBi", gpt(Alibi, embed=lambda self, ids: self.tok_embed(ids), build=lambda self: delattr(self, "pos_embed"))
    ),
    Control("grouped queries", gpt(GroupedQueries)),
    Control("retention", gpt(Retention)),
    Control("causal convolution", gpt(block=CausalConvolutionBlock)),
    Control("LSTM", lambda: LSTMModel(False)),
    Control("masked token mixer", lambda: TokenMixer(True)),
    Control("sliding window", lambda: Windowed()),
    Control("token shift", gpt(embed=shift_by_padding)),
    Control("cumulative mean", gpt(embed=causal_bag_of_words)),
    Control("bidirectional LSTM, encoder", lambda: LSTMModel(True), causal=False),
    Control("window open to both sides, encoder", lambda: SymmetricWindow(), causal=False),
    Control("token mixer, encoder", lambda: TokenMixer(False), causal=False),
    Control("one block", gpt(depth=1)),
]
