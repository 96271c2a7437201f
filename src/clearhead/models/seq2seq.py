"""The encoder-decoder of 2017: read the whole source, then write the target token by token.

Dims: B batch, L length, Q target tokens, K source tokens, E model width, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from clearhead.models import build
from clearhead.models.config import Seq2SeqConfig, check_kind
from clearhead.models.embeddings import embed_ids, embeddings_or, padding_mask, token_embedding, token_scale
from clearhead.models.generate import (
    DecodeState,
    GenerateOutput,
    Greedy,
    ModelDecodeState,
    Strategy,
    check_generation,
    check_room,
    log_probabilities,
)
from clearhead.nn import masks
from clearhead.nn.attention import Linear, TiedLinear
from clearhead.nn.cache import DecoderCache
from clearhead.nn.eval_mode import eval_mode


class Seq2Seq(nn.Module):
    """source (B,K), target so far (B,Q) -> logits (B,Q,V) of the target token after each."""

    def __init__(self, config: Seq2SeqConfig):
        super().__init__()
        check_kind(config, Seq2SeqConfig)
        self.config = config
        one_table = config.tie_weights and config.src_vocab_size == config.tgt_vocab_size
        self.embed_source = None if one_table else token_embedding(config.src_vocab_size, config.width)
        self.embed_target = token_embedding(config.tgt_vocab_size, config.width)
        self.source_positions = build.build_pos_embed(config.positions, config.context, config)
        self.target_positions = build.build_pos_embed(config.positions, config.context, config)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = build.build_encoder(config)
        self.decoder = build.build_decoder(config, config.decoder_blocks)
        self.head = TiedLinear() if config.tie_weights else Linear(config.width, config.tgt_vocab_size, bias=False)

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
        self, target: Tensor, memory: Tensor, *, source_lengths: Tensor | None = None, cache: DecoderCache | None = None
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
        return embed_ids(ids, table.weight) * token_scale(self.config.positions, self.config.width)

    def target_tokens(self, ids: Tensor) -> Tensor:
        return embed_ids(ids, self.embed_target.weight) * token_scale(self.config.positions, self.config.width)

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
    ) -> GenerateOutput:
        """Writes a target for each source (B,K): from the token `begin` to the token `end`, or n_tokens."""
        prompt = torch.full((len(source), 1), begin, device=source.device)
        check_generation(prompt, n_tokens, self.config.tgt_vocab_size, end)
        check_room(self.config, n_tokens)
        with eval_mode(self), torch.no_grad():
            return how(self.writers(source, source_lengths, use_cache=use_cache), prompt, n_tokens, end)

    def writers(
        self, source: Tensor, source_lengths: Tensor | None = None, *, use_cache: bool = True
    ) -> Callable[[int], DecodeState]:
        """For a strategy: writers(N) writes N targets for each source (B,K)."""
        memory = self.encode(source, source_lengths=source_lengths)

        def writers(n_each: int) -> DecodeState:
            """Every source n_each times, one after the other."""
            rows = torch.arange(len(source), device=source.device).repeat_interleave(n_each)
            memories, lengths = memory[rows], None if source_lengths is None else source_lengths[rows]
            cache = DecoderCache(self.config.decoder_blocks) if use_cache else None
            return ModelDecodeState(
                lambda ids, cache: self.decode(ids, memories, source_lengths=lengths, cache=cache), cache
            )

        return writers


# Several encoder-decoders that write as one: the probability of the next token is the mean of theirs.
#
# Models that were trained apart make different mistakes, and their mean makes fewer.
# Dims: B batch, K source tokens, N sequences, V vocabulary.


class Ensemble(nn.Module):
    """Models of the same vocabularies, of any size each."""

    def __init__(self, models: Sequence[Seq2Seq]):
        super().__init__()
        sizes = sorted({(model.config.src_vocab_size, model.config.tgt_vocab_size) for model in models})
        if len(sizes) != 1:
            raise ValueError(
                f"models that write together have the same vocabularies, got sizes {sizes}; train them on the same data"
            )
        self.parts = nn.ModuleList(models)

    @property
    def models(self) -> list[Seq2Seq]:
        return cast(list[Seq2Seq], list(self.parts))

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
    ) -> GenerateOutput:
        """As Seq2Seq.generate; scores are log-probabilities under the mean."""
        prompt = torch.full((len(source), 1), begin, device=source.device)
        check_generation(prompt, n_tokens, self.models[0].config.tgt_vocab_size, end)
        for model in self.models:
            check_room(model.config, n_tokens)
        with eval_mode(self), torch.no_grad():
            makers = [model.writers(source, source_lengths, use_cache=use_cache) for model in self.models]
            return how(lambda n_each: EnsembleDecodeState([maker(n_each) for maker in makers]), prompt, n_tokens, end)


class EnsembleDecodeState:
    """Asks all writers for the next token, and answers their mean."""

    def __init__(self, writers: Sequence[DecodeState]):
        self.writers = writers

    def next_logits(self, ids: Tensor) -> Tensor:
        each = torch.stack([log_probabilities(writer.next_logits(ids)) for writer in self.writers])  # (writers,N,V)
        return each.logsumexp(0) - math.log(len(self.writers))

    def select(self, rows: Tensor) -> None:
        for writer in self.writers:
            writer.select(rows)
