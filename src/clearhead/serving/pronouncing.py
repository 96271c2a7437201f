"""A run of `pronounce` that says words. Dims: B batch, K letters."""

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import cast

from clearhead.data.dictionary import MOST
from clearhead.data.pairs import Pairs
from clearhead.data.tokens import BEGIN, END, PAD, Vocabulary
from clearhead.models.beam import Beam
from clearhead.models.generate import room
from clearhead.models.seq2seq import Seq2Seq
from clearhead.models.together import Together
from clearhead.serving.session import AT_ONCE, Session

MOST_PHONES = MOST + 1
"""longest answer: as many as a dictionary's longest, and the end mark"""
BEAM = Beam(5)


def beam_of(size: int | None) -> Beam:
    """Of the size that was asked for, if one was."""
    return BEAM if size is None else replace(BEAM, size=size)


@dataclass(frozen=True)
class Spoken:
    """One pronunciation of a word, and the logarithm of its probability under the model. Pronunciations are ordered as
    the beam orders them: by that number over their length, those less probable than the greedy answer last."""

    phones: tuple[str, ...]
    score: float
    ended: bool = True
    """False: cut off, as the answer of a model that has hardly learnt may be"""

    @property
    def score_per_token(self) -> float:
        """The mean log-probability of its tokens, the end-of-sequence token among them: what the beam orders by."""
        return self.score / max(1, len(self.phones) + self.ended)

    def __str__(self) -> str:
        return " ".join(self.phones if self.ended else (*self.phones, "..."))


def pronounce(session: Session, words: Sequence[str], how: Beam = BEAM) -> list[list[Spoken]]:
    """For each word the beam's candidates, the best first."""
    model = session.model
    if not isinstance(model, Seq2Seq | Together):
        raise ValueError(f"{session.path} says no words, got {words[0]!r}; ask a run of the recipe pronounce")
    ids = [spelled(session, word) for word in words]
    sources = Pairs.of(ids, [[END]] * len(ids))
    order = sources.lengths[:, 0].argsort(stable=True)  # words of like length need little padding
    found: list[list[Spoken]] = [[] for _ in words]
    models = model.models if isinstance(model, Together) else [model]
    n_tokens = min(room(each.config, 1, MOST_PHONES) for each in models)
    for chosen in order.split(max(1, AT_ONCE // max(1, how.size // BEAM.size))):  # of wide beams, fewer at once
        source, _ = sources.take(chosen)
        made = model.generate(
            source, how, begin=BEGIN, end=END, n_tokens=n_tokens, source_lengths=(source != PAD).sum(1)
        )
        for i, place in enumerate(chosen.tolist()):
            rows = zip(made.candidates[i].tolist(), made.scores[i].tolist(), strict=True)
            found[place] = [Spoken(read(session, row), score, END in row) for row, score in rows if score > -math.inf]
    return found


def together(sessions: Sequence[Session]) -> Session:
    """Runs that say words as one; what is asked about its data is asked of the first."""
    first = sessions[0]
    for other in sessions:
        if not isinstance(other.model, Seq2Seq):
            raise ValueError(f"runs of pronounce answer together, got {other.path}; leave it out")
        if (other.symbols, other.classes) != (first.symbols, first.classes):
            raise ValueError(
                f"runs that answer together know the same letters and phones, got other ones in {other.path} than in "
                f"{first.path}; leave one of them out"
            )
    if len(sessions) == 1:
        return first
    joined = copy(first)
    joined.model = Together([cast(Seq2Seq, each.model) for each in sessions])
    return joined


def read(session: Session, ids: Sequence[int]) -> tuple[str, ...]:
    """What is written up to the end mark; other marks, which only a poor model writes, are shown."""
    return tuple(session.classes[i] for i in takewhile(lambda i: i != END, ids))


def spelled(session: Session, word: str) -> list[int]:
    """The ids of a word's letters."""
    letters = word.strip().lower()
    if not letters:
        raise ValueError(f"a word has letters, got {word!r}; write one")
    if len(letters) > MOST:
        raise ValueError(
            f"a word has at most {MOST} letters, got {len(letters)}: {letters[:20]!r}...; write a shorter one"
        )
    return Vocabulary(session.symbols).ids(letters)
