"""Training and saving: parameters without a gradient, and hidden or shared modules."""

import torch
import torch.nn.functional as F
from torch import nn

from .parts import CONTEXT, GPT, VOCAB, WIDTH, Attention, Block, Control, Fault, later, linear, variant


def gpt(block=Block, attention=Attention, **methods):
    return lambda: variant(GPT, **methods)(attention, block)


class BlockList(GPT):
    """Blocks in a plain list: unknown to parameters(), state_dict() and .to()."""

    def __init__(self):
        super().__init__(depth=0)
        del self.blocks
        self.blocks = [Block() for _ in range(2)]


class BlockDict(GPT):
    def __init__(self):
        super().__init__(depth=0)
        self.layers = {"first": Block(), "second": Block()}

    def run(self, x, masked):
        for block in self.layers.values():
            x = block(x, masked)
        return x


class NestedList(GPT):
    """A list of pairs inside a registered block."""

    def __init__(self):
        super().__init__()
        self.adapters = [(linear(), linear()) for _ in range(2)]

    def logits(self, x):
        for down, up in self.adapters:
            x = x + up(down(x).relu())
        return super().logits(x)


class ParameterList(GPT):
    """Parameters in a plain list."""

    def build(self):
        self.scales = [nn.Parameter(torch.ones(WIDTH)) for _ in range(2)]

    def run(self, x, masked):
        for block, scale in zip(self.blocks, self.scales, strict=True):
            x = block(x, masked) * scale
        return x


class TensorList(GPT):
    """A mask per length in a dict: not moved by .to(device)."""

    def build(self):
        self.masks = {n: later(n) for n in range(1, CONTEXT)}

    def mask(self, length):
        return self.masks[length]


class TensorAttribute(GPT):
    def build(self):
        self.tril = later(CONTEXT)

    def mask(self, length):
        return self.tril[:length, :length]


class RepeatedBlock(GPT):
    def build(self):
        self.blocks = nn.ModuleList([Block()] * 3)


class RepeatedSequential(GPT):
    def build(self):
        norm = nn.LayerNorm(WIDTH)
        self.mlps = nn.Sequential(*[nn.Sequential(norm, linear(), nn.GELU())] * 3)

    def logits(self, x):
        return super().logits(x + self.mlps(x))


class ClonedBlocks(GPT):
    """Blocks that share their weights by reference, though they are different modules."""

    def build(self):
        for block in self.blocks[1:]:
            block.attn.query.weight = self.blocks[0].attn.query.weight


def only_last_block(self, x, masked):
    for block in self.blocks:
        y = block(x, masked)
    return y


def skip_second(self, x, masked):
    return self.blocks[0](x, masked)


class NoGrad(Block):
    def forward(self, x, masked=None):
        with torch.no_grad():
            x = x + self.attn(self.norm1(x), masked)
        return x + self.mlp(self.norm2(x))


class NumpyMlp(Block):
    def forward(self, x, masked=None):
        x = x + self.attn(self.norm1(x), masked)
        return x + torch.tensor(self.mlp(self.norm2(x)).tolist(), dtype=x.dtype)


class HardRouter(Block):
    """argmax is not differentiable, so the router learns nothing."""

    def __init__(self, attention):
        super().__init__(attention)
        self.router = linear(WIDTH, 2)

    def forward(self, x, masked=None):
        chosen = F.one_hot(self.router(x).argmax(-1), 2).to(x)
        return super().forward(x, masked) * (1 + chosen[..., :1])


class Rounded(Block):
    def forward(self, x, masked=None):
        return x + self.mlp(self.norm2((x + self.attn(self.norm1(x), masked)).round()))


class ScaleOfZero(Block):
    """A branch times a constant of 0."""

    def forward(self, x, masked=None):
        return x + self.attn(self.norm1(x), masked) + 0.0 * self.mlp(self.norm2(x))


class SharedNorm(Block):
    def forward(self, x, masked=None):
        x = x + self.attn(self.norm1(x), masked)
        return x + self.mlp(self.norm1(x))


