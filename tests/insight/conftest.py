"""Attention as people write it by hand, each in another order of axes and steps. All return (B,Q,E)."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from clearhead import MultiHeadAttention, VisionTransformer, attend_reference, masks
from clearhead.models.config import VisionConfig

B, L, WIDTH, HEADS = 2, 5, 8, 2
D = WIDTH // HEADS


class ByHand(nn.Module):
    """x (B,L,E) -> (B,L,E). `weights` is what a subclass's own formula gave, (B,H,Q,K)."""

    def __init__(self, num_heads=HEADS, dropout=0.0):
        super().__init__()
        self.qkv, self.out, self.num_heads, self.p = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            num_heads,
            dropout,
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        return self.out(self.attend(scores, v).transpose(1, 2).flatten(2))

    def attend(self, scores, v):
        self.weights = scores.softmax(-1)
        return self.drop(self.weights) @ v


class Functional(ByHand):
    def attend(self, scores, v):
        self.weights = F.softmax(scores, dim=-1, dtype=torch.float64).to(v.dtype)
        return torch.matmul(F.dropout(self.weights, self.p, self.training), v)


class Joined(ByHand):
    def attend(self, scores, v):
        self.weights = nn.Softmax(dim=-1)(scores)
        out = torch.bmm(self.drop(self.weights).flatten(0, 1), v.flatten(0, 1))
        return out.view(v.shape)


class Einsum(ByHand):
    def attend(self, scores, v):
        self.weights = torch.softmax(scores, -1)
        return torch.einsum("b h i j, b h j d -> b h i d", self.drop(self.weights), v)


class EinsumOtherOrder(ByHand):
    def attend(self, scores, v):
        self.weights = torch.softmax(scores, dim=3)
        out = torch.einsum("jbhd,ijbh->bihd", v.permute(2, 0, 1, 3), self.weights.permute(2, 3, 0, 1))
        return out.transpose(1, 2)


class EinsumDots(ByHand):
    def attend(self, scores, v):
        self.weights = torch.softmax(scores, dim=3)
        return torch.einsum("...qk,...kd->...qd", self.weights, v)


class Columns(ByHand):
    """Tokens are columns: v softargmax(kᵀ q), the shares of one query below each other."""

    def attend(self, scores, v):
        shares = scores.mT.softmax(dim=-2)  # (B,H,K,Q)
        self.weights = shares.mT
        return (v.mT @ shares).mT


class Masked(ByHand):
    """Steps between softmax and values: the weights of the first key are taken away, and the rest made to sum to 1."""

    def attend(self, scores, v):
        hidden = torch.arange(scores.shape[-1]) == 0
        weights = scores.softmax(-1).masked_fill(hidden, 0.0)
        self.weights = weights / weights.sum(-1, keepdim=True)
        return torch.where(torch.ones_like(hidden), self.weights, 0.0) @ v


class OwnDropout(ByHand):
    def attend(self, scores, v):
        self.weights = torch.softmax(scores, -1)
        keep = (torch.rand_like(self.weights) > 0.5).float() / 0.5
        return (self.weights * keep).to(v.dtype) @ v


class TalkingHeads(ByHand):
    def attend(self, scores, v):
        mix = torch.eye(self.num_heads).flip(0) + 0.5
        self.weights = torch.einsum("bhij,hg->bgij", scores.softmax(-1), mix)
        return self.weights @ v


BY_HAND = [ByHand, Functional, Joined, Einsum, EinsumOtherOrder, EinsumDots, Columns, Masked, TalkingHeads]


class OneHead(nn.Module):
    """No axis for heads; with a softmax at the end that is no attention."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.classify = nn.Linear(WIDTH, 3)

    def forward(self, x):
        weights = torch.softmax(self.q(x) @ self.k(x).transpose(-2, -1), -1)
        return torch.softmax(self.classify(weights @ self.v(x)), -1)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return torch.softmax(self.linear(x), -1).sum(1)


class Raises(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = ByHand()

    def forward(self, x):
        self.inner(x)
        raise RuntimeError("in the middle of it")


class OurReference(nn.Module):
    """Our formula, with a mask that hides the last two keys."""

    def __init__(self):
        super().__init__()
        self.attention = MultiHeadAttention(WIDTH, HEADS, attend=attend_reference)

    def forward(self, x):
        return self.attention(x, mask=masks.padding([L, L - 2], L))


def small_vit():
    config = VisionConfig(
        width=WIDTH, depth=2, num_heads=HEADS, mlp_dim=16, image_size=8, patch_size=4, in_channels=1, num_classes=3
    )
    return VisionTransformer.from_config(config)


def encoder():
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def tokens():
    return torch.randn(B, L, WIDTH)


KINDS = {
    "ours": (small_vit, lambda: (torch.randn(B, 1, 8, 8),)),
    "our formula": (OurReference, lambda: (tokens(),)),
    "by hand": (ByHand, lambda: (tokens(),)),
    "joined heads": (Joined, lambda: (tokens(),)),
    "torch.nn": (lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), lambda: (tokens(),) * 3),
    "torch.nn encoder": (encoder, lambda: (tokens(),)),
    "torch.nn transformer": (
        lambda: nn.Transformer(WIDTH, HEADS, 1, 1, 16, batch_first=True),
        lambda: (tokens(), tokens()),
    ),
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(params=BY_HAND, ids=lambda kind: kind.__name__)
def by_hand(request):
    """A way to write attention by hand, as a class."""
    return request.param


@pytest.fixture(params=KINDS)
def kind(request):
    """A model in evaluation mode and its inputs."""
    build, inputs = KINDS[request.param]
    return build().eval(), inputs()


@pytest.fixture
def written():
    """Models by name, for tests of one of them."""
    classes = [*BY_HAND, OwnDropout, OneHead, Classifier, Raises, OurReference]
    return SimpleNamespace(small_vit=small_vit, encoder=encoder, tokens=tokens, **{c.__name__: c for c in classes})
