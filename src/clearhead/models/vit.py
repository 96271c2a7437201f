"""The vision transformer: an image is a sequence of patches.

Dims: B batch, C channels, P patches, L tokens (P, and the class token where there is one), E model width.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.models import build
from clearhead.models.config import VisionConfig, check_kind
from clearhead.models.first_weights import start_like_bert
from clearhead.models.inputs import embeddings_or


class VisionTransformer(nn.Module):
    """images (B,C,height,width) -> logits (B,n_classes), for any height and width that the patch size divides."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        check_kind(config, VisionConfig)
        self.config = config
        self.tokenize = build.tokenizer(config)
        self.positions = build.grid_positions(config)
        self.readout = build.readout(config)
        self.embedding_norm = nn.LayerNorm(config.width) if config.embedding_norm else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = build.encoder(config)
        self.head = build.head(config, config.n_classes)
        if config.first_weights == "bert":
            start_like_bert(self)

    def forward(self, images: Tensor | None = None, *, inputs_embeds: Tensor | None = None) -> Tensor:
        """`inputs_embeds` (B,P,E) are patch embeddings made elsewhere, for the grid that the model was built for."""
        x = embeddings_or(self.tokenize, images, inputs_embeds, self.config.width)
        grid = self.config.grid if images is None else self.tokenize.grid(images)
        check_patches(x, grid)
        angles = self.positions.angles(grid, x.device)
        if angles is not None:  # the class token stands nowhere: angle 0
            angles = F.pad(angles, (0, 0, self.readout.n_extra, 0))
        x = self.readout.begin(self.positions(x, grid))  # (B,P,E) -> (B,L,E)
        x = self.encoder(self.dropout(self.embedding_norm(x)), angles=angles)
        return self.head(self.readout(x))


def check_patches(x: Tensor, grid: tuple[int, int]) -> None:
    if x.shape[1] != grid[0] * grid[1]:
        raise ValueError(
            f"inputs_embeds must have one embedding for each of the {grid[0]} x {grid[1]} patches, got {x.shape[1]}; "
            "build the model with another image_size or patch_size"
        )
