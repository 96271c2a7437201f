"""Generation and losses: caches, other lengths, left padding, and losses without a shift."""

import torch
import torch.nn.functional as F
from torch import nn

from .causal import Rotary
from .parts import CONTEXT, GPT, VOCAB, WIDTH, Attention, Control, Fault, later, linear, variant


class CachedAttention(Attention):
    """Returns its output and the keys and values of all tokens so far."""

    def forward(self, x, past=None, masked=None):
        q, k, v = self.project(x, x)
        if past is not None:
            k, v = self.join(past, k, v)
        weights = self.scores(q, k).masked_fill(masked, torch.finfo(x.dtype).min).softmax(-1)
        return self.out(self.merge(weights @ v)), (k, v)

    def join(self, past, k, v):
        return torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)


class CachedGPT(nn.Module):
    """input_ids (B,L), past_key_values of a former call -> (logits, past_key_values)."""

    def __init__(self, attention=CachedAttention):
        super().__init__()
        self.embed, self.pos = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.attns, self.norms = (
            nn.ModuleList(attention() for _ in range(2)),
            nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2)),
        )
        self.head = linear(WIDTH, VOCAB)

    def positions(self, n, start):
        return torch.arange(start, start + n)

    def mask(self, n, start):
        return later(start + n)[start:]

    def forward(self, input_ids, past_key_values=None):
        start = 0 if past_key_values is None else past_key_values[0][0].shape[2]
        n = input_ids.shape[1]
        x, kept = self.embed(input_ids) + self.pos(self.positions(n, start)), []
        for i, (attn, norm) in enumerate(zip(self.attns, self.norms, strict=True)):
            y, new = attn(norm(x), None if past_key_values is None else past_key_values[i], self.mask(n, start))
            x, kept = x + y, [*kept, new]
        return self.head(x), tuple(kept)


class NamedCache(CachedGPT):
    """The same with a parameter called `cache` and a dict as output."""

    def forward(self, ids, cache=None, use_cache=False):
        logits, kept = super().forward(ids, cache)
        return {"logits": logits, "cache": kept if use_cache else None}


class StartPosition(GPT):
    """Llama's own interface: a cache inside the module, and the position of the first token as an argument."""

    offset = 0

    def build(self):
        self.register_buffer("kept", torch.zeros(8, CONTEXT, WIDTH), persistent=False)

    def forward(self, tokens, start_pos=0):
        n = tokens.shape[1]
        x = self.tok_embed(tokens) + self.pos_embed(
            torch.arange(start_pos, start_pos + n) + self.offset * (start_pos > 0)
        )
        self.kept[: len(x), start_pos : start_pos + n] = x.detach()
        x = torch.cat([self.kept[: len(x), :start_pos].to(x), x], 1)
        return self.logits(self.run(x, later(start_pos + n)))[:, start_pos:]


class RecurrentState(nn.Module):
    """A GRU that returns its state."""

    keeps = True

    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.head = (
            nn.Embedding(VOCAB, WIDTH),
            nn.GRU(WIDTH, WIDTH, batch_first=True),
            linear(WIDTH, VOCAB),
        )

    def forward(self, ids, state=None):
        x, new = self.rnn(self.embed(ids), state if self.keeps else None)
        return self.head(x), new


class FrozenMask(GPT):
    """Fails at any other length than the first."""

    def build(self):
        self.cached = None

    def mask(self, length):
        self.cached = later(length) if self.cached is None else self.cached
        return self.cached


