"""The encoder-decoder transformer (Vaswani et al., 2017): encode the source, then decode the target token by token.

An `Ensemble` averages the next-token probabilities of several such models.

Dims: B batch, L length, Q target tokens, K source tokens, E model width, V vocabulary.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.models.config import Activation, Norm, NormLayerName, PosEmbedName, Seq2SeqConfig, check_kind
from clearhead.models.generate import (
    DecodeState,
    GenerateOutput,
    Greedy,
    ModelDecodeState,
    Strategy,
    check_context_length,
    check_generation,
    log_probabilities,
)
from clearhead.models.presets import preset
from clearhead.models.stack import (
    build_decoder_blocks,
    build_encoder_blocks,
    build_pos_embed,
    embed_ids,
    final_norm,
    input_embeddings,
    padding_mask,
    token_embedding,
    token_scale,
)
from clearhead.nn import masks
from clearhead.nn.attention import Linear
from clearhead.nn.blocks import Decoder, Encoder, eval_mode
from clearhead.nn.cache import DecoderCache
from clearhead.validation import suggest_keywords


class Seq2Seq(nn.Module):
    """source (B,K), target so far (B,Q) -> logits (B,Q,V) of the target token after each."""

    @suggest_keywords
    def __init__(
        self,
        *,
        src_vocab_size: int,
        tgt_vocab_size: int,
        width: int,
        depth: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        qk_norm: bool = False,
        decoder_depth: int | None = None,
        context_length: int = 512,
        pos_embed: PosEmbedName = "sinusoidal",
        tie_weights: bool = False,
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
        self.config = config = Seq2SeqConfig(
            src_vocab_size=src_vocab_size,
            tgt_vocab_size=tgt_vocab_size,
            width=width,
            depth=depth,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            qk_norm=qk_norm,
            decoder_depth=decoder_depth,
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
        one_table = config.tie_weights and config.src_vocab_size == config.tgt_vocab_size
        self.src_embed = None if one_table else token_embedding(config.src_vocab_size, config.width)
        self.tgt_embed = token_embedding(config.tgt_vocab_size, config.width)
        self.src_pos_embed = build_pos_embed(config.pos_embed, config.context_length, config)
        self.tgt_pos_embed = build_pos_embed(config.pos_embed, config.context_length, config)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = Encoder(build_encoder_blocks(config), final_norm(config))
        self.decoder = Decoder(build_decoder_blocks(config, config.decoder_blocks), final_norm(config))
        self.lm_head = None if config.tie_weights else Linear(config.width, config.tgt_vocab_size, bias=False)

    @classmethod
    def from_config(cls, config: Seq2SeqConfig) -> "Seq2Seq":
        check_kind(config, Seq2SeqConfig)
        return cls(**vars(config))

    @classmethod
    def from_preset(cls, name: str, changes: Mapping[str, Any] | None = None) -> "Seq2Seq":
        """The model of a preset, with some fields of its config changed; `list_presets` has the names."""
        config = preset(name, changes)
        check_kind(config, Seq2SeqConfig)
        return cls(**vars(config))

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
        x = input_embeddings(self.source_tokens, source, inputs_embeds, self.config.width)
        x = self.dropout(self.src_pos_embed(x))
        rotary_angles, logit_bias = self.src_pos_embed.attention_inputs(x)
        return self.encoder(x, mask=padding_mask(source_lengths, x), rotary_angles=rotary_angles, logit_bias=logit_bias)

    def decode(
        self, target: Tensor, memory: Tensor, *, source_lengths: Tensor | None = None, cache: DecoderCache | None = None
    ) -> Tensor:
        """Logits (B,Q,V); with a cache, `target` is the newest tokens only."""
        start = 0 if cache is None else cache.length
        x = self.dropout(self.tgt_pos_embed(self.target_tokens(target), start))
        rotary_angles, logit_bias = self.tgt_pos_embed.attention_inputs(x, start)
        length = x.shape[1]
        x = self.decoder(
            x,
            memory,
            mask=masks.causal(length, start + length, x.device),
            memory_mask=padding_mask(source_lengths, memory),
            rotary_angles=rotary_angles,
            logit_bias=logit_bias,
            cache=cache,
        )
        return F.linear(x, self.tgt_embed.weight) if self.lm_head is None else self.lm_head(x)

    def source_tokens(self, ids: Tensor) -> Tensor:
        table = self.tgt_embed if self.src_embed is None else self.src_embed
        return embed_ids(ids, table.weight) * token_scale(self.config.pos_embed, self.config.width)

    def target_tokens(self, ids: Tensor) -> Tensor:
        return embed_ids(ids, self.tgt_embed.weight) * token_scale(self.config.pos_embed, self.config.width)

    def generate(
        self,
        source: Tensor,
        *,
        bos_id: int,
        eos_id: int | None,
        max_new_tokens: int,
        strategy: Strategy = Greedy(),
        source_lengths: Tensor | None = None,
        use_cache: bool = True,
    ) -> GenerateOutput:
        """Writes a target for each source (B,K): from the token `bos_id` to `eos_id`, or max_new_tokens."""
        prompt = torch.full((len(source), 1), bos_id, device=source.device)
        check_generation(prompt, max_new_tokens, self.config.tgt_vocab_size, eos_id)
        check_context_length(self.config, max_new_tokens)
        with eval_mode(self), torch.no_grad():
            return strategy(
                self.decode_states(source, source_lengths, use_cache=use_cache), prompt, max_new_tokens, eos_id
            )

    def decode_states(
        self, source: Tensor, source_lengths: Tensor | None = None, *, use_cache: bool = True
    ) -> Callable[[int], DecodeState]:
        """For a strategy: make_state(N) decodes N targets for each source (B,K)."""
        memory = self.encode(source, source_lengths=source_lengths)

        def make_state(n_each: int) -> DecodeState:
            """Every source n_each times, one after the other."""
            rows = torch.arange(len(source), device=source.device).repeat_interleave(n_each)
            memories, lengths = memory[rows], None if source_lengths is None else source_lengths[rows]
            cache = DecoderCache(self.config.decoder_blocks) if use_cache else None
            return ModelDecodeState(
                lambda ids, cache: self.decode(ids, memories, source_lengths=lengths, cache=cache), cache
            )

        return make_state


class Ensemble(nn.Module):
    """Several encoder-decoders whose next-token probabilities are averaged; sizes may differ, vocabularies may not."""

    def __init__(self, models: Sequence[Seq2Seq]):
        super().__init__()
        sizes = sorted({(model.config.src_vocab_size, model.config.tgt_vocab_size) for model in models})
        if len(sizes) != 1:
            raise ValueError(f"all models of an ensemble must have the same vocabularies, got sizes {sizes}")
        self.parts = nn.ModuleList(models)

    @property
    def models(self) -> list[Seq2Seq]:
        return cast(list[Seq2Seq], list(self.parts))

    def generate(
        self,
        source: Tensor,
        *,
        bos_id: int,
        eos_id: int | None,
        max_new_tokens: int,
        strategy: Strategy = Greedy(),
        source_lengths: Tensor | None = None,
        use_cache: bool = True,
    ) -> GenerateOutput:
        """As Seq2Seq.generate; scores are log-probabilities under the mean."""
        prompt = torch.full((len(source), 1), bos_id, device=source.device)
        check_generation(prompt, max_new_tokens, self.models[0].config.tgt_vocab_size, eos_id)
        for model in self.models:
            check_context_length(model.config, max_new_tokens)
        with eval_mode(self), torch.no_grad():
            makers = [model.decode_states(source, source_lengths, use_cache=use_cache) for model in self.models]
            return strategy(
                lambda n_each: EnsembleDecodeState([maker(n_each) for maker in makers]), prompt, max_new_tokens, eos_id
            )


class EnsembleDecodeState:
    """Asks all writers for the next token, and answers their mean."""

    def __init__(self, states: Sequence[DecodeState]):
        self.states = states

    def next_logits(self, ids: Tensor) -> Tensor:
        each = torch.stack([log_probabilities(state.next_logits(ids)) for state in self.states])  # (states,N,V)
        return each.logsumexp(0) - math.log(len(self.states))

    def select(self, rows: Tensor) -> None:
        for state in self.states:
            state.select(rows)
