"""A run of `words` or `text` that writes: samples from a language model."""

from dataclasses import replace

import torch
from torch import Tensor

from clearhead.data.characters import from_user, to_user
from clearhead.data.draws import key_of
from clearhead.data.tokens import BEGIN, END, Vocabulary
from clearhead.models.generate import Sampling, room
from clearhead.models.language import LanguageModel
from clearhead.serving.session import Session

MOST_LETTERS = 40
"""a word that is longer is broken off"""
FIRST = "\n"
"""what a text goes on from without a prompt, if it has lines"""


def sample(session: Session, prompt: str, how: Sampling, *, n: int, n_tokens: int) -> list[str]:
    """n continuations of a prompt, each with the prompt before it: words to their end, of a text n_tokens."""
    model, known = session.model, Vocabulary(session.symbols)
    if not isinstance(model, LanguageModel):
        raise ValueError(
            f"a run of the recipe words or text writes, got {session.path}, which answers about {session.takes}; "
            f"ask it with: clearhead predict {session.path}"
        )
    if n < 1 or n_tokens < 1:
        raise ValueError(f"there must be something to write, got n={n}, n_tokens={n_tokens}; choose 1 or more of both")
    level = session.config.data.level
    symbols = from_user(prompt, level)
    if known.has_marks:
        begin = torch.tensor([[BEGIN, *known.ids(symbols)]]).expand(n, -1)
        n_letters = max(1, room(model.config, begin.shape[1], MOST_LETTERS))
        rows = model.generate(begin, how, n_tokens=n_letters, end=END).ids
        return [prompt + "".join(known.read(row)) for row in rows.tolist()]
    if not symbols:
        symbols = FIRST if FIRST in known.places else known.symbols[0]
    rows = continued(model, torch.tensor([known.ids(symbols)]).expand(n, -1), how, n_tokens)
    return [prompt + to_user("".join(known.read(row)), level) for row in rows[:, len(symbols) :].tolist()]


def continued(model: LanguageModel, ids: Tensor, how: Sampling, n_tokens: int) -> Tensor:
    """ids (B,L) and n_tokens more. The model has learnt from no more than its context: when that is full, it reads the
    last half of it anew and goes on."""
    context, left = model.config.context, n_tokens
    while left:
        seen = ids[:, -context:] if ids.shape[1] < context else ids[:, -max(1, context // 2) :]
        count = min(left, context - seen.shape[1] + 1)
        seed = None if how.seed is None else key_of(how.seed, "sample", left) >> 1  # torch takes 63 bits
        ids = torch.cat([ids, model.generate(seen, replace(how, seed=seed), n_tokens=count).ids], dim=1)
        left -= count
    return ids
