"""The sequence predictor: an encoder with an answer for each token, or one for the whole sequence.

Dims: B batch, L length, E model width.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.models import build
from clearhead.models.config import PredictorConfig, check_kind
from clearhead.models.inputs import OneHotLinear, embeddings_or, padding_mask
from clearhead.nn.checks import check_mask


class SequencePredictor(nn.Module):
    """ids (B,L), or features (B,L,n_inputs) -> logits (B,L,n_outputs), or (B,n_outputs) for the whole sequence."""

    def __init__(self, config: PredictorConfig):
        super().__init__()
        check_kind(config, PredictorConfig)
        self.config = config
        self.embed = OneHotLinear(config.n_inputs, config.width)
        self.readout = build.readout(config)
        self.positions = build.positions(config.positions, config.context + self.readout.n_extra, config)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = build.encoder(config)
        self.head = build.head(config, config.n_outputs)

    def forward(
        self,
        x: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        lengths: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """`lengths` (B,) says how many tokens of each sequence are real; `mask` (to B,H,L,L) who may see whom."""
        embedded = embeddings_or(self.embed, x, inputs_embeds, self.config.width)
        n_examples, length, _ = embedded.shape
        if mask is not None:
            check_mask(mask, (n_examples, self.config.n_heads, length, length))
        padding = padding_mask(lengths, embedded)
        present = None if padding is None else padding[:, 0, 0]
        embedded = self.readout.begin(embedded)
        embedded = self.dropout(self.positions(embedded))
        angles, logit_bias = self.positions.inside(embedded)
        mask = whole_mask(mask, present, length, self.readout.n_extra)
        encoded = self.encoder(embedded, mask=mask, angles=angles, logit_bias=logit_bias)
        return self.head(self.readout(encoded, present))


def whole_mask(mask: Tensor | None, present: Tensor | None, length: int, n_extra: int) -> Tensor | None:
    """Mask and padding joined, widened by the tokens in front, which all may see and which see all."""
    if mask is not None and n_extra:
        mask = mask.expand(*mask.shape[:-2], length, length)
        mask = F.pad(mask, (n_extra, 0, n_extra, 0), value=True)
    if present is not None:
        real = F.pad(present, (n_extra, 0), value=True)[:, None, None, :]
        mask = real if mask is None else mask & real
    return mask
