"""Autoregressive generation: greedy decoding, sampling and beam search.

A `DecodeState` returns the logits of the next token; a strategy (`Greedy`, `Sampling` or `Beam`) selects the token.
Results are the same with and without a key-value cache.
Dims: B batch, N beams or candidates per example, L prompt length, T new tokens, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.models.config import LanguageConfig, Seq2SeqConfig
from clearhead.nn.cache import DecoderCache

MAX_SEED = torch.iinfo(torch.int64).max
MAX_BEAM_SIZE = 1000


@dataclass(frozen=True)
class GenerateOutput:
    """The generated tokens, without the prompt: N candidates for each example, best first."""

    candidates: Tensor
    """(B,N,T), padded with eos_id"""
    lengths: Tensor
    """(B,N): number of new tokens, including the end-of-sequence token"""
    scores: Tensor
    """(B,N): log-probability of the new tokens"""

    @property
    def ids(self) -> Tensor:
        """(B,T): the best candidate of each example."""
        return self.candidates[:, 0]


class DecodeState(Protocol):
    """The logits of the next token for a batch of growing sequences."""

    def next_logits(self, ids: Tensor) -> Tensor:
        """(N,length) -> (N,V)"""

    def select(self, rows: Tensor) -> None:
        """Continue with these rows, in this order."""


class ModelDecodeState:
    """`forward(ids, cache)` returns logits (N,length,V). With a cache, `ids` are the tokens that are not in it yet."""

    def __init__(self, forward: Callable[[Tensor, DecoderCache | None], Tensor], cache: DecoderCache | None):
        self.forward, self.cache = forward, cache

    def next_logits(self, ids: Tensor) -> Tensor:
        cached = 0 if self.cache is None else self.cache.length
        return self.forward(ids[:, cached:], self.cache)[:, -1]

    def select(self, rows: Tensor) -> None:
        if self.cache is not None:
            self.cache.select(rows)


Strategy = Callable[[Callable[[int], DecodeState], Tensor, int, int | None], GenerateOutput]
"""(make_state, prompt (B,L), max_new_tokens, eos_id) -> GenerateOutput.

