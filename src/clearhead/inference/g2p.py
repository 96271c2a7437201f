"""A run of `pronounce` that says words. Dims: B batch, K letters."""

import math
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from clearhead.data.dataset import SequencePairs
from clearhead.data.vocab import BOS, EOS, MAX_WORD_LENGTH, PAD, SPECIAL_TOKENS, Vocabulary
from clearhead.drawing import displayable
from clearhead.inference.run import AT_ONCE, Run
from clearhead.insight.edit import entropy, head_importance
from clearhead.insight.head_plots import draw_head_importance
from clearhead.insight.look import look
from clearhead.insight.plots import draw_alignment, draw_head_grid
from clearhead.models.generate import Beam, free_positions
from clearhead.models.seq2seq import Ensemble, Seq2Seq

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_PHONES = MAX_WORD_LENGTH + 1
"""longest answer: as many as a dictionary's longest, and the end mark"""
BEAM = Beam(5)


def beam_of(size: int | None) -> Beam:
    """Of the size that was asked for, if one was."""
    return BEAM if size is None else replace(BEAM, size=size)


@dataclass(frozen=True)
class Pronunciation:
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


def pronounce(run: Run, words: Sequence[str], how: Beam = BEAM) -> list[list[Pronunciation]]:
    """For each word the beam's candidates, the best first."""
    model = run.model
    if not isinstance(model, Seq2Seq | Ensemble):
        raise ValueError(f"{run.path} says no words, got {words[0]!r}; ask a run of the recipe pronounce")
    ids = [spelled(run, word) for word in words]
    sources = SequencePairs.of(ids, [[EOS]] * len(ids))
    order = sources.lengths[:, 0].argsort(stable=True)  # words of like length need little padding
    found: list[list[Pronunciation]] = [[] for _ in words]
    models = model.models if isinstance(model, Ensemble) else [model]
    n_tokens = min(free_positions(each.config, 1, MOST_PHONES) for each in models)
    for chosen in order.split(max(1, AT_ONCE // max(1, how.size // BEAM.size))):  # of wide beams, fewer at once
        source, _ = sources.get_batch(chosen)
        made = model.generate(
            source, strategy=how, bos_id=BOS, eos_id=EOS, max_new_tokens=n_tokens, source_lengths=(source != PAD).sum(1)
        )
        for i, place in enumerate(chosen.tolist()):
            rows = zip(made.candidates[i].tolist(), made.scores[i].tolist(), strict=True)
            found[place] = [
                Pronunciation(read(run, row), score, EOS in row) for row, score in rows if score > -math.inf
            ]
    return found


def ensemble(runs: Sequence[Run]) -> Run:
    """Runs that say words as one; what is asked about its data is asked of the first."""
    first = runs[0]
    for other in runs:
        if not isinstance(other.model, Seq2Seq):
            raise ValueError(f"runs of pronounce answer together, got {other.path}; leave it out")
        if (other.vocab, other.classes) != (first.vocab, first.classes):
            raise ValueError(
                f"runs that answer together know the same letters and phones, got other ones in {other.path} than in "
                f"{first.path}; leave one of them out"
            )
    if len(runs) == 1:
        return first
    joined = copy(first)
    joined.model = Ensemble([cast(Seq2Seq, each.model) for each in runs])
    return joined


def read(run: Run, ids: Sequence[int]) -> tuple[str, ...]:
    """What is written up to the end mark; other marks, which only a poor model writes, are shown."""
    return tuple(run.classes[i] for i in takewhile(lambda i: i != EOS, ids))


def spelled(run: Run, word: str) -> list[int]:
    """The ids of a word's letters."""
    letters = word.strip().lower()
    if not letters:
        raise ValueError(f"a word has letters, got {word!r}; write one")
    if len(letters) > MAX_WORD_LENGTH:
        raise ValueError(f"a word has at most {MAX_WORD_LENGTH} letters, got {len(letters)}: {letters[:20]!r}...")
    return Vocabulary(run.vocab).encode(letters)


# Which letters a run of `pronounce` looks at while it writes each phone: its cross-attention, as pictures.
#
# Dims: H heads, Q written tokens, K letters.


WALLS = {
    "cross.png": ("cross_attn", "every head of the decoder, looking at the letters"),
    "encoder.png": ("encoder.", "every head of the encoder"),
    "decoder.png": ("decoder.", "every head of the decoder, looking at what is written"),
}
"""file name -> what its layers' addresses have in them, and what it shows"""


def written(run: Run, word: str) -> tuple[str, ...]:
    """The phones that the run writes for a word, and the end mark if it comes to one."""
    best = pronounce(run, [word])[0][0]
    return (*best.phones, SPECIAL_TOKENS[EOS]) if best.ended else best.phones


def pictures_of_word(run: Run, word: str, about: str = "") -> "Iterator[tuple[str, str, Figure]]":
    """File name, what it shows, and the figure, with a line about the prediction in its title."""
    phones, letters = written(run, word), tuple(map(displayable, word.strip().lower()))
    target = torch.tensor([Vocabulary(run.classes).encode(phones)])
    given = torch.cat([torch.full((1, 1), BOS), target[:, :-1]], dim=1)
    inputs = torch.tensor([spelled(run, word)]), given
    with torch.no_grad():
        seen = look(run.model, *inputs)
        weights = {address: seen[address].weights() for address in seen}
    address, aligned = sharpest({name: w for name, w in weights.items() if "cross_attn" in name})
    what = "which letter each phone looks at"
    about = f"\n{about}" if about else ""
    title = f"{what},\n{address}, mean of heads{about}"
    yield "alignment.png", what, draw_alignment(aligned, letters, phones, names=("letter", "phone"), title=title)
    for name, (part, what) in WALLS.items():
        chosen = {address: w for address, w in weights.items() if part in address}
        if part == "decoder.":
            chosen = {address: w for address, w in chosen.items() if "cross_attn" not in address}
        yield name, what, draw_head_grid([w[0] for w in chosen.values()], list(chosen), title=what + about)

    def score(output: Tensor) -> Tensor:
        return output.log_softmax(-1).gather(-1, target[..., None]).mean()

    unit = "change of the mean log-probability of a phone\n(below 0: less sure without the head)"
    what = "what the model loses without each head"
    changes = head_importance(run.model, inputs, score)
    yield "heads.png", what, draw_head_importance(changes, list(seen), unit=unit, title=what + about)


def sharpest(layers: dict[str, Tensor]) -> tuple[str, Tensor]:
    """The layer whose heads look at the fewest letters together: its address, and the mean of its heads (Q,K)."""
    means = {address: weights.mean(1, keepdim=True) for address, weights in layers.items()}
    address = min(means, key=lambda address: float(entropy(means[address])))
    return address, means[address][0, 0]
