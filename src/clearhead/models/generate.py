"""Generation: from the logits of the next token to a sequence.

A `Writer` knows how a model continues a sequence; `Greedy`, `Sampling` and `Beam` (in beam.py) decide which token is
taken. All work with and without a key/value cache, and answer the same.
Dims: B batch, N candidates for each example, L prompt length, T new tokens, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.models.config import LanguageConfig, Seq2SeqConfig
from clearhead.nn.cache import DecoderCache

MOST_SEED = torch.iinfo(torch.int64).max
"""a generator takes no more"""


@dataclass(frozen=True)
class GenerateOutput:
    """New tokens (the prompt is not among them); for each example its N candidates, the best first."""

    candidates: Tensor
    """(B,N,T); padded with eos_id"""
    lengths: Tensor
    """(B,N) new tokens, the end token included"""
    scores: Tensor
    """(B,N) log-probability of those tokens under the model"""

    @property
    def ids(self) -> Tensor:
        """(B,T): the best candidate of each example."""
        return self.candidates[:, 0]


class DecodeState(Protocol):
    """The next token's logits after sequences that grow."""

    def next_logits(self, ids: Tensor) -> Tensor:
        """(N,length) -> (N,V)"""

    def select(self, rows: Tensor) -> None:
        """These rows go on, in this order."""


class ModelDecodeState:
    """`continue_with(ids, cache)` is a model's own pass: logits (N,length,V), of the newest ids if there is a cache."""

    def __init__(self, continue_with: Callable[[Tensor, DecoderCache | None], Tensor], cache: DecoderCache | None):
        self.continue_with, self.cache = continue_with, cache

    def next_logits(self, ids: Tensor) -> Tensor:
        known = 0 if self.cache is None else self.cache.length
        return self.continue_with(ids[:, known:], self.cache)[:, -1]

    def select(self, rows: Tensor) -> None:
        if self.cache is not None:
            self.cache.select(rows)


