"""The sequence predictor: an encoder with one output for each token, or, with pooling, one for the sequence.

Dims: B batch, L length, E model width.
"""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.models.config import (
    Activation,
    Norm,
    NormLayerName,
    PosEmbedName,
    PredictorConfig,
    PredictorPoolingName,
    check_kind,
)
from clearhead.models.presets import preset
from clearhead.models.stack import (
    OneHotLinear,
    build_encoder_blocks,
    build_head,
    build_pooling,
    build_pos_embed,
    final_norm,
    input_embeddings,
    padding_mask,
)
from clearhead.nn.masks import Mask, check_mask, dense
from clearhead.validation import suggest_keywords


class SequencePredictor(nn.Module):
    """ids (B,L) or features (B,L,in_features) -> (B,L,out_features), or (B,out_features) with pooling."""

    @suggest_keywords
    def __init__(
        self,
        *,
        in_features: int,
        out_features: int,
        width: int,
        depth: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        qk_norm: bool = False,
        context_length: int = 512,
        pos_embed: PosEmbedName = "sinusoidal",
        pooling: PredictorPoolingName = "none",
        input_dropout: float = 0.0,
        head_mlp_dim: int = 0,
        head_norm: bool = False,
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
        self.config = config = PredictorConfig(
            in_features=in_features,
            out_features=out_features,
            width=width,
            depth=depth,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            qk_norm=qk_norm,
            context_length=context_length,
            pos_embed=pos_embed,
            pooling=pooling,
            input_dropout=input_dropout,
            head_mlp_dim=head_mlp_dim,
            head_norm=head_norm,
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
        self.embed = OneHotLinear(config.in_features, config.width, config.input_dropout)
        self.pool = build_pooling(config)
        self.pos_embed = build_pos_embed(config.pos_embed, config.context_length + self.pool.num_prefix_tokens, config)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(build_encoder_blocks(config))
        self.norm = final_norm(config)
        self.head = build_head(config, config.out_features)

    @classmethod
    def from_config(cls, config: PredictorConfig) -> "SequencePredictor":
        check_kind(config, PredictorConfig)
        return cls(**vars(config))

    @classmethod
    def from_preset(cls, name: str, changes: Mapping[str, Any] | None = None) -> "SequencePredictor":
        """The model of a preset (see `list_presets`), optionally with changed config fields."""
        config = preset(name, changes)
        check_kind(config, PredictorConfig)
        return cls(**vars(config))

    def forward(
        self,
        x: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        lengths: Tensor | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        """`lengths` (B,) excludes padding; `mask`, broadcastable to (B,H,L,L), is True where a token may attend."""
        x, valid = self.hidden_states(x, inputs_embeds, lengths, mask)
        return self.head(self.pool(x, valid))

    def features(
        self,
        x: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        lengths: Tensor | None = None,
        mask: Mask | None = None,
        all_layers: bool = False,
    ) -> Tensor | tuple[Tensor, ...]:
        """The encoder's last hidden state (B,L,E); with pooling="cls", (B,1+L,E) with the class token first.

        all_layers=True returns the hidden states of all layers: the input of the first block, then the output of each
        block. The final norm, if any, is applied to the last one.
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
        """The encoder's output, and `valid` (B,L): False at padding, or None if there is no padding."""
        embedded = input_embeddings(self.embed, x, inputs_embeds, self.config.width)
        n_examples, length, _ = embedded.shape
        if mask is not None:
            check_mask(mask, (n_examples, self.config.num_heads, length, length))
        padding = padding_mask(lengths, embedded)
        valid = None if padding is None else padding[:, 0, 0]
        embedded = self.pool.prepend_tokens(embedded)
        embedded = self.dropout(self.pos_embed(embedded))
        rotary_angles, logit_bias = self.pos_embed.attention_inputs(embedded)
        mask = expand_mask(mask, valid, length, self.pool.num_prefix_tokens)
        states = [embedded]
        for block in self.blocks:
            embedded = block(embedded, mask=mask, rotary_angles=rotary_angles, logit_bias=logit_bias)
            if all_layers:
                states.append(embedded)
        states[-1] = self.norm(embedded)
        return (tuple(states) if all_layers else states[-1]), valid


def expand_mask(mask: Mask | None, valid: Tensor | None, length: int, num_prefix_tokens: int) -> Mask | None:
    """The mask combined with the padding mask; prefix tokens attend to all tokens and are visible to all."""
    if mask is not None and num_prefix_tokens:
        mask = dense(mask).expand(*mask.shape[:-2], length, length)
        mask = F.pad(mask, (num_prefix_tokens, 0, num_prefix_tokens, 0), value=True)
    if valid is not None:
        padding = F.pad(valid, (num_prefix_tokens, 0), value=True)[:, None, None, :]
        mask = padding if mask is None else mask & padding
    return mask