make_state(N) returns a DecodeState for N sequences per example."""


@dataclass(frozen=True)
class Greedy:
    """Greedy decoding: the most probable token at each step."""

    def __call__(
        self, make_state: Callable[[int], DecodeState], prompt: Tensor, max_new_tokens: int, eos_id: int | None
    ) -> GenerateOutput:
        return decode(make_state(1), prompt, max_new_tokens, eos_id, lambda logits: logits.argmax(-1))


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Tokens sampled from softmax(logits / temperature), restricted to the top k tokens or to a nucleus of mass top_p.

    A temperature below 1 sharpens the distribution; top_p keeps the fewest tokens whose probabilities sum to top_p.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    """seed of a generator of its own; None uses torch's global random state"""

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature must be above 0, got {self.temperature}; use top_k=1 for greedy decoding")
        if self.top_k is not None and (not isinstance(self.top_k, int) or self.top_k < 1):
            raise ValueError(f"top_k must be at least 1, got {self.top_k}; leave it out to keep all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}; leave it out to keep all tokens")
        if self.seed is not None and (not isinstance(self.seed, int) or not 0 <= self.seed <= MAX_SEED):
            raise ValueError(f"seed must be an integer from 0 to {MAX_SEED}, got {self.seed}")

    def __call__(
        self, make_state: Callable[[int], DecodeState], prompt: Tensor, max_new_tokens: int, eos_id: int | None
    ) -> GenerateOutput:
        generator = None if self.seed is None else torch.Generator(prompt.device).manual_seed(self.seed)

        def sample(logits: Tensor) -> Tensor:
            return torch.multinomial(self.distribution(logits), 1, generator=generator)[:, 0]

        return decode(make_state(1), prompt, max_new_tokens, eos_id, sample)

    def distribution(self, logits: Tensor) -> Tensor:
        """The probabilities of the next token: logits (B,V) -> (B,V)"""
        logits = logits.float() if logits.device.type == "mps" else logits.double()  # MPS has no float64
        # the largest logit becomes 0, so that no temperature overflows
        logits = (logits - logits.amax(-1, keepdim=True)) / self.temperature
        if self.top_k is not None:
            logits = keep_top_k(logits, self.top_k)
        if self.top_p is not None:
            logits = keep_top_p(logits, self.top_p)
        return logits.softmax(-1)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """All but the k largest logits of each row become -inf; logits equal to the k-th largest are kept."""
    smallest_kept = logits.topk(min(k, logits.shape[-1])).values[:, -1:]
    return logits.masked_fill(logits < smallest_kept, -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """All logits become -inf except those of the fewest tokens whose probabilities sum to p, and at least one."""
    ordered, tokens = logits.sort(descending=True)
    probabilities = ordered.softmax(-1)
    mass_before = probabilities.cumsum(-1) - probabilities
    drop_ordered = mass_before >= p
    drop_ordered[:, 0] = False
    return logits.masked_fill(drop_ordered.gather(-1, tokens.argsort(-1)), -torch.inf)


def decode(
    state: DecodeState, prompt: Tensor, max_new_tokens: int, eos_id: int | None, select: Callable[[Tensor], Tensor]
) -> GenerateOutput:
    """Generate one sequence per example; `select` maps logits (B,V) to the next tokens (B,)."""
    ids, n_prompt = prompt, prompt.shape[1]
    ended = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
    lengths = torch.zeros(len(prompt), dtype=torch.long, device=prompt.device)
    scores = torch.zeros(len(prompt), device=prompt.device)
    for _ in range(max_new_tokens):
        logits = state.next_logits(ids)
        token = select(logits)
        if eos_id is not None:
            token = token.masked_fill(ended, eos_id)
        log_p = log_probabilities(logits).gather(-1, token[:, None])[:, 0]
        scores = scores + log_p.masked_fill(ended, 0.0)
        lengths = lengths + ~ended
        ids = torch.cat([ids, token[:, None]], dim=1)
        if eos_id is not None:
            ended = ended | (token == eos_id)
            if ended.all():
                break
    return GenerateOutput(ids[:, None, n_prompt:], lengths[:, None], scores[:, None])


def log_probabilities(logits: Tensor) -> Tensor:
    """At least in float32, because sums over many tokens lose accuracy in half precision."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def check_generation(prompt: Tensor, max_new_tokens: int, vocab_size: int, eos_id: int | None) -> None:
    if prompt.dim() != 2 or not prompt.numel():
        raise ValueError(
            f"prompt must be ids (B,L) with at least one example and one token, got shape {tuple(prompt.shape)}; "
            "prompt[None] adds a batch dimension"
        )
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be a positive integer, got {max_new_tokens}")
    if eos_id is not None and not (isinstance(eos_id, int) and 0 <= eos_id < vocab_size):
        raise ValueError(
            f"eos_id must be a token id from 0 to {vocab_size - 1}, or None to generate max_new_tokens, got {eos_id}"
        )


def free_positions(config: LanguageConfig | Seq2SeqConfig, n_prompt: int, max_new_tokens: int) -> int:
    """The number of new tokens that fit after a prompt; only a learned position table limits it."""
    return (
        min(max_new_tokens, config.context_length - n_prompt + 1) if config.pos_embed == "learned" else max_new_tokens
    )


def check_context_length(config: LanguageConfig | Seq2SeqConfig, length: int) -> None:
    """Raise an error before the first token is generated if prompt and new tokens exceed the position table."""
    if config.pos_embed == "learned" and length > config.context_length:
        raise ValueError(
            f"prompt and new tokens must fit the learned position table of {config.context_length} rows, got {length}; "
            "use a smaller max_new_tokens"
        )


@dataclass(frozen=True)
class Beam:
    """Beam search over `size` sequences, ranked by log-probability / length ** length_penalty.

    The greedy sequence is always a candidate, so the best candidate is at least as probable as greedy decoding.
    """

    size: int = 5
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or not 1 <= self.size <= MAX_BEAM_SIZE:
            raise ValueError(f"beam size must be from 1 to {MAX_BEAM_SIZE}, got {self.size}")
        if not 0 <= self.length_penalty <= 10:
            raise ValueError(
                f"length_penalty must be from 0 to 10, got {self.length_penalty}; 0 ranks by log-probability alone"
            )

    def __call__(
        self, make_state: Callable[[int], DecodeState], prompt: Tensor, max_new_tokens: int, eos_id: int | None
    ) -> GenerateOutput:
        if self.size == 1:
            return Greedy()(make_state, prompt, max_new_tokens, eos_id)
        beams = self.search(make_state(self.size), prompt, max_new_tokens, eos_id)
        greedy = Greedy()(make_state, prompt, max_new_tokens, eos_id)
        greedy = replace(greedy, candidates=pad_to_max(greedy.candidates, max_new_tokens, eos_id))
        best = self.merge_greedy(beams, greedy)
        return replace(best, candidates=best.candidates[..., : int(best.lengths.max())])

    def merge_greedy(self, beams: GenerateOutput, greedy: GenerateOutput) -> GenerateOutput:
        """The `size` best candidates: those at least as probable as the greedy one, then the others, each by rank."""
        is_greedy = (beams.candidates == greedy.candidates).all(-1)  # (B,N)
        # The score of the same sequence may differ in its last bits between the two searches.
        beam_scores = beams.scores.masked_fill(~is_greedy, torch.inf).amin(-1, keepdim=True)
        threshold = torch.minimum(greedy.scores, beam_scores)
        is_duplicate = is_greedy.any(-1, keepdim=True)
        both = concatenate(beams, replace(greedy, scores=greedy.scores.masked_fill(is_duplicate, -torch.inf)))
        by_rank = self.rank(both.scores, both.lengths).argsort(descending=True, stable=True)
        is_below = (both.scores < threshold).gather(1, by_rank)
        return gather_candidates(both, by_rank.gather(1, is_below.int().argsort(stable=True))[:, : self.size])

    def search(self, state: DecodeState, prompt: Tensor, max_new_tokens: int, eos_id: int | None) -> GenerateOutput:
        n_examples, n_prompt = prompt.shape
        live = prompt[:, None].expand(-1, self.size, -1)  # (B,N,length)
        empty_scores = torch.full((n_examples, self.size), -torch.inf, device=prompt.device)
        ended = make_candidates(live[..., :0], empty_scores, 1, max_new_tokens, eos_id)
        n_ended = torch.zeros_like(prompt[:, :1])
        live_scores = empty_scores.clone()
        live_scores[:, 0] = 0.0  # all beams begin with the same prompt, so only one of them may continue
        first_row = torch.arange(n_examples, device=prompt.device)[:, None] * self.size
        for length in range(1, max_new_tokens + 1):
            log_p = log_probabilities(state.next_logits(live.flatten(0, 1)))  # (B*N,V)
            totals = (live_scores.flatten()[:, None] + log_p).reshape(n_examples, -1)  # (B,N*V)
            # Each beam has one continuation that ends, so at least N of the best 2N continuations do not end.
            scores, indices = totals.topk(min(2 * self.size, totals.shape[1]))
            beams, tokens = indices // log_p.shape[-1], indices % log_p.shape[-1]
            extended = torch.cat([gather_sequences(live, beams), tokens[..., None]], dim=-1)
            if eos_id is not None:
                ends = (tokens == eos_id) & (torch.arange(tokens.shape[1], device=tokens.device) < self.size)
                new_scores = scores.masked_fill(~ends, -torch.inf)
                new = make_candidates(extended[..., n_prompt:], new_scores, length, max_new_tokens, eos_id)
                ended, n_ended = self.best_of(ended, new), n_ended + ends.sum(1, keepdim=True)
                # The search of an example stops after `size` ended sequences, so a single beam is greedy decoding.
                scores = scores.masked_fill((tokens == eos_id) | (n_ended >= self.size), -torch.inf)
            live_scores, kept = scores.topk(self.size)
            live = gather_sequences(extended, kept)
            if self.is_finished(ended, live_scores, max_new_tokens):
                return ended
            state.select((first_row + beams.gather(1, kept)).flatten())
        unended = make_candidates(live[..., n_prompt:], live_scores, max_new_tokens, max_new_tokens, eos_id)
        return self.best_of(ended, unended)

    def rank(self, scores: Tensor, lengths: Tensor | int) -> Tensor:
        return scores / lengths**self.length_penalty

    def is_finished(self, ended: GenerateOutput, live_scores: Tensor, max_new_tokens: int) -> bool:
        """Whether no live beam can still outrank an ended one. The score of a beam can only decrease."""
        upper_bound = self.rank(live_scores[:, 0], max_new_tokens)
        return bool((self.rank(ended.scores, ended.lengths)[:, -1] >= upper_bound).all())

    def best_of(self, a: GenerateOutput, b: GenerateOutput) -> GenerateOutput:
        """The `size` best candidates of both."""
        both = concatenate(a, b)
        return gather_candidates(both, self.rank(both.scores, both.lengths).topk(self.size).indices)


def make_candidates(
    ids: Tensor, scores: Tensor, length: int, max_new_tokens: int, eos_id: int | None
) -> GenerateOutput:
    """Sequences (B,M,T) of one length with scores (B,M), which are -inf for sequences that are not candidates."""
    lengths = torch.full_like(scores, length, dtype=torch.long)
    return GenerateOutput(pad_to_max(ids, max_new_tokens, eos_id), lengths, scores)


def pad_to_max(ids: Tensor, max_new_tokens: int, eos_id: int | None) -> Tensor:
    """(B,M,T) -> (B,M,max_new_tokens), so that sequences can be compared and concatenated."""
    return F.pad(ids, (0, max_new_tokens - ids.shape[-1]), value=0 if eos_id is None else eos_id)


def concatenate(a: GenerateOutput, b: GenerateOutput) -> GenerateOutput:
    """The candidates of both, along dim 1."""
    return GenerateOutput(
        torch.cat([a.candidates, b.candidates], dim=1),
        torch.cat([a.lengths, b.lengths], dim=1),
        torch.cat([a.scores, b.scores], dim=1),
    )


def gather_candidates(output: GenerateOutput, indices: Tensor) -> GenerateOutput:
    """The candidates at indices (B,M), in this order."""
    return GenerateOutput(
        gather_sequences(output.candidates, indices),
        output.lengths.gather(1, indices),
        output.scores.gather(1, indices),
    )


def gather_sequences(sequences: Tensor, indices: Tensor) -> Tensor:
    """Sequences (B,N,T) at indices (B,M) -> (B,M,T)"""
    return sequences.gather(1, indices[..., None].expand(-1, -1, sequences.shape[-1]))
