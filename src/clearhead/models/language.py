"""The decoder-only language model: each token is told from the ones before it.

Dims: B batch, L length, E model width, V vocabulary.
"""

import torch
from torch import Tensor, nn

from clearhead.models import build
from clearhead.models.config import LanguageConfig, check_kind
from clearhead.models.embeddings import embed_ids, embeddings_or, token_embedding, token_scale
from clearhead.models.generate import (
    DecodeState,
    GenerateOutput,
    Greedy,
    ModelDecodeState,
    Strategy,
    check_generation,
    check_room,
)
from clearhead.nn import masks
from clearhead.nn.attention import Linear, TiedLinear
from clearhead.nn.cache import DecoderCache
from clearhead.nn.eval_mode import eval_mode
from clearhead.nn.masks import Mask, check_mask


class LanguageModel(nn.Module):
    """ids (B,L) -> logits (B,L,V) of the token after each."""

    def __init__(self, config: LanguageConfig):
        super().__init__()
        check_kind(config, LanguageConfig)
        self.config = config
        self.embed = token_embedding(config.n_tokens, config.width)
        self.positions = build.build_pos_embed(config.positions, config.context, config)
        self.dropout = nn.Dropout(config.dropout)
        self.stack = build.build_encoder(config)
        self.head = TiedLinear() if config.tie_weights else Linear(config.width, config.n_tokens, bias=False)

    def forward(
        self,
        ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        mask: Mask | None = None,
        cache: DecoderCache | None = None,
    ) -> Tensor:
        """With a cache, ids are the newest tokens only. `mask` (to B,H,L,K) is joined with the causal one."""
        x = self.features(ids, inputs_embeds=inputs_embeds, mask=mask, cache=cache)
        return self.head(x, self.embed.weight) if self.config.tie_weights else self.head(x)

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
        x = embeddings_or(self.tokens, ids, inputs_embeds, self.config.width)
        start = 0 if cache is None else cache.length
        n_examples, length, _ = x.shape
        if mask is not None:
            check_mask(mask, (n_examples, self.config.num_heads, length, start + length))
        causal = masks.causal(length, start + length, x.device)
        x = self.dropout(self.positions(x, start))
        angles, logit_bias = self.positions.inside(x, start)
        mask = causal if mask is None else causal & mask
        return self.stack(x, mask=mask, angles=angles, logit_bias=logit_bias, cache=cache, all_layers=all_layers)

    def tokens(self, ids: Tensor) -> Tensor:
        return embed_ids(ids, self.embed.weight) * token_scale(self.config.positions, self.config.width)

    def generate(
        self,
        prompt: Tensor,
        how: Strategy = Greedy(),
        *,
        n_tokens: int,
        end: int | None = None,
        use_cache: bool = True,
    ) -> GenerateOutput:
        """Continues each prompt (B,L) by up to n_tokens tokens, or until `end`."""
        check_generation(prompt, n_tokens, self.config.n_tokens, end)
        check_room(self.config, prompt.shape[1] + n_tokens - 1)

        def writers(n_each: int) -> DecodeState:
            cache = DecoderCache(self.config.depth) if use_cache else None
            return ModelDecodeState(lambda ids, cache: self(ids, cache=cache), cache)

        with eval_mode(self), torch.no_grad():
            return how(writers, prompt, n_tokens, end)
