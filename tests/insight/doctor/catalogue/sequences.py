"""Encoder-decoders and images: sources that are ignored or leak, and patches that are no patches."""

import torch
import torch.nn.functional as F
from torch import nn

from .parts import (
    CONTEXT,
    HEADS,
    VOCAB,
    WIDTH,
    Attention,
    Block,
    Control,
    DecoderBlock,
    Fault,
    Translator,
    ViT,
    later,
    linear,
    variant,
)


def translator(**methods):
    return lambda: variant(Translator, **methods)()


def vit(attention=Attention, block=Block, **methods):
    return lambda: variant(ViT, **methods)(attention, block)


def decode_unmasked(self, tgt, memory, masked):
    return self.decoder(self.embedded(tgt), memory, None, masked)


def decode_without_padding(self, tgt, memory, masked):
    return self.decoder(self.embedded(tgt), memory, later(tgt.shape[1]), None)


def decode_itself(self, tgt, memory, masked):
    """Attends to the target twice; the memory is not used."""
    x = self.embedded(tgt)
    return self.decoder(x, x, later(tgt.shape[1]), later(tgt.shape[1]))


def decode_mean(self, tgt, memory, masked):
    """The memory is replaced by its mean: every source position counts alike, and so does padding."""
    return self.decoder(self.embedded(tgt), memory.mean(1, keepdim=True), later(tgt.shape[1]), None)


def decode_with_target_context(self, tgt, memory, masked):
    """The target is appended to the memory."""
    context = torch.cat([memory, self.embedded(tgt)], 1)
    return self.decoder(self.embedded(tgt), context, later(tgt.shape[1]), None)


def encode_unmasked(self, src, masked):
    return self.encoder(self.embedded(src))


def encode_causally(self, src, masked):
    causal = later(src.shape[1])
    return self.encoder(self.embedded(src), causal if masked is None else causal | masked)


class RequiredMasks(Translator):
    """src_mask (B,1,S) and tgt_mask (B,L,L), True = may attend, both required: the Annotated Transformer."""

    def forward(self, src, tgt, src_mask, tgt_mask):
        hidden, later_hidden = (src_mask == 0)[:, None], (tgt_mask == 0)[:, None]
        return self.head(self.decoder(self.embedded(tgt), self.encode(src, hidden), later_hidden, hidden))


class TorchTranslator(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.pos = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.inner, self.head = nn.Transformer(WIDTH, HEADS, 1, 1, 16, batch_first=True), linear(WIDTH, VOCAB)

    def forward(self, src, tgt, src_key_padding_mask=None):
        x, y = (self.embed(ids) + self.pos(torch.arange(ids.shape[1])) for ids in (src, tgt))
        return self.head(
            self.inner(
                x,
                y,
                tgt_mask=later(tgt.shape[1]),
                src_key_padding_mask=src_key_padding_mask,
                memory_key_padding_mask=src_key_padding_mask,
            )
        )


class Decoder(nn.Module):
    """features x (B,L,E) and memory (B,S,E)."""

    def __init__(self):
        super().__init__()
        self.pos, self.block = nn.Parameter(torch.randn(CONTEXT, WIDTH)), DecoderBlock()

    def forward(self, x, memory):
        return self.block(x + self.pos[: x.shape[1]], memory, later(x.shape[1]), None)


class Perceiver(nn.Module):
    """Three learned queries attend to the tokens."""

    def __init__(self):
        super().__init__()
        self.embed, self.pos = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.queries, self.attn = nn.Parameter(torch.randn(1, 3, WIDTH)), Attention()

    def forward(self, ids):
        x = self.embed(ids) + self.pos(torch.arange(ids.shape[1]))
        return self.attn(self.queries.expand(len(x), -1, -1), None, x)


class Codebooks(nn.Module):
    """ids (B,L,4): four codebooks per step, as in audio models."""

    def __init__(self):
        super().__init__()
        self.embeds = nn.ModuleList(nn.Embedding(VOCAB, WIDTH) for _ in range(4))
        self.pos, self.block, self.head = nn.Embedding(CONTEXT, WIDTH), Block(), linear(WIDTH, VOCAB)

    def forward(self, codes):
        x = sum(embed(codes[..., i]) for i, embed in enumerate(self.embeds))
        return self.head(self.block(x + self.pos(torch.arange(codes.shape[1])), later(codes.shape[1])))


def patches_by_view(self, images):
    return images.reshape(len(images), 16, -1)


def patches_by_unfold(self, images):
    """F.unfold gives (B,pixels,patches); a view does not exchange the axes."""
    return F.unfold(images, 4, stride=4).reshape(len(images), 16, -1)


def patches_of_unfold(self, images):
    return F.unfold(images, 4, stride=4).mT


def patches_of_rows(self, images):
    """Whole rows instead of squares."""
    return images.permute(0, 2, 1, 3).reshape(len(images), 16, -1)


def patches_without_border(self, images):
    """A stride of 3 over 12 pixels: the border is never read."""
    x = images[:, :, 2:14, 2:14].unfold(2, 4, 4).unfold(3, 4, 4)
    x = x.permute(0, 2, 3, 1, 4, 5).reshape(len(images), 9, -1)
    return F.pad(x, (0, 0, 0, 7))


def first_token_only(self, images):
    x = ViT.tokens(self, images)
    return torch.cat([x[:, :1], x[:, 1:].detach() * 0 + self.pos_embed[:, 1:]], 1)


class NoAttention(Block):
    def forward(self, x, masked=None):
        return x + self.mlp(self.norm2(x))


def batch_patches(self, images):
    """Patches with the batch axis in the wrong place."""
    return ViT.patches(self, images).reshape(16, len(images), -1).transpose(0, 1)


class ConvPatches(ViT):
    def build(self):
        self.proj = nn.Conv2d(3, WIDTH, 4, 4)

    def tokens(self, images):
        x = self.proj(images).flatten(2).mT
        return torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed


class ConvStem(ConvPatches):
    def build(self):
        self.proj = nn.Sequential(
            nn.Conv2d(3, WIDTH, 3, 2, 1), nn.BatchNorm2d(WIDTH), nn.GELU(), nn.Conv2d(WIDTH, WIDTH, 3, 2, 1)
        )


class WindowAttention(nn.Module):
    """Windows of 2 x 2 patches, as in Swin."""

    def __init__(self):
        super().__init__()
        self.proj, self.block, self.head = nn.Conv2d(3, WIDTH, 4, 4), Block(), linear(WIDTH, 5)

    def forward(self, images):
        x = self.proj(images)  # (B,E,4,4)
        x = x.unflatten(3, (2, 2)).unflatten(2, (2, 2)).permute(0, 2, 4, 3, 5, 1)  # (B,2,2,2,2,E)
        windows = self.block(x.flatten(3, 4).flatten(0, 2))
        return self.head(windows.unflatten(0, (-1, 4)).mean((1, 2)))


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2, self.head = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1), linear(8, 5)

    def forward(self, x):
        return self.head(self.conv2(self.conv1(x).relu()).relu().mean((2, 3)))


