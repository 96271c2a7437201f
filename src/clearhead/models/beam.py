"""Beam search: follow the N likeliest beginnings at once, and keep the best that have ended.

The score of a sequence is its log-probability; sequences of different length are compared by score / length^penalty.
The greedy answer stays a candidate, and what is less probable comes after it: by neither number is the answer worse.
Dims: B batch, N beams, L prompt length, T new tokens, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.models.generate import Generated, Greedy, Writer, log_probabilities

NEVER = -torch.inf
MOST = 1000
"""sequences that are followed at once: more of them take memory and find nothing better"""


@dataclass(frozen=True)
class Beam:
    """The best of `size` sequences followed at once; a higher length_penalty favours longer ones."""

    size: int = 5
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or not 1 <= self.size <= MOST:
            raise ValueError(f"a beam's size must be from 1 to {MOST}, got {self.size}; 1 is greedy search")
        if not 0 <= self.length_penalty <= 10:
            raise ValueError(
                f"length_penalty must be from 0 to 10, got {self.length_penalty}; 0 compares plain log-probabilities"
            )

    def __call__(self, writers: Callable[[int], Writer], prompt: Tensor, n_tokens: int, end: int | None) -> Generated:
        if self.size == 1:
            return Greedy()(writers, prompt, n_tokens, end)
        found = self.search(writers(self.size), prompt, n_tokens, end)
        greedy = Greedy()(writers, prompt, n_tokens, end)
        greedy = replace(greedy, candidates=filled(greedy.candidates, n_tokens, end))
        best = self.with_greedy(found, greedy)
        return replace(best, candidates=best.candidates[..., : int(best.lengths.max())])

    def with_greedy(self, found: Generated, greedy: Generated) -> Generated:
        """The `size` best of both: first what is at least as probable as the greedy answer, then the rest, by rank."""
        same = (found.candidates == greedy.candidates).all(-1)  # (B,N)
        again = found.scores.masked_fill(~same, torch.inf).amin(-1, keepdim=True)  # it may differ in its last bits
        least = torch.minimum(greedy.scores, again)
        both = joined(found, replace(greedy, scores=greedy.scores.masked_fill(same.any(-1, keepdim=True), NEVER)))
        by_rank = self.rank(both.scores, both.lengths).argsort(descending=True, stable=True)
        is_behind = (both.scores < least).gather(1, by_rank)
        return chosen(both, by_rank.gather(1, is_behind.int().argsort(stable=True))[:, : self.size])

    def search(self, writer: Writer, prompt: Tensor, n_tokens: int, end: int | None) -> Generated:
        n_examples, n_prompt = prompt.shape
        live = prompt[:, None].expand(-1, self.size, -1)  # (B,N,length)
        nothing = torch.full((n_examples, self.size), NEVER, device=prompt.device)
        ended = candidates(live[..., :0], nothing, 1, n_tokens, end)
        n_ended = torch.zeros_like(prompt[:, :1])
        live_scores = nothing.clone()
        live_scores[:, 0] = 0.0  # all beams begin alike: one of them is enough
        first_row = torch.arange(n_examples, device=prompt.device)[:, None] * self.size
        for length in range(1, n_tokens + 1):
            log_p = log_probabilities(writer.next_logits(live.flatten(0, 1)))  # (B*N,V)
            totals = (live_scores.flatten()[:, None] + log_p).reshape(n_examples, -1)  # (B,N*V)
            # Each beam can end in one way, so at least N of the best 2N go on.
            scores, choices = totals.topk(min(2 * self.size, totals.shape[1]))
            beams, tokens = choices // log_p.shape[-1], choices % log_p.shape[-1]
            grown = torch.cat([take(live, beams), tokens[..., None]], dim=-1)
            if end is not None:
                ends = (tokens == end) & (torch.arange(tokens.shape[1], device=tokens.device) < self.size)
                new = candidates(grown[..., n_prompt:], scores.masked_fill(~ends, NEVER), length, n_tokens, end)
                ended, n_ended = self.best_of(ended, new), n_ended + ends.sum(1, keepdim=True)
                # A beam that has ended is used up: with one beam, that is greedy search.
                scores = scores.masked_fill((tokens == end) | (n_ended >= self.size), NEVER)
            live_scores, kept = scores.topk(self.size)
            live = take(grown, kept)
            if self.decided(ended, live_scores, n_tokens):
                return ended
            writer.select((first_row + beams.gather(1, kept)).flatten())
        unended = candidates(live[..., n_prompt:], live_scores, n_tokens, n_tokens, end)
        return self.best_of(ended, unended)

    def rank(self, scores: Tensor, lengths: Tensor | int) -> Tensor:
        return scores / lengths**self.length_penalty

    def decided(self, ended: Generated, live_scores: Tensor, n_tokens: int) -> bool:
        """Nothing that goes on can still become a candidate: its score only falls, its length only grows."""
        hope = self.rank(live_scores[:, 0], n_tokens)
        return bool((self.rank(ended.scores, ended.lengths)[:, -1] >= hope).all())

    def best_of(self, some: Generated, others: Generated) -> Generated:
        """The `size` best of both."""
        both = joined(some, others)
        return chosen(both, self.rank(both.scores, both.lengths).topk(self.size).indices)


def candidates(ids: Tensor, scores: Tensor, length: int, n_tokens: int, end: int | None) -> Generated:
    """Sequences (B,M,T) of one length with their scores (B,M); NEVER marks what is no candidate."""
    return Generated(filled(ids, n_tokens, end), torch.full_like(scores, length, dtype=torch.long), scores)


def filled(ids: Tensor, n_tokens: int, end: int | None) -> Tensor:
    """(B,M,T) -> (B,M,n_tokens), so that sequences can be compared and joined."""
    return F.pad(ids, (0, n_tokens - ids.shape[-1]), value=0 if end is None else end)


def joined(some: Generated, others: Generated) -> Generated:
    """The candidates of both, one after the other."""
    return Generated(
        torch.cat([some.candidates, others.candidates], dim=1),
        torch.cat([some.lengths, others.lengths], dim=1),
        torch.cat([some.scores, others.scores], dim=1),
    )


def chosen(some: Generated, places: Tensor) -> Generated:
    """The candidates at these places (B,M), in this order."""
    return Generated(take(some.candidates, places), some.lengths.gather(1, places), some.scores.gather(1, places))


def take(sequences: Tensor, chosen: Tensor) -> Tensor:
    """Whole sequences (B,N,T) by their number (B,M) -> (B,M,T)"""
    return sequences.gather(1, chosen[..., None].expand(-1, -1, sequences.shape[-1]))
