"""The encoder-decoder of 2017: read the whole source, then write the target token by token.

Dims: B batch, L length, Q target tokens, K source tokens, E model width, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from clearhead.models import build
from clearhead.models.config import Seq2SeqConfig, check_kind
from clearhead.models.generate import (
    Generated,
    Greedy,
    ModelWriter,
    Strategy,
    Writer,
    check_generation,
    check_room,
)
from clearhead.models.inputs import embeddings_or, look_up, padding_mask, token_scale, token_table
from clearhead.nn import masks
from clearhead.nn.cache import Cache
from clearhead.nn.linear import TiedLinear, XavierLinear
from clearhead.nn.stage import testing_stage


class Seq2Seq(nn.Module):
    """source (B,K), target so far (B,Q) -> logits (B,Q,V) of the target token after each."""

    def __init__(self, config: Seq2SeqConfig):
        super().__init__()
        check_kind(config, Seq2SeqConfig)
        self.config = config
        one_table = config.tie_weights and config.n_source == config.n_target
        self.embed_source = None if one_table else token_table(config.n_source, config.width)
        self.embed_target = token_table(config.n_target, config.width)
        self.source_positions = build.positions(config.positions, config.context, config)
        self.target_positions = build.positions(config.positions, config.context, config)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = build.encoder(config)
        self.decoder = build.decoder(config, config.decoder_blocks)
        self.head = TiedLinear() if config.tie_weights else XavierLinear(config.width, config.n_target, bias=False)

    def forward(
        self,
        source: Tensor | None,
        target: Tensor,
        *,
        inputs_embeds: Tensor | None = None,
        source_lengths: Tensor | None = None,
    ) -> Tensor:
        """`inputs_embeds` (B,K,E) may stand for the source. Padding at the target's end needs no mask: it is causal."""
        memory = self.encode(source, inputs_embeds=inputs_embeds, source_lengths=source_lengths)
        return self.decode(target, memory, source_lengths=source_lengths)

    def encode(
        self,
        source: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        source_lengths: Tensor | None = None,
    ) -> Tensor:
        """What the decoder attends to: (B,K) -> (B,K,E)"""
        x = embeddings_or(self.source_tokens, source, inputs_embeds, self.config.width)
        x = self.dropout(self.source_positions(x))
        angles, logit_bias = self.source_positions.inside(x)
        return self.encoder(x, mask=padding_mask(source_lengths, x), angles=angles, logit_bias=logit_bias)

    def decode(
        self, target: Tensor, memory: Tensor, *, source_lengths: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        """Logits (B,Q,V); with a cache, `target` is the newest tokens only."""
        start = 0 if cache is None else cache.length
        x = self.dropout(self.target_positions(self.target_tokens(target), start))
        angles, logit_bias = self.target_positions.inside(x, start)
        length = x.shape[1]
        x = self.decoder(
            x,
            memory,
            mask=masks.causal(length, start + length, x.device),
            memory_mask=padding_mask(source_lengths, memory),
            angles=angles,
            logit_bias=logit_bias,
            cache=cache,
        )
        return self.head(x, self.embed_target.weight) if self.config.tie_weights else self.head(x)

    def source_tokens(self, ids: Tensor) -> Tensor:
        table = self.embed_target if self.embed_source is None else self.embed_source
        return look_up(ids, table.weight) * token_scale(self.config.positions, self.config.width)

    def target_tokens(self, ids: Tensor) -> Tensor:
        return look_up(ids, self.embed_target.weight) * token_scale(self.config.positions, self.config.width)

    def generate(
        self,
        source: Tensor,
        how: Strategy = Greedy(),
        *,
        begin: int,
        end: int | None,
        n_tokens: int,
        source_lengths: Tensor | None = None,
        use_cache: bool = True,
    ) -> Generated:
        """Writes a target for each source (B,K): from the token `begin` to the token `end`, or n_tokens."""
        prompt = torch.full((len(source), 1), begin, device=source.device)
        check_generation(prompt, n_tokens, self.config.n_target, end)
        check_room(self.config, n_tokens)
        with testing_stage(self), torch.no_grad():
            return how(self.writers(source, source_lengths, use_cache=use_cache), prompt, n_tokens, end)

    def writers(
        self, source: Tensor, source_lengths: Tensor | None = None, *, use_cache: bool = True
    ) -> Callable[[int], Writer]:
        """For a strategy: writers(N) writes N targets for each source (B,K)."""
        memory = self.encode(source, source_lengths=source_lengths)

        def writers(n_each: int) -> Writer:
            """Every source n_each times, one after the other."""
            rows = torch.arange(len(source), device=source.device).repeat_interleave(n_each)
            memories, lengths = memory[rows], None if source_lengths is None else source_lengths[rows]
            cache = Cache(self.config.decoder_blocks) if use_cache else None
            return ModelWriter(
                lambda ids, cache: self.decode(ids, memories, source_lengths=lengths, cache=cache), cache
            )

        return writers