class ImageMixer(ViT):
    def build(self):
        del self.blocks
        self.mix = linear(17, 17)

    def forward(self, images):
        x = self.tokens(images)
        x = x + self.mix(self.norm(x).mT).mT
        return self.head(x.mean(1))


FAULTS = [
    Fault("decoder without a causal mask", translator(decode=decode_unmasked), "causality", "self_attn"),
    Fault("cross-attention to padding", translator(decode=decode_without_padding), "padding", "cross_attn"),
    Fault("encoder attends to padding", translator(encode=encode_unmasked), "padding", "encoder"),
    Fault(
        "padding mask of the source dropped",
        translator(encode=encode_unmasked, decode=decode_without_padding),
        "padding",
        "no effect",
    ),
    Fault("memory ignored", translator(decode=decode_itself), "dependency", "src"),
    Fault("memory averaged with its padding", translator(decode=decode_mean), "padding", "src"),
    Fault("target appended to the memory", translator(decode=decode_with_target_context), "causality", "cross_attn"),
    Fault("source mask not applied", lambda: variant(RequiredMasks, encode=encode_unmasked)(), "padding", "src_mask"),
    Fault("encoder of the source is causal", translator(encode=encode_causally), "dependency", "encoder"),
    Fault("patches by view", vit(patches=patches_by_view), "patches", "view", False),
    Fault("unfolded patches not transposed", vit(patches=patches_by_unfold), "patches", "view", False),
    Fault("patches of whole rows", vit(patches=patches_of_rows), "patches", "rows", False),
    Fault("border of the image is ignored", vit(patches=patches_without_border), "dependency", "pixels", False),
    Fault("class token without attention", vit(block=NoAttention), "dependency", "images", False),
    Fault("patches do not reach the tokens", vit(tokens=first_token_only), "dependency", "images", False),
    Fault("patches of other images", vit(patches=batch_patches), "batch", "reshape", False),
]

CONTROLS = [
    Control("encoder-decoder", translator()),
    Control("encoder-decoder with required masks", lambda: RequiredMasks()),
    Control("nn.Transformer with embeddings", lambda: TorchTranslator(), warnings=("fully masked rows",)),
    Control("decoder of features and memory", lambda: Decoder(), warnings=("order",)),
    Control("learned queries", lambda: Perceiver(), False),
    Control("four codebooks", lambda: Codebooks()),
    Control("ViT", vit(), False),
    Control("ViT, mean of all tokens", vit(pool=lambda self, x: x.mean(1)), False),
    Control("ViT, F.unfold", vit(patches=patches_of_unfold), False),
    Control("ViT, patches by convolution", lambda: ConvPatches(), False),
    Control("ViT, convolutional stem", lambda: ConvStem(), False),
    Control("ViT, examined as causal", vit()),
    Control("window attention", lambda: WindowAttention(), False),
    Control("convolutional network", lambda: ConvNet(), False),
    Control("image mixer", lambda: ImageMixer(), False),
]