class StalePositions(GPT):
    """Positions are kept from the first call and stretched to other lengths."""

    def build(self):
        self.length = None

    def embed(self, ids):
        self.length = self.length or ids.shape[1]
        return self.tok_embed(ids) + self.pos_embed(torch.arange(ids.shape[1]) * self.length // ids.shape[1])


class GrowingCache(GPT):
    """A table of positions that is made once and grows where it must: right."""

    def build(self):
        self.table = None

    def embed(self, ids):
        if self.table is None or len(self.table) < ids.shape[1]:
            self.table = torch.linspace(0, 1, 2 * CONTEXT).unsqueeze(-1)[: 2 * ids.shape[1]]
        return super().embed(ids) + self.table[: ids.shape[1]].to(self.tok_embed.weight)


class ScaledByLength(GPT):
    """Divides by the number of tokens of the call, which changes with every generated token."""

    def logits(self, x):
        return self.lm_head(self.norm(x) / x.shape[1])


class LeftPadding(GPT):
    """A decoder that takes position_ids, so that padding on the left changes nothing."""

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        n = input_ids.shape[1]
        masked = later(n)
        if attention_mask is not None:
            masked = masked | (attention_mask == 0)[:, None, None]
        position_ids = self.positions(position_ids, n)
        return self.logits(self.run(self.tok_embed(input_ids) + self.pos_embed(position_ids), masked))

    def positions(self, position_ids, n):
        return torch.arange(n)[None] if position_ids is None else position_ids


def count_all(self, position_ids, n):
    """position_ids is ignored."""
    return torch.arange(n)[None]


class OwnPositions(LeftPadding):
    """Positions are counted from the mask itself."""

    shift = 1

    def forward(self, input_ids, attention_mask=None):
        positions = None
        if attention_mask is not None:
            positions = (attention_mask.long().cumsum(1) - self.shift).clamp(min=0)
        return super().forward(input_ids, attention_mask, positions)


class WithLabels(GPT):
    """Returns the loss of `labels`, which are the ids themselves, as in Hugging Face Transformers."""

    def loss(self, logits, labels):
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def forward(self, input_ids, labels=None):
        logits = super().forward(input_ids)
        return {"logits": logits, "loss": None if labels is None else self.loss(logits, labels)}


def unshifted(self, logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def shifted_wrongly(self, logits, labels):
    return F.cross_entropy(logits[:, 1:].flatten(0, 1), labels[:, :-1].flatten())


def loss_without_shift(logits, ids):
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def loss_with_shift(logits, ids):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def loss_of_previous(logits, ids):
    return F.cross_entropy(logits[:, 1:].flatten(0, 1), ids[:, :-1].flatten())


class RotaryCache(CachedAttention):
    """Rotates keys by their position in the call, not in the sequence."""

    project = Rotary.project
    rotate = Rotary.rotate


FAULTS = [
    Fault(
        "cache: positions start at 0 again",
        lambda: variant(CachedGPT, positions=lambda self, n, start: torch.arange(n))(),
        "cache",
        "step",
    ),
    Fault(
        "cache: positions off by one",
        lambda: variant(CachedGPT, positions=lambda self, n, start: torch.arange(start, start + n) + (start > 0))(),
        "cache",
        "step",
    ),
    Fault(
        "cache: new keys before old ones, wrong values",
        lambda: CachedGPT(
            variant(CachedAttention, join=lambda self, p, k, v: (torch.cat([k, p[0]], 2), torch.cat([p[1], v], 2)))
        ),
        "cache",
        "step",
    ),
    Fault(
        "cache: old keys are forgotten",
        lambda: variant(CachedGPT, mask=lambda self, n, start: later(n))(
            variant(CachedAttention, join=lambda self, p, k, v: (k, v))
        ),
        "cache",
        "step",
    ),
    Fault(
        "cache: mask of the new tokens only",
        lambda: variant(CachedGPT, mask=lambda self, n, start: torch.cat([torch.ones(n, start) > 0, later(n)], 1))(),
        "cache",
        "step",
    ),
    Fault("cache: rotation restarts", lambda: CachedGPT(RotaryCache), "cache", "step"),
    Fault(
        "cache: dict output, positions restart",
        lambda: variant(NamedCache, positions=lambda self, n, start: torch.arange(n))(),
        "cache",
        "step",
    ),
    Fault("cache: start_pos off by one", lambda: variant(StartPosition, offset=1)(), "cache", "step"),
    Fault("state of a GRU is ignored", lambda: variant(RecurrentState, keeps=False)(), "cache", "step"),
    Fault("mask of the first length", lambda: FrozenMask(), "length", "length"),
    Fault("positions of the first length", lambda: StalePositions(), "length", "length"),
    Fault("output divided by the length", lambda: ScaledByLength(), "length", "shorter"),
    Fault("position_ids ignored", lambda: variant(LeftPadding, positions=count_all)(), "padding", "left"),
    Fault("positions of the mask off by one", lambda: variant(OwnPositions, shift=0)(), "padding", "mask"),
    Fault("labels without a shift", lambda: variant(WithLabels, loss=unshifted)(), "loss", "shift"),
    Fault(
        "labels shifted in the wrong direction", lambda: variant(WithLabels, loss=shifted_wrongly)(), "loss", "shift"
    ),
    Fault("loss without a shift", lambda: GPT(), "loss", "shift", options={"loss": loss_without_shift}),
    Fault("loss of the previous token", lambda: GPT(), "loss", "shift", options={"loss": loss_of_previous}),
]

CONTROLS = [
    Control("cache", lambda: CachedGPT()),
    Control("cache called `cache`, dict output", lambda: NamedCache()),
    Control("start_pos", lambda: StartPosition(), warnings=("saving",)),
    Control("GRU with a state", lambda: RecurrentState()),
    Control("table that grows", lambda: GrowingCache(), warnings=("saving",)),
    Control("position_ids", lambda: LeftPadding()),
    Control("positions of the mask", lambda: OwnPositions()),
    Control("labels with a shift", lambda: WithLabels()),
    Control("loss with a shift", lambda: GPT(), options={"loss": loss_with_shift}),
]
