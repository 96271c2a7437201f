"""The decoder-only language model: it predicts each token from the ones before it.

Dims: B batch, L length, E model width, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.models.config import Activation, LanguageConfig, Norm, NormLayerName, PosEmbedName, check_kind
from clearhead.models.generate import (
    DecodeState,
    GenerateOutput,
    Greedy,
    ModelDecodeState,
    Strategy,
    check_context_length,
    check_generation,
)
from clearhead.models.presets import preset
from clearhead.models.stack import (
    build_encoder_blocks,
    build_pos_embed,
    embed_ids,
    final_norm,
    input_embeddings,
    token_embedding,
    token_scale,
)
from clearhead.nn import masks
from clearhead.nn.attention import Linear
from clearhead.nn.blocks import eval_mode
from clearhead.nn.cache import DecoderCache
from clearhead.nn.masks import Mask, check_mask
from clearhead.validation import suggest_keywords


class LanguageModel(nn.Module):
    """ids (B,L) -> logits (B,L,V) of the token after each."""

    @suggest_keywords
    def __init__(
        self,
        *,
        vocab_size: int,
        width: int,
        depth: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        qk_norm: bool = False,
        context_length: int = 512,
        pos_embed: PosEmbedName = "learned",
        tie_weights: bool = True,
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
        self.config = config = LanguageConfig(
            vocab_size=vocab_size,
            width=width,
            depth=depth,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            qk_norm=qk_norm,
            context_length=context_length,
            pos_embed=pos_embed,
            tie_weights=tie_weights,
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
        self.tok_embed = token_embedding(config.vocab_size, config.width)
        self.pos_embed = build_pos_embed(config.pos_embed, config.context_length, config)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(build_encoder_blocks(config))
        self.norm = final_norm(config)
        self.lm_head = None if config.tie_weights else Linear(config.width, config.vocab_size, bias=False)

    @classmethod
    def from_config(cls, config: LanguageConfig) -> "LanguageModel":
        check_kind(config, LanguageConfig)
        return cls(**vars(config))

    @classmethod
    def from_preset(cls, name: str, changes: Mapping[str, Any] | None = None) -> "LanguageModel":
        """The model of a preset, with some fields of its config changed; `list_presets` has the names."""
        config = preset(name, changes)
        check_kind(config, LanguageConfig)
        return cls(**vars(config))

    def forward(
        self,
        ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        mask: Mask | None = None,
        cache: DecoderCache | None = None,
    ) -> Tensor:
        """With a cache, ids are the newest tokens only. `mask` (to B,H,L,K) is joined with the causal one."""
        x = cast(Tensor, self.features(ids, inputs_embeds=inputs_embeds, mask=mask, cache=cache))
        return F.linear(x, self.tok_embed.weight) if self.lm_head is None else self.lm_head(x)

    def features(
        self,
        ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        mask: Mask | None = None,
        cache: DecoderCache | None = None,
        all_layers: bool = False,
    ) -> Tensor | tuple[Tensor, ...]:
        """The last hidden state (B,L,E), from which the head computes the logits.

        all_layers=True returns the hidden states of all layers: the embeddings that enter the first block, then the
        output of each block; the last one has gone through the final norm, where there is one.
        """
        x = input_embeddings(self.tokens, ids, inputs_embeds, self.config.width)
        start = 0 if cache is None else cache.length
        n_examples, length, _ = x.shape
        if mask is not None:
            check_mask(mask, (n_examples, self.config.num_heads, length, start + length))
        causal = masks.causal(length, start + length, x.device)
        x = self.dropout(self.pos_embed(x, start))
        rotary_angles, logit_bias = self.pos_embed.attention_inputs(x, start)
        mask = causal if mask is None else causal & mask
        states = [x]
        for i, block in enumerate(self.blocks):
            layer_cache = None if cache is None else cache.layers[i]
            x = block(x, mask=mask, rotary_angles=rotary_angles, logit_bias=logit_bias, cache=layer_cache)
            if all_layers:
                states.append(x)
        states[-1] = self.norm(x)
        return tuple(states) if all_layers else states[-1]

    def tokens(self, ids: Tensor) -> Tensor:
        return embed_ids(ids, self.tok_embed.weight) * token_scale(self.config.pos_embed, self.config.width)

    def generate(
        self,
        prompt: Tensor,
        *,
        max_new_tokens: int,
        strategy: Strategy = Greedy(),
        eos_id: int | None = None,
        use_cache: bool = True,
    ) -> GenerateOutput:
        """Continues each prompt (B,L) by up to max_new_tokens tokens, or until `eos_id`."""
        check_generation(prompt, max_new_tokens, self.config.vocab_size, eos_id)
        check_context_length(self.config, prompt.shape[1] + max_new_tokens - 1)

        def make_state(n_each: int) -> DecodeState:
            cache = DecoderCache(self.config.depth) if use_cache else None
            return ModelDecodeState(lambda ids, cache: self(ids, cache=cache), cache)

        with eval_mode(self), torch.no_grad():
            return strategy(make_state, prompt, max_new_tokens, eos_id)