class InPlaceBlock(Block):
    """Overwrites a tensor that the backward pass needs."""

    def forward(self, x, masked=None):
        y = (x + self.attn(self.norm1(x), masked)).exp()
        z = y * y
        y.clamp_(max=1.0)
        return self.norm2(z) + self.mlp(self.norm2(x))


class Tied(GPT):
    def build(self):
        self.lm_head.weight = self.tok_embed.weight


class HiddenTeacher(GPT):
    """A frozen module in a list, on purpose outside of state_dict()."""

    def build(self):
        self.teacher = [linear().requires_grad_(False)]

    def logits(self, x):
        return super().logits(x + self.teacher[0].to(x.dtype)(x))


class Checkpointed(GPT):
    def run(self, x, masked):
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, masked, use_reentrant=False)
        return x


class Frozen(GPT):
    def build(self):
        self.tok_embed.requires_grad_(False)


class Auxiliary(GPT):
    """A head that only train() mode uses."""

    def build(self):
        self.auxiliary = linear(WIDTH, VOCAB)

    def logits(self, x):
        return super().logits(x) + (self.auxiliary(x) if self.training else 0.0)


class Unused(GPT):
    """A module of a library that this configuration never runs."""

    def build(self):
        self.unused = linear()


class LayerScale(Block):
    def __init__(self, attention):
        super().__init__(attention)
        self.gamma = nn.Parameter(torch.full((WIDTH,), 1e-5))

    def forward(self, x, masked=None):
        return x + self.gamma * (super().forward(x, masked) - x)


def one_hot_output(self, x):
    return F.one_hot(self.lm_head(self.norm(x)).argmax(-1), VOCAB).to(x)


FAULTS = [
    Fault("blocks in a plain list", lambda: BlockList(), "saving", "blocks"),
    Fault("blocks in a plain dict", lambda: BlockDict(), "saving", "layers"),
    Fault("modules in a list of pairs", lambda: NestedList(), "saving", "adapters"),
    Fault("parameters in a plain list", lambda: ParameterList(), "saving", "scales"),
    Fault("masks in a plain dict", lambda: TensorList(), "saving", "masks"),
    Fault("mask as a plain attribute", lambda: TensorAttribute(), "saving", "tril"),
    Fault("[block] * 3", lambda: RepeatedBlock(), "shared modules", "blocks"),
    Fault("[mlp] * 3 in nn.Sequential", lambda: RepeatedSequential(), "shared modules", "mlps"),
    Fault("only the last block counts", gpt(run=only_last_block), "gradient", "blocks.0"),
    Fault("attention under no_grad", gpt(NoGrad), "gradient", "attn"),
    Fault("MLP by way of Python numbers", gpt(NumpyMlp), "gradient", "mlp"),
    Fault("router by argmax", gpt(HardRouter), "gradient", "router"),
    Fault("rounded activations", gpt(Rounded), "gradient", "attn"),
    Fault("branch times zero", gpt(ScaleOfZero), "gradient", "mlp"),
    Fault("argmax as output", gpt(logits=one_hot_output), "gradient", "lm_head"),
    Fault("embeddings detached", gpt(embed=lambda self, ids: GPT.embed(self, ids).detach()), "gradient", "tok_embed"),
    Fault(
        "parameter used by value",
        gpt(logits=lambda self, x: F.linear(self.norm(x), self.lm_head.weight.data)),
        "gradient",
        "lm_head",
    ),
    Fault("tensor overwritten in place", gpt(InPlaceBlock), "gradient", "training fails"),
    Fault("one norm for two branches", gpt(SharedNorm), "norms", "norm1"),
]

CONTROLS = [
    Control("tied embeddings", lambda: Tied()),
    Control("weights shared by reference", lambda: ClonedBlocks()),
    Control("hidden frozen teacher", lambda: HiddenTeacher(), warnings=("saving",)),
    Control("checkpointed blocks", lambda: Checkpointed()),
    Control("frozen embeddings", lambda: Frozen()),
    Control("head of train() mode", lambda: Auxiliary()),
    Control("module that never runs", lambda: Unused(), warnings=("gradient",)),
    Control("layer scale", gpt(LayerScale)),
    Control("empty parameter", gpt(build=lambda self: setattr(self, "empty", nn.Parameter(torch.empty(0, WIDTH))))),
]
