"""Transformers as people write them, right and with one mistake each. All are small and have a residual path."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, N_IDS, CONTEXT = 8, 2, 11, 16


class Attention(nn.Module):
    """x (B,L,E), hidden to (B,H,L,L) or None. What a mistake changes is a method."""

    key_bias = False

    def __init__(self):
        super().__init__()
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.out = nn.Linear(WIDTH, WIDTH, bias=self.key_bias), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, hidden=None):
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        weights = self.weights(self.scores(q, k), hidden)
        return self.out((weights @ v).transpose(1, 2).flatten(2))

    def scores(self, q, k):
        return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])

    def weights(self, scores, hidden):
        return (scores if hidden is None else scores.masked_fill(hidden, -1e9)).softmax(-1)


class LateMask(Attention):
    def weights(self, scores, hidden):
        weights = scores.softmax(-1)
        return weights if hidden is None else weights.masked_fill(hidden, 0.0)


class Infinite(Attention):
    def weights(self, scores, hidden):
        return (scores if hidden is None else scores.masked_fill(hidden, -math.inf)).softmax(-1)


class Safe(Infinite):
    """A row that sees nothing gets zeros, and no NaN on the way back."""

    def weights(self, scores, hidden):
        if hidden is None:
            return scores.softmax(-1)
        return scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(hidden, 0.0)


class NanBackwards(Attention):
    """The answer is mended, the gradient is not."""

    def weights(self, scores, hidden):
        if hidden is None:
            return scores.softmax(-1)
        return (scores + torch.zeros_like(scores).masked_fill(hidden, -math.inf)).softmax(-1).nan_to_num()


class Unscaled(Attention):
    def scores(self, q, k):
        return q @ k.transpose(-2, -1)


class ScaledQueries(Attention):
    def scores(self, q, k):
        return torch.einsum("bhqd,bhkd->bhqk", q * q.shape[-1] ** -0.5, k)


class Swapped(Attention):
    def scores(self, q, k):
        return k @ q.mT / math.sqrt(q.shape[-1])


class WithKeyBias(Attention):
    key_bias = True


class Unseen(Attention):
    """A softmax that nobody recognises."""

    def weights(self, scores, hidden):
        scores = scores if hidden is None else scores.masked_fill(hidden, -1e9)
        exponentials = (scores - scores.amax(-1, keepdim=True)).exp()
        return exponentials / exponentials.sum(-1, keepdim=True)


class WrongView(Attention):
    """Heads by view() alone: what becomes a head is a piece of the sequence."""

    def forward(self, x, hidden=None):
        q, k, v = (layer(x).view(len(x), HEADS, x.shape[1], -1) for layer in (self.query, self.key, self.value))
        return self.out((self.weights(self.scores(q, k), hidden) @ v).transpose(1, 2).flatten(2))


class WrongAxis(Attention):
    def weights(self, scores, hidden):
        return (scores if hidden is None else scores.masked_fill(hidden, -1e9)).softmax(-2)


class Block(nn.Module):
    def __init__(self, attention=Attention):
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))

    def forward(self, x, hidden=None):
        x = x + self.attention(self.norm1(x), hidden)
        return x + self.mlp(self.norm2(x))


class SharedNorm(Block):
    def __init__(self):
        super().__init__()
        self.norm2 = self.norm1


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


class Generic(nn.Module):
    """features (B,L,E) and a mask (L,L) of pairs, True = may attend, required."""

    def __init__(self, attention=Attention):
        super().__init__()
        self.block = Block(attention)

    def hidden(self, mask):
        return mask == 0

    def forward(self, x, mask):
        return self.block(x, None if mask is None else self.hidden(mask))


class GenericDropped(Generic):
    def hidden(self, mask):
        return None


class Additive(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, x, mask=None):
        q, k, v = (layer(x) for layer in (self.attention.query, self.attention.key, self.attention.value))
        scores = q @ k.mT / math.sqrt(WIDTH)
        return x + self.attention.out((scores if mask is None else scores + mask).softmax(-1) @ v)


class MixedBatch(nn.Module):
    """Takes (B,L,E) for (L,B,E) inside."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16)

    def forward(self, x):
        x = self.layer(x)
        return x + x.roll(1, dims=1)


class HardFloat(Generic):
    def forward(self, x, mask=None):
        return super().forward(x.to(torch.float32), mask)


class Upcast(Generic):
    def forward(self, x, mask=None):
        return super().forward(x, mask).float()


class OfTorch(nn.Module):
    """nn.MultiheadAttention as people wrap it."""

    def __init__(self, **options):
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), nn.LayerNorm(WIDTH)
        self.options = options

    def forward(self, x, attn_mask=None, key_padding_mask=None):
        masks = {"attn_mask": attn_mask, "key_padding_mask": key_padding_mask}
        return self.norm(x + self.attention(x, x, x, **masks, **self.options)[0])


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


class Unknown(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, edges):
        return self.linear(x)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def ward():
    """All of the above, by name."""
    return SimpleNamespace(**{name: value for name, value in globals().items() if isinstance(value, type)})
