"""The decoder-only language model: each token is told from the ones before it.

Dims: B batch, L length, E model width, V vocabulary.
"""

import torch
from torch import Tensor, nn

from clearhead.models import build
from clearhead.models.config import LanguageConfig
from clearhead.models.generate import Generated, Greedy, Strategy, Writer, check_generation, testing_stage
from clearhead.models.inputs import check_ids, embeddings_or
from clearhead.nn import masks
from clearhead.nn.cache import Cache
from clearhead.nn.linear import xavier_linear


class LanguageModel(nn.Module):
    """ids (B,L) -> logits (B,L,V) of the token after each."""

    def __init__(self, config: LanguageConfig):
        super().__init__()
        self.config = config
        self.embed = token_table(config.n_tokens, config.width)
        self.positions = build.positions(config.positions, config.context, config)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = build.encoder(config)
        self.head = xavier_linear(config.width, config.n_tokens, bias=False)
        if config.tie_weights:
            self.head.weight = self.embed.weight

    def forward(
        self,
        ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """With a cache, ids are the newest tokens only. `mask` (to B,H,L,K) is joined with the causal one."""
        x = embeddings_or(self.tokens, ids, inputs_embeds, self.config.width)
        start = 0 if cache is None else cache.length
        length = x.shape[1]
        causal = masks.causal(length, start + length, x.device)
        x = self.dropout(self.positions(x, start))
        angles, bias = self.positions.inside(x, start)
        x = self.encoder(x, mask=causal if mask is None else causal & mask, angles=angles, bias=bias, cache=cache)
        return self.head(x)

    def tokens(self, ids: Tensor) -> Tensor:
        check_ids(ids, self.config.n_tokens)
        return self.embed(ids)

    def generate(
        self,
        prompt: Tensor,
        how: Strategy = Greedy(),
        *,
        n_tokens: int,
        end: int | None = None,
        use_cache: bool = True,
    ) -> Generated:
        """Continues each prompt (B,L) by up to n_tokens tokens, or until `end`."""
        check_generation(prompt, n_tokens, self.config.n_tokens, end)

        def writers(n_each: int) -> Writer:
            cache = Cache(self.config.depth) if use_cache else None
            return Writer(lambda ids, cache: self(ids, cache=cache), cache)

        with testing_stage(self):
            return how(writers, prompt, n_tokens, end)


def token_table(n_tokens: int, width: int) -> nn.Embedding:
    """A learned vector for each token, of about unit length: a table that also serves as output gives logits near 0."""
    table = nn.Embedding(n_tokens, width)
    with torch.no_grad():
        nn.init.normal_(table.weight, std=width**-0.5)
    return table
