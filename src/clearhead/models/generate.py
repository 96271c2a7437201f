"""Generation: from the logits of the next token to a sequence.

A `Writer` knows how a model continues a sequence; `Greedy`, `Sampling` and `Beam` (in beam.py) decide which token is
taken. All work with and without a key/value cache, and answer the same.
Dims: B batch, N candidates for each example, L prompt length, T new tokens, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from clearhead.models.config import LanguageConfig, Seq2SeqConfig
from clearhead.nn.cache import Cache

MOST_SEED = torch.iinfo(torch.int64).max
"""a generator takes no more"""


@dataclass(frozen=True)
class Generated:
    """New tokens (the prompt is not among them); for each example its N candidates, the best first."""

    candidates: Tensor
    """(B,N,T); after a candidate's end, the end token again"""
    lengths: Tensor
    """(B,N) new tokens, the end token included"""
    scores: Tensor
    """(B,N) log-probability of those tokens under the model"""

    @property
    def ids(self) -> Tensor:
        """(B,T): the best candidate of each example."""
        return self.candidates[:, 0]


class Writer(Protocol):
    """The next token's logits after sequences that grow."""

    def next_logits(self, ids: Tensor) -> Tensor:
        """(N,length) -> (N,V)"""

    def select(self, rows: Tensor) -> None:
        """These rows go on, in this order."""


class ModelWriter:
    """`continue_with(ids, cache)` is a model's own pass: logits (N,length,V), of the newest ids if there is a cache."""

    def __init__(self, continue_with: Callable[[Tensor, Cache | None], Tensor], cache: Cache | None):
        self.continue_with, self.cache = continue_with, cache

    def next_logits(self, ids: Tensor) -> Tensor:
        known = 0 if self.cache is None else self.cache.length
        return self.continue_with(ids[:, known:], self.cache)[:, -1]

    def select(self, rows: Tensor) -> None:
        if self.cache is not None:
            self.cache.select(rows)


Strategy = Callable[[Callable[[int], Writer], Tensor, int, int | None], Generated]
"""(writers, prompt (B,L), n_tokens, end) -> Generated; writers(N) makes a Writer for N sequences per example."""


@dataclass(frozen=True)
class Greedy:
    """Always the likeliest token."""

    def __call__(self, writers: Callable[[int], Writer], prompt: Tensor, n_tokens: int, end: int | None) -> Generated:
        return write(writers(1), prompt, n_tokens, end, lambda logits: logits.argmax(-1))


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Tokens drawn from the model's own distribution, sharpened or cut.

    temperature below 1 prefers likely tokens; top_k keeps the k likeliest; top_p the fewest that hold p of the mass.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    """the same seed draws the same tokens; without one, torch's own random state decides"""

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(
                f"temperature must be above 0, got {self.temperature}; for the likeliest token each time set top_k to 1"
            )
        if self.top_k is not None and (not isinstance(self.top_k, int) or self.top_k < 1):
            raise ValueError(f"top_k must be at least 1, got {self.top_k}; leave it out to keep all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}; leave it out to keep all tokens")
        if self.seed is not None and (not isinstance(self.seed, int) or not 0 <= self.seed <= MOST_SEED):
            raise ValueError(f"seed must be a whole number from 0 to {MOST_SEED}, got {self.seed}; choose another")

    def __call__(self, writers: Callable[[int], Writer], prompt: Tensor, n_tokens: int, end: int | None) -> Generated:
        random = None if self.seed is None else torch.Generator(prompt.device).manual_seed(self.seed)

        def draw(logits: Tensor) -> Tensor:
            shares = self.distribution(logits)
            return torch.multinomial(shares, 1, generator=random)[:, 0]

        return write(writers(1), prompt, n_tokens, end, draw)

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
    """-inf for all but the fewest tokens of each row whose probabilities add up to p; the likeliest always stays."""
    ordered, tokens = logits.sort(descending=True)
    shares = ordered.softmax(-1)
    mass_before = shares.cumsum(-1) - shares
    drop_ordered = mass_before >= p
    drop_ordered[:, 0] = False
    return logits.masked_fill(drop_ordered.gather(-1, tokens.argsort(-1)), -torch.inf)


def write(
    writer: Writer, prompt: Tensor, n_tokens: int, end: int | None, choose: Callable[[Tensor], Tensor]
) -> Generated:
    """One candidate per example: choose (B,V) -> (B,) the next token, until all have ended or n_tokens are written."""
    ids, n_prompt = prompt, prompt.shape[1]
    ended = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
    lengths = torch.zeros(len(prompt), dtype=torch.long, device=prompt.device)
    scores = torch.zeros(len(prompt), device=prompt.device)
    for _ in range(n_tokens):
        logits = writer.next_logits(ids)
        token = choose(logits)
        if end is not None:
            token = token.masked_fill(ended, end)
        log_p = log_probabilities(logits).gather(-1, token[:, None])[:, 0]
        scores = scores + log_p.masked_fill(ended, 0.0)
        lengths = lengths + ~ended
        ids = torch.cat([ids, token[:, None]], dim=1)
        if end is not None:
            ended = ended | (token == end)
            if ended.all():
                break
    return Generated(ids[:, None, n_prompt:], lengths[:, None], scores[:, None])


def log_probabilities(logits: Tensor) -> Tensor:
    """At least in float32: sums of many would drown in less."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def check_generation(prompt: Tensor, n_tokens: int, n_vocabulary: int, end: int | None) -> None:
    if prompt.dim() != 2 or not prompt.numel():
        raise ValueError(
            "a prompt must be ids (batch, length) with at least one token for one example, "
            f"got shape {tuple(prompt.shape)}; "
            "add a batch of one with prompt[None], and begin with the token that begins every text"
        )
    if not isinstance(n_tokens, int) or n_tokens < 1:
        raise ValueError(f"n_tokens must be at least 1, got {n_tokens}; it is the largest number of new tokens")
    if end is not None and not (isinstance(end, int) and 0 <= end < n_vocabulary):
        raise ValueError(f"end must be an id from 0 to {n_vocabulary - 1}, got {end}; None generates all n_tokens")


def room(config: LanguageConfig | Seq2SeqConfig, n_prompt: int, n_tokens: int) -> int:
    """How many of n_tokens new ones fit behind a prompt: all, but for a learned position table that ends before."""
    return min(n_tokens, config.context - n_prompt + 1) if config.positions == "learned" else n_tokens


def check_room(config: LanguageConfig | Seq2SeqConfig, length: int) -> None:
    """Before the first token rather than at the one that no longer fits."""
    if config.positions == "learned" and length > config.context:
        raise ValueError(
            f"prompt and new tokens must fit the learned position table of {config.context} rows, got {length}; "
            "ask for fewer tokens, or build the model with a larger context or other positions"
        )
