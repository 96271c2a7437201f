"""Manual attention implementations with different axis orders and steps. All return (B,Q,E)."""

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


class ManualAttention(nn.Module):
    """x (B,L,E) -> (B,L,E). `weights` (B,H,Q,K) are those computed by the subclass's formula."""

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


class Functional(ManualAttention):
    def attend(self, scores, v):
        self.weights = F.softmax(scores, dim=-1, dtype=torch.float64).to(v.dtype)
        return torch.matmul(F.dropout(self.weights, self.p, self.training), v)


class MergedHeads(ManualAttention):
    def attend(self, scores, v):
        self.weights = nn.Softmax(dim=-1)(scores)
        out = torch.bmm(self.drop(self.weights).flatten(0, 1), v.flatten(0, 1))
        return out.view(v.shape)


class Einsum(ManualAttention):
    def attend(self, scores, v):
        self.weights = torch.softmax(scores, -1)
        return torch.einsum("b h i j, b h j d -> b h i d", self.drop(self.weights), v)


class EinsumOtherOrder(ManualAttention):
    def attend(self, scores, v):
        self.weights = torch.softmax(scores, dim=3)
        out = torch.einsum("jbhd,ijbh->bihd", v.permute(2, 0, 1, 3), self.weights.permute(2, 3, 0, 1))
        return out.transpose(1, 2)


class EinsumDots(ManualAttention):
    def attend(self, scores, v):
        self.weights = torch.softmax(scores, dim=3)
        return torch.einsum("...qk,...kd->...qd", self.weights, v)


class Columns(ManualAttention):
    """Tokens are columns: v softargmax(kᵀ q), with the weights of one query in a column."""

    def attend(self, scores, v):
        weights_by_column = scores.mT.softmax(dim=-2)  # (B,H,K,Q)
        self.weights = weights_by_column.mT
        return (v.mT @ weights_by_column).mT


class Masked(ManualAttention):
    """Between softmax and values, the first key's weights are zeroed and the rest are renormalized."""

    def attend(self, scores, v):
        masked = torch.arange(scores.shape[-1]) == 0
        weights = scores.softmax(-1).masked_fill(masked, 0.0)
        self.weights = weights / weights.sum(-1, keepdim=True)
        return torch.where(torch.ones_like(masked), self.weights, 0.0) @ v


class ManualDropout(ManualAttention):
    def attend(self, scores, v):
        self.weights = torch.softmax(scores, -1)
        keep = (torch.rand_like(self.weights) > 0.5).float() / 0.5
        return (self.weights * keep).to(v.dtype) @ v


class TalkingHeads(ManualAttention):
    def attend(self, scores, v):
        mix = torch.eye(self.num_heads).flip(0) + 0.5
        self.weights = torch.einsum("bhij,hg->bgij", scores.softmax(-1), mix)
        return self.weights @ v


MANUAL = [ManualAttention, Functional, MergedHeads, Einsum, EinsumOtherOrder, EinsumDots, Columns, Masked, TalkingHeads]


class SingleHead(nn.Module):
    """No head axis, and a final softmax that is not attention."""

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
        self.inner = ManualAttention()

    def forward(self, x):
        self.inner(x)
        raise RuntimeError("raised during the forward pass")


class OurReference(nn.Module):
    """attend_reference with a padding mask for the last two keys."""

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


MODELS = {
    "VisionTransformer": (small_vit, lambda: (torch.randn(B, 1, 8, 8),)),
    "attend_reference": (OurReference, lambda: (tokens(),)),
    "manual": (ManualAttention, lambda: (tokens(),)),
    "merged heads": (MergedHeads, lambda: (tokens(),)),
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


@pytest.fixture(params=MANUAL, ids=lambda cls: cls.__name__)
def manual_class(request):
    """A class with a manual attention implementation."""
    return request.param


@pytest.fixture(params=MODELS)
def model_and_inputs(request):
    """A model in evaluation mode and its inputs."""
    build, inputs = MODELS[request.param]
    return build().eval(), inputs()


@pytest.fixture
def models():
    """All model classes by name, for tests of a single one."""
    classes = [*MANUAL, ManualDropout, SingleHead, Classifier, Raises, OurReference]
    return SimpleNamespace(small_vit=small_vit, encoder=encoder, tokens=tokens, **{c.__name__: c for c in classes})
