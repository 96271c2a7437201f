"""The vision transformer (Dosovitskiy et al. 2021): an image is a sequence of patches.

Dims: B batch, C channels, P patches, L tokens (P, and class token and register tokens where there are
such), E model width.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.models.config import (
    Activation,
    InitName,
    Norm,
    NormLayerName,
    PatchEmbedName,
    PoolingName,
    PosEmbed2dName,
    VisionConfig,
    check_kind,
)
from clearhead.models.presets import preset
from clearhead.models.stack import (
    build_encoder_blocks,
    build_head,
    build_norm,
    build_pooling,
    final_norm,
    input_embeddings,
)
from clearhead.nn.positions import LearnedPosEmbed2d, NoPosEmbed2d, PosEmbed2d, RotaryPosEmbed2d, SinusoidalPosEmbed2d
from clearhead.nn.tokens import ConvEmbed, ConvStem, PatchEmbed, RegisterTokens
from clearhead.validation import suggest_keywords


class VisionTransformer(nn.Module):
    """images (B,C,height,width) -> logits (B,num_classes), for any height and width that the patch size divides.

    In place of images, `inputs_embeds` takes patch embeddings (B,P,E) computed elsewhere, for the grid that the model
    was built for; with includes_cls_token=True they are (B,1+P,E) and the first is the class token. The model adds
    positions to the patches. The class token has none of its own: a learned one is part of its embedding.
    """

    @suggest_keywords
    def __init__(
        self,
        *,
        image_size: int | tuple[int, int],
        patch_size: int,
        num_classes: int,
        width: int,
        depth: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        qk_norm: bool = False,
        in_channels: int = 3,
        patch_embed: PatchEmbedName = "patch",
        pos_embed: PosEmbed2dName = "learned",
        pooling: PoolingName = "cls",
        num_register_tokens: int = 0,
        head_mlp_dim: int = 0,
        embed_norm: bool = False,
        init: InitName = "xavier",
        mlp_dim: int | None = None,
        activation: Activation = "gelu",
        norm: Norm = "pre",
        norm_layer: NormLayerName = "layernorm",
        norm_eps: float = 1e-5,
        layer_scale: float | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        mlp_dropout: float = 0.0,
        drop_path: float = 0.0,
        beta: float | None = None,
        output_projection: bool = True,
    ) -> None:
        super().__init__()
        self.config = config = VisionConfig(
            image_size=image_size,
            patch_size=patch_size,
            num_classes=num_classes,
            width=width,
            depth=depth,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            qk_norm=qk_norm,
            in_channels=in_channels,
            patch_embed=patch_embed,
            pos_embed=pos_embed,
            pooling=pooling,
            num_register_tokens=num_register_tokens,
            head_mlp_dim=head_mlp_dim,
            embed_norm=embed_norm,
            init=init,
            mlp_dim=mlp_dim,
            activation=activation,
            norm=norm,
            norm_layer=norm_layer,
            norm_eps=norm_eps,
            layer_scale=layer_scale,
            bias=bias,
            dropout=dropout,
            attention_dropout=attention_dropout,
            mlp_dropout=mlp_dropout,
            drop_path=drop_path,
            beta=beta,
            output_projection=output_projection,
        )

        self.patch_embed: PatchEmbed | ConvEmbed | ConvStem
        match patch_embed:
            case "patch":
                self.patch_embed = PatchEmbed(in_channels, width, patch_size)
            case "conv":
                self.patch_embed = ConvEmbed(in_channels, width, patch_size)
            case "conv-stem":
                self.patch_embed = ConvStem(in_channels, width, patch_size)
            case _:
                raise ValueError(f"unknown patch_embed {patch_embed!r}")

        self.pos_embed: PosEmbed2d
        match pos_embed:
            case "learned":
                self.pos_embed = LearnedPosEmbed2d(config.grid, width)
            case "sinusoidal":
                self.pos_embed = SinusoidalPosEmbed2d()
            case "rotary":
                self.pos_embed = RotaryPosEmbed2d(config.head_dim)
            case "none":
                self.pos_embed = NoPosEmbed2d()
            case _:
                raise ValueError(f"unknown pos_embed {pos_embed!r}")

        self.pool = build_pooling(config)
        self.registers = RegisterTokens(num_register_tokens, width) if num_register_tokens else None
        self.embed_norm = build_norm(config, width) if embed_norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(build_encoder_blocks(config))
        self.norm = final_norm(config)
        self.head = build_head(config, num_classes)
        if init == "bert":
            init_bert_(self)

    @classmethod
    def from_config(cls, config: VisionConfig) -> "VisionTransformer":
        check_kind(config, VisionConfig)
        return cls(**vars(config))

    @classmethod
    def from_preset(cls, name: str, changes: Mapping[str, Any] | None = None) -> "VisionTransformer":
        """The model of a preset, with some fields of its config changed; `list_presets` has the names."""
        config = preset(name, changes)
        check_kind(config, VisionConfig)
        return cls(**vars(config))

    def reset_classifier(self, num_classes: int) -> None:
        """Replace the head by a new one for `num_classes` classes, as in timm; all other weights stay."""
        self.config = replace(self.config, num_classes=num_classes)
        example = next(self.head.parameters())
        self.head = build_head(self.config, num_classes).to(example).train(self.training)
        if self.config.init == "bert":
            init_bert_(self.head)

    def forward(
        self,
        images: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        includes_cls_token: bool = False,
    ) -> Tensor:
        x = self.features(images, inputs_embeds=inputs_embeds, includes_cls_token=includes_cls_token)
        return self.head(self.pool(x))

    def features(
        self,
        images: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        includes_cls_token: bool = False,
        all_layers: bool = False,
    ) -> Tensor | tuple[Tensor, ...]:
        """The encoder's last hidden state (B,L,E), from which head(pool(features)) computes the logits.

        all_layers=True returns the hidden states of all layers: the embeddings that enter the first block, then the
        output of each block; the last one has gone through the final norm, where there is one. Register tokens are left
        out: the class token, where there is one, is followed by the patches.
        """
        x, rotary_angles = self.embed(images, inputs_embeds, includes_cls_token)
        states = [x]
        for block in self.blocks:
            x = block(x, rotary_angles=rotary_angles)
            if all_layers:
                states.append(x)
        states[-1] = self.norm(x)
        if self.registers is not None:
            states = [self.registers.remove(state, self.pool.num_prefix_tokens) for state in states]
        return tuple(states) if all_layers else states[-1]

    def embed(
        self, images: Tensor | None, inputs_embeds: Tensor | None, includes_cls_token: bool
    ) -> tuple[Tensor, Tensor | None]:
        """What enters the encoder: tokens (B,L,E), and rotary angles (L,D/2) where the model has them."""
        if includes_cls_token and images is not None:
            raise ValueError("includes_cls_token=True is for inputs_embeds, got images, which contain no class token")
        x = input_embeddings(self.patch_embed, images, inputs_embeds, self.config.width)
        grid = self.config.grid if images is None else self.patch_embed.grid(images)
        self.check_tokens(x, grid, includes_cls_token)
        angles = self.pos_embed.rotary_angles(grid, x.device)
        if angles is not None:  # class token and register tokens have no position: angle 0
            angles = F.pad(angles, (0, 0, self.pool.num_prefix_tokens + self.config.num_register_tokens, 0))
        cls_token, patches = (x[:, :1], x[:, 1:]) if includes_cls_token else (None, x)
        patches = self.pos_embed(patches, grid)
        if self.registers is not None:
            patches = self.registers(patches)
        x = self.pool.prepend_tokens(patches) if cls_token is None else torch.cat([cls_token, patches], dim=1)
        return self.dropout(self.embed_norm(x)), angles

    def check_tokens(self, x: Tensor, grid: tuple[int, int], includes_cls_token: bool) -> None:
        """Refuses a number of tokens that is not the grid's; whether one of them is a class token is never guessed."""
        has_cls_token = self.pool.num_prefix_tokens > 0
        if includes_cls_token and not has_cls_token:
            raise ValueError(
                f"includes_cls_token=True needs a model with pooling='cls', got pooling={self.config.pooling!r}"
            )
        given, patches = x.shape[1], f"{grid[0]} x {grid[1]} patches"
        n_tokens = grid[0] * grid[1] + includes_cls_token
        if given == n_tokens:
            return
        hint = ""
        if has_cls_token and not includes_cls_token and given == n_tokens + 1:
            hint = "; pass includes_cls_token=True if the first of them is the class token"
        elif includes_cls_token and given == n_tokens - 1:
            hint = "; leave out includes_cls_token if they are the patches alone"
        parts = f"the class token and {patches}" if includes_cls_token else patches
        raise ValueError(f"inputs_embeds must have {n_tokens} tokens ({parts}), got {given}{hint}")


BERT = 0.02
"""standard deviation of BERT's initial weights"""


def init_bert_(model: nn.Module) -> None:
    """BERT's initialization: normal weights with standard deviation 0.02, zero biases; suits deep post-norm stacks."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.normal_(module.weight, std=BERT)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
