"""Inside attention: heads, softmax, scale, and the roles of queries, keys and values."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from .causal import Rotary
from .parts import GPT, HEADS, VOCAB, WIDTH, Attention, Block, Control, Encoder, Fault, linear, variant


def encoder(attention=None, **methods):
    attention = variant(attention or Attention, **methods)
    return lambda: Encoder(attention)


def view_split(self, x):
    return x.reshape(len(x), HEADS, x.shape[1], -1)


def view_merge(self, x):
    return x.reshape(len(x), x.shape[2], -1)


class FusedView(nn.Module):
    """Queries, keys and values of one linear layer, all split by view()."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = linear(WIDTH, 3 * WIDTH, bias=False), linear()

    def split(self, x):
        return x.reshape(len(x), 3, HEADS, x.shape[1], -1).unbind(1)

    def forward(self, x, masked=None):
        q, k, v = self.split(self.qkv(x))
        return self.out(
            F.scaled_dot_product_attention(q, k, v, None if masked is None else ~masked).transpose(1, 2).flatten(2)
        )


class Fused(FusedView):
    def split(self, x):
        return x.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)


class PerHead(nn.Module):
    """One module per head, concatenated."""

    def __init__(self, shared=False):
        super().__init__()
        heads = [OneHead() for _ in range(HEADS)]
        self.heads, self.out = nn.ModuleList([heads[0]] * HEADS if shared else heads), linear()

    def forward(self, x, masked=None):
        masked = None if masked is None else masked[..., 0, :, :] if masked.dim() > 2 else masked
        return self.out(torch.cat([head(x, masked) for head in self.heads], -1))


class OneHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = linear(WIDTH, WIDTH // HEADS), linear(WIDTH, WIDTH // HEADS, bias=False)
        self.value = linear(WIDTH, WIDTH // HEADS)

    def forward(self, x, masked=None):
        scores = self.query(x) @ self.key(x).mT * (WIDTH // HEADS) ** -0.5
        scores = scores if masked is None else scores.masked_fill(masked, torch.finfo(scores.dtype).min)
        return scores.softmax(-1) @ self.value(x)


class FlooredWidth(nn.Module):
    """Three heads of 8 // 3 = 2 columns each: two columns of every projection are never used."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = linear(), linear(bias=False), linear(), linear(6, WIDTH)

    def split(self, x):
        return x[..., :6].unflatten(-1, (3, 2)).transpose(1, 2)

    def forward(self, x, masked=None):
        q, k, v = (self.split(layer(x)) for layer in (self.query, self.key, self.value))
        return self.out(
            F.scaled_dot_product_attention(q, k, v, None if masked is None else ~masked).transpose(1, 2).flatten(2)
        )


def equal_heads(self, x, memory):
    q, k, v = Attention.project(self, x, memory)
    return q[:, :1].expand_as(q), k[:, :1].expand_as(k), v


def values_as_keys(self, x, memory):
    return self.split(self.query(x)), self.split(self.value(memory)), self.split(self.key(memory))


def keys_as_values(self, x, memory):
    k = self.split(self.key(memory))
    return self.split(self.query(x)), k, k


def queries_as_keys(self, x, memory):
    return self.split(self.key(x)), self.split(self.query(memory)), self.split(self.value(memory))


class Einsum(Attention):
    def forward(self, x, masked=None, memory=None):
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)) for layer in (self.query, self.key, self.value))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
        scores = scores if masked is None else scores.masked_fill(masked, torch.finfo(scores.dtype).min)
        return self.out(torch.einsum("bhqk,bkhd->bqhd", self.normalize(scores), v).flatten(2))


class Merged(Attention):
    """Batch and heads in one axis, with bmm and baddbmm."""

    def forward(self, x, masked=None, memory=None):
        q, k, v = (y.flatten(0, 1) for y in self.project(x, x))
        bias = q.new_zeros(1, 1, 1)
        if masked is not None:
            full = masked.expand(len(x), HEADS, x.shape[1], x.shape[1]).flatten(0, 1)
            bias = torch.zeros_like(full, dtype=q.dtype).masked_fill(full, torch.finfo(q.dtype).min / 2)
        weights = torch.baddbmm(bias, q, k.mT, alpha=q.shape[-1] ** -0.5).softmax(-1)
        return self.out(self.merge(torch.bmm(weights, v).unflatten(0, (-1, HEADS))))


class TalkingHeads(Attention):
    """Mixes the heads of the weights."""

    def __init__(self):
        super().__init__()
        self.talk = nn.Parameter(torch.eye(HEADS) + 0.1)

    def mix(self, weights, v):
        return torch.einsum("bhqk,hg->bgqk", weights, self.talk / self.talk.sum(0)) @ v


class Cosine(Attention):
    """Normalized queries and keys with a learned temperature, as in Swin v2."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(HEADS, 1, 1))

    def scores(self, q, k):
        return F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * self.temperature.exp()


class ConvolutionalKeys(Attention):
    """Keys and values of a strided convolution, as in PVT."""

    def __init__(self):
        super().__init__()
        self.reduce = nn.Conv1d(WIDTH, WIDTH, 2, 2)

    def forward(self, x, masked=None, memory=None):
        return super().forward(x, None, self.reduce(x.mT).mT)


class LinearAttention(Attention):
    """elu(q) + 1 and elu(k) + 1; no softmax."""

    def forward(self, x, masked=None, memory=None):
        q, k, v = self.project(x, x)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        return self.out(self.merge(q @ (k.mT @ v) / (q @ k.sum(-2)[..., None])))


class QueryNorm(Attention):
    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = nn.LayerNorm(WIDTH // HEADS), nn.LayerNorm(WIDTH // HEADS)

    def scores(self, q, k):
        return super().scores(self.q_norm(q), self.k_norm(k))


def own_softmax(self, scores):
    exponentials = (scores - scores.amax(-1, keepdim=True)).exp()
    return exponentials / exponentials.sum(-1, keepdim=True)


def sum_of_weights(self, weights, v):
    return weights.sum(-1, keepdim=True) * v


class Parallel(Block):
    """Attention and MLP side by side, as in GPT-J."""

    def forward(self, x, masked=None):
        return x + self.attn(self.norm1(x), masked) + self.mlp(self.norm2(x))


class PostNorm(Block):
    def forward(self, x, masked=None):
        x = self.norm1(x + self.attn(x, masked))
        return self.norm2(x + self.mlp(x))


class Discarded(Block):
    """The result of the attention is computed, but not used."""

    def forward(self, x, masked=None):
        self.attn(self.norm1(x), masked)
        return x + self.mlp(self.norm2(x))


class FourierMixer(nn.Module):
    """FNet: a Fourier transform over tokens and features."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), linear(WIDTH, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x + torch.fft.fft2(x).real)


class ScaledTwice(Attention):
    def forward(self, x, masked=None, memory=None):
        q, k, v = self.project(x, x)
        q = q / math.sqrt(q.shape[-1])
        return self.out(self.merge(F.scaled_dot_product_attention(q, k, v, None if masked is None else ~masked)))


class Experts(Block):
    """Each token takes the expert with the largest score."""

    def __init__(self, attention):
        super().__init__(attention)
        self.mlp, self.router = nn.ModuleList(linear() for _ in range(2)), linear(WIDTH, 2)

    def forward(self, x, masked=None):
        x = x + self.attn(self.norm1(x), masked)
        y = self.norm2(x)
        gates = self.router(y).softmax(-1)
        chosen = F.one_hot(gates.argmax(-1), 2).to(y) * gates
        return x + sum(chosen[..., i : i + 1] * expert(y) for i, expert in enumerate(self.mlp))


FAULTS = [
    Fault(
        "heads split by view, decoder", lambda: GPT(variant(Attention, split=view_split)), "causality", "blocks.0.attn"
    ),
    Fault(
        "heads merged by view, decoder", lambda: GPT(variant(Attention, merge=view_merge)), "causality", "blocks.0.attn"
    ),
    Fault(
        "heads split and merged by view, decoder",
        lambda: GPT(variant(Attention, split=view_split, merge=view_merge)),
        "heads",
        "blocks.0.attn",
    ),
    Fault("heads split by view, encoder", encoder(split=view_split), "heads", "blocks.0.attn", False),
    Fault("heads merged by view, encoder", encoder(merge=view_merge), "heads", "blocks.0.attn", False),
    Fault(
        "heads split and merged by view, encoder",
        encoder(split=view_split, merge=view_merge),
        "heads",
        "blocks.0.attn",
        False,
    ),
    Fault("fused projection split by view", lambda: Encoder(FusedView), "heads", "blocks.0.attn", False),
    Fault("one module for all heads", lambda: GPT(lambda: PerHead(shared=True)), "shared modules", "heads"),
    Fault("all heads have the same weights", encoder(project=equal_heads), "heads", "same", False),
    Fault("head width rounded down", lambda: Encoder(FlooredWidth), "gradient", "blocks.0.attn.query", False),
    Fault("no softmax", encoder(normalize=lambda self, s: s), "attention weights", "softmax", False),
    Fault(
        "sigmoid instead of softmax",
        encoder(normalize=lambda self, s: s.sigmoid()),
        "attention weights",
        "softmax",
        False,
    ),
    Fault(
        "relu instead of softmax", encoder(normalize=lambda self, s: s.relu()), "attention weights", "softmax", False
    ),
    Fault(
        "log_softmax as weights",
        encoder(normalize=lambda self, s: s.log_softmax(-1)),
        "attention weights",
        "softmax",
        False,
    ),
    Fault(
        "softmax over the queries", encoder(normalize=lambda self, s: s.softmax(-2)), "attention weights", "axis", False
    ),
    Fault(
        "softmax over the heads", encoder(normalize=lambda self, s: s.softmax(1)), "attention weights", "axis", False
    ),
    Fault("softmax over the batch", encoder(normalize=lambda self, s: s.softmax(0)), "batch", "blocks.0.attn", False),
    Fault(
        "softmax twice",
        encoder(normalize=lambda self, s: s.softmax(-1).softmax(-1)),
        "attention weights",
        "twice",
        False,
    ),
    Fault(
        "weights divided again", encoder(normalize=lambda self, s: s.softmax(-1) / 2), "attention weights", "sum", False
    ),
    Fault("weights summed before the product", encoder(mix=sum_of_weights), "dependency", "blocks.0.attn", False),
    Fault("no scale", encoder(scores=lambda self, q, k: q @ k.mT), "scale", "1/sqrt", False),
    Fault(
        "scale of the model width",
        encoder(scores=lambda self, q, k: q @ k.mT / math.sqrt(WIDTH)),
        "scale",
        "1/sqrt",
        False,
    ),
    Fault(
        "divided by D, not by its root",
        encoder(scores=lambda self, q, k: q @ k.mT / q.shape[-1]),
        "scale",
        "1/sqrt",
        False,
    ),
    Fault(
        "multiplied by sqrt(D)",
        encoder(scores=lambda self, q, k: q @ k.mT * math.sqrt(q.shape[-1])),
        "scale",
        "1/sqrt",
        False,
    ),
    Fault("scale before SDPA, which scales again", lambda: Encoder(ScaledTwice), "scale", "1/sqrt", False),
    Fault("queries and keys swapped", encoder(project=queries_as_keys), "keys and queries", "key", False),
    Fault("keys and values swapped", encoder(project=values_as_keys), "keys and queries", "value", False),
    Fault("keys used as values", encoder(project=keys_as_values), "gradient", "value", False),
    Fault("attention discarded", lambda: variant(Encoder)(block=Discarded), "dependency", "blocks.0.attn", False),
    Fault(
        "keys times keys",
        encoder(scores=lambda self, q, k: k @ k.mT / math.sqrt(k.shape[-1])),
        "gradient",
        "query",
        False,
    ),
]


CONTROLS = [
    Control("fused projection", lambda: Encoder(Fused), False),
    Control("one module per head", lambda: GPT(PerHead)),
    Control("einsum", lambda: Encoder(Einsum), False),
    Control("batch and heads merged", lambda: Encoder(Merged), False),
    Control("talking heads", lambda: Encoder(TalkingHeads), False, ("attention weights",)),
    Control("cosine attention", lambda: Encoder(Cosine), False, ("scale",)),
    Control(
        "keys of a strided convolution",
        lambda: variant(Encoder, forward=lambda self, ids: self.norm(self.run(self.embed(ids), None)))(
            ConvolutionalKeys
        ),
        False,
    ),
    Control(
        "linear attention",
        lambda: variant(Encoder, forward=lambda self, ids: self.norm(self.run(self.embed(ids), None)))(LinearAttention),
        False,
    ),
    Control("norms of queries and keys", lambda: Encoder(QueryNorm), False),
    Control("a softmax of its own", encoder(normalize=own_softmax), False),
    Control("rotary positions, encoder", lambda: Encoder(Rotary), False),
    Control("attention and MLP in parallel", lambda: GPT(block=Parallel)),
    Control("post-norm", lambda: GPT(block=PostNorm)),
    Control("Fourier mixer", lambda: FourierMixer(), False),
    Control(
        "shared block by a loop",
        lambda: variant(GPT, run=lambda self, x, m: self.blocks[0](self.blocks[0](x, m), m))(depth=1),
    ),
    Control("mixture of experts", lambda: GPT(block=Experts), warnings=("gradient",)),
]
