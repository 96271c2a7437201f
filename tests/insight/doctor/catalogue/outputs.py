"""Outputs: dtypes, randomness, state, examples of a batch that affect each other, and activations on the logits."""

import torch
import torch.nn.functional as F
from torch import nn

from .parts import CONTEXT, GPT, HEADS, WIDTH, Attention, Block, Control, Encoder, Fault, later, linear, variant


def gpt(block=Block, attention=Attention, **methods):
    return lambda: variant(GPT, **methods)(attention, block)


class Float32Mask(Attention):
    def hide(self, scores, masked):
        return scores + torch.zeros(masked.shape, dtype=torch.float32).masked_fill(masked, -1e9)


class Float32Positions(GPT):
    """A table of float32 in a plain computation."""

    def embed(self, ids):
        angles = torch.arange(ids.shape[1], dtype=torch.float32)[:, None] * torch.ones(WIDTH, dtype=torch.float32)
        return self.tok_embed(ids) + self.pos_embed(torch.arange(ids.shape[1])) + angles.sin()


class LargeConstant(Attention):
    def hide(self, scores, masked):
        return scores + masked.to(scores) * torch.tensor(-1e9).to(scores)


class Noise(GPT):
    def embed(self, ids):
        x = super().embed(ids)
        return x + 0.1 * torch.randn_like(x)


class Counter(GPT):
    """Keys of all calls are kept."""

    seen = 0

    def embed(self, ids):
        self.seen = self.seen + 1
        return super().embed(ids) * (1 + 0.1 * self.seen)


class InPlaceFeatures(nn.Module):
    """Adds positions to the caller's tensor."""

    def __init__(self, copies=False):
        super().__init__()
        self.pos, self.block, self.copies = nn.Parameter(torch.randn(CONTEXT, WIDTH)), Block(), copies

    def forward(self, x):
        x = x.clone() if self.copies else x
        x += self.pos[: x.shape[1]].detach() if not self.copies else self.pos[: x.shape[1]]
        return self.block(x, later(x.shape[1]))


class BatchPositions(GPT):
    """Positions of the batch axis instead of the length axis."""

    def embed(self, ids):
        return self.tok_embed(ids) + self.pos_embed(torch.arange(len(ids)))[:, None]


class BatchMean(Block):
    def forward(self, x, masked=None):
        x = super().forward(x, masked)
        return x - x.mean(0, keepdim=True)


class LengthFirst(Block):
    """nn.MultiheadAttention without batch_first=True."""

    def __init__(self, attention, batch_first=False):
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first)

    def forward(self, x, masked=None):
        y = self.norm1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class FlatBatch(GPT):
    """The batch as one long sequence."""

    def run(self, x, masked):
        flat = super().run(x.reshape(1, -1, WIDTH), later(x.shape[0] * x.shape[1]))
        return flat.reshape(x.shape)


class BatchNormEncoder(Encoder):
    def build(self):
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def pool(self, x, mask):
        return self.batch_norm(x.mT).mT


class DropoutBlock(Block):
    def __init__(self, attention):
        super().__init__(attention)
        self.drop = nn.Dropout(0.3)

    def forward(self, x, masked=None):
        return x + self.drop(super().forward(x, masked))


def always_dropout(self, x):
    return self.lm_head(F.dropout(self.norm(x), 0.3))


class KernelDropout(Attention):
    def forward(self, x, masked=None, memory=None):
        q, k, v = self.project(x, x)
        return self.out(self.merge(F.scaled_dot_product_attention(q, k, v, ~masked, dropout_p=0.2)))


class Classifier(Encoder):
    """(B,5)"""

    activation = staticmethod(lambda x: x)

    def build(self):
        self.head = linear(WIDTH, 5)

    def pool(self, x, mask):
        keep = torch.ones_like(x[..., :1]) if mask is None else mask[..., None].to(x)
        return self.activation(self.head((x * keep).sum(1) / keep.sum(1).clamp(min=1)))


FAULTS = [
    Fault("mask in float32", gpt(attention=Float32Mask), "dtype", "bfloat16"),
    Fault("positions in float32", lambda: Float32Positions(), "dtype", "bfloat16"),
    Fault("-1e9 in float16", lambda: GPT(LargeConstant).half(), "dtype", "-1e9"),
    Fault("dropout without training=", gpt(logits=always_dropout), "output", "dropout"),
    Fault("dropout_p of SDPA in eval() mode", gpt(attention=KernelDropout), "output", "dropout"),
    Fault("noise in eval() mode", lambda: Noise(), "output", "random"),
    Fault("state between calls", lambda: Counter(), "output", "state"),
    Fault("the caller's tensor is modified", lambda: InPlaceFeatures(), "input", "in place"),
    Fault("positions along the batch axis", lambda: BatchPositions(), "batch", "position in the batch"),
    Fault("mean over the batch", gpt(BatchMean), "batch", "blocks.0"),
    Fault("batch_first forgotten", lambda: Encoder(block=LengthFirst), "batch", "blocks.0.attn", False),
    Fault("batch as one long sequence", lambda: FlatBatch(), "batch", "reshape"),
    Fault(
        "softmax on the logits",
        lambda: variant(Classifier, activation=staticmethod(lambda x: x.softmax(-1)))(),
        "logits",
        "softmax",
        False,
    ),
    Fault(
        "relu on the logits",
        lambda: variant(Classifier, activation=staticmethod(lambda x: x.relu()))(),
        "logits",
        "relu",
        False,
    ),
    Fault(
        "softmax on the logits of a decoder",
        gpt(logits=lambda self, x: GPT.logits(self, x).softmax(-1)),
        "logits",
        "softmax",
    ),
    Fault(
        "softmax on the logits over the tokens",
        gpt(logits=lambda self, x: GPT.logits(self, x).softmax(1)),
        "causality",
        "softmax",
    ),
    Fault(
        "log of a softmax of a softmax",
        gpt(logits=lambda self, x: GPT.logits(self, x).softmax(-1).softmax(-1).log()),
        "logits",
        "softmax",
    ),
]

CONTROLS = [
    Control("batch norm", lambda: variant(BatchNormEncoder)(), False),
    Control("dropout", gpt(DropoutBlock)),
    Control("classifier", lambda: Classifier(), False),
    Control("log-probabilities", gpt(logits=lambda self, x: GPT.logits(self, x).log_softmax(-1))),
    Control("clones its input", lambda: InPlaceFeatures(copies=True)),
    Control(
        "nn.MultiheadAttention, batch_first",
        lambda: variant(Encoder, forward=lambda self, ids: self.run(self.embed(ids), None))(
            block=lambda a: LengthFirst(a, True)
        ),
        False,
        ("gradient",),
    ),
    Control("GPT in float16", lambda: GPT().half()),
    Control("GPT in bfloat16", lambda: GPT().bfloat16()),
]
