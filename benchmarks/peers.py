"""The vision transformers that ours is compared with, built from one config of ours at equal size.

Each takes images (B,C,height,width) and returns logits (B,num_classes): pre-norm, GELU, class token, learned positions.
Each builder imports its own library, so that a peer that is not installed is skipped rather than an error.
"""

import importlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from clearhead.models.config import VisionConfig
from clearhead.models.vit import VisionTransformer

OPERATORS = "nms", "qnms"


def torchvision_or_stand_in() -> None:
    """Makes `import torchvision` work beside a build of torch that its operators were not compiled for.

    timm and vit-pytorch import torchvision, whose import fails if its compiled operators are missing. No vision
    transformer calls them, so it is enough to declare them. A missing torchvision stays missing.
    """
    try:
        importlib.import_module("torchvision")
    except ImportError:
        return
    except RuntimeError:
        for name in OPERATORS:
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


class TorchVit(nn.Module):
    """The vision transformer that a user of torch.nn writes around its encoder."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        rows, columns = config.grid
        layer = nn.TransformerEncoderLayer(
            config.width,
            config.num_heads,
            config.mlp_width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.patches = nn.Conv2d(config.in_channels, config.width, config.patch_size, stride=config.patch_size)
        self.class_token = nn.Parameter(0.02 * torch.randn(1, 1, config.width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, rows * columns + 1, config.width))
        self.encoder = nn.TransformerEncoder(
            layer, config.depth, norm=nn.LayerNorm(config.width), enable_nested_tensor=False
        )
        self.head = nn.Linear(config.width, config.num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)  # (B,E,rows,columns) -> (B,P,E)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1)
        return self.head(self.encoder(x + self.positions)[:, 0])


def timm_vit(config: VisionConfig) -> nn.Module:
    from timm.models import VisionTransformer as TimmVit

    return TimmVit(
        img_size=config.image_shape,
        patch_size=config.patch_size,
        in_chans=config.in_channels,
        num_classes=config.num_classes,
        embed_dim=config.width,
        depth=config.depth,
        num_heads=config.num_heads,
        mlp_ratio=config.mlp_width / config.width,
    )


def vit_pytorch_vit(config: VisionConfig) -> nn.Module:
    from vit_pytorch import ViT

    return ViT(
        image_size=config.image_shape,
        patch_size=config.patch_size,
        channels=config.in_channels,
        num_classes=config.num_classes,
        dim=config.width,
        depth=config.depth,
        heads=config.num_heads,
        dim_head=config.head_dim,
        mlp_dim=config.mlp_width,
    )


class HuggingFaceVit(nn.Module):
    """ViTForImageClassification that returns the logits only."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        from transformers import ViTConfig, ViTForImageClassification

        self.model = ViTForImageClassification(
            ViTConfig(
                image_size=config.image_shape,
                patch_size=config.patch_size,
                num_channels=config.in_channels,
                num_labels=config.num_classes,
                hidden_size=config.width,
                num_hidden_layers=config.depth,
                num_attention_heads=config.num_heads,
                intermediate_size=config.mlp_width,
                attn_implementation="sdpa",
            )
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images).logits


OURS = "clearhead"
PEERS: dict[str, Callable[[VisionConfig], nn.Module]] = {
    "torch.nn": TorchVit,
    "timm": timm_vit,
    "vit-pytorch": vit_pytorch_vit,
    "transformers": HuggingFaceVit,
}


def build_all(config: VisionConfig) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Our model and its installed peers by name, and the reason why each other peer is missing."""
    torchvision_or_stand_in()
    models: dict[str, nn.Module] = {OURS: VisionTransformer.from_config(config)}
    missing: dict[str, str] = {}
    for name, build in PEERS.items():
        try:
            models[name] = build(config)
        except ImportError as error:
            missing[name] = str(error)
    check_equal_size(models)
    return models, missing


def n_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def check_equal_size(models: dict[str, nn.Module]) -> None:
    """Within 1% of each other: vit-pytorch has no bias on q, k and v, and two more norms."""
    ours = n_parameters(models[OURS])
    for name, model in models.items():
        assert abs(n_parameters(model) / ours - 1) < 0.01, f"{name} has {n_parameters(model)} parameters, ours {ours}"