Strategy = Callable[[Callable[[int], DecodeState], Tensor, int, int | None], GenerateOutput]
"""(make_state, prompt (B,L), max_new_tokens, eos_id) -> GenerateOutput.

make_state(N) makes the DecodeState of N sequences per example."""


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
    """the same seed draws the same tokens; without one, torch's own random state decides"""

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature must be above 0, got {self.temperature}; use top_k=1 for greedy decoding")
        if self.top_k is not None and (not isinstance(self.top_k, int) or self.top_k < 1):
            raise ValueError(f"top_k must be at least 1, got {self.top_k}; leave it out to keep all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}; leave it out to keep all tokens")
        if self.seed is not None and (not isinstance(self.seed, int) or not 0 <= self.seed <= MOST_SEED):
            raise ValueError(f"seed must be a whole number from 0 to {MOST_SEED}, got {self.seed}; choose another")

    def __call__(
        self, make_state: Callable[[int], DecodeState], prompt: Tensor, max_new_tokens: int, eos_id: int | None
    ) -> GenerateOutput:
        random = None if self.seed is None else torch.Generator(prompt.device).manual_seed(self.seed)

        def draw(logits: Tensor) -> Tensor:
            shares = self.distribution(logits)
            return torch.multinomial(shares, 1, generator=random)[:, 0]

        return decode(make_state(1), prompt, max_new_tokens, eos_id, draw)

    def distribution(self, logits: Tensor) -> Tensor:
        """What is drawn from. (B,V) -> (B,V)"""
        logits = logits.double()  # the largest becomes 0, and stays it at any temperature
        logits = (logits - logits.amax(-1, keepdim=True)) / self.temperature
        if self.top_k is not None:
            logits = keep_top_k(logits, self.top_k)
        if self.top_p is not None:
            logits = keep_top_p(logits, self.top_p)
        return logits.softmax(-1)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """-inf for all but the k largest of each row (and what ties with the last of them)."""
    smallest_kept = logits.topk(min(k, logits.shape[-1])).values[:, -1:]
    return logits.masked_fill(logits < smallest_kept, -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """-inf for all but the fewest tokens of each row whose probabilities sum to p; the most probable token is kept."""
    ordered, tokens = logits.sort(descending=True)
    shares = ordered.softmax(-1)
    mass_before = shares.cumsum(-1) - shares
    drop_ordered = mass_before >= p
    drop_ordered[:, 0] = False
    return logits.masked_fill(drop_ordered.gather(-1, tokens.argsort(-1)), -torch.inf)


def decode(
    state: DecodeState, prompt: Tensor, max_new_tokens: int, eos_id: int | None, choose: Callable[[Tensor], Tensor]
) -> GenerateOutput:
    """One candidate per example: choose (B,V) -> (B,) picks each next token."""
    ids, n_prompt = prompt, prompt.shape[1]
    ended = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
    lengths = torch.zeros(len(prompt), dtype=torch.long, device=prompt.device)
    scores = torch.zeros(len(prompt), device=prompt.device)
    for _ in range(max_new_tokens):
        logits = state.next_logits(ids)
        token = choose(logits)
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
    """At least in float32: sums of many would drown in less."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def check_generation(prompt: Tensor, max_new_tokens: int, vocab_size: int, eos_id: int | None) -> None:
    if prompt.dim() != 2 or not prompt.numel():
        raise ValueError(
            "a prompt must be ids (batch, length) with at least one token for one example, "
            f"got shape {tuple(prompt.shape)}; "
            "add a batch of one with prompt[None], and begin with the token that begins every text"
        )
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(
            f"max_new_tokens must be at least 1, got {max_new_tokens}; it is the largest number of new tokens"
        )
    if eos_id is not None and not (isinstance(eos_id, int) and 0 <= eos_id < vocab_size):
        raise ValueError(
            f"eos_id must be an id from 0 to {vocab_size - 1}, got {eos_id}; None generates all max_new_tokens"
        )


def free_positions(config: LanguageConfig | Seq2SeqConfig, n_prompt: int, max_new_tokens: int) -> int:
    """How many new tokens fit after a prompt: all of them, unless a learned position table ends before."""
    return (
        min(max_new_tokens, config.context_length - n_prompt + 1) if config.pos_embed == "learned" else max_new_tokens
    )


def check_room(config: LanguageConfig | Seq2SeqConfig, length: int) -> None:
    """Before the first token rather than at the one that no longer fits."""
    if config.pos_embed == "learned" and length > config.context_length:
        raise ValueError(
            f"prompt and new tokens must fit the learned position table of {config.context_length} rows, got {length}; "
            "ask for fewer tokens, or build the model with a larger context_length or another pos_embed"
        )


NEVER = -torch.inf
MOST = 1000
"""largest beam size"""


@dataclass(frozen=True)
class Beam:
    """Beam search over `size` sequences, ranked by log-probability / length ** length_penalty.

    The greedy sequence stays a candidate, so the result is never less probable than greedy decoding's.
    """

    size: int = 5
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or not 1 <= self.size <= MOST:
            raise ValueError(f"a beam's size must be from 1 to {MOST}, got {self.size}; 1 is greedy search")
        if not 0 <= self.length_penalty <= 10:
            raise ValueError(
                f"length_penalty must be from 0 to 10, got {self.length_penalty}; 0 compares plain log-probabilities"
            )

    def __call__(
        self, make_state: Callable[[int], DecodeState], prompt: Tensor, max_new_tokens: int, eos_id: int | None
    ) -> GenerateOutput:
        if self.size == 1:
            return Greedy()(make_state, prompt, max_new_tokens, eos_id)
        found = self.search(make_state(self.size), prompt, max_new_tokens, eos_id)
        greedy = Greedy()(make_state, prompt, max_new_tokens, eos_id)
        greedy = replace(greedy, candidates=filled(greedy.candidates, max_new_tokens, eos_id))
        best = self.with_greedy(found, greedy)
        return replace(best, candidates=best.candidates[..., : int(best.lengths.max())])

    def with_greedy(self, found: GenerateOutput, greedy: GenerateOutput) -> GenerateOutput:
        """The `size` best of both: first what is at least as probable as the greedy answer, then the rest, by rank."""
        same = (found.candidates == greedy.candidates).all(-1)  # (B,N)
        again = found.scores.masked_fill(~same, torch.inf).amin(-1, keepdim=True)  # it may differ in its last bits
        least = torch.minimum(greedy.scores, again)
        both = joined(found, replace(greedy, scores=greedy.scores.masked_fill(same.any(-1, keepdim=True), NEVER)))
        by_rank = self.rank(both.scores, both.lengths).argsort(descending=True, stable=True)
        is_behind = (both.scores < least).gather(1, by_rank)
        return chosen(both, by_rank.gather(1, is_behind.int().argsort(stable=True))[:, : self.size])

    def search(self, state: DecodeState, prompt: Tensor, max_new_tokens: int, eos_id: int | None) -> GenerateOutput:
        n_examples, n_prompt = prompt.shape
        live = prompt[:, None].expand(-1, self.size, -1)  # (B,N,length)
        nothing = torch.full((n_examples, self.size), NEVER, device=prompt.device)
        ended = candidates(live[..., :0], nothing, 1, max_new_tokens, eos_id)
        n_ended = torch.zeros_like(prompt[:, :1])
        live_scores = nothing.clone()
        live_scores[:, 0] = 0.0  # all beams begin alike: one of them is enough
        first_row = torch.arange(n_examples, device=prompt.device)[:, None] * self.size
        for length in range(1, max_new_tokens + 1):
            log_p = log_probabilities(state.next_logits(live.flatten(0, 1)))  # (B*N,V)
            totals = (live_scores.flatten()[:, None] + log_p).reshape(n_examples, -1)  # (B,N*V)
            # Each beam can end in one way, so at least N of the best 2N go on.
            scores, choices = totals.topk(min(2 * self.size, totals.shape[1]))
            beams, tokens = choices // log_p.shape[-1], choices % log_p.shape[-1]
            grown = torch.cat([select_candidates(live, beams), tokens[..., None]], dim=-1)
            if eos_id is not None:
                ends = (tokens == eos_id) & (torch.arange(tokens.shape[1], device=tokens.device) < self.size)
                new = candidates(
                    grown[..., n_prompt:], scores.masked_fill(~ends, NEVER), length, max_new_tokens, eos_id
                )
                ended, n_ended = self.best_of(ended, new), n_ended + ends.sum(1, keepdim=True)
                # A beam that has ended is used up: with one beam, that is greedy search.
                scores = scores.masked_fill((tokens == eos_id) | (n_ended >= self.size), NEVER)
            live_scores, kept = scores.topk(self.size)
            live = select_candidates(grown, kept)
            if self.decided(ended, live_scores, max_new_tokens):
                return ended
            state.select((first_row + beams.gather(1, kept)).flatten())
        unended = candidates(live[..., n_prompt:], live_scores, max_new_tokens, max_new_tokens, eos_id)
        return self.best_of(ended, unended)

    def rank(self, scores: Tensor, lengths: Tensor | int) -> Tensor:
        return scores / lengths**self.length_penalty

    def decided(self, ended: GenerateOutput, live_scores: Tensor, max_new_tokens: int) -> bool:
        """Nothing that goes on can still become a candidate: its score only falls, its length only grows."""
        hope = self.rank(live_scores[:, 0], max_new_tokens)
        return bool((self.rank(ended.scores, ended.lengths)[:, -1] >= hope).all())

    def best_of(self, some: GenerateOutput, others: GenerateOutput) -> GenerateOutput:
        """The `size` best of both."""
        both = joined(some, others)
        return chosen(both, self.rank(both.scores, both.lengths).topk(self.size).indices)


def candidates(ids: Tensor, scores: Tensor, length: int, max_new_tokens: int, eos_id: int | None) -> GenerateOutput:
    """Sequences (B,M,T) of one length with their scores (B,M); NEVER marks what is no candidate."""
    return GenerateOutput(
        filled(ids, max_new_tokens, eos_id), torch.full_like(scores, length, dtype=torch.long), scores
    )


def filled(ids: Tensor, max_new_tokens: int, eos_id: int | None) -> Tensor:
    """(B,M,T) -> (B,M,max_new_tokens), so that sequences can be compared and joined."""
    return F.pad(ids, (0, max_new_tokens - ids.shape[-1]), value=0 if eos_id is None else eos_id)


def joined(some: GenerateOutput, others: GenerateOutput) -> GenerateOutput:
    """The candidates of both, one after the other."""
    return GenerateOutput(
        torch.cat([some.candidates, others.candidates], dim=1),
        torch.cat([some.lengths, others.lengths], dim=1),
        torch.cat([some.scores, others.scores], dim=1),
    )


def chosen(some: GenerateOutput, places: Tensor) -> GenerateOutput:
    """The candidates at these places (B,M), in this order."""
    return GenerateOutput(
        select_candidates(some.candidates, places), some.lengths.gather(1, places), some.scores.gather(1, places)
    )


def select_candidates(sequences: Tensor, chosen: Tensor) -> Tensor:
    """Whole sequences (B,N,T) by their number (B,M) -> (B,M,T)"""
    return sequences.gather(1, chosen[..., None].expand(-1, -1, sequences.shape[-1]))
