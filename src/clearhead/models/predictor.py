"""The sequence predictor: an encoder with an answer for each token, or one for the whole sequence.

Dims: B batch, L length, E model width.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.models import build
from clearhead.models.config import PredictorConfig, check_kind
from clearhead.models.embeddings import OneHotLinear, embeddings_or, padding_mask
from clearhead.nn.masks import Mask, check_mask, dense


class SequencePredictor(nn.Module):
    """ids (B,L), or features (B,L,n_inputs) -> logits (B,L,n_outputs), or (B,n_outputs) for the whole sequence."""

    def __init__(self, config: PredictorConfig):
        super().__init__()
        check_kind(config, PredictorConfig)
        self.config = config
        self.embed = OneHotLinear(config.n_inputs, config.width, config.input_dropout)
        self.readout = build.build_pooling(config)
        self.positions = build.build_pos_embed(config.positions, config.context + self.readout.n_extra, config)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = build.build_encoder(config)
        self.head = build.build_head(config, config.n_outputs)

    def forward(
        self,
        x: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        lengths: Tensor | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        """`lengths` (B,) counts the real tokens of each sequence; `mask` (to B,H,L,L) is True where one may attend."""
        encoded, present = self.hidden_states(x, inputs_embeds, lengths, mask)
        return self.head(self.readout(encoded, present))

    def features(
        self,
        x: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        lengths: Tensor | None = None,
        mask: Mask | None = None,
        all_layers: bool = False,
    ) -> Tensor | tuple[Tensor, ...]:
        """The encoder's last hidden state (B,L,E), the class token first where there is one.

        all_layers=True returns the hidden states of all layers: the embeddings that enter the first block, then the
        output of each block; the last one has gone through the final norm, where there is one.
        """
        return self.hidden_states(x, inputs_embeds, lengths, mask, all_layers)[0]

    def hidden_states(
        self,
        x: Tensor | None,
        inputs_embeds: Tensor | None,
        lengths: Tensor | None,
        mask: Mask | None,
        all_layers: bool = False,
    ) -> tuple[Any, Tensor | None]:
        """The encoder's output, and `present` (B,L): True at real tokens, None where all of them are."""
        embedded = embeddings_or(self.embed, x, inputs_embeds, self.config.width)
        n_examples, length, _ = embedded.shape
        if mask is not None:
            check_mask(mask, (n_examples, self.config.num_heads, length, length))
        padding = padding_mask(lengths, embedded)
        present = None if padding is None else padding[:, 0, 0]
        embedded = self.readout.begin(embedded)
        embedded = self.dropout(self.positions(embedded))
        angles, logit_bias = self.positions.inside(embedded)
        mask = expand_mask(mask, present, length, self.readout.n_extra)
        encoded = self.encoder(embedded, mask=mask, angles=angles, logit_bias=logit_bias, all_layers=all_layers)
        return encoded, present


def expand_mask(mask: Mask | None, present: Tensor | None, length: int, n_extra: int) -> Mask | None:
    """Mask and padding joined, widened by the tokens in front, which all may see and which see all."""
    if mask is not None and n_extra:
        mask = dense(mask).expand(*mask.shape[:-2], length, length)
        mask = F.pad(mask, (n_extra, 0, n_extra, 0), value=True)
    if present is not None:
        real = F.pad(present, (n_extra, 0), value=True)[:, None, None, :]
        mask = real if mask is None else mask & real
    return mask
